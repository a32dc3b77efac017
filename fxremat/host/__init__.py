"""Storage on the host for tensors of the device: `tier` is the interface, `files` and `pinned` implement it."""
