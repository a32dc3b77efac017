"""Transfers to the host and back: one clock for all copies, and the choice of the values that leave."""
