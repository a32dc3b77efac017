"""Models that are larger than this machine, planned for devices that are not here.

    python -m fxremat plan examples.what_if:llama_8b --mem 24GiB --device A100,H100,H200 --effort 0
    python -m fxremat plan examples.what_if:llama_1b --mem 60GiB --device H200 --largest batch

The parameters are on the meta device: they have shapes and take no memory. docs/what-if.md shows what is printed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, SHARED, BASE = 128256, 8, 500_000.0  # of all sizes: tokens, heads of keys, and the base of the rotations


class Norm(nn.Module):
    """The root mean square norm, op by op in float32, as the transformers library has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to the same."""
        exact = x.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * exact.to(x.dtype)


class Layer(nn.Module):
    """Attention whose keys are shared by groups of heads, and a gated product."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.before, self.between = Norm(width), Norm(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, SHARED * self.head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        h = self.before(x)
        q, k, v = (part(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        h = self.between(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """A decoder that returns the loss of predicting each next token."""

    def __init__(self, *, layers: int, width: int, hidden: int, heads: int, tied: bool) -> None:
        super().__init__()
        self.head_width = width // heads
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Layer(width, hidden, heads) for _ in range(layers))
        self.norm, self.head = Norm(width), nn.Linear(width, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) numbers of tokens to a number."""
        x = self.words(tokens)
        steps = torch.arange(0, self.head_width, 2, device=tokens.device) / self.head_width
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), BASE**-steps).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        scores = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())


def llama_8b(batch: int = 1, length: int = 4096) -> tuple[nn.Module, Tensor]:
    """A model of Llama 3.1 8B's sizes in bfloat16, and tokens, without data."""
    with torch.device("meta"):
        model = Llama(layers=32, width=4096, hidden=14336, heads=32, tied=False)
        return model.to(torch.bfloat16), torch.zeros(batch, length, dtype=torch.long)


def llama_1b(batch: int = 1, length: int = 4096) -> tuple[nn.Module, Tensor]:
    """A model of Llama 3.2 1B's sizes in bfloat16, and tokens, without data."""
    with torch.device("meta"):
        model = Llama(layers=16, width=2048, hidden=8192, heads=32, tied=True)
        return model.to(torch.bfloat16), torch.zeros(batch, length, dtype=torch.long)
