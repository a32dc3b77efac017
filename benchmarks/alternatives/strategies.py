"""The alternatives to fxremat: every strategy with each of its settings, as a model to be trained.

    for strategy in strategies(case, FAMILIES):
        model = strategy.make()             a fresh model; its training step is what is measured

All but the last family keep plain PyTorch's operators and only choose what is computed again. Compiled callables run
their graphs op by op, so that all are measured on the same kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from ..models import Case
from .by_hand import Block, Placement, Run, longest_chain, placements, plainly

TORCH_BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)
SEGMENT_COUNTS = 10  # about so many are tried

aten = torch.ops.aten
PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
    }
)
ATTENTION = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to train in less memory."""

    family: str
    setting: str
    make: Callable[[], nn.Module]


def strategies(case: Case, families: Iterable[str]) -> list[Strategy]:
    """Every setting of these families for a model. Raises KeyError for an unknown family."""
    return [strategy for family in families for strategy in FAMILIES[family](case)]


def rewired(case: Case, placement: Placement, run: Run) -> nn.Module:
    """A fresh model whose blocks run as `run` says."""
    model = case.model()
    placement.rewire(model, run)
    return model


def _checkpoint(case: Case) -> Iterator[tuple[str, Placement, Run]]:
    """Every block of each placement; of the natural one also every second and third."""
    ways = placements(case.name)
    for name, placement in ways.items():
        if not placement.nested:
            yield f"every {name}", placement, every(1)
    natural, placement = next(iter(ways.items()))
    if placement.chain:
        yield f"every 2nd {natural}", placement, every(2)
        yield f"every 3rd {natural}", placement, every(3)


def _sequential(case: Case) -> Iterator[tuple[str, Placement, Run]]:
    """From two segments to one a block; models without a chain are left out."""
    for placement in _chains(case):
        longest = longest_chain(rewired(case, placement, plainly))
        for count in segment_counts(longest):
            yield f"{count} segments", placement, in_segments(count)


def _nested(case: Case) -> Iterator[tuple[str, Placement, Run]]:
    for placement in _chains(case):
        for depth in (2, 3):
            yield f"{depth} deep", placement, nested(depth)
        yield "halves of halves", placement, halved
    for name, placement in placements(case.name).items():
        if placement.nested:
            yield name, placement, every(1)


def _selective(case: Case) -> Iterator[tuple[str, Placement, Run]]:
    name, placement = next(iter(placements(case.name).items()))
    yield f"every {name}, keeps products", placement, selective(1)
    yield f"every {name}, keeps every 2nd product", placement, selective(2)


def _chains(case: Case) -> list[Placement]:
    """The natural placement, where it is a chain."""
    return [placement for placement in list(placements(case.name).values())[:1] if placement.chain]


def segment_counts(blocks: int) -> list[int]:
    """From 2 to all, about evenly in ratio.

    >>> segment_counts(12)
    [2, 3, 4, 5, 7, 8, 10, 12]
    """
    steps = SEGMENT_COUNTS - 1
    return sorted({round(2 * (blocks / 2) ** (i / steps)) for i in range(steps + 1)})


def _by_hand(
    family: str, ways: Callable[[Case], Iterable[tuple[str, Placement, Run]]], case: Case
) -> Iterator[Strategy]:
    for setting, placement, run in ways(case):
        yield Strategy(family=family, setting=setting, make=partial(rewired, case, placement, run))


def _torch_budget(family: str, backend: str, case: Case) -> Iterator[Strategy]:
    for budget in TORCH_BUDGETS:
        yield Strategy(family=family, setting=f"{budget:g}", make=partial(compiled, case, backend, budget))


FAMILIES: dict[str, Callable[[Case], Iterable[Strategy]]] = {
    **{
        family: partial(_by_hand, family, ways)
        for family, ways in {
            "checkpoint": _checkpoint,
            "checkpoint_sequential": _sequential,
            "nested": _nested,
            "selective": _selective,
        }.items()
    },
    **{
        family: partial(_torch_budget, family, backend)
        for family, backend in {
            "torch_budget": "aot_eager",
            "torch_budget_decomposed": "aot_eager_decomp_partition",
        }.items()
    },
}
"""The strategies, by the names that `--strategies` takes."""


def every(stride: int) -> Run:
    """Checkpoints the first of each `stride` blocks."""

    def run(blocks: Sequence[Block], x: Any) -> Any:
        for i, block in enumerate(blocks):
            x = block(x) if i % stride else checkpoint(block, x, use_reentrant=False)
        return x

    return run


def in_segments(count: int) -> Run:
    """torch's own function; at most a segment a block."""

    def run(blocks: Sequence[Block], x: Any) -> Any:
        return checkpoint_sequential(list(blocks), min(count, len(blocks)), x, use_reentrant=False)

    return run


def nested(depth: int) -> Run:
    """Checkpoints inside checkpoints, `depth` deep; every level has about as many parts, the last single blocks."""

    def run(blocks: Sequence[Block], x: Any) -> Any:
        parts = round(len(blocks) ** (1 / depth)) if depth > 1 else len(blocks)
        inner = nested(depth - 1) if depth > 1 else plainly
        for part in split(blocks, max(1, parts)):
            x = checkpoint(partial(inner, part), x, use_reentrant=False)
        return x

    return run


def halved(blocks: Sequence[Block], x: Any) -> Any:
    """Checkpoints both halves, and the halves of each, down to single blocks."""
    for part in split(blocks, 2):
        run = plainly if len(part) == 1 else halved
        x = checkpoint(partial(run, part), x, use_reentrant=False)
    return x


def split(blocks: Sequence[Block], parts: int) -> list[Sequence[Block]]:
    """At most `parts` runs of blocks, of nearly equal length.

    >>> split("abcdefg", 3)
    ['ab', 'cd', 'efg']
    """
    ends = [i * len(blocks) // parts for i in range(parts + 1)]
    return [blocks[start:end] for start, end in pairwise(ends) if start < end]


def selective(each: int) -> Run:
    """Checkpoints every block but keeps the results of its products, or of every second one."""

    def run(blocks: Sequence[Block], x: Any) -> Any:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=partial(_keep_products, each))
        return x

    return run


def _keep_products(each: int) -> Any:
    """The contexts of one checkpointed block: keeps attention and the first of each `each` products."""
    seen: defaultdict[bool, int] = defaultdict(int)  # the recomputation counts anew

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        keep = op in ATTENTION
        if op in PRODUCTS:
            keep = seen[context.is_recompute] % each == 0
            seen[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def compiled(case: Case, backend: str, budget: float) -> nn.Module:
    """torch.compile with torch's own `activation_memory_budget`, through one of torch's own backends.

    The backend is a function of its own, so that dynamo takes no graph of another budget for this one.
    """
    from torch._dynamo import lookup_backend
    from torch._functorch import config

    stock = lookup_backend(backend)

    def with_budget(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        with config.patch(activation_memory_budget=budget):
            return stock(graph, inputs)

    model: Any = torch.compile(case.model(), backend=with_budget, fullgraph=True, dynamic=False)
    return model
