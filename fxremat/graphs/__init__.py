"""From a graph of torch.fx to a `StepGraph`: `captured.py`; what graphs say of ops, and what these take."""
