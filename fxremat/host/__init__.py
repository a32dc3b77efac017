"""Host tiers, to which the device's tensors are copied: `tier` is the interface, `files` and `pinned` implement it."""
