"""Solvers for schedules that also copy tensors to the host and back. None imports torch or the simulator."""
