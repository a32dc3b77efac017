"""Seconds and bytes of each op of a joint graph: measured on the device, or estimated from a description of one."""
