"""Pipelined training: a model in stages on several devices, each inside its own budget."""
