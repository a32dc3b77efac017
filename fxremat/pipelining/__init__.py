"""Pipelined training: a model is split into stages on several devices, each within its own memory budget."""
