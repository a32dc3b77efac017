"""Models whose parameters ranks share train as FSDP2 and DistributedDataParallel train them, bit for bit, in a budget.

Each test is one or two jobs of processes, which do several checks, since it takes seconds until a job has started.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import fxremat
from tests.ranks import run_ranks
from tests.sharded_training import (
    Batches,
    Floats,
    Images,
    Text,
    differences,
    gradients,
    in_blocks,
    own_cache,
    pictures,
    seeded,
    texts,
    train,
    unequal,
    vectors,
)

QUICK: Mapping[str, Any] = {"effort": 0, "cost": "estimate"}
MORE = ("100%", "60%", "35%")
LEAST = "least"


class Case(NamedTuple):
    """A model, what it trains on, and the policy of its parameters."""

    make: Callable[[], nn.Module]
    batches: Callable[[int], Batches]
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()


half, single = torch.bfloat16, torch.float32
CASES = {
    "tied": Case(Text, texts),
    "dropout": Case(partial(Text, dropout=0.2), texts),
    "batch norm": Case(Images, pictures),
    "uneven": Case(partial(Text, words=63, labels=1), partial(texts, words=63)),
    "bf16, reduced in fp32": Case(Text, texts, MixedPrecisionPolicy(half, single)),
    "bf16": Case(Text, texts, MixedPrecisionPolicy(half)),
    "inputs cast": Case(Floats, vectors, MixedPrecisionPolicy(half, single)),
    "inputs not cast": Case(
        partial(Floats, casts=True), vectors, MixedPrecisionPolicy(half, single, cast_forward_inputs=False)
    ),
    "outputs cast": Case(Floats, vectors, MixedPrecisionPolicy(half, single, output_dtype=single)),
}


def compared(
    make: Callable[[], nn.Module], reference: nn.Module, batches: Batches, rank: int, budgets: tuple[str, ...]
) -> dict[str, list[str]]:
    """What differs from the reference's training, for each budget, or the least where that is more."""
    theirs = train(reference, batches, rank)
    found, least = {}, 0
    for budget in budgets:
        compiled = fxremat.compile(make(), mem=(least or 1) if budget == LEAST else budget, **QUICK)
        try:
            compiled.make_plan(batches[0], {})
        except fxremat.BudgetTooSmall as error:
            assert not least or error.minimum == least
            compiled = fxremat.compile(make(), mem=error.minimum, **QUICK)
        found[budget] = differences(train(compiled, batches, rank), theirs)
        assert compiled.plan.predicted_peak <= compiled.plan.budget
        least = compiled.plan.minimum
    return found


# --- the same bits ----------------------------------------------------------------------------------------------------


def _as_fsdp(rank: int, world: int, names: tuple[str, ...], budgets: tuple[str, ...]) -> dict[str, Any]:
    own_cache()
    mesh = init_device_mesh("cpu", (world,))
    found = {}
    for name in names:
        case = CASES[name]

        def make(case: Case = case) -> nn.Module:
            return in_blocks(seeded(case.make), mesh, mp_policy=case.policy)

        found[name] = compared(make, make(), case.batches(rank), rank, budgets)
    return found


def _as_ddp(rank: int, world: int, names: tuple[str, ...], budgets: tuple[str, ...]) -> dict[str, Any]:
    own_cache()
    found = {}
    for name in names:
        case = CASES[name]

        def make(case: Case = case) -> nn.Module:
            return fxremat.fully_shard(seeded(case.make), replicate=True)

        model = seeded(case.make)
        reference = DistributedDataParallel(model, broadcast_buffers=False)
        found[name] = compared(make, _Inside(reference), case.batches(rank), rank, budgets)
    return found


