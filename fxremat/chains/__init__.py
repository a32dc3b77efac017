"""Chains of blocks, schedules that run them as text, and the simulator that defines validity, memory and time."""
