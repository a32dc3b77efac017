"""The runtime of a training step: the drop-in module, the dynamo backend, and what they need while torch traces."""
