"""One model, every alternative and fxremat at every budget, in one process with one thread.

    each point      one step from a fixed seed: its loss, gradients and buffers beside plain's
                    its peak, by both meters; two steps for a rough time
    those in play   rounds in which all of them take turns, in an order that alternates; the least time counts
    those ahead     twice as many rounds more

In play are plain PyTorch, fxremat, and every alternative that no other clearly beats in both peak and rough time;
ahead are those of them that no other beats by a little.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import fxremat
from fxremat.settings import Search

from .. import meter, report
from ..models import Case
from .floor import floor_bytes
from .rows import Kind, Measured, Ours, Point, Record
from .strategies import Strategy, strategies

PLAIN = "plain"
CLEARLY = 1.12  # a rough time that is this many times less is less
A_LITTLE = 1.05  # the same of the least of some rounds
CLOSE = 1e-4  # relative; more where the model itself makes more of a last bit
SEED = 7

Part = Sequence[Tensor]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The loss, the gradients and the buffers that one step from a fixed seed leaves."""

    loss: Part
    gradients: Part  # in the order of parameters()
    buffers: Part


def measure(case: Case, families: Iterable[str], percents: Sequence[float], rounds: int) -> Record:
    """The record of one model. Set the number of threads to 1 first."""
    start, load = time.perf_counter(), os.getloadavg()[0]
    with many_graphs():
        bench = Bench(case)
        plain = bench.look(PLAIN, case.model())
        first_planning, least = bench.least()
        ours = [least, *(bench.ours(percent, plain.peak, least.minimum) for percent in percents)]
        points = [bench.alternative(strategy) for strategy in strategies(case, families)]
        mine = [PLAIN, *(row.name for row in ours if row.measured)]
        kept = in_play(plain, {point.name: point.measured for point in points if point.measured})
        seconds = bench.rounds([*mine, *kept], rounds)
        timed = {row.name: _timed(row, seconds) for row in points if row.name in kept}
        plain = replace(plain, seconds=seconds[PLAIN])
        ahead = in_play(plain, {name: one for name, one in timed.items() if one}, A_LITTLE)
        longer = bench.rounds([*mine, *ahead], 2 * rounds)
        seconds |= {name: min(seconds[name], least) for name, least in longer.items()}
    conditions = {
        **report.machine(),
        "rounds": rounds,
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "minutes": round((time.perf_counter() - start) / 60, 1),
    }
    return Record(
        model=case.name,
        conditions=conditions,
        plain=replace(plain, seconds=seconds[PLAIN]),
        floor=bench.floor,
        rounding=bench.rounding,
        first_planning_seconds=first_planning,
        points=[replace(row, measured=_timed(row, seconds)) for row in points],
        ours=[replace(row, measured=_timed(row, seconds)) for row in ours],
    )


def _timed(row: Point | Ours, seconds: Mapping[str, float]) -> Measured | None:
    return row.measured and replace(row.measured, seconds=seconds.get(row.name))


