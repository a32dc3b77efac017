"""Checkpoints where a user would put them into each model, without changing what it computes.

    placement = placements("gpt")["layer"]
    placement.rewire(model, run)        from now on `run(blocks, x)` decides how the layers run one after another

A *block* is a function from a value to the next one; every placement finds the model's own blocks and hands them, a
run of consecutive ones at a time, to `run`. The model keeps its parameters and buffers, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.convnets import DenseLayer, DenseNet
from ..models.unet import UNet

Block = Callable[[Any], Any]
Run = Callable[[Sequence[Block], Any], Any]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One way to see a model as blocks."""

    rewire: Callable[[Any, Run], None]
    chain: bool = False  # blocks follow one another, so that segments make sense
    nested: bool = False  # there are blocks inside blocks


def plainly(blocks: Sequence[Block], x: Any) -> Any:
    """The `Run` of plain PyTorch."""
    for block in blocks:
        x = block(x)
    return x


def longest_chain(model: nn.Module) -> int:
    """Of a rewired model: the most blocks that follow one another."""
    return max(len(module) for module in model.modules() if isinstance(module, Trunk | Stage))


def placements(model: str) -> dict[str, Placement]:
    """The ways to cut this model, by name; the first is the natural one. Raises KeyError for an unknown model."""
    return _PLACEMENTS[model]


class Trunk(nn.Module):
    """Modules that the model calls one after another, `size` of them to a block, run by `run`."""

    def __init__(self, modules: nn.Sequential | nn.ModuleList, run: Run, size: int = 1) -> None:
        super().__init__()
        self.parts, self.run, self.size = modules, run, size

    def __len__(self) -> int:
        """The number of blocks: the last one may have fewer than `size` modules."""
        return -(-len(self.parts) // self.size)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the blocks on `x`; what follows `x` is handed to every module."""
        parts = list(self.parts)
        groups = [parts[i : i + self.size] for i in range(0, len(parts), self.size)]
        return self.run([partial(_one_after_another, group, args, kwargs) for group in groups], x)


def _one_after_another(
    modules: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], x: Any
) -> Any:
    for module in modules:
        x = module(x, *args, **kwargs)
    return x


class Stage(nn.Module):
    """The layers of one stage of a DenseNet: a block reads all values before it and adds one."""

    def __init__(self, layers: nn.ModuleList, run: Run) -> None:
        super().__init__()
        self.layers, self.run = layers, run

    def __len__(self) -> int:
        """The number of blocks: one a layer."""
        return len(self.layers)

    def forward(self, values: list[Tensor]) -> Tensor:
        """Appends all new values but the last, which it returns, as a single layer would."""
        every = self.run([partial(_grown, layer) for layer in self.layers], tuple(values))
        values += every[len(values) : -1]
        return every[-1]


