"""Pipelines over processes of this machine: models, plans made by hand, and what each process does.

`python -m tests.pipes FOLDER RANK` runs one process of the job that FOLDER/job.json describes, and leaves what it saw
in FOLDER/RANK.pt. torchrun says the rank by itself.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat
from benchmarks.meter import peak_bytes
from benchmarks.models.gpt import Block
from benchmarks.pipeline_steps import WIDTH as PRETENDED
from benchmarks.pipeline_steps import Layer
from fxremat.solvers.pipeline.model import Layers, Machines, PipelinePlan, PlannedStage, Way, WorkKind

ROOT = Path(__file__).parents[1]
WORDS, WIDTH, LENGTH, ROWS = 64, 32, 16, 8


class Gpt(nn.Module):
    """Embedding, blocks and a head of its own; dropout where asked for."""

    def __init__(self, blocks: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 4, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, None)
        return self.head(self.norm(x))


class Convolutions(nn.Sequential):
    """Batch norm, whose statistics change with each micro-batch, and activations in place."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for entering, leaving in ((3, 8), (8, 16), (16, 16), (16, 16)):
            layers += [
                nn.Conv2d(entering, leaving, 3, padding=1),
                nn.BatchNorm2d(leaving),
                nn.ReLU(inplace=True),
            ]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def next_token(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Section(nn.Module):
    """Adds to its input what some layers make of it, so that it can be cut before and behind but not inside."""

    def __init__(self, depth: int, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh()))
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def gpt() -> tuple[nn.Module, Tensor, Tensor, Callable[[Any, Tensor], Tensor]]:
    torch.manual_seed(0)
    model = Gpt(blocks=2)
    return model, torch.randint(WORDS, (ROWS, LENGTH)), torch.randint(WORDS, (ROWS, LENGTH)), next_token


def convolutions() -> tuple[nn.Module, Tensor, Tensor, Callable[[Any, Tensor], Tensor]]:
    torch.manual_seed(0)
    model = Convolutions()
    return model, torch.randn(ROWS, 3, 8, 8), torch.randint(10, (ROWS,)), nn.CrossEntropyLoss()


