"""Language models whose largest tensors are the logits: a GPT, an encoder-decoder and a Llama with many words.

    model, batch = LANGUAGE["gpt_32k"].model(), LANGUAGE["gpt_32k"].batch()
    model(*batch).backward()
    model.loss, model.checkpointed = chunked(4), True       # the head by other means, and a checkpoint per layer

The last input is what the words should be; one in twelve is left out of the loss (-100). `gpt_wide` has few words, and
MLPs eight times as wide as the model instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .case import Case
from .gpt import Attention

IGNORED = -100
# The loss of hidden [rows, width], weight [words, width] and targets [rows].
Head = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Shape:
    words: int
    width: int
    layers: int
    heads: int
    batch: int
    tokens: int  # per sequence
    wider: int = 4  # hidden width of an MLP over `width`
    tied: bool = False


def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits at once; they are upcast where the model is in half precision."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, ignore_index=IGNORED)


class LanguageModel(nn.Module):
    """Embedding and head; a subclass says how `hidden` comes from the inputs."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.words, shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight
        self.loss: Head = whole
        self.checkpointed = False  # whether each layer runs again in the backward

    def initialize(self) -> None:
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def through(self, layers: Iterable[nn.Module], x: Tensor, *more: Any) -> Tensor:
        for layer in layers:
            x = checkpoint(layer, x, *more, use_reentrant=False) if self.checkpointed else layer(x, *more)
        return x

    def hidden(self, *inputs: Tensor) -> Tensor:
        """The input of the head, [batch, tokens, width]."""
        raise NotImplementedError

    def forward(self, *batch: Tensor) -> Tensor:
        *inputs, targets = batch
        return self.loss(self.hidden(*inputs).flatten(0, 1), self.head.weight, targets.flatten())


class Block(nn.Module):
    """A pre-norm block of a GPT, without dropout."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        inner = shape.wider * shape.width
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape.width, shape.heads, dropout=0.0)
        self.norm2 = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(nn.Linear(shape.width, inner), nn.GELU(), nn.Linear(inner, shape.width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), None)
        return x + self.mlp(self.norm2(x))


class GPT(LanguageModel):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.position = nn.Embedding(shape.tokens, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.initialize()

    def hidden(self, *inputs: Tensor) -> Tensor:
        (tokens,) = inputs
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        return self.norm(self.through(self.layers, x))


class BiasedAttention(nn.Module):
    """Attention as T5 has it: unscaled, of logits to which a learned bias is added."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q, self.k, self.v, self.out = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(memory)), self.split(self.v(memory))
        logits = q @ k.transpose(-1, -2)
        attention = (logits if bias is None else logits + bias).softmax(-1)
        return self.out((attention @ v).transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        inner = shape.wider * shape.width
        self.norm1, self.norm2 = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.attention = BiasedAttention(shape)
        self.up = nn.Linear(shape.width, inner, bias=False)
        self.down = nn.Linear(inner, shape.width, bias=False)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, bias)
        return x + self.down(F.relu(self.up(self.norm2(x))))


class DecoderLayer(EncoderLayer):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.norm3 = nn.RMSNorm(shape.width)
        self.across = BiasedAttention(shape)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        assert memory is not None
        y = self.norm1(x)
        x = x + self.attention(y, y, bias)
        x = x + self.across(self.norm3(x), memory, None)
        return x + self.down(F.relu(self.up(self.norm2(x))))


class EncoderDecoder(LanguageModel):
    """Like T5: RMSNorm, no absolute positions, biases of the distance that all layers of a side share."""

    FAR = 32  # distances beyond are one

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.encoder = nn.ModuleList(EncoderLayer(shape) for _ in range(shape.layers))
        self.decoder = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.layers))
        self.encoder_norm, self.norm = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.encoder_bias = nn.Embedding(2 * self.FAR + 1, shape.heads)
        self.decoder_bias = nn.Embedding(2 * self.FAR + 1, shape.heads)
        self.initialize()

    def bias(self, table: nn.Module, tokens: Tensor) -> Tensor:
        """[heads, tokens, tokens]."""
        place = torch.arange(tokens.shape[1], device=tokens.device)
        distance = (place[None] - place[:, None]).clamp(-self.FAR, self.FAR) + self.FAR
        return table(distance).permute(2, 0, 1)

    def hidden(self, *inputs: Tensor) -> Tensor:
        source, tokens = inputs
        x = self.through(self.encoder, self.embedding(source), self.bias(self.encoder_bias, source))
        memory = self.encoder_norm(x)
        length = tokens.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        bias = self.bias(self.decoder_bias, tokens).masked_fill(future, -1e9)
        return self.norm(self.through(self.decoder, self.embedding(tokens), bias, memory))


class LlamaLayer(nn.Module):
    """RMSNorm, rotary positions, half as many keys as queries, SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.size = shape.width, shape.width // shape.heads
        inner = shape.wider * width
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width // 2, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k = rotated(self.split(self.q(y)), cos, sin), rotated(self.split(self.k(y)), cos, sin)
        k, v = k.repeat_interleave(2, dim=1), self.split(self.v(y)).repeat_interleave(2, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Llama(LanguageModel):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.layers = nn.ModuleList(LlamaLayer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.size = shape.width // shape.heads
        self.initialize()

    def hidden(self, *inputs: Tensor) -> Tensor:
        (tokens,) = inputs
        x = self.embedding(tokens)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        frequency = 10000.0 ** (-torch.arange(0, self.size, 2, device=tokens.device) / self.size)
        angle = place[:, None] * frequency
        return self.norm(self.through(self.layers, x, angle.cos().to(x.dtype), angle.sin().to(x.dtype)))


def case_of(name: str, model: Callable[[Shape], LanguageModel], shape: Shape, sides: int = 1) -> Case:
    """`sides` texts go in: an encoder-decoder reads two."""

    def draw(g: torch.Generator) -> tuple[Tensor, ...]:
        size = (shape.batch, shape.tokens)
        inputs = [torch.randint(shape.words, size, generator=g) for _ in range(sides)]
        targets = torch.randint(shape.words, size, generator=g)
        left_out = torch.rand(size, generator=g) < 1 / 12
        return *inputs, targets.masked_fill(left_out, IGNORED)

    return Case(name=name, build=lambda: model(shape), draw=draw)


def _half(case: Case) -> Case:
    """The same with weights and activations in bfloat16."""
    return Case(name=f"{case.name}_bf16", build=lambda: case.build().bfloat16(), draw=case.draw)


_TEXT: dict[str, Any] = {"width": 128, "heads": 4, "batch": 2, "tokens": 256}
_FULL = {
    "gpt_32k": case_of("gpt_32k", GPT, Shape(words=32_768, layers=4, **_TEXT)),
    "gpt_50k_tied": case_of("gpt_50k_tied", GPT, Shape(words=50_257, layers=4, tied=True, **_TEXT)),
    "t5_32k": case_of("t5_32k", EncoderDecoder, Shape(words=32_128, layers=2, tied=True, **_TEXT), sides=2),
    "llama_128k": case_of(
        "llama_128k", Llama, Shape(words=128_256, width=64, layers=4, heads=4, batch=2, tokens=128)
    ),
}
LANGUAGE = {**_FULL, "gpt_32k_bf16": _half(_FULL["gpt_32k"])}
"""Models whose floor is the head."""
WIDE = case_of("gpt_wide", GPT, Shape(words=256, width=128, layers=4, heads=4, batch=8, tokens=256, wider=8))
"""A model whose floor is an MLP."""