def _grown(layer: nn.Module, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return *values, layer(list(values))


def _sequential(name: str, *, size: int = 1) -> Placement:
    """The model's `nn.Sequential` of this name."""

    def rewire(model: nn.Module, run: Run) -> None:
        setattr(model, name, Trunk(getattr(model, name), run, size))

    return Placement(rewire=rewire, chain=True)


def _lists(*names: str) -> Placement:
    """The model's `nn.ModuleList`s of these names, which it loops over."""

    def rewire(model: nn.Module, run: Run) -> None:
        for name in names:
            setattr(model, name, nn.ModuleList([Trunk(getattr(model, name), run)]))

    return Placement(rewire=rewire, chain=True)


def _each(kind: Callable[[nn.Module], bool]) -> Placement:
    """Every module of a kind, each a block of its own."""

    def rewire(model: nn.Module, run: Run) -> None:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if kind(child):
                    setattr(parent, name, Trunk(nn.ModuleList([child]), run))

    return Placement(rewire=rewire)


def _is_conv_bn(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and [type(part) for part in module] == [
        nn.Conv2d,
        nn.BatchNorm2d,
    ]


def _is_branch(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and isinstance(module[-1], nn.ReLU)


def _is_mlp(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and isinstance(module[0], nn.Linear)


def _double_convs(model: UNet, run: Run, size: int) -> None:
    for convs in (model.down, model.up):
        for i, convolutions in enumerate(convs):
            assert isinstance(convolutions, nn.Sequential)
            convs[i] = Trunk(convolutions, run, size)
    model.bottom = Trunk(model.bottom, run, size)  # type: ignore[assignment]


def _steps(model: UNet, run: Run) -> None:
    """A block a double convolution; on the way up together with the upsampling and the concatenation."""

    def up(i: int, skip: Tensor, x: Tensor) -> Tensor:
        return model.up[i](torch.cat([skip, model.enlarge[i](x)], 1))

    def forward(images: Tensor, labels: Tensor) -> Tensor:
        x, skips = images, []
        for down in model.down:
            x = run([down], x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = run([model.bottom], x)
        for i in range(len(model.up)):
            x = run([partial(up, i, skips.pop())], x)
        return F.cross_entropy(model.head(x), labels)

    model.forward = forward  # type: ignore[method-assign]


def _levels(model: UNet, run: Run, count: int) -> None:
    """A block is all that lies below a resolution, for the first `count` of them; blocks inside blocks."""
    last = len(model.down)

    def level(i: int, x: Tensor) -> Tensor:
        if i == last:
            return run([model.bottom], x)
        skip = run([model.down[i]], x)
        below: Block = partial(level, i + 1)
        inner = run([below], F.max_pool2d(skip, 2)) if i < count else below(F.max_pool2d(skip, 2))
        return run([partial(up, last - 1 - i, skip)], inner)

    def up(i: int, skip: Tensor, x: Tensor) -> Tensor:
        return model.up[i](torch.cat([skip, model.enlarge[i](x)], 1))

    def forward(images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model.head(level(0, images)), labels)

    model.forward = forward  # type: ignore[method-assign]


def _stages(model: DenseNet, run: Run) -> None:
    for i, layers in enumerate(model.stages):
        assert isinstance(layers, nn.ModuleList)
        model.stages[i] = nn.ModuleList([Stage(layers, run)])


def _whole_stages(model: DenseNet, run: Run) -> None:
    """Each stage is one block."""

    def at_once(blocks: Sequence[Block], values: Any) -> Any:
        return run([partial(plainly, blocks)], values)

    _stages(model, at_once)


def _squeezes(model: DenseNet, run: Run) -> None:
    """The concatenation, norm and 1x1 convolution of every layer: what torchvision calls memory_efficient."""
    for layer in model.modules():
        if isinstance(layer, DenseLayer):
            layer.forward = partial(_squeezed, layer, run)  # type: ignore[method-assign]


def _squeezed(layer: DenseLayer, run: Run, earlier: list[Tensor]) -> Tensor:
    def squeeze(values: tuple[Tensor, ...]) -> Tensor:
        return layer.squeeze(F.relu(layer.norm1(torch.cat(values, 1))))

    return layer.spatial(F.relu(layer.norm2(run([squeeze], tuple(earlier)))))


_CONV_BN = _each(_is_conv_bn)
_MLP = _each(_is_mlp)

_PLACEMENTS: dict[str, dict[str, Placement]] = {
    "gpt": {"layer": _lists("blocks"), "MLP": _MLP},
    "encoder_decoder": {"layer": _lists("encoder", "decoder")},
    "mixer": {"block": _sequential("blocks"), "MLP": _MLP},
    "deep_chain": {"block": _sequential("blocks")},
    "unet": {
        "double convolution": Placement(rewire=partial(_double_convs, size=6)),
        "convolution": Placement(rewire=partial(_double_convs, size=3)),
        "step": Placement(rewire=_steps),
        "1 level": Placement(rewire=partial(_levels, count=1), nested=True),
        "2 levels": Placement(rewire=partial(_levels, count=2), nested=True),
        "all levels": Placement(rewire=partial(_levels, count=99), nested=True),
    },
    "resnet": {"block": _sequential("blocks"), "convolution and norm": _CONV_BN},
    "inception": {
        "block": _sequential("blocks"),
        "branch": _each(_is_branch),
        "convolution and norm": _CONV_BN,
    },
    "siamese": {"convolution, norm and ReLU": _sequential("tower", size=2), "convolution and norm": _CONV_BN},
    "densenet": {
        "layer": Placement(rewire=_stages, chain=True),
        "stage": Placement(rewire=_whole_stages),
        "squeeze": Placement(rewire=_squeezes),
    },
}
