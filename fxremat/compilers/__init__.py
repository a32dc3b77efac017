"""Planning as a pass inside other compilers: graphs that they captured are read, planned, and returned rewritten."""
