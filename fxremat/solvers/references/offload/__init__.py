"""References for chains with a link to the host: which values leave, when, and what is recomputed in addition."""
