"""Functions that generated graphs call besides torch's ops: replayed random draws, copies, weight updates."""
