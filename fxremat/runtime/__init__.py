"""What runs in a training step: the drop-in module, the dynamo backend, and what they need while torch traces."""
