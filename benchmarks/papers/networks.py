"""The networks of the papers in plain torch, each written as a chain wherever its graph allows.

ResNet (He et al., 2016; the 1001-layer one with pre-activation), DenseNet (Huang et al., 2017), Inception v3
(Szegedy et al., 2016) and GPT-2. A dense layer hands on everything before it together with its own output, as
one value: so the thesis makes a chain of it. The loss is inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.gpt import GPT, Shape


def _conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Classifier(nn.Module):
    """Cross-entropy of a sequence of stages, average pooling and a linear layer."""

    def __init__(self, stages: Sequence[nn.Module], channels: int, classes: int = 1000) -> None:
        super().__init__()
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.stages(images).mean((2, 3))), labels)


class Residual(nn.Module):
    """A branch of convolutions around a shortcut, then ReLU."""

    def __init__(self, inputs: int, branch: nn.Module, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = branch
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else _conv_bn(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.shortcut(x))


def _basic(inputs: int, width: int, stride: int) -> Residual:
    branch = nn.Sequential(_conv_bn(inputs, width, 3, stride), nn.ReLU(), _conv_bn(width, width, 3))
    return Residual(inputs, branch, width, stride)


def _bottleneck(inputs: int, width: int, stride: int) -> Residual:
    branch = nn.Sequential(
        _conv_bn(inputs, width, 1),
        nn.ReLU(),
        _conv_bn(width, width, 3, stride),
        nn.ReLU(),
        _conv_bn(width, 4 * width, 1),
    )
    return Residual(inputs, branch, 4 * width, stride)


def resnet(depths: Sequence[int], *, bottleneck: bool) -> nn.Module:
    """`depths` counts the residual blocks of each stage; the width doubles from 64."""
    stages: list[nn.Module] = [_conv_bn(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, depth in enumerate(depths):
        for i in range(depth):
            width, stride = 64 << stage, 2 if stage and i == 0 else 1
            stages.append((_bottleneck if bottleneck else _basic)(channels, width, stride))
            channels = width * (4 if bottleneck else 1)
    return Classifier(stages, channels)


class PreActivation(nn.Module):
    """A bottleneck whose normalizations come before its convolutions."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.branch = nn.Sequential(
            _conv_bn(inputs, width, 1),
            nn.ReLU(),
            _conv_bn(width, width, 3, stride),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
        )
        same = stride == 1 and inputs == 4 * width
        self.shortcut = None if same else nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(x))
        return self.branch(y) + (x if self.shortcut is None else self.shortcut(y))


def resnet_1001() -> nn.Module:
    """Three stages of 111 bottlenecks of width 16, 32, 64."""
    stages: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    channels = 16
    for stage in range(3):
        for i in range(111):
            width = 16 << stage
            stages.append(PreActivation(channels, width, 2 if stage and i == 0 else 1))
            channels = 4 * width
    return Classifier([*stages, nn.BatchNorm2d(channels), nn.ReLU()], channels, classes=10)


class DenseLayer(nn.Module):
    """BN-ReLU-1x1, BN-ReLU-3x3; its output comes after its input."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.squeeze = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.spatial = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.squeeze(F.relu(self.norm1(x)))
        return torch.cat([x, self.spatial(F.relu(self.norm2(y)))], 1)


def densenet(depths: Sequence[int], *, growth: int = 32, channels: int = 64) -> nn.Module:
    """`depths` counts the layers of each stage; half the channels pass from one to the next."""
    stages: list[nn.Module] = [_conv_bn(3, channels, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    for stage, depth in enumerate(depths):
        if stage:
            stages += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1, bias=False)]
            stages.append(nn.AvgPool2d(2))
            channels //= 2
        for _ in range(depth):
            stages.append(DenseLayer(channels, growth))
            channels += growth
    return Classifier([*stages, nn.BatchNorm2d(channels), nn.ReLU()], channels)


class Cell(nn.Module):
    """Branches over one input, their outputs one after another."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _unit(
    inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1, padding: int | None = None
) -> nn.Sequential:
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    around = (height // 2, width // 2) if padding is None else (padding, padding)
    conv = nn.Conv2d(inputs, outputs, (height, width), stride, around, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs, eps=0.001), nn.ReLU())


def _inception_a(inputs: int, pool: int) -> Cell:
    return Cell(
        _unit(inputs, 64, 1),
        nn.Sequential(_unit(inputs, 48, 1), _unit(48, 64, 5)),
        nn.Sequential(_unit(inputs, 64, 1), _unit(64, 96, 3), _unit(96, 96, 3)),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), _unit(inputs, pool, 1)),
    )


