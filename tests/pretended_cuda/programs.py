"""Random training programs that copy between device and host, each run under the race detector.

    activations(seed, ...)     a random model at random budgets: the emitted forward and backward of each, three times
    weights(seed, ...)         a training loop whose parameters and optimizer state live on the host, five steps

What is random: the model, budgets, the solver, whether steps run on the default stream or on another one, whether a
step fails in the middle, and whether events pass before somebody waits for them. Numbers mean nothing here, since
kernels compute nothing; what is checked is the order of what is issued.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch

import fxremat
from fxremat.graphs import region
from fxremat.host.tier import HostTier
from fxremat.ops.parameters import Weights
from fxremat.planned_step import PlannedStep
from fxremat.settings import Offload, Search
from fxremat.torch_private import boxed
from tests import dags
from tests.pretended_cuda.detector import counted, described, races
from tests.pretended_cuda.log import Kind, log
from tests.pretended_cuda.marking import AUTOGRAD, Failed, fuse, marked

WIDTH, ROWS = 16, 64  # of activations: eight granules
OPTIONS: dict[str, Any] = {"search": Search(seconds=0.0, slots=100)}
BUDGETS = 8  # programs of one model
STEPS = 3  # of one program
LOOP = 5  # steps of a training loop
KINDS_OF_WEIGHTS = ("linear", "linear", "norm", "relu", "dropout", "tokens", "cat", "add")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "AdamW, capturable": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, capturable=True),
    "AdamW, one by one": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=False),
    "Adam, amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD, momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Counts of what was run, and the races that were found."""

    programs: int = 0
    steps: int = 0
    failed_steps: int = 0
    copies: int = 0
    launches: int = 0
    racing: int = 0  # programs with a race
    races: tuple[str, ...] = ()

    def __add__(self, other: Tally) -> Tally:
        return Tally(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Tally)})


def activations(seed: int, device: torch.device, tier: HostTier | bool = True) -> Iterator[Tally]:
    """Yield what running the programs of one random model shows, program by program.

    Args:
        seed: of all that is random.
        device: where the model is; another one may be current.
        tier: where activations wait; True: in pinned memory.
    """
    draw = random.Random(seed)
    plan = _planned(draw, device, tier)
    for share, program in () if plan is None else _programs(plan, draw):
        given = [_empty(node) for node in program.captured.primals]
        fails = 1 if draw.random() < 0.5 else None
        with _stream(draw, device), _logged(draw) as outcome:
            for step in range(STEPS):
                with fuse.after(draw.randrange(len(program.graph.ops)) if step == fails else None):
                    outcome.run(lambda given=given, program=program: run_once(program, given))
        yield outcome.tally(f"model {seed}, {share:.0%} of what budgets may save")
        torch.cuda.synchronize()


def _planned(draw: random.Random, device: torch.device, tier: HostTier | bool) -> PlannedStep | None:
    """The plan of a random model; None where it has none, such as of a model without anything to compute."""
    _begin()
    kinds = dags.KINDS[:-1]  # without convolutions, which need cuDNN's plans
    layers = [_layer(draw, kinds, chained=0.6) for _ in range(draw.randrange(4, 20))]
    recipe = dags.Recipe(tuple(layers), draw.randrange(3), False, draw.random() < 0.2)
    model = dags.Dag(recipe).to(device).train()
    inputs = tuple(
        torch.empty(ROWS, WIDTH, device=device, requires_grad=draw.random() < 0.3) for _ in range(2)
    )
    options = {**OPTIONS, "costs": "H100", "solver": draw.choice(["auto", "keep_all"])}
    try:
        return fxremat.plan(model, inputs, mem="100%", offload=tier, **options)
    except fxremat.FxrematError:
        return None


def _programs(plan: Any, draw: random.Random) -> Iterator[tuple[float, Any]]:
    """Programs of a step at random budgets, from the least one on, with their share of what may be saved."""
    try:
        plan.within(1)
    except fxremat.BudgetTooSmall as error:
        least = error.minimum
    for share in [1.0, *(draw.random() for _ in range(BUDGETS - 1))]:
        with contextlib.suppress(fxremat.BudgetTooSmall):
            yield share, plan.within(round(least + (1 - share) * (plan.keep_all_peak - least)))


def run_once(plan: Any, given: list[Any]) -> None:
    """Run the emitted forward and backward of a plan, and mark that results are read."""
    joint = plan.captured
    forward, backward = (marked(boxed(graph)) for graph in plan.graphs)
    results: list[Any] = list(forward(list(given)))
    saved = results[len(joint.forward_outputs) :]
    del results[len(joint.forward_outputs) :]
    _read(results, "the caller, of an output")
    tangents = [_empty(node) for node in joint.tangent_nodes]
    arguments = [*saved, *tangents]
    del saved, tangents
    _read(backward(arguments), "the caller, of a gradient")


