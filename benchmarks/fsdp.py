"""Data parallelism on a throttled link: seconds and memory of a step of DDP, FSDP2, and fxremat on a sharded model.

    python -m benchmarks.fsdp [variant ...]     writes benchmarks/results/fsdp.json, and prints it as a table

Two processes of one thread each train a GPT, each on its own batch; the link (benchmarks/throttle.py) is so slow that
communication takes about a third of a step. A step is forward and backward until all gradients are reduced; no
optimizer. Its seconds are those of the slower process, the least of several steps; its peak is what it allocates above
what was there when it began, on the process where that is more. `resident` is what stays between steps: parameters, and
the buckets of DDP.

On a GPU, FSDP2 overlaps through streams. A CPU has none, so there FSDP2 as it is waits for each collective where it
starts it. The "overlapped" variants do by public means what the streams do: the next block's all-gather is
prefetched, and a block's reduce-scatter is waited for when the next one wants its buffer. "alone" is the plain model
without communication.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import fxremat
from benchmarks import report, throttle
from benchmarks.meter import Step, peak_bytes
from benchmarks.models.gpt import GPT, Shape
from fxremat.settings import Search

RESULT = Path(__file__).parent / "results" / "fsdp.json"
SHAPE = Shape(layers=6, width=192, heads=6, vocabulary=512, batch=8, tokens=64)
PROCESSES = 2
BYTES_PER_SECOND, LATENCY = 200e6, 100e-6
WARM_UP, STEPS = 3, 20
BUDGETS = ("100%", "85%", "70%", "55%", "40%")
SAME = 1e-4  # relative difference of gradient norms, from different orders of summation
WATCHDOG = 580.0  # seconds for all variants


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """A model under a way of data parallelism."""

    model: nn.Module
    step: Step  # forward and backward until all gradients are reduced
    resident_bytes: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """Measurements of a variant; `error` says why where there are none."""

    variant: str
    step_seconds: float | None = None
    link_seconds: float | None = None  # what a step's collectives take on the link one after the other
    peak_bytes: int | None = None
    resident_bytes: int | None = None
    gradient_norm: float | None = None
    budget: int | None = None  # bytes; of a plan, as what follows
    predicted_seconds: float | None = None
    predicted_peak: int | None = None
    hidden: float | None = None  # share of the link's seconds that no op waits for
    gathers: int | None = None  # collectives of a step that gather parameters
    error: str | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.variant:30s} {self.error.splitlines()[-1]}"
        times = [seconds or 0.0 for seconds in (self.step_seconds, self.link_seconds)]
        sizes = [size or 0 for size in (self.peak_bytes, self.resident_bytes)]
        columns = [f"{t * 1e3:7.1f} ms" for t in times] + [f"{size / 2**20:7.1f} MiB" for size in sizes]
        if self.predicted_seconds is not None and self.step_seconds is not None and self.hidden is not None:
            columns += [f"{self.predicted_seconds * 1e3:7.1f} ms predicted, {self.hidden:4.0%} hidden"]
        return " ".join((f"{self.variant:30s}", *columns))


def gpt() -> GPT:
    """The model, the same in each process."""
    torch.manual_seed(0)
    return GPT(SHAPE, dropout=0.0)


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and targets of this process."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    text = torch.randint(SHAPE.vocabulary, (SHAPE.batch, SHAPE.tokens + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def trainee(model: nn.Module, resident: Iterable[Tensor], finish: Callable[[], None] | None = None) -> Trainee:
    """Train `model` on this process's batch; `finish` waits for the gradients that are still under way."""
    inputs = batch()

    def step() -> Tensor:
        loss = model(*inputs)
        loss.backward()
        if finish is not None:
            finish()
        return loss.detach()

    return Trainee(model=model, step=step, resident_bytes=throttle.bytes_of(map(local, resident)))


def local(tensor: Tensor) -> Tensor:
    """This process's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# Variants: each builds a trainee on a mesh of one dimension.


def alone(mesh: DeviceMesh) -> Trainee:
    model = gpt()
    return trainee(model, model.parameters())


def data_parallel(mesh: DeviceMesh) -> Trainee:
    """Buckets of about one block, as the blocks of the others are sent."""
    model = gpt()
    block = throttle.bytes_of(model.blocks[0].parameters())
    parallel = DistributedDataParallel(
        model,
        process_group=mesh.get_group(),
        bucket_cap_mb=block / 2**20,
        gradient_as_bucket_view=True,
    )
    weights = list(model.parameters())
    return trainee(parallel, weights + weights)  # the buckets are as large as the weights


def sharded(mesh: DeviceMesh, reshard: bool) -> GPT:
    """FSDP2 as it is: each block, and the rest with the root."""
    model = gpt()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model


def blocking(reshard: bool) -> Callable[[DeviceMesh], Trainee]:
    def build(mesh: DeviceMesh) -> Trainee:
        model = sharded(mesh, reshard)
        return trainee(model, model.parameters())

    return build


class LateReduceScatter(DefaultReduceScatter):
    """A reduce-scatter that goes on beside the backward of the next block.

    FSDP2 keeps one input buffer under way: it waits for the last reduce-scatter before it allocates for the next one.
    """

    def __init__(self) -> None:
        self._under_way: dist.Work | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.finish()
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work:
        self._under_way = super().__call__(output_tensor, input_tensor, group, op, async_op=True)
        return self._under_way

    def finish(self) -> None:
        """Wait for what is under way."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None


