"""Models whose parameters ranks share train as FSDP2 and DistributedDataParallel train them, bit for bit, in a budget.

What is tried every day is one job of processes, and every other test is one or two: it takes seconds until a job has
started.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import fxremat
from benchmarks import throttle
from benchmarks.meter import model_peak
from fxremat.runtime import loss_meter
from fxremat.settings import Offload, Search
from tests.ranks import run_ranks
from tests.sharded_training import (
    Batches,
    Floats,
    Images,
    Text,
    adamw,
    differences,
    gradients,
    in_blocks,
    least_budget,
    own_cache,
    pictures,
    seeded,
    state,
    texts,
    train,
    unequal,
    vectors,
)
from tests.test_readme import job_of_one
from tests.training import same

QUICK: Mapping[str, Any] = {"search": Search(seconds=0), "costs": "estimate"}
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
    "uneven with dropout": Case(partial(Text, words=63, labels=1, dropout=0.2), partial(texts, words=63)),
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
    """Differences from the reference's training, for each budget, or for the least where that is more."""
    theirs = train(reference, batches, rank)
    found, least = {}, 0
    for budget in budgets:
        mem = (least or 1) if budget == LEAST else budget
        try:
            compiled = fxremat.compile(make(), mem=mem, example_inputs=batches[0], **QUICK)
        except fxremat.BudgetTooSmall as error:
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
    """The module that DistributedDataParallel wraps, with its parameters' own names, called through the wrapper."""

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
MIXED = tuple(name for name in CASES if CASES[name].policy != MixedPrecisionPolicy())


def _every_day(rank: int, world: int) -> dict[str, Any]:
    """What two ranks see of all that is tried every day, in one job."""
    return {
        "fsdp": _as_fsdp(rank, world, ("uneven with dropout",), ("60%",)),
        "ddp": _as_ddp(rank, world, ("dropout",), ("60%",)),
        "refused": _refused(rank, world),
        "hosted": _hosted(rank, world),
        "loss outside": _loss_that_takes_more_on_one_rank(rank, world),
        "shapes": _fails(rank, world, "shapes"),  # the last, since the ranks' captures differ then
    }


@pytest.fixture(scope="module")
def every_day(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_every_day, 2, tmp_path_factory.mktemp("ranks"), limit=300)


def test_training_is_fsdp2s_bit_for_bit(every_day: list[dict[str, Any]]) -> None:
    assert equal([found["fsdp"] for found in every_day])


@pytest.mark.long
def test_mixed_precision_is_fsdp2s_bit_for_bit(tmp_path: Path) -> None:
    assert equal(run_ranks(_as_fsdp, 2, tmp_path, MIXED[1:], ("60%",)))


def test_training_is_ddps_bit_for_bit(every_day: list[dict[str, Any]]) -> None:
    assert equal([found["ddp"] for found in every_day])


