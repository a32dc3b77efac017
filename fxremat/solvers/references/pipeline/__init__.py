"""References for pipelined model parallelism: an integer program, and the partition of PipeDream."""
