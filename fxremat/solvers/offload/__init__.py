"""Solvers that move values to the host and back. None imports torch or the simulator."""