@pytest.mark.long
@pytest.mark.parametrize("names", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_training_is_fsdp2s_at_every_budget(names: tuple[str, ...], tmp_path: Path) -> None:
    """Two ranks are compared: more of them add in an order that depends on the place in a buffer."""
    assert equal(run_ranks(_as_fsdp, 2, tmp_path, names, (*MORE, LEAST), limit=600))


@pytest.mark.long
def test_training_is_ddps_at_every_budget(tmp_path: Path) -> None:
    assert equal(run_ranks(_as_ddp, 2, tmp_path, PLAIN, (*MORE, LEAST), limit=600))


def _by_means(rank: int, world: int) -> dict[str, Any]:
    """Differences from FSDP2 where the planner chooses the means, and the means that it chose from, on each rank."""
    own_cache()
    mesh, case = init_device_mesh("cpu", (world,)), CASES["dropout"]

    def make() -> nn.Module:
        return in_blocks(seeded(case.make), mesh)

    batches = case.batches(rank)
    theirs, found, means = train(make(), batches, rank), {}, []
    for mem in ("90%", "60%", "min"):
        compiled = fxremat.compile(make(), mem=mem, exact=True, **QUICK)
        found[mem] = differences(train(compiled, batches, rank), theirs)
        means.append([(each.name, each.chosen) for each in compiled.plan.means])
    rounding = fxremat.compile(make(), mem="60%", exact=False, **QUICK | {"costs": "measure"})
    train(rounding, batches, rank)
    kernels = {each.name: each.why_not for each in rounding.plan.means}["compiled kernels"]
    return {"differ": {"dropout": found}, "means": means, "kernels": kernels}


@pytest.mark.long
def test_ranks_choose_the_same_means(tmp_path: Path) -> None:
    results = run_ranks(_by_means, 2, tmp_path, limit=300)
    assert equal([found["differ"] for found in results])
    assert results[0]["means"] == results[1]["means"]
    assert {each["kernels"] for each in results} == {"ops communicate with other ranks"}


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


@pytest.mark.long
def test_tensor_parallel_training_is_the_same(tmp_path: Path) -> None:
    assert equal(run_ranks(_tensor_parallel, 2, tmp_path))


@pytest.mark.long
def test_tensor_and_data_parallel_training_is_the_same(tmp_path: Path) -> None:
    assert equal(run_ranks(_tensor_and_data_parallel, 4, tmp_path, limit=300))


# --- accumulation, and other uses of parameters -----------------------------------------------------------------------


def collectives(step: Callable[[], object]) -> Counter[str]:
    """Count the functional collectives of each kind that a step starts."""
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


def _accumulating(rank: int, world: int, name: str) -> dict[str, Any]:
    own_cache()
    mesh = init_device_mesh("cpu", (world,))
    found: dict[str, Any] = {}
    batches = vectors(rank, steps=3)
    for make in ({"layers": Floats, "odd": Odd}[name],):
        wrap = partial(in_blocks, mesh=mesh) if make is Floats else partial(fully_shard, mesh=mesh)
        theirs, _ = _accumulated(wrap(seeded(make)), batches, _without_sync)
        compiled = fxremat.compile(wrap(seeded(make)), mem="100%", **QUICK)
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
        replicated = fxremat.compile(fxremat.fully_shard(seeded(make), replicate=True), mem="100%", **QUICK)
        parallel = DistributedDataParallel(seeded(make), find_unused_parameters=make is Odd)
        theirs, _ = _accumulated(_Inside(parallel), batches, lambda _, parallel=parallel: parallel.no_sync())
        ours, counts = _accumulated(replicated, batches, lambda m: m.no_sync())
        found[f"{name}, replicated"] = [unequal(*pair) for pair in zip(ours, theirs, strict=True)]
        found[f"{name}, replicated, all"] = [sum(c.values()) for c in counts]
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", ["odd", "layers"])
def test_gradients_accumulate_without_communication(name: str, tmp_path: Path) -> None:
    for found in run_ranks(_accumulating, 2, tmp_path, name):
        for what, seen in found.items():
            if what.endswith(("reductions", "all")):
                assert [bool(count) for count in seen] == 2 * [False, False, True], (what, seen)
            else:
                assert seen == [[], []], what


# --- in the place of the model ----------------------------------------------------------------------------------------


def _drop_in(rank: int, world: int, folder: str) -> dict[str, Any]:
    own_cache()
    mesh = init_device_mesh("cpu", (world,))
    batches = texts(rank)
    ours, theirs = (in_blocks(seeded(partial(Text, dropout=0.1)), mesh) for _ in range(2))
    parameters = dict(ours.named_parameters())
    compiled = fxremat.compile(ours, mem="70%", **QUICK)
    seen: dict[str, Any] = {"calls": [], "order": []}
    for model in (compiled, theirs):
        model.blocks[0].register_forward_hook(lambda *_: seen["order"].append("after"))
        model.blocks[0].register_forward_pre_hook(lambda *_: seen["order"].append("before"))
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=foreach)
        for model, foreach in ((compiled, True), (theirs, True))
    ]
    scores = []
    for model, optimizer in zip((compiled, theirs), optimizers):
        torch.manual_seed(rank)
        results = []
        for step, batch in enumerate(batches):
            model.eval()
            results.append(model(*batch).detach())
            with torch.no_grad():
                results.append(model(*batch))
                model.train()
                results.append(model(*batch))
            loss = model(*batch)
            if step == 2:  # between the forward of a step and its backward
                with torch.no_grad():
                    results.append(model(*batch))
            loss.backward()
            results.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor())
            optimizer.step()
            optimizer.zero_grad()
            results.append(loss.detach())
            if step == 1:
                model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        scores.append(results)
    seen["calls"] = [k for k, pair in enumerate(zip(*scores, strict=True)) if not same(*pair)]
    seen["state"] = unequal(state(compiled), state(theirs))
    seen["is one"] = isinstance(compiled, FSDPModule)
    seen["names"] = list(compiled.state_dict()) == list(theirs.state_dict())
    seen["placements"] = all(
        isinstance(value, DTensor) and value.placements == theirs.state_dict()[name].placements
        for name, value in compiled.state_dict().items()
    )
    now = dict(compiled.named_parameters())
    seen["same objects"] = list(now) == list(parameters) and all(now[name] is parameters[name] for name in now)
    seen["checkpoints"] = _checkpoints(compiled, theirs, optimizers, batches[0], folder)
    seen["scaled"] = _scaled(mesh, batches)
    return seen


