"""Shapes that a chain does not describe well: an encoder-decoder, an Inception, a siamese network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, Size, labelled_images
from .convnets import conv_bn


class Seq2Seq(nn.Module):
    """A transformer whose encoder output reaches every decoder layer; next-token loss."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(tokens, width)
        common = {"dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, **common)  # type: ignore[arg-type]
            for _ in range(layers)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, heads, **common)  # type: ignore[arg-type]
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
        length = tokens.shape[1]
        positions = self.position(torch.arange(length, device=tokens.device))
        memory = self.embedding(source) + positions
        for layer in self.encoder:
            memory = layer(memory)
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        x = self.embedding(tokens) + positions
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def encoder_decoder(size: Size) -> Case:
    layers, width, heads, vocabulary, batch, tokens = (
        (4, 256, 8, 2048, 16, 96) if size == "full" else (2, 32, 2, 128, 4, 16)
    )

    def draw(g: torch.Generator) -> tuple[Tensor, ...]:
        shape = (batch, tokens)
        return tuple(torch.randint(vocabulary, shape, generator=g) for _ in range(3))

    return Case(
        name="encoder_decoder", build=lambda: Seq2Seq(layers, width, heads, vocabulary, tokens), draw=draw
    )


class InceptionBlock(nn.Module):
    """Four parallel branches, concatenated."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        relu = nn.ReLU
        self.branches = nn.ModuleList(
            [
                nn.Sequential(conv_bn(inputs, width, 1), relu()),
                nn.Sequential(conv_bn(inputs, width, 1), relu(), conv_bn(width, width, 3), relu()),
                nn.Sequential(
                    conv_bn(inputs, width // 2, 1), relu(), conv_bn(width // 2, width, 3), relu(),
                    conv_bn(width, width, 3), relu(),
                ),
                nn.Sequential(nn.AvgPool2d(3, 1, 1), conv_bn(inputs, width, 1), relu()),
            ]
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Inception(nn.Module):
    def __init__(self, depth: int, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_bn(3, width, 3, 2), nn.ReLU())
        channels = [width] + [4 * width] * depth
        self.blocks = nn.Sequential(*(InceptionBlock(c, width) for c in channels[:-1]))
        self.head = nn.Linear(channels[-1], classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.stem(images)).mean((2, 3))), labels)


def inception(size: Size) -> Case:
    if size == "full":
        return Case(name="inception", build=lambda: Inception(9, 32, 10), draw=labelled_images(4, 96))
    return Case(name="inception", build=lambda: Inception(3, 8, 10), draw=labelled_images(2, 32))


class Siamese(nn.Module):
    """One tower applied to two images; contrastive loss on the distance of their embeddings."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_bn(3, width, 3, 2), nn.ReLU()]
        for _ in range(depth):
            layers += [conv_bn(width, width, 3), nn.ReLU()]
        self.tower = nn.Sequential(*layers)

    def forward(self, left: Tensor, right: Tensor, same: Tensor) -> Tensor:
        a, b = self.tower(left).mean((2, 3)), self.tower(right).mean((2, 3))
        return F.binary_cross_entropy_with_logits(1 - (a - b).square().sum(1), same)


def siamese(size: Size) -> Case:
    depth, width, batch, side = (22, 32, 4, 128) if size == "full" else (4, 8, 2, 32)

    def draw(g: torch.Generator) -> tuple[Tensor, ...]:
        left, right = (torch.randn(batch, 3, side, side, generator=g) for _ in range(2))
        return left, right, torch.randint(2, (batch,), generator=g).float()

    return Case(name="siamese", build=lambda: Siamese(depth, width), draw=draw)
