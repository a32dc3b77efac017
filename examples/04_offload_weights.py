"""Train a model whose parameters, gradients and Adam state do not fit: the weights live on the host.

The plain run and the one inside the budget have the same losses to the last bit. The budget is below the size of the
parameters alone; it covers everything that the step has on the device: weights that stay, gradients, optimizer state
and activations. Without a CUDA device the host is memory-mapped files.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat
from fxremat import Offload

DEPTH, WIDTH, ROWS, STEPS = 24, 384, 64, 8
SHARE = 0.9  # of the bytes of the parameters; gradients and Adam's state are three times as much again


class Deep(nn.Module):
    """Residual blocks of norm, linear, GELU and dropout; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))
            for _ in range(DEPTH)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(x, y)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """An ordinary training loop; the loss of each step."""
    torch.manual_seed(1)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(ROWS, WIDTH)
        optimizer.zero_grad()
        loss = model(x, x.roll(1, 0))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = Deep()
    ours = copy.deepcopy(plain)
    size = sum(p.nbytes for p in plain.parameters())
    mem = int(SHARE * size)
    print(f"parameters {size / 2**20:.1f} MiB; with gradients and Adam's state {4 * size / 2**20:.1f} MiB")
    print(f"budget for all of the step: {mem / 2**20:.1f} MiB")
    first, second = (torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (plain, ours))
    offload = Offload(weights=True, activations=False)
    small = fxremat.compile(ours, mem=mem, offload=offload, optimizer=second)  # the one line
    curves = train(plain, first), train(small, second)
    for step, (theirs, mine) in enumerate(zip(*curves), 1):
        print(f"{step:>4}  {theirs:.7f}  {mine:.7f}")
    print("the two curves are", "identical" if curves[0] == curves[1] else "DIFFERENT")
    print(f"\n{small.plan}")


if __name__ == "__main__":
    main()
