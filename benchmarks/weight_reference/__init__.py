"""Reference for weights that wait on the host: Weight Offloading Strategies as published, on chains of layers.

Only tests and benchmarks use it. `fxremat.transfers.weights` makes the same greedy choice on the ops of a real step.
"""
