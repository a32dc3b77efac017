"""Joint graph to chain: ops and values, cuts and carried values, blocks, save options."""
