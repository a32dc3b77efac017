"""A model to measure: how to build it, and how to draw a batch for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Size = Literal["full", "small"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model whose forward takes `batch(seed)` and returns its loss."""

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], tuple[Tensor, ...]]

    def model(self, seed: int = 0, device: str = "cpu") -> nn.Module:
        """A fresh model in training mode, the same for the same seed and device. Leaves the global RNGs alone."""
        devices = [torch.cuda.current_device()] if device == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.device(device):
            torch.manual_seed(seed)
            return self.build().train()

    def batch(self, seed: int = 0) -> tuple[Tensor, ...]:
        """Inputs and targets; the same seed gives the same batch."""
        return self.draw(torch.Generator().manual_seed(seed))


class Autocast(nn.Module):
    """A model whose forward runs under autocast to bfloat16."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        with torch.autocast(first.device.type, torch.bfloat16):
            return self.inner(first, *others)


def labelled_images(
    batch: int, side: int, classes: int = 10
) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    """Draws (images [batch, 3, side, side], labels [batch])."""

    def draw(g: torch.Generator) -> tuple[Tensor, ...]:
        images = torch.randn(batch, 3, side, side, generator=g)
        return images, torch.randint(classes, (batch,), generator=g)

    return draw
