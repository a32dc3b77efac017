"""Convolutional models with GroupNorm, whose images do not know of each other: a ResNet, and a UNet that removes noise.

With BatchNorm an image's values depend on the batch it is in; with GroupNorm any part of the batch can run by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, labelled_images

GROUPS = 8


def norm_conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Norm, SiLU, 3x3 convolution."""
    return nn.Sequential(
        nn.GroupNorm(GROUPS, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, stride, padding=1)
    )


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.first, self.second = norm_conv(inputs, outputs, stride), norm_conv(outputs, outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + self.shortcut(x)


class ResNet(nn.Module):
    """Cross-entropy of image classes; `depths` counts the blocks of each stage, the width doubles from `width`."""

    def __init__(self, depths: Sequence[int], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        widths = [width << stage for stage in range(len(depths))]
        blocks = [
            Residual(wide if i else widths[max(stage - 1, 0)], wide, stride=2 if stage and i == 0 else 1)
            for stage, (depth, wide) in enumerate(zip(depths, widths, strict=True))
            for i in range(depth)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.GroupNorm(GROUPS, widths[-1])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.silu(self.norm(self.blocks(self.stem(images))))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class UNet(nn.Module):
    """Squared error of the predicted noise; `levels` halvings, nearest upsampling, skips concatenated."""

    def __init__(self, levels: int, width: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Residual(wide, wide) for wide in widths[:-1])
        self.shrink = nn.ModuleList(
            nn.Conv2d(narrow, wide, 3, stride=2, padding=1) for narrow, wide in pairwise(widths)
        )
        self.bottom = Residual(widths[-1], widths[-1])
        self.up = nn.ModuleList(Residual(wide + narrow, narrow) for wide, narrow in pairwise(widths[::-1]))
        self.head = norm_conv(width, 3)

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        x, skips = self.stem(images + noise), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x)
            skips.append(x)
            x = shrink(x)
        x = self.bottom(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0, mode="nearest"), skips.pop()], 1))
        return F.mse_loss(self.head(x), noise)


def noisy_images(g: torch.Generator) -> tuple[Tensor, ...]:
    images, noise = (torch.randn(16, 3, 64, 64, generator=g) for _ in range(2))
    return images, noise


GROUPED = {
    "resnet_gn": Case(
        name="resnet_gn", build=lambda: ResNet((2, 2, 2), 16, 10), draw=labelled_images(16, 64)
    ),
    "unet_gn": Case(name="unet_gn", build=lambda: UNet(3, 16), draw=noisy_images),
}
