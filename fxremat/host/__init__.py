"""Where tensors wait that leave the device: `tier` is the contract, `files` and `pinned` keep it."""
