"""Steps of real pipelines in processes of this machine: do they take as long as planned?

    even      eight layers of equal times; all the memory that one device takes, or a part of it for each
    uneven    three that take 1 : 2 : 1 of the time; contiguous, and as the planner likes it

The devices are pretended: a layer sleeps for as long as it would compute, since the cores of a machine like this one
are no devices of their own. Values, their memory, and copies by gloo are real. Part of `python -m benchmarks.pipeline`.
A step is timed from one barrier to the next; the fastest of several counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat
from benchmarks.meter import peak_bytes

MICROBATCHES, ROUNDS = 8, 6
ROWS, WIDTH = 64, 4096  # of a micro-batch: 1 MiB
SECONDS = 0.02  # of a layer's forward; its backward takes twice as long


@torch.library.custom_op("fxremat_benchmarks::work", mutates_args=())
def work(x: Tensor, seconds: float) -> Tensor:
    """The forward of a layer."""
    time.sleep(seconds)
    return x.clone()


@torch.library.custom_op("fxremat_benchmarks::work_backward", mutates_args=())
def work_backward(gradient: Tensor, x: Tensor, seconds: float) -> Tensor:
    """Its backward, which reads what went in."""
    time.sleep(2 * seconds)
    return gradient + x


@work.register_fake
def _(x: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


@work_backward.register_fake
def _(gradient: Tensor, x: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.seconds = inputs[1]


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return work_backward(gradient, x, ctx.seconds), None


work.register_autograd(_gradient, setup_context=_remember)


class Layer(nn.Module):
    """Works on what it scales."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = work(x * self.scale, self.seconds)
        return y


@dataclass(frozen=True, kw_only=True)
class Case:
    """Layers of such times, and how they are planned."""

    name: str
    times: tuple[float, ...]
    devices: int = 2
    share: float = 1.0  # of what one device takes that trains all of it
    contiguous: bool = False  # no effort goes beyond such allocations

    def model(self) -> nn.Module:
        """The layers in a row."""
        return nn.Sequential(*(Layer(SECONDS * seconds) for seconds in self.times))

    def batch(self) -> tuple[Tensor, Tensor]:
        """Input and target."""
        return torch.randn(MICROBATCHES * ROWS, WIDTH), torch.randn(MICROBATCHES * ROWS, WIDTH)


CASES = (
    Case(name="even", times=(1.0,) * 8),
    Case(name="even", times=(1.0,) * 8, share=0.7),
    Case(name="even", times=(1.0,) * 8, devices=4),
    Case(name="even", times=(1.0,) * 8, devices=4, share=0.6),
    Case(name="uneven", times=(1.0, 2.0, 1.0), share=2.0, contiguous=True),
    Case(name="uneven", times=(1.0, 2.0, 1.0), share=2.0),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Seconds are of a step."""

    name: str
    share: float
    contiguous_only: bool
    devices: tuple[int, ...]  # of the stages
    predicted: float
    measured: float
    alone: float  # plain PyTorch in one process, micro-batch after micro-batch
    bandwidth: float  # bytes per second, measured
    planning: float  # seconds


def plain_step(model: nn.Module, inputs: Tensor, target: Tensor) -> None:
    """One step in this process."""
    model.zero_grad()
    for x, y in zip(inputs.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        F.mse_loss(model(x), y).backward()


def worker(number: int, out: Path) -> None:
    """Plan and time one case as one of its processes; the first one writes the row."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    case, rank = CASES[number], dist.get_rank()
    model, (inputs, target) = case.model(), case.batch()
    alone = _fastest(partial(plain_step, model, inputs, target)) if rank == 0 else 0.0
    model.zero_grad()
    dist.barrier()
    start = time.perf_counter()
    pipe = fxremat.pipeline(
        model, inputs, mem=_budget(model, case, inputs, target), devices=case.devices,
        microbatches=MICROBATCHES, loss_fn=F.mse_loss, example_target=target, effort=0.0 if case.contiguous else 5.0,
    )  # fmt: skip
    planning = time.perf_counter() - start

    def step() -> None:
        for parameter in pipe.parameters():
            parameter.grad = None
        dist.barrier()
        pipe.step(inputs, target)
        dist.barrier()

    measured = _fastest(step)
    if rank == 0:
        row = Row(
            name=case.name, share=case.share, contiguous_only=case.contiguous,
            devices=tuple(stage.device for stage in pipe.plan.stages), predicted=pipe.seconds, measured=measured,
            alone=alone, bandwidth=pipe.plan.machines.bandwidth or 0.0, planning=planning,
        )  # fmt: skip
        out.write_text(json.dumps(asdict(row)))
    dist.barrier()
    dist.destroy_process_group()


def _budget(model: nn.Module, case: Case, inputs: Tensor, target: Tensor) -> int:
    """A share of what one device takes: parameters, and the peak of a micro-batch with all gradients."""
    peak = peak_bytes(partial(plain_step, model, inputs, target))
    model.zero_grad()
    return int(case.share * (peak + sum(parameter.nbytes for parameter in model.parameters())))


def _fastest(step: Callable[[], None]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def rows() -> Iterator[dict[str, Any]]:
    """Run every case, one after the other."""
    for number in range(len(CASES)):
        devices = CASES[number].devices
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "row.json"
            start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices)]
            script = ["-m", "benchmarks.pipeline_steps", str(number), str(out)]
            subprocess.run([sys.executable, *start, *script], check=True)
            yield json.loads(out.read_text())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("case", type=int)
    parser.add_argument("out", type=Path)
    args = parser.parse_args(arguments)
    worker(args.case, args.out)


if __name__ == "__main__":
    main()