def overlapped(reshard: bool) -> Callable[[DeviceMesh], Trainee]:
    def build(mesh: DeviceMesh) -> Trainee:
        model, reduce_scatter = sharded(mesh, reshard), LateReduceScatter()
        modules: list[Any] = [model, *model.blocks]
        for module, following in pairwise(modules):
            module.set_modules_to_forward_prefetch([following])
        for module in modules:
            assert isinstance(module, FSDPModule)
            module.set_custom_reduce_scatter(reduce_scatter)
        modules[0]._set_unshard_async_op(True)
        return trainee(model, model.parameters(), reduce_scatter.finish)

    return build


def planned(mem: str) -> Callable[[DeviceMesh], Trainee]:
    """fxremat on the model that FSDP2 sharded: all-gathers are recomputed and moved as the budget wants."""

    def build(mesh: DeviceMesh) -> Trainee:
        model = sharded(mesh, reshard=True)
        compiled = fxremat.compile(model, mem=mem, example_inputs=batch(), search=Search(progress=False))
        return trainee(compiled, model.parameters())

    return build


def replicated(mem: str) -> Callable[[DeviceMesh], Trainee]:
    """fxremat on whole weights, which sends gradients as DDP does."""

    def build(mesh: DeviceMesh) -> Trainee:
        model = fxremat.fully_shard(gpt(), mesh, replicate=True)
        compiled = fxremat.compile(model, mem=mem, example_inputs=batch(), search=Search(progress=False))
        return trainee(compiled, model.parameters())

    return build


def around_fxremat(mesh: DeviceMesh) -> Trainee:
    """DDP around a compiled model: all gradients arrive when its backward has ended."""
    model = gpt()
    compiled = fxremat.compile(model, mem="100%", example_inputs=batch(), search=Search(progress=False))
    block = throttle.bytes_of(model.blocks[0].parameters())
    parallel = DistributedDataParallel(
        compiled, process_group=mesh.get_group(), bucket_cap_mb=block / 2**20, gradient_as_bucket_view=True
    )
    weights = list(model.parameters())
    return trainee(parallel, weights + weights)


VARIANTS: dict[str, Callable[[DeviceMesh], Trainee]] = {
    "alone": alone,
    "DDP": data_parallel,
    "FSDP2 reshard": blocking(reshard=True),
    "FSDP2 keep": blocking(reshard=False),
    "FSDP2 reshard, overlapped": overlapped(reshard=True),
    "FSDP2 keep, overlapped": overlapped(reshard=False),
}
OURS: dict[str, Callable[[DeviceMesh], Trainee]] = {
    "DDP around fxremat": around_fxremat,
    **{f"fxremat {mem}": planned(mem) for mem in BUDGETS},
    **{f"fxremat replicated {mem}": replicated(mem) for mem in BUDGETS},
}


class Meeting:
    """A channel beside the throttled link, on which the processes tell each other about the measuring."""

    def __init__(self) -> None:
        self._group = dist.new_group(list(range(dist.get_world_size())), backend="gloo")

    def largest(self, value: float) -> float:
        """The largest value of all processes; each waits for all."""
        found = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return found.item()

    def seconds(self, built: Trainee) -> float:
        """Seconds of one step, begun together, on the process where it takes longer."""
        self.fresh(built)
        start = time.perf_counter()
        built.step()
        return self.largest(time.perf_counter() - start)

    def fresh(self, built: Trainee) -> None:
        """Drop the gradients, and wait for all."""
        built.model.zero_grad(set_to_none=True)
        dist.barrier(self._group)


