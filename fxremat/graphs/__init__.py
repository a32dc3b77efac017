"""Read a torch.fx graph as a `StepGraph` (`captured.py`), and derive from its nodes names, costs and bytes of ops."""
