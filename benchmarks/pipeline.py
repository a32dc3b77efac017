"""Pipelines on paper: the figures of the thesis, chapter 7, how long planning takes, and the page docs/pipeline.md.

    python -m benchmarks.pipeline [speed | figures | programs | steps | page ...]     (default: all; about an hour)

Chains are those of benchmarks/papers/chains. `figures` goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterable
from itertools import pairwise, product
from math import exp, fsum, inf, log
from pathlib import Path
from typing import Any

from benchmarks import pipeline_steps, report
from benchmarks.papers import chains
from fxremat.errors import BudgetTooSmall
from fxremat.pipelining.profile import joined
from fxremat.solvers.pipeline.best_plan import plan_pipeline
from fxremat.solvers.pipeline.check import check
from fxremat.solvers.pipeline.contiguous import best_partition
from fxremat.solvers.pipeline.groups import scheduled
from fxremat.solvers.pipeline.madpipe import as_published, best_madpipe
from fxremat.solvers.pipeline.model import Layer, Layers, Machines, PipelinePlan, PlannedStage, Way
from fxremat.solvers.pipeline.of_chain import layers_of, ways_of
from fxremat.solvers.pipeline.period_bound import lower_bound
from fxremat.solvers.pipeline.stage_costs import Job
from fxremat.solvers.pipeline.tasks import planned
from fxremat.solvers.references.pipeline.ilp import least_pattern
from fxremat.solvers.references.pipeline.pipedream import best_of_targets, pipedream

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "pipeline.json"
PAGE = ROOT / "docs" / "pipeline.md"
NETWORKS = ("resnet50_1000x8", "resnet101_1000x8", "inception_v3_1000x8", "densenet121_1000x8")
DEVICES = (2, 4, 8)
MEMORIES = (3, 4, 6, 8, 10, 12, 16)  # GB
BANDWIDTHS = (12, 24)  # GB/s
COPIES = 3
EFFORT = 2.0
TIGHT = 10  # GB: below, PipeDream is wanted to be 20 % slower
MOST = {"contiguous": 10.0, "joint": 10.0, "madpipe": 60.0}  # seconds, 100 layers on 8 devices
LAYERS, ON = 100, 8
PROGRAMS = {"resnet34_224x32": (0.5, 1, 2), "resnet50_1000x8": (4, 8, 16)}  # GB
PIECES = (8,)
PROGRAM_SECONDS = 60.0  # for each of its two solves


def instances() -> Iterable[tuple[str, int, int, int]]:
    """Network, devices, GB, GB/s; the devices that matter most first."""
    return product(NETWORKS, DEVICES, MEMORIES, BANDWIDTHS)


def case(network: str, devices: int, memory: int, bandwidth: int) -> dict[str, Any]:
    """A row: seconds per micro-batch by each planner, None where nothing fits."""
    chain = chains.read(network)
    machines = Machines(devices=devices, memory=memory * 1e9, bandwidth=bandwidth * 1e9, copies=COPIES)
    job = Job(layers_of(chain), machines)
    row: dict[str, Any] = {"network": network, "devices": devices, "memory": memory, "bandwidth": bandwidth}
    row |= {"alone": job.seconds, "bound": lower_bound(job)}
    row["pipedream"], row["pipedream hopes"] = _pipedream(job)
    row["pipedream of many"] = _of_many(job)
    row["contiguous"] = _or_none(lambda: best_partition(job).period)
    published, hoped = as_published(job, low=min(row["bound"], job.seconds))
    row["madpipe"] = None
    if published is not None:
        row["madpipe"] = published.period
        check(
            planned(
                job, published.stages, published.starts, published.tick, skip=None, bound=0.0, by="madpipe"
            )
        )
    row["madpipe hopes"] = None if hoped == inf else hoped
    row["ours"] = _or_none(lambda: _checked(plan_pipeline(job.layers, machines, effort=EFFORT)))
    row["recomputing"] = _or_none(
        lambda: _checked(plan_pipeline(job.layers, machines, options=ways_of(chain), effort=0.0))
    )
    return row


def _pipedream(job: Job) -> tuple[float | None, float | None]:
    try:
        partition, believed = pipedream(job)
    except BudgetTooSmall:
        return None, None
    check(scheduled(job, partition.stages, partition.tick, skip=None, bound=0.0, by="pipedream"))
    return partition.period, believed


def _of_many(job: Job) -> float | None:
    partition = best_of_targets(job)
    return None if partition is None else partition.period


def _checked(plan: PipelinePlan) -> float:
    check(plan)
    return plan.period


def _or_none(period: Callable[[], float]) -> float | None:
    try:
        return period()
    except BudgetTooSmall:
        return None


def figures() -> None:
    """Add every row that is missing."""
    record = _record()
    rows: list[dict[str, Any]] = record.setdefault("rows", [])
    known = {tuple(row[name] for name in ("network", "devices", "memory", "bandwidth")) for row in rows}
    for instance in instances():
        if instance in known:
            continue
        start = time.perf_counter()
        rows.append(case(*instance))
        print(*instance, f"{time.perf_counter() - start:.1f} s", flush=True)
        _write({"rows": rows})
    _write({"figures conditions": report.machine()})


def programs() -> None:
    """Beside the integer program of chapter 6, on pieces of a chain and on all of its layers."""
    rows: list[dict[str, Any]] = []
    for network, memories in PROGRAMS.items():
        layers = layers_of(chains.read(network))
        for memory in memories:
            machines = Machines(devices=ON, memory=memory * 1e9, bandwidth=BANDWIDTHS[0] * 1e9, copies=COPIES)
            job = Job(layers, machines)
            row: dict[str, Any] = {"network": network, "memory": memory, "bound": lower_bound(job)}
            row["pipedream"], _ = _pipedream(job)
            row["pipedream of many"] = _of_many(job)
            published, _ = as_published(job, low=min(row["bound"], job.seconds))
            row["madpipe"] = None if published is None else published.period
            row["ours"] = _or_none(lambda: _checked(plan_pipeline(job.layers, job.machines, effort=EFFORT)))  # noqa: B023
            for count in (*PIECES, job.count):
                start = time.perf_counter()
                name = "layers" if count == job.count else f"{count} pieces"
                row[name] = _by_program(job, count)
                row[f"{name} seconds"] = time.perf_counter() - start
            rows.append(row)
            print(row, flush=True)
            _write({"programs": rows, "programs conditions": report.machine()})


def _by_program(job: Job, count: int) -> float | None:
    seconds = [layer.forward_time + layer.backward_time for layer in job.layers.layers]
    pieces = pairwise(joined(range(job.count + 1), seconds, count))
    stages = [
        PlannedStage(first=first, last=end - 1, device=0, way=job.keeping_all(first, end - 1))
        for first, end in pieces
    ]
    pattern = least_pattern(job, stages, free=True, seconds=PROGRAM_SECONDS)
    if pattern is None:
        return None
    return _checked(
        planned(job, pattern.stages, pattern.starts, pattern.tick, skip=None, bound=0.0, by="ilp")
    )


def steps() -> None:
    """Real steps of two processes, as predicted?"""
    found = []
    for row in pipeline_steps.rows():
        found.append(row)
        print(row, flush=True)
    _write({"steps": found, "steps conditions": report.machine()})


def uneven(layers: int) -> Layers:
    """Layers of random costs: activations shrink and weights grow along the chain, as in a convnet."""
    draw = random.Random(0)
    return Layers(
        input_bytes=1,
        input_grad_bytes=1,
        layers=tuple(
            Layer(
                forward_time=draw.random(),
                backward_time=2 * draw.random(),
                weight_bytes=draw.random() * (0.2 + place / layers),
                saved_bytes=10 * draw.random() * (1.5 - place / layers),
                output_bytes=2 * draw.random(),
                grad_bytes=2 * draw.random(),
            )
            for place in range(layers)
        ),
    )


def _ways(layers: Layers, job: Job) -> Callable[[int, int], list[Way]]:
    """Eight ways of a stage: parts of it are run again from its first layer's input."""

    def ways(first: int, last: int) -> list[Way]:
        keep = job.keeping_all(first, last)
        found = []
        for part in range(8):
            cut = first + (last - first) * part // 7
            again = job.keeping_all(first, cut)
            kept = keep.kept_bytes - (again.kept_bytes - layers.layers[first].saved_bytes if part else 0.0)
            backward = keep.backward_time + (again.forward_time if part else 0.0)
            found.append(
                Way(
                    forward_time=keep.forward_time,
                    backward_time=backward,
                    kept_bytes=max(0.0, kept),
                    peak_bytes=keep.peak_bytes,
                )
            )
        return found

    return ways


