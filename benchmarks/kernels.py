"""Planned steps in regions that Inductor compiles, beside plain PyTorch and every way of torch.compile to save memory.

    python -m benchmarks.kernels --models gpt,unet --budgets 100,80,60,50,40,30
    python -m benchmarks.readme                              puts what is on record into docs/kernels.md

For each model, in a process of its own, on the CPU with one thread:

    eager                          PyTorch; its measured peak is 100 %
    torch.compile                  Inductor, which keeps what its partitioner keeps by default
    torch.compile, budget 0.8      the same with torch's `activation_memory_budget`, for each point of `--sweep`
    torch.compile + checkpoint     the same of a model with a checkpoint around each of its natural blocks
    fxremat inductor 60 %          fxremat with backend="inductor", in that share of eager's peak, and in the least
    fxremat eager 60 %             fxremat with PyTorch's own kernels, in the same bytes, and in its own least

All of them take turns; the seconds of a step are process CPU time, the least of all rounds. Seconds of compiling are
those of the clock, from the first call until its step is over, after a tiny model was compiled in the same way, but
with empty caches of kernels and costs: torch.compile has a cache of its own, and the budgets of fxremat share another.
A way that fails has the first line of its error on record. Records of other models stay as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

import fxremat
from fxremat.settings import Search

from . import meter, models, report
from .alternatives.by_hand import placements
from .alternatives.measure import difference, many_graphs
from .alternatives.strategies import every, rewired
from .models import Case

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "kernels.json"
MODELS = "gpt,unet"
BUDGETS = "100,80,60,50,40,30"
SWEEP = "1,0.9,0.8,0.7,0.6,0.5,0.4,0.3,0.2,0.1"
ROUNDS = 7
MOST_SECONDS = 4 * 3600.0  # of one model
SEED = 7
LONGEST_ERROR = 160  # characters

EAGER, COMPILED = "eager", "torch.compile"
SWEPT, CHECKPOINTED = f"{COMPILED}, budget", f"{COMPILED} + checkpoint"
OURS, OURS_EAGER = "fxremat inductor", "fxremat eager"
TORCH = (EAGER, COMPILED, SWEPT, CHECKPOINTED)
"""The families that are not fxremat."""

Gradients = Sequence[Tensor]  # of the parameters, in their order


@dataclass(frozen=True, kw_only=True)
class Row:
    """Measurements of one way to train; `error` says why where there are none."""

    family: str
    setting: str = ""
    percent: float | None = None  # of eager's peak; None: not of fxremat, or its least
    place: int = 0  # among the calls of its family: 1 is the first
    peak: int | None = None  # bytes
    seconds: float | None = None  # of the processor, of a step
    first_seconds: float | None = None  # of the clock, until the first step is over: planning, compiling, and the step
    same_bits: bool | None = None  # of loss and gradients of two steps from the same seed
    worst_to_eager: float | None = None  # of all gradients: norm of the difference over that of eager's
    worst_to_compiled: float | None = None  # ... over that of torch.compile's
    all_to_eager: float | None = None  # the same of all gradients together
    all_to_compiled: float | None = None
    budget: int | None = None  # bytes; of fxremat, as what follows
    minimum: int | None = None  # the least budget
    predicted_peak: int | None = None
    regions: int | None = None  # None: the plan runs op by op
    distinct: int | None = None  # regions that differ, each of which is compiled once
    region_ops: int | None = None  # executions of ops that are in regions
    compiling_seconds: float | None = None  # of the clock, of the regions that were new
    error: str | None = None

    @property
    def name(self) -> str:
        """The family and the setting."""
        return f"{self.family} {self.setting}".rstrip()

    def __str__(self) -> str:
        if self.peak is None:
            return f"{self.name:30s} {self.error}"
        regions = f"  {self.regions} regions, {self.distinct} distinct" if self.regions else ""
        return f"{self.name:30s}{self.peak / 1e6:8.1f} MB, first step after {self.first_seconds:.1f} s{regions}"


@dataclass(frozen=True, kw_only=True)
class Record:
    """All rows of one model, and the conditions under which they were measured."""

    model: str
    size: str
    conditions: Mapping[str, Any]
    rows: Sequence[Row]

    def row(self, family: str, setting: str = "") -> Row:
        """The row of this name. Raises KeyError where there is none."""
        for row in self.rows:
            if (row.family, row.setting) == (family, setting):
                return row
        raise KeyError(f"{family} {setting}".rstrip())


# The ways.


def through_inductor(model: nn.Module, budget: float = 1.0) -> nn.Module:
    """torch.compile with Inductor and torch's own `activation_memory_budget`.

    The backend is a function of its own: under one backend, dynamo would share the code of one model with its copies.
    """
    from torch._dynamo import lookup_backend
    from torch._functorch import config

    stock = lookup_backend("inductor")

    def with_budget(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        with config.patch(activation_memory_budget=budget, enable_autograd_cache=False):
            return stock(graph, inputs)

    compiled: Any = torch.compile(model, backend=with_budget, fullgraph=True, dynamic=False)
    return compiled


def checkpointed(case: Case) -> nn.Module:
    """The model with a checkpoint around each block of its natural placement."""
    return rewired(case, next(iter(placements(case.name).values())), every(1))


def planned(model: nn.Module, family: str, mem: int) -> nn.Module:
    """fxremat in a number of bytes; it plans at the first call."""
    kernels = "inductor" if family == OURS else "eager"
    return fxremat.compile(model, mem=mem, search=Search(progress=False), backend=kernels)


@contextlib.contextmanager
def empty_kernel_cache() -> Iterator[None]:
    """While inside, Inductor knows no kernels from before."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache(dir=os.environ.get("TORCHINDUCTOR_CACHE_DIR"), delete=False):
        yield


