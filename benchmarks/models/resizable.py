"""Models with inputs of any size, and a dozen sizes to train each of them at: `KINDS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .gpt import GPT, Shape

Size = tuple[int, int]  # a batch, and the length of its texts or the side of its pictures
WORDS = 256


class ConvNet(nn.Module):
    """Convolutions with batch normalization, one of them strided, and a classifier over what is left of the picture."""

    def __init__(self) -> None:
        super().__init__()
        same = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)]
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *same, nn.Conv2d(8, 16, 3, stride=2, padding=1))
        self.norm, self.head = nn.BatchNorm2d(16), nn.Linear(16, 5)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = F.relu(self.norm(self.body(images))).mean((2, 3))
        return F.cross_entropy(self.head(features), labels)


def gpt(layers: int = 2) -> nn.Module:
    """A GPT for lengths up to 256."""
    return GPT(Shape(layers=layers, width=32, heads=2, vocabulary=WORDS, batch=8, tokens=256))


def of_transformers(name: str) -> nn.Module:
    """A language model of the library `transformers`, whose loss it computes itself."""
    import transformers

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    kind = {"Llama": "LlamaForCausalLM", "Bert": "BertForMaskedLM"}[name]
    config = getattr(transformers, f"{name}Config")(**shape, vocab_size=WORDS, max_position_embeddings=256)
    return getattr(transformers, kind)(config).train()


def pictures(size: Size) -> dict[str, Tensor]:
    """A batch of square pictures with labels."""
    draw = torch.Generator().manual_seed(sum(size))
    return {
        "images": torch.randn(size[0], 3, size[1], size[1], generator=draw),
        "labels": torch.randint(0, 5, (size[0],), generator=draw),
    }


def text(size: Size, *, padded: bool = False) -> dict[str, Tensor]:
    """A batch of texts, which end at different places where they are padded."""
    draw = torch.Generator().manual_seed(sum(size))
    found = {name: torch.randint(0, WORDS, size, generator=draw) for name in ("tokens", "targets")}
    if padded:
        found["padding"] = torch.arange(size[1]).expand(size) >= _ends(size, draw)
    return found


def sentences(size: Size) -> dict[str, Tensor]:
    """A batch of padded texts in the terms of `transformers`."""
    draw = torch.Generator().manual_seed(sum(size))
    tokens = torch.randint(3, WORDS, size, generator=draw)
    mask = (torch.arange(size[1]).expand(size) < _ends(size, draw)).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.where(mask > 0, tokens, -100)}


def _ends(size: Size, draw: torch.Generator) -> Tensor:
    return torch.randint(1, size[1] + 1, (size[0], 1), generator=draw)


@dataclass(frozen=True)
class Kind:
    """A model, inputs of a size for it, and the sizes to train it at, the largest first."""

    model: Callable[[], nn.Module]
    inputs: Callable[[Size], Mapping[str, Tensor]]
    sizes: tuple[Size, ...]
    share: float = 0.45  # of what keeping everything takes at the largest: the budget
    options: Mapping[str, Any] = field(default_factory=lambda: {"dynamic": True})  # to compile it with
    captures: int = 1  # that they lead to


_LENGTHS = (128, 96, 128, 31, 77, 16, 100, 127, 64, 120, 33, 90)
_SIDES = (40, 32, 40, 17, 31, 40, 20, 39, 24, 36, 38, 12)
TEXTS = tuple(zip((8, 8, 4, 3, 8, 2, 5, 7, 6, 2, 8, 4), _LENGTHS, strict=True))
PICTURES = tuple(zip((6, 6, 3, 2, 5, 4, 6, 2, 3, 5, 6, 4), _SIDES, strict=True))
RANGES = {name: {0: (2, 8), 1: (16, 128)} for name in ("tokens", "targets")}
KINDS = {
    "GPT": Kind(gpt, text, TEXTS, options={"dynamic": RANGES}),
    "padded GPT": Kind(gpt, partial(text, padded=True), TEXTS),
    "conv + BatchNorm": Kind(ConvNet, pictures, PICTURES, share=0.75),
    "Llama": Kind(partial(of_transformers, "Llama"), sentences, TEXTS, 0.55, {"dynamic": None}, captures=3),
    "BERT": Kind(partial(of_transformers, "Bert"), sentences, TEXTS, share=0.6),
}


def loss_of(output: Any) -> Tensor:
    """The loss that a model returns, by itself or beside other outputs."""
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss
