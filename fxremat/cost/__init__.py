"""Seconds and bytes of each op of a joint graph: measured on the device, or estimated for a device description."""
