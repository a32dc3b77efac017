"""What emitted graphs call beside torch's ops: random draws with saved states, copies, updates of weights."""
