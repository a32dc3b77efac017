"""Small modules for tests of the surface: a stack deep enough to recompute in, and a step to compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import fxremat
from fxremat.settings import Search
from tests.training import gradients_of, same, state_of, unequal

WIDTH, ROWS = 32, 128
QUICK: Any = {"search": Search(seconds=0.0, slots=100)}  # bits do not depend on how good a plan is


class Stack(nn.Module):
    """Six blocks of linear, GELU and dropout; returns its last value, without a loss."""

    def __init__(self, depth: int = 6, dropout: float = 0.1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Loss(nn.Module):
    """Mean square of what a module returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return scalar(self.inner(*args, **kwargs))


class Words(nn.Module):
    """A loss over many words, which dominates memory: single ops hold the logits three times, Inductor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4096, 16), nn.Linear(16, 4096, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embedding(tokens).tanh()).flatten(0, 1), tokens.flatten())


def tokens() -> tuple[Tensor]:
    return (torch.randint(4096, (4, 64), generator=torch.Generator().manual_seed(1)),)


def rows(n: int = ROWS, seed: int = 0) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed))


def scalar(output: object) -> Tensor:
    """One number that depends on every floating tensor of a nested output."""
    tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([t.float().square().mean() for t in tensors]).sum()


@dataclass(frozen=True, kw_only=True)
class Step:
    """All that one forward and backward leaves behind."""

    output: Any
    gradients: dict[str, Tensor | None]
    input_gradients: list[Tensor | None]
    state: dict[str, Tensor]
    rng: Tensor


Body = Callable[..., Any]


def plain_body(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward and backward of a step, as every step does unless a test says otherwise."""
    output = model(*args, **kwargs)
    scalar(output).backward()
    return output


def under_autocast(model: nn.Module, x: Tensor) -> Tensor:
    """A step whose forward is in half precision where it may be."""
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    scalar(output).backward()
    return output


def record(model: nn.Module, args: Any, kwargs: dict[str, Any], body: Body = plain_body) -> Step:
    """Runs `body(model, *args, **kwargs)` on copies of the inputs from a fixed RNG state."""
    args, kwargs = tree_map(_copy, (args, kwargs))
    torch.manual_seed(3)
    output = body(model, *args, **kwargs)
    return Step(
        output=tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, output),
        gradients=gradients_of(model),
        input_gradients=[v.grad for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)],
        state=state_of(model),
        rng=torch.get_rng_state(),
    )


def _copy(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def assert_as_plain(
    make: Callable[[], nn.Module],
    *args: Any,
    body: Body = plain_body,
    mem: int | str = "min",
    **kwargs: Any,
) -> nn.Module:
    """One step of `make()` compiled does bit for bit what it does plain; by default at the least budget.

    Returns the compiled model.
    """
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    compiled = fxremat.compile(make(), mem=mem, **QUICK)
    expected, got = record(plain, args, kwargs, body), record(compiled, args, kwargs, body)

    assert type(got.output) is type(expected.output)
    for ours, theirs in zip(tree_leaves(got.output), tree_leaves(expected.output), strict=True):
        assert same(ours, theirs) if isinstance(theirs, Tensor) else ours == theirs
    assert unequal(got.gradients, expected.gradients) == []
    for i, (mine, its) in enumerate(zip(got.input_gradients, expected.input_gradients, strict=True)):
        assert same(mine, its), f"gradient of input {i}"
    assert unequal(got.state, expected.state) == []
    assert torch.equal(got.rng, expected.rng), "random state"
    return compiled


def mse(output: Tensor) -> Tensor:
    return F.mse_loss(output, torch.zeros_like(output))


class FourLayers(nn.Module):
    """Four times linear and tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Overwriting(nn.Module):
    """Reads a buffer, overwrites it, and goes on: to compute its first layers again takes a copy of the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.ones(16))
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sin(self.layers[0](x) + self.bias)
        self.bias.mul_(0.9)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x.sum()


class Total(nn.Module):
    """The sum, as a loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh().sum()


class Carrier(nn.Module):
    """An encoder, and a decoder each of whose layers reads the encoder's result."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(8, 8) for _ in range(depth)])
        self.decoder = nn.ModuleList([nn.Linear(8, 8) for _ in range(depth)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.encoder:
            x = torch.relu(layer(x))
        for layer in self.decoder:
            y = torch.relu(layer(y + x))
        return y.square().mean()