def speed() -> None:
    """Seconds of each planner on 100 layers and 8 devices, the worst of five memories; compiled before."""
    layers = uneven(LAYERS)
    weights = fsum(layer.weight_bytes for layer in layers.layers)
    found = dict.fromkeys(MOST, 0.0)
    periods: list[dict[str, Any]] = []
    for memory in (40, 80, 120, 200, 300):
        machines = Machines(devices=ON, memory=memory + COPIES * weights / ON, bandwidth=4.0, copies=COPIES)
        job = Job(layers, machines)
        joint = Job(layers, machines, _ways(layers, job))
        if not periods:  # compile
            for compiled in (job, joint):
                small = Job(
                    uneven(6), machines, compiled.options and _ways(uneven(6), Job(uneven(6), machines))
                )
                best_partition(small)
                best_madpipe(small, low=1e-3)
        row: dict[str, Any] = {"memory": memory}
        row["contiguous"] = _timed(found, "contiguous", lambda job=job: best_partition(job).period)  # type: ignore[misc]
        row["joint"] = _timed(found, "joint", lambda job=joint: best_partition(job).period)  # type: ignore[misc]
        below = row["contiguous"] or inf
        row["madpipe"] = _timed(found, "madpipe", lambda job=job, below=below: _period(job, below))  # type: ignore[misc]
        periods.append(row)
    for name, most in MOST.items():
        print(
            f"{name}: {found[name]:.1f} s, at most {most:g} s: {'held' if found[name] <= most else 'NOT HELD'}"
        )
    _write({"seconds": found, "periods": periods, "speed conditions": report.machine()})


