"""Copies of tensors to the host and back: which tensors to copy, and a simulated clock for when copies run."""
