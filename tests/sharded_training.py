"""Small models whose parameters ranks share, and training them on each rank's own batches, recording every bit."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fxremat
from tests.training import same

Batches = Sequence[tuple[Tensor, ...]]
STEPS = 5


class Attention(nn.Module):
    """Causal attention and a feed-forward part, each added to what came in."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.dropout(self.out(seen.reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.second(x)))))


class Text(nn.Module):
    """A language model whose head is its embedding; called with tokens and targets, it returns the loss."""

    def __init__(
        self, words: int = 64, width: int = 16, blocks: int = 2, dropout: float = 0.0, labels: int = 0
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Attention(width, dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.labels = nn.Linear(width, labels) if labels else None

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())
        return loss if self.labels is None else loss + self.labels(x).square().mean()


class Residual(nn.Module):
    """Two convolutions with statistics of the batch, beside what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.last(self.second(F.relu(self.norm(self.first(x))))))


class Images(nn.Module):
    """A small ResNet that returns its loss."""

    def __init__(self, width: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(blocks))
        self.head = nn.Linear(width, 5)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), targets)


class Dense(nn.Module):
    """A normalized layer that is added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.layer(self.norm(x)))


class Floats(nn.Module):
    """Dense layers that are called with numbers, of the type of their weights where `casts`."""

    def __init__(self, width: int = 12, blocks: int = 2, casts: bool = False) -> None:
        super().__init__()
        self.casts = casts
        self.first = nn.Linear(6, width)
        self.blocks = nn.ModuleList(Dense(width) for _ in range(blocks))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = self.first(x.to(self.first.weight.dtype) if self.casts else x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.to(self.head.weight.dtype)).float(), targets)


def texts(rank: int, words: int = 64, steps: int = STEPS, rows: int = 8) -> Batches:
    """Tokens and targets of each step on one rank."""
    random = torch.Generator().manual_seed(100 + rank)
    found = [torch.randint(words, (rows, 17), generator=random) for _ in range(steps)]
    return [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in found]


def pictures(rank: int, steps: int = STEPS) -> Batches:
    """Images and targets of each step on one rank."""
    random = torch.Generator().manual_seed(100 + rank)
    return [
        (torch.randn(8, 3, 8, 8, generator=random), torch.randint(5, (8,), generator=random)) for _ in range(steps)
    ]


def vectors(rank: int, steps: int = STEPS) -> Batches:
    """Numbers and targets of each step on one rank."""
    random = torch.Generator().manual_seed(100 + rank)
    return [(torch.randn(64, 6, generator=random), torch.randint(5, (64,), generator=random)) for _ in range(steps)]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A model that is the same on every rank and in every call."""
    torch.manual_seed(0)
    return make()


def in_blocks(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    """torch's own `fully_shard` on each block, and on the rest."""
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def own_cache() -> None:
    """A cost cache of this rank alone; before the first compile."""
    os.environ["FXREMAT_CACHE"] = tempfile.mkdtemp(prefix="fxremat-")


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else local(p.grad).clone() for name, p in model.named_parameters()}


def state(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: local(value.detach()).clone() for name, value in (*model.named_parameters(), *model.named_buffers())
    }


@dataclass(frozen=True, kw_only=True)
class Record:
    """Losses, gradients, final values and random state that a training run left behind on one rank."""

    losses: list[Tensor]
    gradients: list[Mapping[str, Tensor | None]]  # of each step
    state: Mapping[str, Tensor]  # parameters and buffers at the end
    random: Tensor  # the state of the generator at the end


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def train(
    model: nn.Module,
    batches: Batches,
    rank: int,
    *,
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] = adamw,
) -> Record:
    """One step of the optimizer for each batch; the generator has this rank's own seed."""
    torch.manual_seed(7 + rank)
    stepping = optimizer(model.parameters())
    losses, found = [], []
    for batch in batches:
        stepping.zero_grad()
        loss = model(*batch)
        loss.backward()
        losses.append(loss.detach().clone())
        found.append(gradients(model))
        stepping.step()
    return Record(losses=losses, gradients=found, state=state(model), random=torch.get_rng_state())


def differences(ours: Record, theirs: Record) -> list[str]:
    """Name all that is not equal to the last bit."""
    found = [f"loss {k}" for k, pair in enumerate(zip(ours.losses, theirs.losses, strict=True)) if not same(*pair)]
    for k, (one, other) in enumerate(zip(ours.gradients, theirs.gradients, strict=True)):
        found += [f"gradient {k} of {name}" for name in unequal(one, other)]
    found += [f"value of {name}" for name in unequal(ours.state, theirs.state)]
    return found + ([] if same(ours.random, theirs.random) else ["generator"])


def unequal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Names of tensors that differ in a bit, or that one of the two lacks."""
    return [
        f"{name} ({_distance(ours.get(name), theirs.get(name))})"
        for name in {**theirs, **ours}
        if name not in ours or name not in theirs or not same(ours[name], theirs[name])
    ]


def _distance(one: Tensor | None, other: Tensor | None) -> str:
    if one is None or other is None or one.shape != other.shape:
        return " and ".join("none" if x is None else str(tuple(x.shape)) for x in (one, other))
    return f"{(one - other).abs().max().item():.1e}" if one.numel() else "empty"


def least_budget(model: nn.Module, batch: tuple[Tensor, ...], **options: Any) -> int:
    """Return the minimum that BudgetTooSmall names."""
    try:
        fxremat.compile(model, mem=1, **options)(*batch)
    except fxremat.BudgetTooSmall as error:
        return error.minimum
    raise AssertionError("a training step fitted in one byte")
