"""All of torch.nn against eager PyTorch: what rounds otherwise in a captured graph is what the README's Limits name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fxremat
from fxremat.settings import Search
from tests.toys import scalar
from tests.training import same

pytestmark = pytest.mark.usefixtures("torch_ready")
LIMITS = (Path(__file__).parents[1] / "README.md").read_text().partition("## Limits")[2]
LINE, IMAGE, CUBE = (4, 6, 12), (2, 6, 8, 8), (2, 6, 4, 8, 8)

# constructor arguments, and the shape of the input
UNARY: Mapping[str, tuple[tuple[Any, ...], tuple[int, ...]]] = {
    **dict.fromkeys(
        ("ELU", "Hardshrink", "Hardsigmoid", "Hardtanh", "Hardswish", "LeakyReLU", "LogSigmoid", "PReLU", "ReLU",
         "ReLU6", "RReLU", "SELU", "CELU", "GELU", "Sigmoid", "SiLU", "Mish", "Softplus", "Softshrink", "Softsign",
         "Tanh", "Tanhshrink", "Identity", "Flatten"),
        ((), LINE),
    ),
    **dict.fromkeys(("GLU", "Softmin", "Softmax", "LogSoftmax"), ((1,), LINE)),
    **dict.fromkeys(("Dropout", "AlphaDropout", "FeatureAlphaDropout"), ((0.3,), LINE)),
    **dict.fromkeys(("Conv1d", "ConvTranspose1d"), ((6, 4, 3), LINE)),
    **dict.fromkeys(("Conv2d", "ConvTranspose2d"), ((6, 4, 3), IMAGE)),
    **dict.fromkeys(("Conv3d", "ConvTranspose3d"), ((6, 4, 3), CUBE)),
    **dict.fromkeys(("MaxPool1d", "AvgPool1d", "AdaptiveAvgPool1d", "AdaptiveMaxPool1d"), ((3,), LINE)),
    **dict.fromkeys(("MaxPool2d", "AvgPool2d", "AdaptiveAvgPool2d", "AdaptiveMaxPool2d"), ((3,), IMAGE)),
    **dict.fromkeys(("MaxPool3d", "AvgPool3d", "AdaptiveAvgPool3d", "AdaptiveMaxPool3d"), ((3,), CUBE)),
    **dict.fromkeys(("LPPool1d",), ((2, 3), LINE)),
    **dict.fromkeys(("LPPool2d",), ((2, 3), IMAGE)),
    **dict.fromkeys(("ReflectionPad1d", "ReplicationPad1d", "ZeroPad1d", "CircularPad1d"), ((2,), LINE)),
    **dict.fromkeys(("ReflectionPad2d", "ReplicationPad2d", "ZeroPad2d", "CircularPad2d"), ((2,), IMAGE)),
    **dict.fromkeys(("ReflectionPad3d", "ReplicationPad3d", "CircularPad3d"), ((1,), CUBE)),
    **dict.fromkeys(("Dropout1d",), ((0.3,), LINE)),
    **dict.fromkeys(("Dropout2d",), ((0.3,), IMAGE)),
    **dict.fromkeys(("Dropout3d",), ((0.3,), CUBE)),
    **dict.fromkeys(("BatchNorm1d", "InstanceNorm1d"), ((6,), LINE)),
    **dict.fromkeys(("BatchNorm2d", "InstanceNorm2d"), ((6,), IMAGE)),
    **dict.fromkeys(("BatchNorm3d", "InstanceNorm3d"), ((6,), CUBE)),
    "GroupNorm": ((3, 6), IMAGE),
    "LayerNorm": ((12,), LINE),
    "RMSNorm": ((12,), LINE),
    "LocalResponseNorm": ((2,), IMAGE),
    "Linear": ((12, 5), LINE),
    "Softmax2d": ((), IMAGE),
    "PixelShuffle": ((1,), IMAGE),
    "PixelUnshuffle": ((2,), IMAGE),
    "ChannelShuffle": ((3,), IMAGE),
    "Upsample": ((None, 2.0), IMAGE),
    "UpsamplingNearest2d": ((None, 2), IMAGE),
    "UpsamplingBilinear2d": ((None, 2), IMAGE),
    "Unfold": ((3,), IMAGE),
    "Fold": (((4, 5), (2, 2)), (2, 24, 12)),
    "Unflatten": ((2, (3, 4)), LINE),
    "TransformerEncoderLayer": ((12, 3, 24), LINE),
    "LSTMCell": ((12, 5), (4, 12)),
    "GRUCell": ((12, 5), (4, 12)),
    "RNNCell": ((12, 5), (4, 12)),
}  # fmt: skip
LOSSES = ("L1Loss", "MSELoss", "HuberLoss", "SmoothL1Loss", "PoissonNLLLoss", "KLDivLoss", "SoftMarginLoss",
          "BCEWithLogitsLoss", "MultiLabelSoftMarginLoss", "CrossEntropyLoss")  # fmt: skip
MADE: Mapping[str, Callable[[], nn.Module]] = {
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(12, 5)),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Conv1d(6, 4, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(12, 12)),
}
OTHERWISE = {"GRUCell"}


class AgainstTarget(nn.Module):
    """A loss against a fixed target, of what a linear layer makes of the input."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(12, 8), getattr(nn, name)()

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x).flatten(0, 1)
        result: Tensor = self.loss(made, torch.full_like(made, 0.5).softmax(-1))
        return result


class Between(nn.Module):
    """A module between products with parameters, so that gradients reach what it reads."""

    def __init__(self, module: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale, self.module = nn.Parameter(torch.rand(shape[1:]) + 0.5), module

    def forward(self, x: Tensor) -> Tensor:
        return scalar(self.module(x * self.scale))


def cases() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    made = {name: (Between(getattr(nn, name)(*args), shape), shape) for name, (args, shape) in UNARY.items()}
    made |= {name: (AgainstTarget(name), LINE) for name in LOSSES}
    return made | {name: (Between(make(), LINE), LINE) for name, make in MADE.items()}


def differs(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Tell whether two steps at the least budget have other bits than eager PyTorch."""
    torch._dynamo.reset()
    plain, x = copy.deepcopy(module), torch.randn(shape)
    fast: Any = {"search": Search(seconds=0.0, slots=100)}
    compiled = fxremat.compile(module, mem=fxremat.plan(module, (x,), mem="100%", **fast).minimum, **fast)
    for seed in range(2):
        for network in (plain, compiled):
            network.zero_grad()
            torch.manual_seed(seed)
            network(x).backward()
        pairs = zip(compiled.parameters(), plain.parameters(), strict=True)
        if not all(same(ours.grad, theirs.grad) for ours, theirs in pairs):
            return True
    states = zip(compiled.state_dict().values(), plain.state_dict().values(), strict=True)
    return not all(map(same, *zip(*states, strict=True)))


@pytest.mark.long
def test_what_rounds_otherwise_is_what_the_limits_name() -> None:
    torch.manual_seed(0)
    found = {name for name, (module, shape) in cases().items() if differs(module, shape)}
    assert found == OTHERWISE


@pytest.mark.parametrize("name", sorted(OTHERWISE))
def test_the_limits_name_what_rounds_otherwise(name: str) -> None:
    assert f"`{name}`" in LIMITS.replace("nn.", "")
