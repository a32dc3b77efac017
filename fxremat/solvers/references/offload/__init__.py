"""Published algorithms for chains with a link to the host: which values are offloaded, when, and what is recomputed."""
