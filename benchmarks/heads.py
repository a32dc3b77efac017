"""Ways to train a language model without all of its logits at once, each a function of a model that gives what to call.

    call = WAYS["by hand 4"](model)         model is a benchmarks.models.words.LanguageModel
    call(*batch).backward()

    by hand k           torch.utils.checkpoint around the head and the loss of each of k chunks of rows
    by hand k, layers   the same, and a checkpoint around each layer
    linear_cross_entropy        torch.nn.functional.linear_cross_entropy, which chunks as it sees fit
    Inductor            torch.compile as it is
    Inductor, k chunks  with torch._inductor.config.auto_chunker; its ratio of output to input from which it chunks is
                        lowered from 8 to 1, since it counts the weight as an input

Liger's fused loss is a Triton kernel: it wants a GPU, and is not here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .models.words import IGNORED, Head, LanguageModel

CHUNKS = (2, 4, 8, 16)


class NotChunked(Exception):
    """Inductor found nothing to chunk, so there is nothing to measure."""


def chunked(chunks: int) -> Head:
    """The mean over all targets, from the sums of checkpointed chunks."""

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        for rows, wanted in zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True):
            total = total + checkpoint(_sum, rows, weight, wanted, use_reentrant=False)
        return total / (targets != IGNORED).sum()

    return loss


def _sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def fused(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """torch's own; the loss has the model's precision."""
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, targets, ignore_index=IGNORED, options=options)


def by_hand(chunks: int, layers: bool) -> Callable[[LanguageModel], nn.Module]:
    def build(model: LanguageModel) -> nn.Module:
        model.loss, model.checkpointed = chunked(chunks), layers
        return model

    return build


def with_fused_loss(model: LanguageModel) -> nn.Module:
    model.loss = fused
    return model


def inductor(chunks: int | None) -> Callable[[LanguageModel], nn.Module]:
    def build(model: LanguageModel) -> nn.Module:
        options: dict[str, Any] = {}
        if chunks is not None:
            options |= {
                "auto_chunker.enable": True,
                "auto_chunker.amplify_ratio_threshold": 1,
                "auto_chunker.num_chunk": chunks,
            }
        compiled: Any = torch.compile(model, options=options)
        assert isinstance(compiled, nn.Module)
        return compiled

    return build


def check_chunked(way: str) -> None:
    """Once a step has run, with no graph from a cache. Raises NotChunked where Inductor was to chunk and did not."""
    from torch._inductor import metrics

    if way in _INDUCTOR_CHUNKS and not metrics.num_auto_chunking:
        raise NotChunked("Inductor's auto_chunker found nothing to chunk")


_INDUCTOR_CHUNKS = {f"Inductor, {k} chunks": inductor(k) for k in CHUNKS}
WAYS: dict[str, Callable[[LanguageModel], nn.Module]] = {
    **{f"by hand {k}": by_hand(k, layers=False) for k in CHUNKS},
    **{f"by hand {k}, layers": by_hand(k, layers=True) for k in CHUNKS},
    "linear_cross_entropy": with_fused_loss,
    "Inductor": inductor(None),
    **_INDUCTOR_CHUNKS,
}