def sections() -> tuple[nn.Module, Tensor, Tensor, Callable[[Any, Tensor], Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(Section(3), Section(6), Section(3))
    return model, torch.randn(ROWS * 128, 256), torch.randn(ROWS * 128, 256), F.mse_loss


def uneven() -> tuple[nn.Module, Tensor, Tensor, Callable[[Any, Tensor], Tensor]]:
    """Layers that take 1 : 2 : 1 of the time: two devices share them evenly if one has the first and last."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(seconds) for seconds in (0.01, 0.02, 0.01)))
    return model, torch.randn(ROWS, PRETENDED), torch.randn(ROWS, PRETENDED), F.mse_loss


MODELS = {"gpt": gpt, "convolutions": convolutions, "sections": sections, "uneven": uneven}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One configuration: which device has each of the stages, of about equal numbers of layers."""

    model: str = "gpt"
    allocation: tuple[int, ...] = (0, 1)
    microbatches: int = 4
    smallest: bool = False  # the way of each stage that takes least memory: it recomputes
    tick: float = 1.0  # times the load of the busiest device
    kill: int | None = None  # this rank ends in the middle of its second step
    mem: int | str = "1GiB"
    by_hand: bool = True  # otherwise planned by fxremat; the allocation says then how many devices there are

    @property
    def devices(self) -> int:
        return max(self.allocation) + 1

    @classmethod
    def read(cls, folder: Path) -> Job:
        fields = json.loads((folder / "job.json").read_text())
        return cls(**fields | {"allocation": tuple(fields["allocation"])})


def by_hand(job: Job) -> Callable[..., PipelinePlan]:
    """A planner that gives each stage as many layers as the others, and runs backwards as soon as may be."""

    def planner(
        layers: Layers, machines: Machines, *, options: Callable[[int, int], Sequence[Way]],
        microbatches: int, effort: float,
    ) -> PipelinePlan:  # fmt: skip
        depth, count = len(job.allocation), len(layers.layers)
        bounds = [count * number // depth for number in range(depth + 1)]
        stages = tuple(
            PlannedStage(
                first=first, last=last - 1, device=device, way=options(first, last - 1)[-1 if job.smallest else 0]
            )
            for first, last, device in zip(bounds, bounds[1:], job.allocation)
        )  # fmt: skip
        return in_groups(layers, machines, stages, microbatches, job.tick)

    return planner


def in_groups(
    layers: Layers, machines: Machines, stages: tuple[PlannedStage, ...], microbatches: int, slack: float
) -> PipelinePlan:
    """Forwards back to back, backwards by groups of stages whose works take one tick: 1F1B* without copies."""
    work = [stage.way.forward_time + stage.way.backward_time for stage in stages]
    loads = [sum(w for w, s in zip(work, stages) if s.device == d) for d in range(machines.devices)]
    tick = slack * max(loads)
    groups, used, group = [0] * len(stages), 0.0, 0
    for number in reversed(range(len(stages))):
        if used + work[number] > tick * 1.0001:
            used, group = 0.0, group + 1
        used += work[number]
        groups[number] = group
    forth = [sum(stage.way.forward_time for stage in stages[:number]) for number in range(len(stages))]
    back = [0.0] * len(stages)
    ready = forth[-1] + stages[-1].way.forward_time
    for number in reversed(range(len(stages))):
        if number + 1 < len(stages) and groups[number] != groups[number + 1]:
            ready = forth[number] + stages[number].way.forward_time + groups[number] * tick
        back[number] = ready
        ready += stages[number].way.backward_time
    plan = PipelinePlan(
        layers=layers, machines=machines, stages=stages, tick=tick, skip=None, forward_starts=tuple(forth),
        backward_starts=tuple(back), forth_starts=(), back_starts=(), in_flight=(), memory=(), bound=tick, by="hand",
    )  # fmt: skip
    return replace(plan, in_flight=tuple(most_in_flight(plan, microbatches)))


def most_in_flight(plan: PipelinePlan, microbatches: int) -> list[int]:
    """Of each stage, from the order of its works."""
    now, most = [0] * len(plan.stages), [0] * len(plan.stages)
    for works in plan.orders(microbatches):
        for work in works:
            now[work.stage] += 1 if work.kind is WorkKind.FORWARD else -1
            most[work.stage] = max(most[work.stage], now[work.stage])
    return most


def reference(job: Job) -> dict[str, Any]:
    """The same micro-batches in the same order in this process, by plain PyTorch."""
    model, inputs, target, loss_fn = MODELS[job.model]()
    losses = []
    for _ in range(2):
        model.zero_grad()
        losses = []
        for x, y in zip(inputs.chunk(job.microbatches), target.chunk(job.microbatches)):
            loss = loss_fn(model(x), y)
            loss.backward()
            losses.append(loss.detach())
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(job.microbatches)
    return {
        "losses": losses,
        "grads": {name: parameter.grad for name, parameter in model.named_parameters()},
        "state": model.state_dict(),
    }


def _end_in_a_step(job: Job, rank: int, pipe: fxremat.Pipeline) -> None:
    """Run steps until one fails; the chosen rank kills itself in the middle of one."""
    if rank == job.kill:
        pipe._rank.stages[0].submod.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    _, inputs, target, _ = MODELS[job.model]()
    while True:
        pipe.step(inputs, target)


def process(folder: Path, rank: int) -> None:
    """Train as one process of a job, and save what it saw."""
    torch.set_num_threads(1)
    job = Job.read(folder)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=job.devices,
        timeout=timedelta(seconds=60),
    )
    model, inputs, target, loss_fn = MODELS[job.model]()
    pipe = fxremat.pipeline(
        model, inputs, mem=job.mem, devices=job.devices, microbatches=job.microbatches, loss_fn=loss_fn,
        example_target=target, planner=by_hand(job) if job.by_hand else None,
        effort=0.0 if job.by_hand else 1.0,
    )  # fmt: skip
    others = {name: weakref.ref(tensor) for name, tensor in model.named_parameters()}
    for name, _ in pipe.named_parameters():
        del others[name]
    del model
    gc.collect()
    pipe.step(inputs, target)
    if job.kill is not None:
        _end_in_a_step(job, rank, pipe)
    seen: dict[str, Any] = {"losses": ()}

    def step() -> None:
        seen["losses"] = pipe.step(inputs, target)

    torch.optim.SGD(pipe.parameters(), lr=0.1)  # which takes no empty list, on ranks without a stage
    for parameter in pipe.parameters():
        parameter.grad = None
    peak = peak_bytes(step)
    weights = sum(parameter.nbytes for parameter in pipe.parameters())
    torch.save(
        seen
        | {
            "grads": {name: parameter.grad for name, parameter in pipe.named_parameters()},
            "state": pipe.state_dict(),
            "in_flight": pipe.in_flight,
            "allowed": pipe.plan.in_flight,
            "peak": peak + weights,
            "predicted": pipe.memory[rank],
            "text": str(pipe),
            "devices": [stage.device for stage in pipe.plan.stages],
            "not ours": [name for name, tensor in others.items() if tensor() is not None],
        },
        folder / f"{rank}.pt",
    )
    dist.barrier()
    dist.destroy_process_group()


def start(job: Job, folder: Path) -> list[subprocess.Popen[str]]:
    """All processes of a job."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps(asdict(job)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.pipes", str(folder), str(rank)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(job.devices)
    ]  # fmt: skip


def results(job: Job, folder: Path) -> list[dict[str, Any]]:
    """Run a job, and return what every process of it saw."""
    running = start(job, folder)
    said = [one.communicate(timeout=240) for one in running]
    for one, (_, errors) in zip(running, said):
        assert one.returncode == 0, errors[-3000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(job.devices)]


if __name__ == "__main__":
    process(Path(sys.argv[1]), int(sys.argv[2] if len(sys.argv) > 2 else os.environ["RANK"]))
