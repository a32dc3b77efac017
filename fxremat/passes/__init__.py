"""Rewrites of graphs, one a file, and lowering: from a program to the two graphs that run."""
