"""Regions run in parts, beside plain PyTorch, plans of whole ops, and heads chunked by other means.

    python -m benchmarks.slices [model ...] [--only WAY ...]     writes benchmarks/results/slices.json, prints a table

For each model, on the CPU with one thread:

    plain                       PyTorch
    fxremat, all kept           a plan of whole ops in the memory that keeping everything takes
    fxremat, least              ... in the least memory there is a plan for
    slices 60%, 40%, 25%        plans with slices=True, in percent of plain PyTorch's measured peak
    slices, least               ... in the least memory there is a plan for
    by hand 4, Inductor, ...    for language models, the ways of benchmarks/heads.py
    slices for by hand 4, ...   plans with slices=True in the memory that this way was measured to take

For models in bfloat16 the ways are fewer, and slices are measured with sums in both precisions (reduce="fp32", "same").

Every row comes from a process of its own, with an empty cache of costs, in which steps of the way and of plain PyTorch
take turns; its seconds are the least of several. Peaks are what the allocator gave out above the start of a step.
Rows of models and ways that are not asked for stay as they are on record.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxremat
from benchmarks import heads, meter, report
from benchmarks.models.case import Case
from benchmarks.models.grouped import GROUPED
from benchmarks.models.words import LANGUAGE, WIDE, LanguageModel
from fxremat.settings import Search, Slices

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "slices.json"
MODELS: dict[str, Case] = {**LANGUAGE, WIDE.name: WIDE, **GROUPED}
PERCENTS = (60, 40, 25)
HALF_WAYS = ("by hand 4", "by hand 16", "linear_cross_entropy")  # beside slices in bfloat16
REDUCE = ("fp32", "same")
STEPS = 7
MOST_SECONDS = 900.0  # of one row
LONGEST_ERROR = 160  # characters
PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train a model: plain, of benchmarks/heads.py, or a plan of fxremat in a budget."""

    name: str
    mem: int | str | None = None  # None: not fxremat
    slices: bool = False
    reduce: str | None = None  # None: as fxremat chooses

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `fxremat.compile` beside the model."""
        options: dict[str, Any] = {"mem": self.mem, "search": Search(progress=False)}
        if self.slices:
            dtype = torch.float32 if self.reduce == "fp32" else self.reduce
            options |= {"slices": Slices(reduce_dtype=dtype)}
        return options


@dataclass(frozen=True, kw_only=True)
class Row:
    """Measurements of one way; `error` says why where there are none."""

    model: str
    way: str
    date: str
    peak: int | None = None
    seconds: float | None = None  # of the processor, of a step
    plain_seconds: float | None = None  # of plain PyTorch, by turns with the above
    loss_ulps: float | None = None  # from plain's loss, in units of its last place in fp32
    worst_error: float | None = None  # of the gradients: norm of the difference over that of plain's
    worst_weight: str | None = None  # where that is
    equal_gradients: int | None = None  # bit for bit
    gradients: int | None = None
    true_error: float | None = None  # of matrices, from the same weights in fp32; for half precision
    true_head_error: float | None = None  # of the head's weight alone
    budget: int | None = None  # bytes; of a plan, as what follows
    minimum: int | None = None  # the least budget
    predicted_peak: int | None = None
    keep_all_peak: int | None = None  # predicted
    predicted_slowdown: float | None = None  # over keeping everything without slices
    planning_seconds: float | None = None  # of the processor, with no cost known
    regions: tuple[dict[str, Any], ...] = ()  # parts, rows, inside, where, sums of each
    error: str | None = None

    @property
    def slowdown(self) -> float:
        assert self.seconds is not None
        assert self.plain_seconds is not None
        return self.seconds / self.plain_seconds

    def __str__(self) -> str:
        start = f"{self.model:14s} {self.way:34s}"
        if self.error is not None or self.peak is None:
            return f"{start} {(self.error or 'not measured').splitlines()[0][:100]}"
        columns = [f"{self.peak / 1e6:7.1f} MB {self.slowdown:6.3f}x"]
        columns += [f"worst error {self.worst_error:.1e} {self.equal_gradients}/{self.gradients} equal"]
        if self.predicted_peak is not None:
            columns += [
                f"predicted {self.predicted_peak / 1e6:7.1f} MB, {self.planning_seconds:.1f} s planning"
            ]
        parts = ", ".join(str(region["parts"]) for region in self.regions)
        return "  ".join((start, *columns, f"parts {parts}" if parts else ""))


# One row, in a process of its own.


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Loss and gradients of one step."""

    loss: Tensor
    gradients: dict[str, Tensor]


