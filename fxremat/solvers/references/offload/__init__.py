"""References for chains with a link to the host: what leaves, when, and what is recomputed besides."""