def warm_up() -> None:
    """Compile a tiny model in both ways: imports and searching for a compiler belong to no model."""
    batch = (torch.ones(4, 8),)
    for wrapped in (through_inductor(_tiny()), planned(_tiny(), OURS, 1 << 20)):
        _stepped(wrapped, batch)


def _tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1), nn.Flatten(0))


def _stepped(model: nn.Module, batch: Sequence[Tensor]) -> None:
    model(*batch).sum().backward()


# One model.


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Loss and gradients of one step from a fixed seed."""

    loss: Tensor
    gradients: Gradients

    def equals(self, other: Outcome) -> bool:
        """Tell whether all bits are the same."""
        ours, theirs = (self.loss, *self.gradients), (other.loss, *other.gradients)
        return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def outcome(model: nn.Module, batch: Sequence[Any]) -> Outcome:
    """Return the loss and gradients of a step that begins without gradients; they are None again afterwards."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(SEED)
    loss = meter.training_step(model, batch)()
    assert isinstance(loss, Tensor)
    gradients = [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return Outcome(loss=loss, gradients=gradients)


def worst_difference(got: Gradients, wanted: Gradients) -> float:
    """The largest relative difference of a gradient, in norm; infinite where there are others."""
    if len(got) != len(wanted):
        return float("inf")
    return max((difference([one], [other]) for one, other in zip(got, wanted, strict=True)), default=0.0)


class Bench:
    """Looks at the ways one by one, and keeps their steps ready for the rounds."""

    def __init__(self, case: Case) -> None:
        self.case, self.batch = case, case.batch()
        self.rows: list[Row] = []
        self._steps: dict[str, meter.Step] = {}
        self._gradients: dict[str, Gradients] = {}  # of eager and of torch.compile

    def look(self, row: Row, make: Callable[[], nn.Module]) -> Row:
        """Everything but the seconds of a step."""
        place = 1 + sum(other.family == row.family for other in self.rows)
        try:
            found = self._looked(replace(row, place=place), make())
        except Exception as error:
            minimum = error.minimum if isinstance(error, fxremat.BudgetTooSmall) else None
            found = replace(row, place=place, minimum=minimum, error=_first_line(error))
        _say(f"  {found}")
        self.rows.append(found)
        return found

    def ours(self, family: str, percents: Sequence[float], peak: int) -> None:
        """fxremat in shares of a peak, and in the least memory that it then tells of."""
        for percent in percents:
            mem = int(peak * percent / 100)
            row = Row(family=family, setting=f"{percent:g} %", percent=percent, budget=mem)
            self.look(row, lambda mem=mem: planned(self.case.model(), family, mem))  # type: ignore[misc]
        least = Row(family=family, setting="least")
        minimums = [row.minimum for row in self.rows if row.family == family and row.minimum is not None]
        if minimums:
            mem = min(minimums)
            self.look(replace(least, budget=mem), lambda: planned(self.case.model(), family, mem))
        else:
            self.rows.append(replace(least, error="no plan has told of the least budget"))

    def timed(self, rounds: int) -> list[Row]:
        """The rows with the least seconds of a step, of rounds in which all take turns."""
        gc.collect()
        gc.freeze()  # so many graphs would make every collection slow
        _say(f"  {rounds} rounds of {len(self._steps)} ways")
        best = meter.step_times(list(self._steps.values()), repeats=rounds)
        gc.unfreeze()
        seconds = dict(zip(self._steps, best, strict=True))
        return [replace(row, seconds=seconds.get(row.name)) for row in self.rows]

    def _looked(self, row: Row, model: nn.Module) -> Row:
        began = time.perf_counter()
        first = outcome(model, self.batch)
        first_seconds = time.perf_counter() - began
        again = outcome(model, self.batch)
        if row.family in (EAGER, COMPILED):
            self._gradients[row.family] = first.gradients
        found = replace(
            row,
            peak=meter.model_peak(model, self.batch),
            first_seconds=first_seconds,
            same_bits=first.equals(again),
            **self._differences(first.gradients),
            **_of_plan(getattr(model, "plan", None)),
        )
        self._steps[row.name] = meter.step_from_none(model, self.batch)
        return found

    def _differences(self, got: Gradients) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for family, end in ((EAGER, "eager"), (COMPILED, "compiled")):
            if family in self._gradients:
                wanted = self._gradients[family]
                found[f"worst_to_{end}"] = worst_difference(got, wanted)
                found[f"all_to_{end}"] = difference(got, wanted)
        return found


def _of_plan(plan: Any) -> dict[str, Any]:
    """The figures that a plan states; nothing where there is none."""
    if plan is None:
        return {}
    found = {"minimum": plan.minimum, "predicted_peak": plan.predicted_peak}
    if plan.compiled is None:
        return found
    return found | {
        "regions": plan.compiled.regions,
        "distinct": plan.compiled.distinct,
        "region_ops": plan.compiled.ops,
        "compiling_seconds": plan.compiled.seconds,
    }


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:LONGEST_ERROR]