def _period(job: Job, below: float) -> float:
    pattern = best_madpipe(job, low=lower_bound(job), below=below)
    return below if pattern is None else pattern.period


def _timed(found: dict[str, float], name: str, work: Callable[[], float]) -> float | None:
    start = time.process_time()
    period = _or_none(work)
    found[name] = max(found[name], time.process_time() - start)
    return None if period == inf else period


def _record() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def _write(part: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(_record() | part, indent=1) + "\n", encoding="utf-8")


HEAD = """# Pipelines: periods on paper, beside PipeDream and MadPipe

Written by `python -m benchmarks.pipeline` from benchmarks/results/pipeline.json. What chapter 7 of A. Shilova's thesis
simulates (Figures 7.4-7.9): images of 1000 x 1000 in batches of 8, P devices of M GB, links of 12 or 24 GB/s, three
copies of the weights. The chains are ours (sizes exact, times a roofline estimate for a V100, where the thesis
measured), so that curves can be compared, not numbers. Every plan below has passed the independent checker.

*PipeDream* is its partition, run by 1F1B*, the best schedule for it; what it believes it keeps is ours to guess: as
many micro-batches as there are stages to the end. *Of many*: the best that it gives for 30 memories that it may
believe in, as in chapter 6 of the thesis. *MadPipe* is the allocation that its dynamic program hopes most of,
with a pattern by modulo scheduling (the thesis: a mixed integer program). *Contiguous* is the exact optimum over
contiguous allocations, *ours* what `plan_pipeline` finds with an effort of {effort:g} s, both without recomputation;
*recomputing* is the exact contiguous optimum where stages may recompute; it also counts gradients and scratch within a
stage, which the model of the thesis leaves out, so that it may not fit where the others do. "-" where nothing fits.
"""


