"""From joint graphs to chains: crossings, cuts, blocks, save sets and towers."""
