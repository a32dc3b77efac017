"""Regions of a joint graph that run in slices, so that a plan gets below what one whole op needs."""