def measured(variants: Sequence[str], mesh: DeviceMesh) -> list[Row]:
    """The rows of the variants, the same on every process; steps take turns, so that all see the same machine."""
    meeting, rows, built = Meeting(), [], {}
    for variant in variants:
        try:
            built[variant] = (VARIANTS | OURS)[variant](mesh)
            for _ in range(WARM_UP):
                meeting.seconds(built[variant])
            built[variant].model.zero_grad(set_to_none=True)
        except Exception as error:  # the same on every process, or the watchdog ends them
            built.pop(variant, None)
            rows.append(Row(variant=variant, error="".join(traceback.format_exception_only(error)).strip()))
    gc.collect()
    least = dict.fromkeys(built, float("inf"))
    for turn in range(STEPS):
        for variant in list(built)[:: 1 if turn % 2 == 0 else -1]:
            least[variant] = min(least[variant], meeting.seconds(built[variant]))
            built[variant].model.zero_grad(set_to_none=True)
    rows += [finished(variant, built[variant], least[variant], mesh, meeting) for variant in built]
    return sorted(rows, key=lambda row: variants.index(row.variant))


def finished(variant: str, built: Trainee, seconds: float, mesh: DeviceMesh, meeting: Meeting) -> Row:
    """The row of a variant whose seconds are known."""
    link: Any = mesh.get_group()
    busy = link.busy_seconds
    meeting.seconds(built)
    busy = link.busy_seconds - busy
    meeting.fresh(built)
    peak = meeting.largest(peak_bytes(built.step))
    row = Row(
        variant=variant,
        step_seconds=seconds,
        link_seconds=busy,
        peak_bytes=int(peak),
        resident_bytes=built.resident_bytes,
        gradient_norm=norm(p.grad for p in built.model.parameters() if p.grad is not None),
        **facts(getattr(built.model, "plan", None)),
    )
    built.model.zero_grad(set_to_none=True)
    return row


def facts(plan: fxremat.Plan | None) -> dict[str, Any]:
    """The budget, the predictions and the communication of a plan's step; nothing where there is no communication."""
    found = None if plan is None else plan.chosen.communication
    if plan is None or found is None:
        return {}
    return {
        "budget": plan.budget,
        "predicted_seconds": plan.predicted_time,
        "predicted_peak": plan.predicted_peak,
        "hidden": found.hidden,
        "gathers": sum(one.name.startswith("all_gather") for one in found.collectives),
    }


def norm(gradients: Iterable[Tensor]) -> float:
    """The norm of all gradients as one vector; sharded ones are gathered."""
    whole = (g.full_tensor() if isinstance(g, DTensor) else g for g in gradients)
    return sum(g.double().square().sum().item() for g in whole) ** 0.5


def run(rank: int, variants: Sequence[str], folder: Path) -> None:
    """One process; the first one writes the rows."""
    faulthandler.dump_traceback_later(WATCHDOG, exit=True)
    torch.set_num_threads(1)
    os.environ["FXREMAT_CACHE"] = str(folder / "costs")  # times of this machine as it is now
    throttle.register()
    dist.init_process_group("throttled", init_method=f"file://{folder}/init", rank=rank, world_size=PROCESSES)
    rows = measured(variants, init_device_mesh("cpu", (PROCESSES,)))
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps([asdict(row) for row in rows]))
    dist.destroy_process_group()


def measure(variants: Sequence[str]) -> list[Row]:
    """The rows of the variants, from processes of their own."""
    throttle.set_link(BYTES_PER_SECOND, LATENCY)
    with tempfile.TemporaryDirectory() as folder:
        spawn(run, (variants, Path(folder)), nprocs=PROCESSES)
        return [Row(**fields) for fields in json.loads((Path(folder) / "rows.json").read_text())]


def agreeing(rows: Sequence[Row]) -> bool:
    """Tell whether all variants that reduce have the same gradients, by their norms."""
    norms = [row.gradient_norm for row in rows if row.gradient_norm is not None and row.variant != "alone"]
    return not norms or max(norms) - min(norms) <= SAME * max(norms)


def conditions() -> dict[str, Any]:
    return {
        **report.machine(),
        "device": "cpu",
        "processes": PROCESSES,
        "threads": 1,
        "bytes_per_second": BYTES_PER_SECOND,
        "latency": LATENCY,
        "shape": asdict(SHAPE),
    }


def main(wanted: Sequence[str] | None = None) -> None:
    """Measure the variants, keep and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    everything = list(VARIANTS | OURS)
    parser.add_argument("variant", nargs="*", default=everything, help=", ".join(everything))
    chosen = parser.parse_args(wanted).variant
    rows = measure(chosen)
    print(f"{'':30s} {'step':>10s} {'link':>10s} {'peak':>11s} {'resident':>11s}", *rows, sep="\n")
    if not agreeing(rows):
        raise SystemExit("the variants disagree about the gradients; nothing is written")
    RESULT.write_text(json.dumps({"conditions": conditions(), "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
