"""Weights that wait on the host: what leaves when, in the cycle of one training step after the other."""