class _Inside(nn.Module):
    """What DistributedDataParallel wraps, with its parameters' own names, called through it."""

    def __init__(self, parallel: DistributedDataParallel) -> None:
        super().__init__()
        self.__dict__["parallel"] = parallel
        self._modules = parallel.module._modules
        self._parameters = parallel.module._parameters
        self._buffers = parallel.module._buffers

    def forward(self, *inputs: Any) -> Any:
        return self.__dict__["parallel"](*inputs)


def equal(results: list[dict[str, dict[str, list[str]]]]) -> bool:
    """True where no rank saw a difference; shows those that were seen."""
    seen = [
        (rank, name, budget, differ[:6])
        for rank, found in enumerate(results)
        for name, budgets in found.items()
        for budget, differ in budgets.items()
        if differ
    ]
    assert seen == []
    return True


PLAIN = ("tied", "dropout", "batch norm", "uneven")
MIXED = tuple(name for name in CASES if name not in PLAIN)


def test_training_is_fsdp2s_bit_for_bit(tmp_path: Path) -> None:
    assert equal(run_ranks(_as_fsdp, 2, tmp_path, ("dropout", "uneven", "batch norm"), ("60%", LEAST)))


def test_mixed_precision_is_fsdp2s_bit_for_bit(tmp_path: Path) -> None:
    assert equal(run_ranks(_as_fsdp, 2, tmp_path, MIXED[1:], ("60%",)))


def test_training_is_ddps_bit_for_bit(tmp_path: Path) -> None:
    assert equal(run_ranks(_as_ddp, 2, tmp_path, ("dropout", "batch norm"), ("60%",)))


@pytest.mark.long
@pytest.mark.parametrize("names", [PLAIN, MIXED], ids=["plain", "mixed"])
@pytest.mark.parametrize("world", [2, 3])
def test_training_is_fsdp2s_at_every_budget(names: tuple[str, ...], world: int, tmp_path: Path) -> None:
    """With three ranks no first dimension of these models but one can be divided evenly."""
    assert equal(run_ranks(_as_fsdp, world, tmp_path, names, (*MORE, LEAST), limit=600))


@pytest.mark.long
def test_training_is_ddps_at_every_budget(tmp_path: Path) -> None:
    assert equal(run_ranks(_as_ddp, 2, tmp_path, PLAIN, (*MORE, LEAST), limit=600))


def _hybrid(rank: int, world: int) -> dict[str, Any]:
    own_cache()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))

    def make() -> nn.Module:
        return in_blocks(seeded(partial(Text, words=63)), mesh)

    return {"hybrid": compared(make, make(), texts(rank, 63), rank, ("60%", LEAST))}


@pytest.mark.long
def test_hybrid_sharding_is_fsdp2s_bit_for_bit(tmp_path: Path) -> None:
    assert equal(run_ranks(_hybrid, 4, tmp_path, limit=300))


class Mlps(nn.Module):
    """Layers for `parallelize_module`: the first of each is cut by columns, the second by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)
        )

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(x, targets)


def _in_parallel(mesh: Any) -> nn.Module:
    model = seeded(Mlps)
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def _numbers(rank: int) -> Batches:
    """The same on the ranks of one tensor-parallel group."""
    random = torch.Generator().manual_seed(100 + rank)
    return [(torch.randn(16, 8, generator=random), torch.randint(8, (16,), generator=random)) for _ in range(5)]


def _tensor_parallel(rank: int, world: int) -> dict[str, Any]:
    own_cache()
    mesh = init_device_mesh("cpu", (world,))
    make = partial(_in_parallel, mesh)
    return {"tensor parallel": compared(make, make(), _numbers(0), 0, ("100%", LEAST))}


def _tensor_and_data_parallel(rank: int, world: int) -> dict[str, Any]:
    own_cache()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def make() -> nn.Module:
        return in_blocks(_in_parallel(mesh["tensor"]), mesh["data"])

    return {"both": compared(make, make(), _numbers(rank // 2), 0, ("100%", LEAST))}


def test_tensor_parallel_training_is_the_same(tmp_path: Path) -> None:
    assert equal(run_ranks(_tensor_parallel, 2, tmp_path))


@pytest.mark.long
def test_tensor_and_data_parallel_training_is_the_same(tmp_path: Path) -> None:
    assert equal(run_ranks(_tensor_and_data_parallel, 4, tmp_path, limit=300))


# --- accumulation, and other uses of parameters -----------------------------------------------------------------------


def collectives(step: Callable[[], object]) -> Counter[str]:
    """How many functional collectives of each kind a step starts."""
    with profile(activities=[ProfilerActivity.CPU]) as recording:
        step()
    found = Counter(event.name.partition("::")[2] for event in recording.events() if "_c10d_functional" in event.name)
    del found["wait_tensor"]
    return found


class Odd(nn.Module):
    """A layer that is used twice, one that is not used, and one that does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.idle = nn.Linear(6, 8), nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.twice = nn.Linear(8, 8)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = self.twice(self.first(x).tanh())
        return F.cross_entropy(self.twice(self.frozen(x).tanh()), targets)


