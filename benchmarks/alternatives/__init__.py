"""fxremat beside everything else that trades time for memory: `python -m benchmarks.alternatives`.

by_hand      where a user would put checkpoints into each model
strategies   the alternatives, each with its settings
measure      one model: every point's peak, time and numbers, in one process
rows         what was measured, and how it is kept as JSON
verdict      who wins where
page         docs/alternatives.md and docs/alternatives.svg
"""
