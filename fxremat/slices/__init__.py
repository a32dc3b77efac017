"""Regions of a joint graph that run in slices, so that a plan can need less memory than one unsliced op."""