def _inception_b(inputs: int) -> Cell:
    return Cell(
        _unit(inputs, 384, 3, 2, 0),
        nn.Sequential(_unit(inputs, 64, 1), _unit(64, 96, 3), _unit(96, 96, 3, 2, 0)),
        nn.MaxPool2d(3, 2),
    )


def _inception_c(inner: int) -> Cell:
    wide, tall = (1, 7), (7, 1)
    return Cell(
        _unit(768, 192, 1),
        nn.Sequential(_unit(768, inner, 1), _unit(inner, inner, wide), _unit(inner, 192, tall)),
        nn.Sequential(
            _unit(768, inner, 1),
            _unit(inner, inner, tall),
            _unit(inner, inner, wide),
            _unit(inner, inner, tall),
            _unit(inner, 192, wide),
        ),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), _unit(768, 192, 1)),
    )


def _inception_d() -> Cell:
    return Cell(
        nn.Sequential(_unit(768, 192, 1), _unit(192, 320, 3, 2, 0)),
        nn.Sequential(
            _unit(768, 192, 1), _unit(192, 192, (1, 7)), _unit(192, 192, (7, 1)), _unit(192, 192, 3, 2, 0)
        ),
        nn.MaxPool2d(3, 2),
    )


def _inception_e(inputs: int) -> Cell:
    def split() -> Cell:
        return Cell(_unit(384, 384, (1, 3)), _unit(384, 384, (3, 1)))

    return Cell(
        _unit(inputs, 320, 1),
        nn.Sequential(_unit(inputs, 384, 1), split()),
        nn.Sequential(_unit(inputs, 448, 1), _unit(448, 384, 3), split()),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), _unit(inputs, 192, 1)),
    )


def inception_v3() -> nn.Module:
    """Without the auxiliary classifier."""
    stem = [_unit(3, 32, 3, 2, 0), _unit(32, 32, 3, 1, 0), _unit(32, 64, 3), nn.MaxPool2d(3, 2)]
    stem += [_unit(64, 80, 1), _unit(80, 192, 3, 1, 0), nn.MaxPool2d(3, 2)]
    cells = [_inception_a(192, 32), _inception_a(256, 64), _inception_a(288, 64), _inception_b(288)]
    cells += [_inception_c(width) for width in (128, 160, 160, 192)]
    cells += [_inception_d(), _inception_e(1280), _inception_e(2048)]
    return Classifier([*stem, *cells, nn.Dropout()], 2048)


GPT2 = Shape(layers=12, width=768, heads=12, vocabulary=50257, batch=8, tokens=1024)


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network and the batches the papers give it: (image side, batch size)."""

    build: Callable[[], nn.Module]
    batches: tuple[tuple[int, int], ...] = ((224, 32), (500, 16))

    def draw(self, side: int, batch: int) -> tuple[Tensor, ...]:
        """Inputs and targets."""
        return torch.empty(batch, 3, side, side), torch.zeros(batch, dtype=torch.int64)


class Text(Network):
    """`side` is the number of tokens."""

    def draw(self, side: int, batch: int) -> tuple[Tensor, ...]:
        return torch.zeros(batch, side, dtype=torch.int64), torch.zeros(batch, side, dtype=torch.int64)


_LARGE = ((224, 32), (500, 16), (1000, 8))
NETWORKS = {
    "resnet18": Network(build=lambda: resnet((2, 2, 2, 2), bottleneck=False)),
    "resnet34": Network(build=lambda: resnet((3, 4, 6, 3), bottleneck=False)),
    "resnet50": Network(build=lambda: resnet((3, 4, 6, 3), bottleneck=True), batches=_LARGE),
    "resnet101": Network(build=lambda: resnet((3, 4, 23, 3), bottleneck=True), batches=_LARGE),
    "resnet152": Network(build=lambda: resnet((3, 8, 36, 3), bottleneck=True)),
    "resnet1001": Network(build=resnet_1001, batches=((224, 1),)),
    "densenet121": Network(build=lambda: densenet((6, 12, 24, 16)), batches=_LARGE),
    "densenet161": Network(build=lambda: densenet((6, 12, 36, 24), growth=48, channels=96)),
    "densenet169": Network(build=lambda: densenet((6, 12, 32, 32))),
    "densenet201": Network(build=lambda: densenet((6, 12, 48, 32))),
    "inception_v3": Network(build=inception_v3, batches=((299, 32), (500, 16), (1000, 8))),
    "gpt2": Text(build=lambda: GPT(GPT2), batches=((1024, 8),)),
}