def measured(
    case: Case, size: str, percents: Sequence[float], sweep: Sequence[float], rounds: int
) -> Record:
    """The record of one model. Set the number of threads to 1 first."""
    began, load = time.perf_counter(), os.getloadavg()[0]
    with many_graphs():
        with empty_kernel_cache():
            warm_up()
        bench = Bench(case)
        eager = bench.look(Row(family=EAGER), case.model)
        if eager.peak is None:
            raise RuntimeError(f"plain PyTorch fails: {eager.error}")
        with empty_kernel_cache():
            bench.look(Row(family=COMPILED), lambda: through_inductor(case.model()))
            for budget in sweep:
                row = Row(family=SWEPT, setting=f"{budget:g}")
                bench.look(row, partial(_with_budget, case, budget))
            bench.look(Row(family=CHECKPOINTED), lambda: through_inductor(checkpointed(case)))
        with empty_kernel_cache():
            bench.ours(OURS, percents, eager.peak)
            bench.ours(OURS_EAGER, percents, eager.peak)
        rows = bench.timed(rounds)
    conditions = {
        **report.machine(),
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "minutes": round((time.perf_counter() - began) / 60, 1),
    }
    return Record(model=case.name, size=size, conditions=conditions, rows=rows)


def _with_budget(case: Case, budget: float) -> nn.Module:
    return through_inductor(case.model(), budget)


# The file.


def parse(text: str) -> list[Record]:
    """The records of a file's text, in the order of the models."""
    found = [
        Record(**{**fields, "rows": [Row(**row) for row in fields["rows"]]}) for fields in json.loads(text)
    ]
    return sorted(found, key=lambda record: models.ALL.index(record.model))


def add(path: Path, record: Record) -> None:
    """Put a record into a file, in place of an older one of the same model; all at once."""
    others = parse(path.read_text(encoding="utf-8")) if path.exists() else []
    records = [*(other for other in others if other.model != record.model), record]
    records.sort(key=lambda one: models.ALL.index(one.model))
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps([asdict(one) for one in records], indent=1) + "\n", encoding="utf-8")
    os.replace(fresh, path)


# The command.


def main() -> None:
    """Measure the models one by one, each in a process of its own."""
    arguments = _parse()
    if arguments.worker:
        torch.set_num_threads(1)
        case = models.get(arguments.models, arguments.size)
        percents, sweep = _numbers(arguments.budgets), _numbers(arguments.sweep)
        add(arguments.out, measured(case, arguments.size, percents, sweep, arguments.rounds))
        return
    failed = [name for name in _split(arguments.models) if not _in_a_process(name, arguments)]
    if failed:
        raise SystemExit(f"benchmarks.kernels: nothing new is on record of {', '.join(failed)}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default=MODELS, help=f"of {', '.join(models.ALL)}; default: {MODELS}")
    parser.add_argument("--size", choices=("full", "small"), default="full", help="small goes with --out")
    parser.add_argument("--budgets", default=BUDGETS, help="percent of eager PyTorch's measured peak")
    parser.add_argument("--sweep", default=SWEEP, help="points of torch's activation_memory_budget")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of which the least time counts")
    parser.add_argument("--out", type=Path, default=OUT, help="the record")
    parser.add_argument("--timeout", type=float, default=MOST_SECONDS, help="seconds of one model")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.size == "small" and arguments.out.resolve() == OUT:
        parser.error("--size small needs --out: the record is that of the full sizes")
    if unknown := sorted(set(_split(arguments.models)) - set(models.ALL)):
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(models.ALL)}")
    return arguments


def _split(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _numbers(text: str) -> list[float]:
    return [float(part) for part in _split(text)]


def _in_a_process(name: str, arguments: argparse.Namespace) -> bool:
    """Measures a model with empty caches; True where its record has been added."""
    _say(name)
    command = [
        *(sys.executable, "-m", "benchmarks.kernels", "--worker", "--models", name, "--size", arguments.size),
        *("--budgets", arguments.budgets, "--sweep", arguments.sweep, "--rounds", str(arguments.rounds)),
        *("--out", str(arguments.out.resolve())),
    ]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        caches = {"FXREMAT_CACHE": f"{folder}/costs", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/kernels"}
        for path in caches.values():
            os.mkdir(path)
        try:
            done = subprocess.run(
                command, cwd=ROOT, env={**os.environ, **caches}, timeout=arguments.timeout
            )
        except subprocess.TimeoutExpired:
            _say(f"  {name} took more than {arguments.timeout:g} s")
            return False
    return done.returncode == 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
