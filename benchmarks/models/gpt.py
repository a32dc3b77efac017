"""A GPT: pre-norm blocks, fused attention, dropout, and an embedding tied to the output layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, Size


@dataclass(frozen=True, kw_only=True)
class Shape:
    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    tokens: int  # per sequence


SHAPES: dict[Size, Shape] = {
    "full": Shape(layers=12, width=256, heads=8, vocabulary=2048, batch=8, tokens=128),
    "small": Shape(layers=3, width=64, heads=4, vocabulary=256, batch=8, tokens=64),
}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.dropout(self.out(y.transpose(1, 2).reshape(b, t, d)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Next-token loss of `tokens` [batch, length]; `padding` is True where there is no token."""

    def __init__(self, shape: Shape, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.tokens, shape.width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads, dropout) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor, padding: Tensor | None = None) -> Tensor:
        length = tokens.shape[1]
        mask = None
        if padding is not None:
            causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
            mask = causal & ~padding[:, None, None, :]
            targets = targets.masked_fill(padding, -100)  # what cross_entropy leaves out
        positions = torch.arange(length, device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt(size: Size) -> Case:
    shape = SHAPES[size]

    def draw(g: torch.Generator) -> tuple[Tensor, ...]:
        text = torch.randint(shape.vocabulary, (shape.batch, shape.tokens + 1), generator=g)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return Case(name="gpt", build=lambda: GPT(shape), draw=draw)


def gpt_padded(size: Size) -> Case:
    """The same with sequences of different lengths, padded on the right."""
    shape, plain = SHAPES[size], gpt(size)

    def draw(g: torch.Generator) -> tuple[Tensor, ...]:
        lengths = torch.randint(shape.tokens // 2, shape.tokens + 1, (shape.batch, 1), generator=g)
        return *plain.draw(g), torch.arange(shape.tokens) >= lengths

    return Case(name="gpt_padded", build=plain.build, draw=draw)
