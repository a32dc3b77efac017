"""Turn a step graph into a chain of blocks: find values that cross positions, cut, and find what blocks can save."""