SPEEDUPS = """
## Speedup over one device without limit (Figure 7.9)

Geometric means, each over the cases in which that planner fits: where it fits in fewer, they are the easier ones.
"""


def page() -> str:
    """Its text."""
    record = _record()
    rows = record.get("rows", [])
    parts = [HEAD.format(effort=EFFORT)]
    if rows:
        parts += [_claims(rows), "## Geometric means by memory (Figure 7.8)\n", _means(rows)]
        parts += [SPEEDUPS, _speedups(rows)]
        parts += ["\n## Periods in milliseconds (Figures 7.4-7.7)\n", *map(_table(rows), NETWORKS)]
    if "programs" in record:
        parts += [_beside_programs(record)]
    if "steps" in record:
        parts += [_steps(record)]
    if "seconds" in record:
        times = ", ".join(
            f"{name} {value:.1f} s (at most {MOST[name]:g})" for name, value in record["seconds"].items()
        )
        conditions = record["speed conditions"]
        parts.append(
            f"\n## Planning time\n\n{LAYERS} layers on {ON} devices, processor time on one core, the worst of "
            f"{len(record['periods'])} memories: {times}. {conditions['cpu']}, {conditions['date']}.\n"
        )
    return "\n".join(parts)


PROGRAM_HEAD = """
## Beside the integer program (Figures 7.2 and 7.3)

Periods in milliseconds on {devices} devices, links of {bandwidth} GB/s. The integer program of chapter 6 decides
about everything at once; HiGHS has {seconds:g} s for the period and as many for the shifts (the thesis: CPLEX, an
hour). It is given the chain joined to 8 pieces of about equal time, and all of its layers.
"""


