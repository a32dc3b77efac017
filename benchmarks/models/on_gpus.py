"""The models in sizes that keep a large GPU busy, so that a step's time is that of its kernels, not of their launches.

    case = get("gpt")               GPT-2 medium, under autocast to bfloat16
    case = get("gpt", "small")      the same structure with fewer and narrower layers, to try a program

`gpt odd` has tensors whose sizes are no multiples of a mebibyte. `resnet` is in float32; all others run under autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from .case import Autocast, Case, labelled_images
from .convnets import ResNet
from .gpt import GPT, Shape
from .mixer import DeepChain, Mixer
from .unet import UNet

GpuSize = Literal["gpu", "small"]


def get(name: str, size: GpuSize = "gpu") -> Case:
    """The named case. Raises KeyError with the known names."""
    if name not in _FACTORIES:
        raise KeyError(f"no model {name!r} for GPUs; known: {', '.join(NAMES)}")
    return replace(_FACTORIES[name](size == "small"), name=name)


def _gpt(small: bool) -> Case:
    shape = Shape(layers=24, width=1024, heads=16, vocabulary=50257, batch=8, tokens=1024)
    few = Shape(layers=2, width=128, heads=4, vocabulary=512, batch=4, tokens=128)
    return _language(few if small else shape)


def _gpt_odd(small: bool) -> Case:
    shape = Shape(layers=12, width=800, heads=10, vocabulary=50257, batch=7, tokens=1000)
    few = Shape(layers=2, width=120, heads=5, vocabulary=511, batch=3, tokens=100)
    return _language(few if small else shape)


def _gpt_padded(small: bool) -> Case:
    """The same with sequences of different lengths, padded on the right."""
    plain = _gpt(small)

    def draw(g: torch.Generator) -> tuple[Tensor, ...]:
        tokens, targets = plain.draw(g)
        batch, length = tokens.shape
        lengths = torch.randint(length // 2, length + 1, (batch, 1), generator=g)
        return tokens, targets, torch.arange(length) >= lengths

    return replace(plain, draw=draw)


def _language(shape: Shape) -> Case:
    def draw(g: torch.Generator) -> tuple[Tensor, ...]:
        text = torch.randint(shape.vocabulary, (shape.batch, shape.tokens + 1), generator=g)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return _case(lambda: Autocast(GPT(shape)), draw)


def _resnet(small: bool) -> Case:
    """ResNet-50 in float32."""
    if small:
        return _case(lambda: ResNet((1, 1, 1, 1), 16, 10), labelled_images(2, 64))
    return _case(lambda: ResNet((3, 4, 6, 3), 64, 1000), labelled_images(96, 224, 1000))


def _resnet_amp(small: bool) -> Case:
    plain = _resnet(small)
    return replace(plain, build=lambda: Autocast(plain.build()))


def _unet(small: bool) -> Case:
    levels, width, batch, side, classes = (2, 8, 2, 32, 4) if small else (4, 64, 16, 320, 4)

    def draw(g: torch.Generator) -> tuple[Tensor, ...]:
        images = torch.randn(batch, 3, side, side, generator=g)
        return images, torch.randint(classes, (batch, side, side), generator=g)

    return _case(lambda: Autocast(UNet(levels, width, classes)), draw)


def _deep_chain(small: bool) -> Case:
    depth, width, rows = (12, 64, 512) if small else (48, 2048, 16384)

    def draw(g: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randn(rows, width, generator=g), torch.randn(rows, width, generator=g)

    return _case(lambda: Autocast(DeepChain(depth, width)), draw)


def _mixer(small: bool) -> Case:
    if small:
        return _case(lambda: Autocast(Mixer(32, 2, ((1, 24), (2, 48), (1, 96)), 10)), labelled_images(4, 32))
    stages = ((4, 192), (6, 384), (4, 768))
    return _case(lambda: Autocast(Mixer(224, 8, stages, 1000)), labelled_images(128, 224, 1000))


def _case(build: Callable[[], nn.Module], draw: Callable[[torch.Generator], tuple[Tensor, ...]]) -> Case:
    return Case(name="", build=build, draw=draw)


_FACTORIES: dict[str, Callable[[bool], Case]] = {
    "gpt": _gpt,
    "gpt odd": _gpt_odd,
    "gpt_padded": _gpt_padded,
    "resnet": _resnet,
    "resnet amp": _resnet_amp,
    "unet": _unet,
    "deep_chain": _deep_chain,
    "mixer": _mixer,
}

NAMES = tuple(_FACTORIES)