def measured(name: str, way: Way) -> Row:
    """The row of a way. Nothing is known of costs where FXREMAT_CACHE is empty."""
    torch.set_num_threads(1)
    row: dict[str, Any] = {"model": name, "way": way.name, "date": report.machine()["date"]}
    case = MODELS[name]
    try:
        call, more = built(case, way)
        row |= more
        got = outcome(call, case.batch())
        heads.check_chunked(way.name)
    except fxremat.BudgetTooSmall as error:
        return Row(**row, error=_first_line(error), budget=_bytes(way.mem), minimum=error.minimum)
    except Exception as error:
        return Row(**row, error=_first_line(error))
    plain = case.model()
    row |= compared(got, outcome(plain, case.batch()))
    if name.endswith("_bf16"):
        row |= against_truth(got, case)
    batch = case.batch()
    row["peak"] = meter.model_peak(call, batch)
    steps = [meter.step_from_none(model, batch) for model in (plain, call)]
    row["plain_seconds"], row["seconds"] = meter.step_times(steps, repeats=STEPS)
    return Row(**row)


def _first_line(error: Exception) -> str:
    """Not all of it: some list every option there is."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:LONGEST_ERROR]


def _bytes(mem: int | str | None) -> int | None:
    return mem if isinstance(mem, int) else None


def built(case: Case, way: Way) -> tuple[nn.Module, dict[str, Any]]:
    """The model to call, and the figures of its plan."""
    model = case.model()
    if way.mem is not None:
        return planned(model, case.batch(), way)
    if way.name == PLAIN:
        return model, {}
    assert isinstance(model, LanguageModel)
    return heads.WAYS[way.name](model), {}


def planned(model: nn.Module, batch: tuple[Tensor, ...], way: Way) -> tuple[nn.Module, dict[str, Any]]:
    start = time.process_time()
    compiled = fxremat.compile(model, example_inputs=batch, **way.options)
    seconds = time.process_time() - start
    plan = compiled.plan
    assert plan is not None
    return compiled, {
        "budget": plan.budget,
        "minimum": plan.minimum,
        "predicted_peak": plan.predicted_peak,
        "keep_all_peak": plan.keep_all_peak,
        "predicted_slowdown": plan.predicted_time / plan.keep_all_time,
        "planning_seconds": seconds,
        "regions": tuple(_region(region) for region in getattr(plan, "slices", ())),
    }


def _region(region: Any) -> dict[str, Any]:
    return {name: getattr(region, name) for name in ("parts", "rows", "inside", "where", "sums")}


def outcome(model: nn.Module, batch: tuple[Tensor, ...]) -> Outcome:
    """Return the loss and gradients of a step that begins without gradients; they are None again afterwards."""
    model.zero_grad(set_to_none=True)
    loss = meter.training_step(model, batch)()
    assert isinstance(loss, Tensor)
    found = {
        name.removeprefix("_orig_mod."): weight.grad.clone()  # Inductor's wrapper has the model inside
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return Outcome(loss=loss.float(), gradients=found)


def compared(got: Outcome, plain: Outcome) -> dict[str, Any]:
    """The differences of a step's numbers from those of plain PyTorch."""
    ulp = torch.nextafter(plain.loss, torch.tensor(torch.inf)) - plain.loss
    errors = relative_errors(got, plain)
    worst = max(errors, key=lambda name: errors[name])
    return {
        "loss_ulps": ((got.loss - plain.loss).abs() / ulp).item(),
        "worst_error": errors[worst],
        "worst_weight": worst if errors[worst] else None,
        "equal_gradients": sum(torch.equal(got.gradients[name], plain.gradients[name]) for name in errors),
        "gradients": len(errors),
    }


def relative_errors(got: Outcome, plain: Outcome) -> dict[str, float]:
    """The relative error of each gradient, in norm."""
    if got.gradients.keys() != plain.gradients.keys():
        raise RuntimeError(f"other gradients: {sorted(got.gradients.keys() ^ plain.gradients.keys())}")
    return {name: relative_error(got.gradients[name], wanted) for name, wanted in plain.gradients.items()}


def relative_error(got: Tensor, wanted: Tensor) -> float:
    norm = wanted.double().norm()
    difference = (got.double() - wanted.double()).norm()
    return (difference / norm).item() if norm else float(difference)


def against_truth(got: Outcome, case: Case) -> dict[str, Any]:
    """The relative errors of gradients against those of the same weights in fp32.

    Of matrices alone: gradients of norms are sums that nearly cancel, and far off in half precision in any way.
    """
    errors = relative_errors(got, outcome(case.model().float(), case.batch()))
    matrices = [error for name, error in errors.items() if got.gradients[name].dim() > 1]
    return {"true_error": max(matrices), "true_head_error": errors["head.weight"]}


