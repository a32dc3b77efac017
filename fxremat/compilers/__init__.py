"""The pass inside of other compilers: graphs that others captured are read, planned, and given back rewritten."""
