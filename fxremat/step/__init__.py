"""One training step op by op: the representation that planning shares. Nothing is planned and nothing runs here."""