def _accumulated(model: nn.Module, batches: Batches, quiet: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Gradients after two rounds of micro-steps of which the last one reduces, and what each step communicated."""
    seen, counts = [], []
    for _ in range(2):
        for batch in batches[:-1]:
            with quiet(model):
                counts.append(collectives(lambda batch=batch: model(*batch).backward()))  # type: ignore[misc]
        counts.append(collectives(lambda: model(*batches[-1]).backward()))
        seen.append(gradients(model))
        model.zero_grad()
    return seen, counts


@contextlib.contextmanager
def _without_sync(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ValueError("no gradient today")


def _accumulating(rank: int, world: int) -> dict[str, Any]:
    own_cache()
    mesh = init_device_mesh("cpu", (world,))
    found: dict[str, Any] = {}
    batches = vectors(rank, steps=3)
    for name, make in (("layers", Floats), ("odd", Odd)):
        wrap = partial(in_blocks, mesh=mesh) if make is Floats else partial(fully_shard, mesh=mesh)
        theirs, _ = _accumulated(wrap(seeded(make)), batches, _without_sync)
        compiled = fxremat.compile(wrap(seeded(make)), mem="80%", **QUICK)
        for how, quiet in (("set_requires_gradient_sync", _without_sync), ("no_sync", lambda m: m.no_sync())):
            ours, counts = _accumulated(compiled, batches, quiet)
            found[f"{name}, {how}"] = [unequal(*pair) for pair in zip(ours, theirs, strict=True)]
            found[f"{name}, {how}, reductions"] = [sum(c[k] for k in c if "reduce" in k) for c in counts]
        with pytest.raises(ValueError, match="no gradient today"):
            _Raises.apply(compiled(*batches[1])).backward()
        compiled.zero_grad()
        found[f"{name}, after an error"] = [
            unequal(*pair) for pair in zip(_accumulated(compiled, batches, _without_sync)[0], theirs, strict=True)
        ]
        replicated = fxremat.compile(fxremat.fully_shard(seeded(make), replicate=True), mem="80%", **QUICK)
        parallel = DistributedDataParallel(seeded(make), find_unused_parameters=make is Odd)
        theirs, _ = _accumulated(_Inside(parallel), batches, lambda _: parallel.no_sync())
        ours, counts = _accumulated(replicated, batches, lambda m: m.no_sync())
        found[f"{name}, replicated"] = [unequal(*pair) for pair in zip(ours, theirs, strict=True)]
        found[f"{name}, replicated, all"] = [sum(c.values()) for c in counts]
    return found


def test_gradients_accumulate_without_communication(tmp_path: Path) -> None:
    for found in run_ranks(_accumulating, 2, tmp_path):
        for name, seen in found.items():
            if "reductions" in name or "all" in name.split(", ")[2:]:
                assert [bool(count) for count in seen] == 2 * [False, False, True], (name, seen)
            else:
                assert seen == [[], []], name
