"""Reading a graph of torch.fx as a `StepGraph` (`captured.py`), what its nodes say of ops, and the bytes of ops."""