def _beside_programs(record: dict[str, Any]) -> str:
    names = (
        "bound",
        "pipedream",
        "pipedream of many",
        "madpipe",
        "ours",
        *(f"{n} pieces" for n in PIECES),
        "layers",
    )
    head = PROGRAM_HEAD.format(devices=ON, bandwidth=BANDWIDTHS[0], seconds=PROGRAM_SECONDS)
    lines = [head, f"| network | M, GB | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    for row in record["programs"]:
        cells = [_cell(row[name] and 1e3 * row[name], ".1f") for name in names]
        lines.append(f"| {row['network']} | {row['memory']:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


STEPS_HEAD = """
## Real steps

Processes of one machine ({cpu}, {date}) as devices, whose layers sleep for as long as they would compute; what they
keep, and what gloo copies between them, is real. *Even* has eight equal layers, *uneven* three that take 1 : 2 : 1 of
the time. Steps of {microbatches} micro-batches, the fastest of several. *Alone* is plain PyTorch in one process; the
share is what each device may take of what that one does.

| model | share | stages on devices | predicted, ms | measured, ms | measured / predicted | alone, ms | planning, s |
|---|---|---|---|---|---|---|---|
"""


def _steps(record: dict[str, Any]) -> str:
    conditions = record["steps conditions"]
    lines = []
    for row in record["steps"]:
        devices = ", ".join(map(str, row["devices"])) + (" (contiguous)" if row["contiguous_only"] else "")
        lines.append(
            f"| {row['name']} | {row['share']:.0%} | {devices} | {1e3 * row['predicted']:.0f} | "
            f"{1e3 * row['measured']:.0f} | {row['measured'] / row['predicted']:.2f} | {1e3 * row['alone']:.0f} | "
            f"{row['planning']:.0f} |"
        )
    head = STEPS_HEAD.format(
        cpu=conditions["cpu"], date=conditions["date"], microbatches=pipeline_steps.MICROBATCHES
    )
    return head + "\n".join(lines) + "\n"


def mean(ratios: Iterable[float]) -> float:
    """The geometric one."""
    logs = [log(ratio) for ratio in ratios]
    return exp(fsum(logs) / len(logs)) if logs else float("nan")


def _ratios(rows: Iterable[dict[str, Any]], over: str, under: str) -> list[float]:
    return [row[over] / row[under] for row in rows if row[over] and row[under]]


NAMES = ("pipedream", "pipedream of many", "madpipe", "contiguous", "ours", "recomputing")


def _claims(rows: list[dict[str, Any]]) -> str:
    tight = [row for row in rows if row["memory"] < TIGHT]
    slower = _ratios(tight, "pipedream", "ours")
    many = _ratios(tight, "pipedream of many", "ours")
    worse = [row for row in rows if row["madpipe"] and (row["ours"] or inf) > row["madpipe"] * (1 + 1e-6)]
    beyond = [row for row in rows if row["contiguous"] and row["ours"] > row["contiguous"] * (1 + 1e-6)]
    unfit = {
        name: sum(row[name] is None for row in rows)
        for name in ("pipedream", "madpipe", "contiguous", "ours")
    }
    faster = _ratios(tight, "ours", "recomputing")
    held = "held" if mean(slower) >= 1.2 else "**not held**"
    counts = ", ".join(f"{name} {count}" for name, count in unfit.items())
    lines = [
        f"* Below {TIGHT} GB PipeDream takes {mean(slower):.2f} times as long as ours, the geometric mean of the",
        f"  {len(slower)} cases where both fit (at worst {max(slower):.2f}); wanted: 1.20: {held}.",
        f"* Of many memories that PipeDream may believe in, its best takes {mean(many):.2f} times as long",
        f"  ({len(many)} cases, at worst {max(many):.2f}).",
        f"* Ours is slower than MadPipe in {len(worse)} of {len(rows)} cases, slower than the exact contiguous optimum",
        f"  in {len(beyond)}; wanted: none.",
        f"* Of {len(rows)} cases nothing fits for: {counts}.",
        f"* Below {TIGHT} GB ours takes {mean(faster):.2f} times as long as the plan that recomputes, where both fit.",
    ]
    return "\n".join(lines) + "\n"


def _means(rows: list[dict[str, Any]]) -> str:
    columns = (("pipedream", "madpipe"), *((name, "ours") for name in NAMES[:4]), ("ours", "bound"))
    lines = [f"| M, GB | {' | '.join(f'{over} / {under}' for over, under in columns)} |"]
    lines.append("|---" * (1 + len(columns)) + "|")
    for memory in MEMORIES:
        some = [row for row in rows if row["memory"] == memory]
        cells = [_cell(mean(_ratios(some, *pair)), ".2f") for pair in columns]
        lines.append(f"| {memory} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _speedups(rows: list[dict[str, Any]]) -> str:
    names = ("pipedream", "madpipe", "ours", "recomputing")
    lines = [f"| P | M, GB | {' | '.join(names)} |", "|---" * 6 + "|"]
    for devices, memory in product(DEVICES, MEMORIES):
        some = [row for row in rows if (row["devices"], row["memory"]) == (devices, memory)]
        cells = [_cell(mean(_ratios(some, "alone", name)), ".2f") for name in names]
        lines.append(f"| {devices} | {memory} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None or value != value else f"{value:{form}}"


def _table(rows: list[dict[str, Any]]) -> Callable[[str], str]:
    names = (
        "bound",
        "pipedream hopes",
        "pipedream",
        "madpipe hopes",
        "madpipe",
        "contiguous",
        "ours",
        "recomputing",
    )

    def table(network: str) -> str:
        lines = [f"<details><summary>{network}</summary>\n", f"| P | M | GB/s | {' | '.join(names)} |"]
        lines.append("|---" * (3 + len(names)) + "|")
        for row in rows:
            if row["network"] == network:
                cells = [_cell(row[name] and 1e3 * row[name], ".1f") for name in names]
                lines.append(
                    f"| {row['devices']} | {row['memory']} | {row['bandwidth']} | {' | '.join(cells)} |"
                )
        return "\n".join([*lines, "\n</details>\n"])

    return table


PARTS: dict[str, Callable[[], None]] = {
    "speed": speed,
    "figures": figures,
    "programs": programs,
    "steps": steps,
    "page": lambda: None,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    for name in parser.parse_args().parts or PARTS:
        PARTS[name]()
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
