"""The parts of `benchmarks.gpu_first_hour`, a file each; `part` is what they share."""
