"""Run groups of ops (regions) of a joint graph on slices of the batch or sequence, to need less memory."""
