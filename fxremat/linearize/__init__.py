"""From a step graph to a chain of blocks, in steps: crossings, cuts, blocks, save sets and towers."""
