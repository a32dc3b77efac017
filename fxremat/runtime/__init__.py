"""What runs in the training step: the drop-in module and the replay of random ops."""