# All rows of a model, one after the other, since budgets come of what was measured before.


class Record:
    """The rows on record; `row` measures one if it is asked for, and writes all of them."""

    def __init__(self, path: Path, only: Sequence[str]) -> None:
        self._path, self._only = path, only
        found = json.loads(path.read_text())["rows"] if path.exists() else []
        self.rows = {(row["model"], row["way"]): Row(**row) for row in found}

    def row(self, model: str, way: Way) -> Row | None:
        """The measured row, or the one on record where this way is not asked for."""
        if self.wants(way.name):
            self.keep(in_a_process(model, way))
        return self.rows.get((model, way.name))

    def keep(self, row: Row) -> None:
        print(row, flush=True)
        self.rows[row.model, row.way] = row
        rows = sorted(self.rows.values(), key=lambda row: list(MODELS).index(row.model))
        conditions = {**report.machine(), "threads": 1, "steps": STEPS}
        record = {"conditions": conditions, "rows": [asdict(row) for row in rows]}
        self._path.write_text(json.dumps(record, indent=1) + "\n")

    def wants(self, way: str) -> bool:
        return not self._only or way.startswith(tuple(self._only))


def in_a_process(model: str, way: Way) -> Row:
    """The row of a process that knows no costs and has measured nothing before."""
    with tempfile.TemporaryDirectory() as costs:
        command = [sys.executable, "-m", "benchmarks.slices", "--worker", model, json.dumps(asdict(way))]
        environment = {**os.environ, "FXREMAT_CACHE": costs, "TORCHINDUCTOR_CACHE_DIR": f"{costs}/kernels"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=MOST_SECONDS
            )
        except subprocess.TimeoutExpired:
            return failed(model, way, f"took more than {MOST_SECONDS:.0f} s")
    if done.returncode:
        return failed(model, way, (done.stderr.strip() or f"ended with {done.returncode}").splitlines()[-1])
    fields = json.loads(done.stdout.splitlines()[-1])
    return Row(**fields)


def failed(model: str, way: Way, why: str) -> Row:
    return Row(model=model, way=way.name, date=report.machine()["date"], error=why)


def measure(model: str, record: Record) -> None:
    """Every row of a model that is asked for."""
    half = model.endswith("_bf16")
    plain = record.row(model, Way(name=PLAIN))
    if plain is None or plain.peak is None:
        raise SystemExit(f"the plain row of {model} has to be measured first")
    record.row(model, Way(name="fxremat, all kept", mem="100%"))
    least(model, record, Way(name="fxremat, least"))
    for reduce in REDUCE if half else (None,):
        more: dict[str, Any] = {"slices": True, "reduce": reduce}
        end = "" if reduce is None else f", sums {reduce}"
        for percent in PERCENTS:
            name, mem = f"slices {percent}%{end}", plain.peak * percent // 100
            record.row(model, Way(name=name, mem=mem, **more))
        least(model, record, Way(name=f"slices, least{end}", **more))
    if model in LANGUAGE:
        for way in HALF_WAYS if half else heads.WAYS:
            beside(model, record, way, slices=not half)


def least(model: str, record: Record, way: Way) -> None:
    """The row of a plan in the least memory, which a budget of one byte is told."""
    if not record.wants(way.name):
        return
    options = {**asdict(way), "mem": 1}
    refused = in_a_process(model, Way(**options))
    if refused.minimum is None:
        record.keep(refused)
    else:
        record.row(model, Way(**{**options, "mem": refused.minimum}))


def beside(model: str, record: Record, way: str, *, slices: bool) -> None:
    """The row of another way, and with `slices` that of a plan in the memory that it takes."""
    found = record.row(model, Way(name=way))
    if slices and found is not None and found.peak is not None:
        record.row(model, Way(name=f"slices for {way}", mem=found.peak, slices=True))


def main(wanted: Sequence[str] | None = None) -> None:
    """Measure the models, and keep and print the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--only", nargs="+", default=(), metavar="WAY", help="ways whose names begin so")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(wanted)
    if arguments.worker:
        name, way = arguments.worker
        print(json.dumps(asdict(measured(name, Way(**json.loads(way))))))
        return
    if unknown := sorted(set(arguments.model) - set(MODELS)):
        raise SystemExit(f"no model {', '.join(unknown)}; known: {', '.join(MODELS)}")
    record = Record(RESULT, arguments.only)
    for model in arguments.model:
        measure(model, record)


if __name__ == "__main__":
    main()
