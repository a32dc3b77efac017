"""Rewrites of graphs, one per file, and lowering: from a program to the two graphs that run."""
