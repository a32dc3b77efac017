"""The way from step graphs to chains: crossings, cuts, blocks, save sets and towers."""
