"""Two chains: one deep and even, one shallow whose blocks differ widely in time and size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, Size, labelled_images


class DeepChain(nn.Module):
    """`depth` identical blocks of linear, norm and GELU with nothing around them; mean squared error."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        blocks = (
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(depth)
        )
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.blocks(x), target)


def deep_chain(size: Size) -> Case:
    depth, width, rows = (48, 128, 1536) if size == "full" else (12, 64, 512)

    def draw(g: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randn(rows, width, generator=g), torch.randn(rows, width, generator=g)

    return Case(name="deep_chain", build=lambda: DeepChain(depth, width), draw=draw)


class MixerBlock(nn.Module):
    """Mixes over positions, then over channels; each a two-layer MLP four times as wide inside."""

    def __init__(self, positions: int, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.over_positions = nn.Sequential(
            nn.Linear(positions, 2 * positions), nn.GELU(), nn.Linear(2 * positions, positions)
        )
        self.norm2 = nn.LayerNorm(width)
        self.over_channels = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_positions(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.norm2(x))


class Merge(nn.Module):
    """Joins each 2 x 2 square of positions into one, and changes the width."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.project = nn.Linear(4 * width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        b, positions, d = x.shape
        side = int(positions**0.5)
        squares = x.view(b, side // 2, 2, side // 2, 2, d).transpose(2, 3)
        return self.project(squares.reshape(b, positions // 4, 4 * d))


class Mixer(nn.Module):
    """`stages` lists (blocks, width); each stage has a quarter of the positions of the one before."""

    def __init__(self, side: int, patch: int, stages: Sequence[tuple[int, int]], classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, stages[0][1], patch, patch)
        positions = (side // patch) ** 2
        blocks: list[nn.Module] = []
        for i, (depth, width) in enumerate(stages):
            if i > 0:
                blocks.append(Merge(stages[i - 1][1], width))
                positions //= 4
            blocks += [MixerBlock(positions, width) for _ in range(depth)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(stages[-1][1], classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        return F.cross_entropy(self.head(self.blocks(x).mean(1)), labels)


def mixer(size: Size) -> Case:
    if size == "full":
        stages = ((3, 64), (4, 160), (3, 384))
        return Case(name="mixer", build=lambda: Mixer(96, 4, stages, 10), draw=labelled_images(16, 96))
    small = ((1, 24), (2, 48), (1, 96))
    return Case(name="mixer", build=lambda: Mixer(32, 2, small, 10), draw=labelled_images(4, 32))