def _checkpoints(
    compiled: nn.Module, plain: nn.Module, optimizers: list[Any], batch: tuple[Tensor, ...], folder: str
) -> list[list[str]]:
    """Differences after one saves, the other one loads, and both train one step on; in both directions."""
    found = []
    for k, (source, target) in enumerate(((0, 1), (1, 0))):
        models = (compiled, plain)
        with torch.no_grad():
            for parameter in models[source].parameters():
                parameter.mul_(1.5)
        save(models[source], optimizers[source], f"{folder}/{k}")
        load(models[target], optimizers[target], f"{folder}/{k}")
        for model, optimizer in zip(models, optimizers):
            torch.manual_seed(5)
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(unequal(state(compiled), state(plain)))
    return found


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """A distributed checkpoint."""
    parts = get_state_dict(model, optimizer)
    checkpoint.save({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Take everything from a distributed checkpoint."""
    parts = get_state_dict(model, optimizer)
    checkpoint.load({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=parts[0], optim_state_dict=parts[1])


def _scaled(mesh: Any, batches: Batches) -> list[str]:
    """Differences with a GradScaler, and an AdamW that is neither fused nor of many tensors at a time."""
    records = []
    for wrap in (lambda model: fxremat.compile(model, mem="80%", **QUICK), lambda model: model):
        model = wrap(in_blocks(seeded(partial(Text, blocks=1)), mesh))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False, fused=False)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for batch in batches[:2]:
            optimizer.zero_grad()
            scaler.scale(model(*batch)).backward()
            scaler.step(optimizer)
            scaler.update()
        records.append(state(model))
    return unequal(*records)


@pytest.mark.long
def test_a_compiled_model_takes_the_place_of_fsdp2s(tmp_path: Path) -> None:
    for seen in run_ranks(_drop_in, 2, tmp_path, str(tmp_path / "checkpoint")):
        order = seen.pop("order")
        assert order
        assert seen == {
            "calls": [], "state": [], "is one": True, "names": True, "placements": True, "same objects": True,
            "checkpoints": [[], []], "scaled": [],
        }  # fmt: skip


def _moved(rank: int, world: int) -> None:
    own_cache()
    model = fxremat.compile(in_blocks(seeded(Floats), init_device_mesh("cpu", (world,))), mem="100%", **QUICK)
    model(*vectors(rank)[0]).backward()
    model.to("cpu")


@pytest.mark.long
@pytest.mark.xfail(reason="dynamo keeps weak references to DTensor parameters, which Module.to cannot swap then")
def test_a_compiled_model_can_be_moved_between_steps(tmp_path: Path) -> None:
    run_ranks(_moved, 2, tmp_path)


def _resumed(rank: int, world: int, folder: str, first: bool) -> list[float]:
    own_cache()
    mesh = init_device_mesh("cpu", (world,))
    compiled = fxremat.compile(in_blocks(seeded(Text), mesh), mem="70%", **QUICK)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    if not first:
        load(compiled, optimizer, folder)
    losses = []
    for batch in texts(0):  # the same on all ranks, so that gradients are those of any number of them
        loss = compiled(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if first:
        save(compiled, optimizer, folder)
    return losses


@pytest.mark.long
def test_training_resumes_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    run_ranks(_resumed, 2, tmp_path, folder, True)
    losses = [run_ranks(_resumed, world, tmp_path, folder, False)[0] for world in (2, 1, 4)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)


# --- plans are equal on all ranks -------------------------------------------------------------------------------------


def _digest(rank: int, world: int, warm: str) -> list[str]:
    """A plan from an empty cache, and one from a cache that has something on the first rank alone."""
    folder = tempfile.mkdtemp(dir=warm)
    os.environ["FXREMAT_CACHE"] = folder
    mesh = init_device_mesh("cpu", (world,))
    plans = []
    for turn in range(2):
        if turn and rank:
            os.environ["FXREMAT_CACHE"] = tempfile.mkdtemp(dir=warm)
        ours = in_blocks(seeded(partial(Text, words=63)), mesh)
        compiled = fxremat.compile(ours, mem="50%", search=Search(seconds=1))
        compiled(*texts(rank, 63)[0]).backward()
        steps = [(step.op, step.role, step.reads, step.writes) for step in compiled.plan.program.steps]
        digest = hashlib.sha256(repr((steps, compiled.plan.program.split)).encode()).hexdigest()
        plans += [digest, compiled.plan.describe(full=True)]
    return plans


@pytest.mark.long
def test_plans_are_equal_on_all_ranks_with_half_warm_caches(tmp_path: Path) -> None:
    first, second = run_ranks(_digest, 2, tmp_path, str(tmp_path))
    assert first == second


# --- memory -----------------------------------------------------------------------------------------------------------


def _measured(rank: int, world: int) -> dict[str, list[tuple[int, int, int]]]:
    """(budget, predicted peak, measured peak) of steps whose gloo runs on threads that the meter does not see."""
    own_cache()
    throttle.register()
    throttle.set_link(bytes_per_second=1e12)
    mesh = DeviceMesh.from_group(dist.new_group(list(range(world)), backend="throttled"), "cpu")
    found: dict[str, list[tuple[int, int, int]]] = {}
    wide = partial(Text, words=256, width=64, blocks=2)
    for name, batch, wrap in (
        ("sharded", texts(rank, 256)[0], partial(in_blocks, mesh=mesh)),
        ("replicated", texts(rank, 256)[0], partial(fxremat.fully_shard, mesh=mesh, replicate=True)),
    ):
        plans: list[Any] = []
        for budget in ("100%", "60%", LEAST):
            mem = plans[-1].minimum if budget == LEAST else budget
            compiled = fxremat.compile(wrap(seeded(wide)), mem=mem, **QUICK)
            peak = model_peak(compiled, batch)
            plans.append(compiled.plan)
            found.setdefault(name, []).append((compiled.plan.budget, compiled.plan.predicted_peak, peak))
    return found


@pytest.mark.long
def test_the_measured_peak_is_the_predicted_one_on_every_rank(tmp_path: Path) -> None:
    for found in run_ranks(_measured, 2, tmp_path):
        for name, rows in found.items():
            for budget, predicted, measured in rows:
                assert predicted <= budget, (name, rows)
                assert measured <= budget, (name, rows)
                # replicated, at 100 %: 5 % are foreseen that are not taken
                assert abs(predicted - measured) <= (0.02 if name == "sharded" else 0.06) * measured, (name, rows)


def _hosted(rank: int, world: int) -> dict[str, Any]:
    """Differences of replicated models whose weights may live on the host, and how many do."""
    own_cache()
    found: dict[str, Any] = {}
    for updates in ("plain", "backward", "step", "around"):
        model = seeded(partial(Floats, width=32))
        if updates in ("backward", "step"):
            fxremat.fully_shard(model, replicate=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        trained: nn.Module = model
        if updates != "plain":
            host = Offload(weights=True, updates="backward" if updates == "backward" else "step")
            trained = fxremat.compile(model, mem="50%", offload=host, optimizer=optimizer, **QUICK)
        if updates in ("plain", "around"):
            trained = DistributedDataParallel(trained)
        for batch in vectors(rank, steps=3):
            optimizer.zero_grad()
            trained(*batch).backward()
            if updates != "backward":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)  # which changes nothing
            optimizer.step()
        if updates == "plain":
            plain = state(model)
            continue
        compiled: Any = trained.module if updates == "around" else trained
        found[updates] = unequal(state(model), plain), len(compiled._fxremat.backend.hosted)
    return found


def test_weights_on_the_host_are_those_of_ddp(every_day: list[dict[str, Any]]) -> None:
    for found in every_day:
        for updates, (differ, hosted) in found["hosted"].items():
            assert differ == [], updates
            assert hosted > 0, updates


def _loss_that_takes_more_on_one_rank(rank: int, world: int) -> tuple[int, list[str]]:
    """The number of plans after two steps of which the first takes more on one rank, and what is logged of it."""
    own_cache()
    mesh = init_device_mesh("cpu", (world,))
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)))
    compiled = fxremat.compile(
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}), mem="100%", **QUICK
    )
    levels, logged = iter([(0, 0), (10**6, 10**6)] if rank == 0 else []), list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fxremat.runtime.dynamo").addHandler(handler)
    with mock.patch.object(loss_meter, "levels_of", side_effect=lambda _: next(levels, None)):
        for _ in range(2):
            compiled(_numbers(0)[0][0]).square().sum().backward()
    return len(compiled.fxremat.plans), logged


def test_no_rank_plans_again_alone_for_its_loss(every_day: list[dict[str, Any]]) -> None:
    (plans, logged), other = (found["loss outside"] for found in every_day)
    assert (plans, other) == (1, (1, []))
    assert len(logged) == 1
    assert 'fxremat.compile(..., loss="' in logged[0]


def _deep(rank: int, world: int) -> tuple[int, int, int]:
    """The least budgets of a deep model, sharded and replicated, and the bytes of one block's weights."""
    own_cache()
    mesh = init_device_mesh("cpu", (world,))
    deep = partial(Text, words=32, width=64, blocks=6)
    batch = texts(rank, 32, rows=1)[0]
    least = []
    for model in (in_blocks(seeded(deep), mesh), in_blocks(seeded(deep), mesh)):
        least.append(least_budget(model, batch, **QUICK))
    block = sum(p.numel() * 4 for p in seeded(deep).blocks[0].parameters())  # type: ignore[union-attr, index]
    compiled = fxremat.compile(in_blocks(seeded(deep), mesh), mem="100%", example_inputs=batch, **QUICK)
    return least[0], compiled.plan.keep_all_peak, block


@pytest.mark.long
def test_the_least_budget_holds_the_gathered_weights_of_two_blocks(tmp_path: Path) -> None:
    """Everything else that a step needs at its peak is there at the end of forward too, where all gathers are kept.

    The gradients that are returned, which are a half of all weights, are in both.
    """
    for least, keep_all, block in run_ranks(_deep, 2, tmp_path):
        assert least <= keep_all - 4 * block


# --- errors -----------------------------------------------------------------------------------------------------------


def _fails(rank: int, world: int, what: str) -> str:
    """The last line of the error that this use gives."""
    own_cache()
    mesh = init_device_mesh("cpu", (world,))
    make: Callable[[], nn.Module] = Text
    with pytest.raises(fxremat.FxrematError) as caught:
        if what == "shapes":
            batch = texts(0, rows=8 + rank)[0]
            fxremat.compile(in_blocks(seeded(make), mesh), mem="80%", **QUICK)(*batch)
        elif what == "models":
            make = partial(Text, blocks=1 + rank)
            fxremat.compile(fxremat.fully_shard(seeded(make), mesh), mem="80%", **QUICK)(*texts(0)[0])
    return str(caught.value)


def test_ranks_whose_shapes_differ_are_told_so(every_day: list[dict[str, Any]]) -> None:
    told = "the ranks' graphs differ: rank 0 was called with 8x16, 8x16, rank 1 was called with 9x16, 9x16; give"
    for found in every_day:
        assert found["shapes"].startswith(told)


@pytest.mark.long
def test_ranks_whose_models_differ_are_told_so(tmp_path: Path) -> None:
    outcomes = run_ranks(_fails, 2, tmp_path, "models", errors=True, limit=60)
    for outcome in outcomes:
        assert not outcome.error, outcome.error
        assert outcome.value.startswith("the ranks' graphs differ: every rank must run the same model")


def _refused(rank: int, world: int) -> list[str]:
    own_cache()
    mesh = init_device_mesh("cpu", (world,))
    messages = []

    def note(function: Callable[[], object]) -> None:
        with pytest.raises(fxremat.FxrematError) as caught:
            function()
        messages.append(str(caught.value))

    parallel = DistributedDataParallel(seeded(Floats))
    offloaded = fully_shard(seeded(Floats), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    once = fxremat.fully_shard(seeded(Floats))
    replicated = fxremat.fully_shard(seeded(Floats), replicate=True)
    note(lambda: fxremat.compile(parallel, mem="80%")(*vectors(rank)[0]))
    note(lambda: fxremat.compile(offloaded, mem="80%"))
    note(lambda: fxremat.fully_shard(once))
    note(lambda: fxremat.fully_shard(replicated, replicate=True))
    note(lambda: fxremat.fully_shard(parallel))
    hosted: dict[str, Any] = {"mem": "80%", "offload": Offload(weights=True)}
    for model in (fully_shard(seeded(Floats), mesh=mesh), _in_parallel(mesh)):
        note(lambda model=model: fxremat.compile(model, optimizer=adamw(model.parameters()), **hosted))  # type: ignore[misc]
    note(fxremat.compile(replicated, optimizer=adamw(replicated.parameters()), **hosted).no_sync().__enter__)
    plain = seeded(Floats)
    around = DistributedDataParallel(fxremat.compile(plain, optimizer=adamw(plain.parameters()), **hosted))
    note(lambda: around(*vectors(rank)[0]))
    before = state(plain)
    note(lambda: fxremat.compile(_in_parallel(mesh), mem="80%", backend="inductor")(*_numbers(0)[0]))
    x, y = vectors(rank)[0]
    for shared in (replicated, parallel, _in_parallel(mesh)):
        note(
            lambda shared=shared: fxremat.pipeline(  # type: ignore[misc]
                shared, x, mem="1GiB", devices=world, microbatches=2, loss_fn=F.cross_entropy, example_target=y
            )
        )
    note(lambda: fxremat.compile(_in_parallel(mesh), device_mem="1GiB"))
    assert unequal(before, state(seeded(Floats))) == []
    return messages


class Norm(nn.Module):
    """A holder of a layer that the model calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)


class Nested(nn.Module):
    """Layers in lists and dicts of a list, as models write them that call `for norm, up in self.layers`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([Norm(), nn.Linear(8, 8)]) for _ in range(2)])
        self.layers.append(nn.ModuleDict({"last": nn.Linear(8, 8)}))

    def forward(self, x: Tensor) -> Tensor:
        for holder, up in list(self.layers)[:2]:  # type: ignore[misc]
            x = x + up(holder.norm(x))
        return self.layers[2]["last"](x).square().mean()  # type: ignore[index]


def test_layers_in_containers_of_containers_are_sharded_one_by_one(tmp_path: Path) -> None:
    x = torch.randn(4, 8)
    plain = seeded(Nested)
    plain(x).backward()
    with job_of_one(tmp_path):
        sharded: Any = fxremat.fully_shard(seeded(Nested))
        ours = fxremat.compile(sharded, mem="100%", **QUICK)
        ours(x).backward()
        found = {name: parameter.grad.full_tensor() for name, parameter in ours.named_parameters()}
    own = [name for name, module in sharded.named_modules() if isinstance(module, FSDPModule)]
    assert own == ["", "layers.0.0.norm", "layers.0.1", "layers.1.0.norm", "layers.1.1", "layers.2.last"]
    assert all(same(found[name], parameter.grad) for name, parameter in plain.named_parameters())


def test_uses_that_cannot_work_are_refused_on_every_rank(every_day: list[dict[str, Any]]) -> None:
    first, second = (found["refused"] for found in every_day)
    assert first == second
    for message, part in zip(
        first,
        (
            "fully_shard(model, replicate=True)",
            "CPUOffloadPolicy",
            "already",
            "already",
            "DistributedDataParallel",
            "12 of this model's 12 parameters are cut among ranks (fully_shard)",
            "12 of this model's 12 parameters are cut among ranks (parallelize_module)",
            "leave no_sync() out",
            'Offload(weights=True, updates="step")',
            "5 of the 46 ops",
            "fully_shard(replicate=True)",
            "DistributedDataParallel",
            "12 of this model's 12 parameters are cut among ranks (parallelize_module)",
            "device_mem counts whole parameters, and 12 of",
        ),
        strict=True,
    ):
        assert part in message
        assert "\n" not in message


def test_without_a_process_group_there_is_nothing_to_share() -> None:
    with pytest.raises(fxremat.FxrematError, match=r"init_process_group\(\) first"):
        fxremat.fully_shard(Floats())
