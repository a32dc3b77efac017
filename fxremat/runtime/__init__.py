"""The runtime of a training step: the module that `fxremat.compile` returns, the dynamo backend, and their helpers."""
