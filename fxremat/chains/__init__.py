"""Chains and joins of blocks, their schedules as text, and the simulator that defines validity, memory and time."""
