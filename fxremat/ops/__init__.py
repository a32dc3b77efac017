"""Functions that emitted graphs call besides torch's ops: random draws with saved states, copies, weight updates."""
