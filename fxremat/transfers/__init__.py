"""What travels to the host and back: one clock for all copies, and the choice of what leaves."""
