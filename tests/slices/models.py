"""Small models whose largest values lie in regions that run in slices: vocabulary heads, wide layers, convolutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, TOKENS = 4096, 32, 64
Loss = Callable[["Words", Tensor, Tensor], Any]


class Block(nn.Module):
    """Attention and a layer four times as wide, each beside its input."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Words(nn.Module):
    """A model of language with a loss of its own; what it needs most is at its head."""

    def __init__(self, loss: Loss, *, tied: bool = False, bias: bool = False, tokens: int = TOKENS) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(tokens, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        self.loss = loss

    def logits(self, x: Tensor) -> Tensor:
        """Logits of every token."""
        h = self.embedding(x) + self.places.weight
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(self.norm(h))
        return logits

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.loss(self, x, y)


def rows_of(model: Words, x: Tensor) -> Tensor:
    """Logits as a matrix."""
    return model.logits(x).view(-1, VOCABULARY)


def class_weights() -> Tensor:
    """A weight for each word, none of them the same."""
    return torch.arange(1, VOCABULARY + 1, dtype=torch.float32) / VOCABULARY


def cross_entropy(**options: Any) -> Loss:
    """The loss that `F.cross_entropy` makes with these options."""
    return lambda model, x, y: F.cross_entropy(rows_of(model, x), y.view(-1), **options)


def weighted(**options: Any) -> Loss:
    """The same with class weights."""
    return lambda model, x, y: F.cross_entropy(rows_of(model, x), y.view(-1), weight=class_weights(), **options)


def in_float32(model: Words, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(rows_of(model, x).float(), y.view(-1))


def with_z_loss(model: Words, x: Tensor, y: Tensor) -> Tensor:
    logits = rows_of(model, x)
    return F.cross_entropy(logits, y.view(-1)) + 1e-4 * torch.logsumexp(logits, -1).square().mean()


def softcapped(model: Words, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(torch.tanh(rows_of(model, x) / 30) * 30, y.view(-1))


def of_some_rows(model: Words, x: Tensor, y: Tensor) -> Tensor:
    y = y.view(-1)
    losses = F.cross_entropy(rows_of(model, x), y, reduction="none")
    return (losses * (y > 4)).sum() / 100


def shifted(model: Words, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model.logits(x)[:, :-1].reshape(-1, VOCABULARY), y[:, 1:].reshape(-1))


def shifted_by_padding(model: Words, x: Tensor, y: Tensor) -> Tensor:
    """The loss of shifted tokens as transformers computes it: the labels are shifted, not the logits."""
    y = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(rows_of(model, x).float(), y, reduction="sum") / y.ne(-100).sum()


def gathered_by_hand(model: Words, x: Tensor, y: Tensor) -> Tensor:
    logs = model.logits(x).log_softmax(-1)
    return -logs.gather(-1, y.clamp_min(0).unsqueeze(-1)).squeeze(-1).mean()


def transposed(model: Words, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model.logits(x).transpose(1, 2), y)


def distilled(model: Words, x: Tensor, y: Tensor) -> Tensor:
    logits = rows_of(model, x)
    teacher = torch.softmax(logits.detach() * 1.1, -1)
    return F.kl_div(logits.log_softmax(-1), teacher, reduction="batchmean")


def with_logits(model: Words, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits = model.logits(x)
    return F.cross_entropy(logits.view(-1, VOCABULARY), y.view(-1)), logits


class Dropped(nn.Module):
    """A wide layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 512), nn.Linear(512, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.gelu(self.up(x)), 0.1, self.training)).square().mean()


class Gated(nn.Module):
    """One layer of SwiGLU beside its input."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, wide, bias=False), nn.Linear(width, wide, bias=False)
        self.down = nn.Linear(wide, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class GatedStack(nn.Module):
    """Layers that are equal, and so are their regions."""

    def __init__(self, depth: int = 2, wide: int = 512) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Gated(WIDTH, wide) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Attention(nn.Module):
    """Attention written by hand, with a mask and dropout of its scores."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
        scores = (q @ k.transpose(-2, -1) / (width // 4) ** 0.5).masked_fill(~seen, float("-inf"))
        return (F.dropout(torch.softmax(scores, -1), self.dropout, self.training) @ v).square().mean()


class Images(nn.Module):
    """Convolutions with GroupNorm, and a loss over ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.second, self.norm2 = nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.silu(self.norm(self.first(x)))
        x = F.max_pool2d(F.silu(self.norm2(self.second(x))), 2)
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


class UNet(nn.Module):
    """Down, up, and across: predicts its input."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.low, self.norm_low = nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32)
        self.up, self.norm_up = nn.Conv2d(48, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.out = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = F.silu(self.norm(self.down(x)))
        low = F.silu(self.norm_low(self.low(F.avg_pool2d(high, 2))))
        joined = torch.cat([high, F.interpolate(low, scale_factor=2, mode="nearest")], 1)
        return F.mse_loss(self.out(F.silu(self.norm_up(self.up(joined)))), x)


class BatchNormed(nn.Module):
    """Two convolutions with a BatchNorm in between, which sees the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.norm(self.first(x)))).square().mean()


@dataclass(frozen=True, kw_only=True)
class Example:
    """A model with its inputs.

    Attributes:
        mem: the budget, of which a region in slices makes use.
        convolutions: compare gradients with those in float64, since convolutions of other sizes are other kernels.
        dtype: of weights and inputs.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    mem: str = "40%"
    convolutions: bool = False
    dtype: torch.dtype = torch.float32
    options: Mapping[str, Any] = field(default_factory=dict)

    def made(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The model, and its inputs, the same every time."""
        torch.manual_seed(0)
        model, inputs = self.make().to(self.dtype), self.inputs()
        return model, tuple(x.to(self.dtype) if x.is_floating_point() else x for x in inputs)


def tokens(batch: int = 4, length: int = TOKENS, ignored: int = 20) -> Callable[[], tuple[Tensor, ...]]:
    """Tokens, and the same as targets, of which so many of each sequence are ignored."""

    def drawn() -> tuple[Tensor, ...]:
        x = torch.randint(0, VOCABULARY, (batch, length))
        y = x.clone()
        y[:, :ignored] = -100
        return x, y

    return drawn


def words(loss: Loss, inputs: Callable[[], tuple[Tensor, ...]] | None = None, **options: Any) -> Example:
    """An example of a model of language."""
    return Example(make=lambda: Words(loss, **options), inputs=inputs or tokens())


def features(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    """Normal numbers."""
    return lambda: (torch.randn(*shape),)


def labelled() -> tuple[Tensor, ...]:
    """Images with their classes."""
    return torch.randn(16, 3, 16, 16), torch.randint(0, 10, (16,))


EVERYDAY: dict[str, Example] = {
    "ignored": words(cross_entropy()),
    "tied": words(cross_entropy(), tied=True),
    "z loss": words(with_z_loss),
    "class weights": words(weighted()),
    "no reduction": words(of_some_rows),
    "logits beside": words(with_logits),
    "dropout": Example(make=Dropped, inputs=features(4, 128, WIDTH)),
    "equal layers": Example(make=GatedStack, inputs=features(4, 128, WIDTH)),
    "attention": Example(make=lambda: Attention(0.1), inputs=features(4, 128, WIDTH)),
    "images": Example(make=Images, inputs=labelled, convolutions=True),
    "bf16": Example(make=lambda: Words(in_float32), inputs=tokens(), dtype=torch.bfloat16),
}
LONG: dict[str, Example] = {
    "bias": words(cross_entropy(), bias=True),
    "softcap": words(softcapped),
    "smooth": words(cross_entropy(label_smoothing=0.1)),
    "smooth and weighted": words(weighted(label_smoothing=0.1)),
    "sum": words(cross_entropy(reduction="sum")),
    "shifted": words(shifted, tokens(ignored=0)),
    "shifted by padding": words(shifted_by_padding),
    "by hand": words(gathered_by_hand),
    "transposed": words(transposed),
    "distilled": words(distilled),
    "odd": words(cross_entropy(), tokens(3, 37), tokens=37),
    "no dropout": Example(make=Attention, inputs=features(4, 128, WIDTH)),
    "u-net": Example(make=UNet, inputs=features(16, 3, 16, 16), convolutions=True),
}