class Bench:
    """Looks at models one by one, and keeps their steps ready for the rounds."""

    def __init__(self, case: Case) -> None:
        self.case, self.batch = case, case.batch()
        self.steps: dict[str, meter.Step] = {}
        self.floor: int | None = None  # known once fxremat has made a plan
        nudged = case.model()
        nudge(nudged)
        self.plain, self.nudged = self._outcome(case.model()), self._outcome(nudged)
        self.rounding = difference(self.nudged.gradients, self.plain.gradients)

    def look(self, name: str, model: nn.Module) -> Measured:
        """Everything but the rounds."""
        outcome, step = self._outcome(model), meter.training_step(model, self.batch)
        peak = meter.peak_bytes(step)
        model.zero_grad(set_to_none=True)
        storages = meter.storage_peak(step)
        self.steps[name] = meter.step_from_none(model, self.batch)
        rough = min(_seconds(self.steps[name]) for _ in range(2))
        model.zero_grad(set_to_none=True)
        _say(f"  {name:<60}{peak / 1e6:8.1f} MB{rough:8.3f} s")
        return Measured(
            peak=peak,
            storages=storages,
            rough=rough,
            seconds=None,
            loss=self._kind(outcome, lambda one: one.loss),
            gradients=self._kind(outcome, lambda one: one.gradients),
            buffers=self._kind(outcome, lambda one: one.buffers),
            gradient_error=difference(outcome.gradients, self.plain.gradients),
        )

    def alternative(self, strategy: Strategy) -> Point:
        """A point, or why there is none."""
        point = Point(family=strategy.family, setting=strategy.setting, measured=None)
        try:
            return replace(point, measured=self.look(point.name, strategy.make()))
        except Exception as error:
            return replace(point, failure=_failure(point.name, error))

    def least(self) -> tuple[float, Ours]:
        """Time fxremat's planning with nothing measured before, and train at the minimum that it then announces."""
        start = time.perf_counter()
        try:
            self._compiled(mem=1)
        except fxremat.BudgetTooSmall as error:
            seconds = time.perf_counter() - start
            row = Ours(percent=None, mem=error.minimum, minimum=error.minimum, measured=None)
            return seconds, self._trained(row)
        raise AssertionError("a training step fitted in one byte")

    def ours(self, percent: float, plain_peak: int, minimum: int) -> Ours:
        """fxremat at this share of plain's peak, where it can."""
        mem = int(plain_peak * percent / 100)
        row = Ours(percent=percent, mem=mem, minimum=minimum, measured=None)
        return row if mem < minimum else self._trained(row)

    def rounds(self, names: Sequence[str], rounds: int) -> dict[str, float]:
        """The least seconds of each, by turns; all other steps are dropped."""
        self.steps = {name: self.steps[name] for name in names}
        gc.collect()
        gc.freeze()  # so many graphs would make every collection slow
        _say(f"  {rounds} rounds of {len(names)} points")
        seconds = meter.step_times([self.steps[name] for name in names], repeats=rounds)
        gc.unfreeze()
        return dict(zip(names, seconds, strict=True))

    def _compiled(self, mem: int) -> fxremat.Rematerialized:
        return fxremat.compile(self.case.model(), mem=mem, example_inputs=self.batch, search=Search(progress=False))

    def _trained(self, row: Ours) -> Ours:
        start = time.perf_counter()
        try:
            model = self._compiled(row.mem)
            planning = time.perf_counter() - start
            measured = self.look(row.name, model)
        except Exception as error:
            return replace(row, failure=_failure(row.name, error))
        self.floor = self.floor or floor_bytes(model.plan)
        return replace(
            row,
            measured=measured,
            planning_seconds=planning,
            predicted_peak=model.plan.predicted_peak,
        )

    def _outcome(self, model: nn.Module) -> Outcome:
        torch.manual_seed(SEED)
        loss = meter.training_step(model, self.batch)()
        assert isinstance(loss, Tensor)
        gradients = [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return Outcome(loss=[loss], gradients=gradients, buffers=[b.clone() for b in model.buffers()])

    def _kind(self, outcome: Outcome, part: Callable[[Outcome], Part]) -> Kind:
        return compared(part(outcome), part(self.plain), part(self.nudged))


def nudge(model: nn.Module) -> None:
    """Change every parameter in its last bit: what then changes in the gradients is what rounding may do."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.nextafter(parameter, torch.tensor(torch.inf)))


def compared(got: Part, plain: Part, nudged: Part) -> Kind:
    """ "close" is within three times what a last bit makes of plain's, and at least within 1e-4."""
    if len(got) == len(plain) and all(map(torch.equal, got, plain)):
        return "equal"
    return "close" if difference(got, plain) <= max(CLOSE, 3 * difference(nudged, plain)) else "wrong"


def difference(got: Part, plain: Part) -> float:
    """Norm of the difference over norm of plain's, all tensors together; infinite where whole numbers differ."""
    if len(got) != len(plain) or any(a.shape != b.shape for a, b in zip(got, plain, strict=True)):
        return float("inf")
    if any(not b.is_floating_point() and not torch.equal(a, b) for a, b in zip(got, plain, strict=True)):
        return float("inf")
    apart, size = _norm([a.double() - b.double() for a, b in zip(got, plain, strict=True)]), _norm(plain)
    return apart / size if size else apart


def _norm(tensors: Part) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5


def in_play(plain: Measured, others: Mapping[str, Measured], clearly: float = CLEARLY) -> list[str]:
    """The names of those that neither plain nor another clearly beats in time without more memory."""
    field: Collection[Measured] = [plain, *others.values()]
    return [
        name
        for name, one in others.items()
        if not any(other.peak <= one.peak and _time(other) * clearly < _time(one) for other in field)
    ]


def _time(measured: Measured) -> float:
    return measured.rough if measured.seconds is None else measured.seconds


def _seconds(step: meter.Step) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


@contextlib.contextmanager
def many_graphs() -> Iterator[None]:
    """Dynamo may keep a graph for every budget of one forward; it asks each whether it is for this backend."""
    import torch._dynamo.config as dynamo_config

    torch._dynamo.reset()
    with dynamo_config.patch(recompile_limit=512, accumulated_recompile_limit=4096):
        yield
    torch._dynamo.reset()


def _failure(name: str, error: Exception) -> str:
    line = next(iter(str(error).strip().splitlines()), "")
    message = f"{type(error).__name__}: {line}"[:200]
    _say(f"  {name} failed: {message}")
    return message


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
