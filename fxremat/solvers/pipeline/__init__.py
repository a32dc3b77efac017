"""Plans pipeline parallelism: which layers run on which device, in which order, and what each device saves."""
