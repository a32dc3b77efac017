"""A UNet: every resolution's features skip over all coarser ones and are concatenated on the way up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, Size


def double_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Per-pixel cross-entropy; `levels` halvings, the width doubling at each."""

    def __init__(self, levels: int, width: int, classes: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList(double_conv(i, o) for i, o in zip([3, *widths], widths[:-1], strict=False))
        self.bottom = double_conv(widths[-2], widths[-1])
        pairs = list(zip(widths[::-1], widths[-2::-1], strict=False))
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, stride=2) for wide, narrow in pairs)
        self.up = nn.ModuleList(double_conv(2 * narrow, narrow) for _, narrow in pairs)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x, skips = images, []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for enlarge, block in zip(self.enlarge, self.up, strict=True):
            x = block(torch.cat([skips.pop(), enlarge(x)], 1))
        return F.cross_entropy(self.head(x), labels)


def unet(size: Size) -> Case:
    levels, width, batch, side = (4, 16, 4, 160) if size == "full" else (2, 8, 2, 32)
    classes = 4

    def draw(g: torch.Generator) -> tuple[Tensor, ...]:
        images = torch.randn(batch, 3, side, side, generator=g)
        return images, torch.randint(classes, (batch, side, side), generator=g)

    return Case(name="unet", build=lambda: UNet(levels, width, classes), draw=draw)
