"""One training step op by op: the data structures that all planning works on."""