def _empty(node: Any) -> Any:
    """A tensor of a node's layout, or its value where that is another."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _read(values: Any, name: str) -> None:
    for value in torch.utils._pytree.tree_leaves(values):
        if isinstance(value, torch.Tensor):
            log.read(value, name)


def weights(seed: int, device: torch.device, optimizer: str | None = None) -> Iterator[Tally]:
    """Yield what one training loop shows whose weights are on the host, with activations there or without.

    Args:
        seed: of all that is random.
        device: where the step runs.
        optimizer: a key of `OPTIMIZERS`; None: the next one for each seed.
    """
    draw = random.Random(seed)
    _begin()
    layers = [_layer(draw, KINDS_OF_WEIGHTS, chained=0.7) for _ in range(draw.randrange(4, 14))]
    model = dags.Dag(dags.Recipe(tuple(layers), 0, False, False)).train()
    batch = tuple(torch.empty(ROWS, WIDTH, device=device) for _ in range(2))
    kind = optimizer or list(OPTIMIZERS)[seed % len(OPTIMIZERS)]
    update = OPTIMIZERS[kind](model.parameters())
    options = {**OPTIONS, "offload": Offload(weights=True, activations=draw.random() < 0.5), "optimizer": update}
    with _watched(), _stream(draw, device):
        compiled = _compiled(model, f"{draw.randrange(15, 100)}%", example_inputs=batch, **options)
        if compiled is None:
            return
        fails = 2 if draw.random() < 0.5 else None
        with _logged(draw) as outcome:
            for step in range(LOOP):
                ops = draw.randrange(2 * len(compiled.plan.graph.ops)) if step == fails else None
                with fuse.after(ops):
                    outcome.run(lambda: train_once(compiled, update, batch))
                _host_looks(model, writes=step == LOOP - 2)
        yield outcome.tally(f"{kind}, model {seed}")
    torch.cuda.synchronize()


def train_once(model: Any, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, ...]) -> None:
    """Run a step of training, and note what autograd's thread and this one order."""
    optimizer.zero_grad()
    loss = model(*batch)
    log.post(AUTOGRAD)
    try:
        loss.backward()
    finally:
        log.join(AUTOGRAD)
    optimizer.step()


def _compiled(model: Any, mem: Any, **options: Any) -> Any:
    """The model within a budget, or within its least; None where it is refused."""
    try:
        return fxremat.compile(model, mem=mem, **options)
    except fxremat.BudgetTooSmall as error:
        return fxremat.compile(model, mem=error.minimum, **options)
    except fxremat.FxrematError:
        return None


def _host_looks(model: Any, *, writes: bool) -> None:
    """Mark what a user may do with parameters of the host between steps."""
    for parameter in model.parameters():
        if not parameter.is_cuda:
            log.read(parameter.data, "the user, of a parameter")
            if writes:
                log.write(parameter.data, "the user, of a parameter")


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """Let compiled steps mark what they do; the gradient of a loss is no number here, so nothing asks whether it is 1.

    What autograd's thread does ends with the wait for copies that `Weights.telling_what_is_new` ends with.
    """
    telling = Weights.telling_what_is_new

    @contextlib.contextmanager
    def telling_and_handing_over(self: Weights) -> Iterator[None]:
        try:
            with telling(self):
                yield
        finally:
            log.post(AUTOGRAD)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Weights, "telling_what_is_new", telling_and_handing_over)
        patch.setattr(region, "boxed", lambda module: marked(boxed(module)))
        yield


def _begin() -> None:
    """Forget the model before, and let `tests.dags` make models of this file's sizes."""
    torch._dynamo.reset()
    gc.collect()
    dags.WIDTH, dags.ROWS = WIDTH, ROWS


def _layer(draw: random.Random, kinds: Any, *, chained: float) -> dags.Layer:
    first = 0 if draw.random() < chained else draw.randrange(12)
    return dags.Layer(draw.choice(kinds), first, draw.randrange(12))


@contextlib.contextmanager
def _stream(draw: random.Random, device: torch.device) -> Iterator[None]:
    """Half of the time another stream of the device than its default one; the current device stays."""
    current = torch.cuda.current_device()
    stream = torch.cuda.Stream(device) if draw.random() < 0.5 else None
    with torch.cuda.stream(stream), torch.cuda.device(current):
        yield


class Outcome:
    """The part of the log that the steps of a program left."""

    def __init__(self) -> None:
        self.steps = self.failed = 0
        self.entries: Any = None
        self.names: list[str] = []

    def run(self, step: Callable[[], None]) -> None:
        """Run a step that may be made to fail."""
        self.steps += 1
        try:
            step()
        except (Failed, SystemError):
            if not fuse.blown:
                raise
            self.failed += 1  # a SystemError where torch told of a free while Python was raising: it then forgets what

    def tally(self, name: str) -> Tally:
        """The counts of one program, and its races with a name that tells how to find it again."""
        found = described(races(self.entries, self.names))
        return Tally(
            programs=1,
            steps=self.steps,
            failed_steps=self.failed,
            copies=counted(self.entries, Kind.COPY),
            launches=counted(self.entries, Kind.LAUNCH),
            racing=int(bool(found)),
            races=tuple(f"{name}: {race}" for race in found[:3]),
        )


@contextlib.contextmanager
def _logged(draw: random.Random) -> Iterator[Outcome]:
    """Log what happens inside; in three of four programs no event passes before somebody waits for it."""
    outcome = Outcome()
    log.start(late=draw.random() < 0.75)
    try:
        yield outcome
    finally:
        outcome.entries, outcome.names = log.stop()


__all__ = ["OPTIMIZERS", "Tally", "activations", "weights"]
