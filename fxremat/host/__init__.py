"""Host tiers, where tensors wait that leave the device: `tier` is the interface, `files` and `pinned` implement it."""
