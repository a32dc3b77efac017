"""Published planners of pipelines, for comparison: an integer program, and PipeDream's partition."""
