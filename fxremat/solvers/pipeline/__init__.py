"""Pipelined model parallelism: which layers go to which device, in which order each works, and what it keeps."""
