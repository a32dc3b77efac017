"""Image classifiers: a ResNet of bottleneck blocks and a DenseNet, both with BatchNorm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, Size, labelled_images


def conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up by four, around a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.reduce = conv_bn(inputs, width, 1)
        self.spatial = conv_bn(width, width, 3, stride)
        self.expand = conv_bn(width, 4 * width, 1)
        same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if same else conv_bn(inputs, 4 * width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.reduce(x))
        y = F.relu(self.spatial(y))
        return F.relu(self.expand(y) + self.shortcut(x))


class ResNet(nn.Module):
    """Cross-entropy of a ResNet; `depths` counts each stage's blocks, the width doubles from `width`."""

    def __init__(self, depths: Sequence[int], width: int, classes: int) -> None:
        super().__init__()
        self.stem = conv_bn(3, width, 7, stride=2)
        blocks: list[nn.Module] = []
        channels = width
        for stage, depth in enumerate(depths):
            for i in range(depth):
                block = Bottleneck(channels, width << stage, stride=2 if stage and i == 0 else 1)
                blocks.append(block)
                channels = 4 * (width << stage)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(images)), 3, stride=2, padding=1)
        return F.cross_entropy(self.head(self.blocks(x).mean((2, 3))), labels)


def resnet(size: Size) -> Case:
    """Full: ResNet-50 at half width."""
    if size == "full":
        return Case(name="resnet", build=lambda: ResNet((3, 4, 6, 3), 32, 10), draw=labelled_images(8, 128))
    return Case(name="resnet", build=lambda: ResNet((1, 2, 1), 8, 10), draw=labelled_images(4, 64))


class DenseLayer(nn.Module):
    """BN-ReLU-1x1, BN-ReLU-3x3 over everything before it in its stage."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.squeeze = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.spatial = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, earlier: list[Tensor]) -> Tensor:
        x = self.squeeze(F.relu(self.norm1(torch.cat(earlier, 1))))
        return self.spatial(F.relu(self.norm2(x)))


class DenseNet(nn.Module):
    def __init__(self, depths: Sequence[int], growth: int, classes: int) -> None:
        super().__init__()
        channels = 2 * growth
        self.stem = conv_bn(3, channels, 3, stride=2)
        self.stages = nn.ModuleList()
        self.transitions = nn.ModuleList()
        for depth in depths:
            self.stages.append(nn.ModuleList(DenseLayer(channels + i * growth, growth) for i in range(depth)))
            channels += depth * growth
            self.transitions.append(conv_bn(channels, channels // 2, 1))
            channels //= 2
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.stem(images))
        for stage, transition in zip(self.stages, self.transitions, strict=True):
            values = [x]
            assert isinstance(stage, nn.ModuleList)
            for layer in stage:
                values.append(layer(values))
            x = F.avg_pool2d(F.relu(transition(torch.cat(values, 1))), 2)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def densenet(size: Size) -> Case:
    if size == "full":
        return Case(name="densenet", build=lambda: DenseNet((6, 12, 8), 16, 10), draw=labelled_images(4, 144))
    return Case(name="densenet", build=lambda: DenseNet((3, 3), 8, 10), draw=labelled_images(2, 32))
