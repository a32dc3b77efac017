"""Random models: DAGs of layers with skips, fork-joins, dense connections, side branches and several outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.capture import capture
from fxremat.cost.estimate import DEVICES, WRAPPED, estimate
from fxremat.graphs.captured import Captured
from fxremat.step.costs import Costs

__all__ = ["capture"]
WIDTH, ROWS = 8, 16
KINDS = (
    "linear",
    "shared",
    "relu",
    "dropout",
    "norm",
    "batch_norm",
    "add",
    "mul",
    "cat",
    "split",
    "tanh",
    "view",
    "tokens",
    "attend",
    "twist",
    "images",
)


TWO_INPUTS = ("add", "mul", "cat")


@dataclass(frozen=True)
class Layer:
    """One layer and which earlier values it reads (counted back from the latest, modulo their number)."""

    kind: str
    first: int
    second: int


@dataclass(frozen=True)
class Recipe:
    """A model to build."""

    layers: tuple[Layer, ...]
    outputs: int  # extra values that the model returns besides its loss
    side: bool  # whether the last layer but one also feeds a branch that nothing reads
    twice: bool = False  # whether all layers run twice, as two towers that share them and meet at the loss


layers = st.builds(Layer, st.sampled_from(KINDS), st.integers(0, 12), st.integers(0, 12))
chain_layers = st.builds(Layer, st.sampled_from(KINDS), st.just(0), st.integers(0, 12))
recipes = st.builds(
    Recipe,
    st.lists(st.one_of(chain_layers, chain_layers, layers), min_size=2, max_size=24).map(tuple),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
)
small_recipes = st.builds(
    Recipe,
    st.lists(st.one_of(chain_layers, layers), min_size=1, max_size=6).map(tuple),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from([False, False, True]),
)


def few(examples: int) -> settings:
    """Settings of a random test whose examples take a while each; a failure shows at once, unshrunk."""
    return settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
    )


class Dag(nn.Module):
    """The model of a recipe; reads two inputs of [rows, WIDTH] and returns its loss (and further values)."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.modules_of = nn.ModuleList([_module(layer.kind) for layer in recipe.layers])

    def forward(self, x: Tensor, y: Tensor) -> Any:
        loss, values = self._tower(x, y)
        if self.recipe.twice:
            other, _ = self._tower(y, x)
            loss = loss + other
        if not self.recipe.outputs:
            return loss
        return {"loss": loss, "more": values[-self.recipe.outputs :], "nothing": None}

    def _tower(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        values = [x, y, self.shared(x)]
        unread = {2}
        for layer, module in zip(self.recipe.layers, self.modules_of, strict=True):
            first = len(values) - 1 - layer.first % len(values)
            second = len(values) - 1 - layer.second % len(values)
            unread -= {first, second} if layer.kind in TWO_INPUTS else {first}
            unread.add(len(values))
            values.append(self._apply_layer(layer.kind, module, values[first], values[second]))
        if self.recipe.side:
            values[-2].sin().cos()
        # A dropout that nothing reads draws in eager mode only: torch.compile never runs it. So all are read.
        loss = values[-1].square().mean() + self.shared(values[-2]).mean()
        return loss + sum(values[index].mean() for index in sorted(unread)), values

    def _apply_layer(self, kind: str, module: nn.Module, first: Tensor, second: Tensor) -> Tensor:
        rows = len(first)
        match kind:
            case "shared":
                return self.shared(first)
            case "add":
                return first + second
            case "mul":
                return first * second
            case "cat":
                return module(torch.cat([first, second], 1))
            case "split":
                left, right = first.split(WIDTH // 2, dim=1)
                return torch.cat([F.relu(right), left], 1)
            case "view":
                return first.view(rows // 2, 2, WIDTH).transpose(0, 1).reshape(rows, WIDTH)
            case "tanh":
                return torch.tanh(first)
            case "tokens":  # a batch of one, whose dimension of size 1 has whatever stride comes out
                tokens = module(first.view(1, rows, WIDTH)).transpose(1, 2)
                return F.gelu(tokens + tokens.flip(2)).transpose(1, 2).reshape(rows, WIDTH)
            case "attend":
                heads = first.view(1, rows, 2, WIDTH // 2).transpose(1, 2)
                mixed = module((heads @ heads.mT).softmax(-1) @ heads)
                return mixed.transpose(1, 2).reshape(rows, WIDTH)
            case "twist":  # the same numbers in the other order of dimensions
                return module(first.t().contiguous().t()) * 0.5
            case "images":
                images = module(first.t().reshape(1, WIDTH, 4, rows // 4))
                return images.flatten(2).transpose(1, 2).squeeze(0)
        return module(first)


def _module(kind: str) -> nn.Module:
    makers: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: nn.Linear(WIDTH, WIDTH),
        "relu": nn.ReLU,
        "dropout": lambda: nn.Dropout(0.3),
        "norm": lambda: nn.LayerNorm(WIDTH),
        "batch_norm": lambda: nn.BatchNorm1d(WIDTH),
        "cat": lambda: nn.Linear(2 * WIDTH, WIDTH),
        "tokens": lambda: nn.Linear(WIDTH, WIDTH),
        "attend": lambda: nn.Linear(WIDTH // 2, WIDTH // 2),
        "twist": lambda: nn.Linear(WIDTH, WIDTH),
        "images": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
    }
    return makers.get(kind, nn.Identity)()


def batch(seed: int = 0, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Two inputs."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def estimated(joint: Captured) -> Costs:
    """Costs that take no time to find, without the workspaces that are known to be needed (convolutions)."""
    costs = estimate(joint, DEVICES["cpu"])
    workspace = tuple(min(size - WRAPPED, 0) for size in costs.sizes.workspace)  # below 0: an operand is overwritten
    return replace(costs, sizes=replace(costs.sizes, workspace=workspace))
