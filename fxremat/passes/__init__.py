"""Schedule to graphs: recompute, liveness, lowering to torch.fx."""
