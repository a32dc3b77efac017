"""Run what is checked on a pretended CUDA, in the environment that `tests.pretended_cuda.install` has made.

    python -m tests.pretended_cuda                  all of it: a table, and benchmarks/results/pretended_cuda.json
    python -m tests.pretended_cuda --parts races --programs 100
    python -m tests.pretended_cuda exec train.py    python train.py on the pretended device; `exec -m module` does too

Each job is a process of its own, with its own settings of the device; results come back as JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.pretended_cuda import report
from tests.pretended_cuda.install import ROOT, Environment

PARTS = ("memory", "races", "auto", "mutants", "dispatch", "tests")  # the longest first
KINDS = {  # of racing programs: their share
    "activations": 0.62,
    "activations on cuda:1": 0.14,
    "files": 0.12,
    "weights": 0.09,
    "weights on cuda:1": 0.03,
}
GROUPS = 6  # of models whose memory is looked at: `models.GROUPS`
REAL_GROUPS = range(5)  # those of real sizes
AT_ONCE = 100  # programs of a job
MOST_MODELS = 15  # that a mutant is looked for in
NO_WORKSPACE = {"CUDNN_WORKSPACE": 0}  # estimates know of none, and it would be most of what a small model needs
A100 = {"CUDA_MAJOR": 8, "CUDA_PROCESSORS": 108}
B200 = {"CUDA_MAJOR": 10, "CUDA_PROCESSORS": 148}
IN_BLOCKS = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
BUDGETS = ("100%", "80%", "60%", "least")
BUDGETS_IN_BLOCKS = ("100%", "least")
OPTIMIZERS = ("SGD", "AdamW")
SIZES = {  # bytes of a device: layers, width and length of what is trained there with mem="auto"
    360 * 10**6: (6, 256, 400),
    700 * 10**6: (6, 256, 780),
    1500 * 10**6: (8, 512, 830),
    6500 * 10**6: (12, 768, 1790),
    24000 * 10**6: (24, 1024, 2600),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of one process: a function of `DOES` and its arguments."""

    part: str  # of the record
    does: str
    arguments: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # of the device
    environment: dict[str, str] = field(default_factory=dict)  # further variables

    def __str__(self) -> str:
        return " ".join([self.does, *map(str, self.arguments.values()), *self.environment.values()])


# --- in a process with a pretended CUDA ---------------------------------------------------------------------


def run_programs(kind: str, first: int, count: int) -> dict[str, Any]:
    """Run so many programs of a kind, and return their tally."""
    from tests.pretended_cuda.programs import Tally

    total, seed = Tally(), first
    while total.programs < count and seed < first + count:
        for tally in _programs(kind, seed):
            total += tally
        seed += 1
    return {kind: asdict(total)}


def _programs(kind: str, seed: int) -> Iterator[Any]:
    import torch

    import fxremat
    from tests.pretended_cuda import programs

    what, _, where = kind.partition(" on ")
    device = torch.device(where or "cuda:0")
    if what == "weights":
        return programs.weights(seed, device)
    return programs.activations(seed, device, fxremat.FileTier() if what == "files" else True)


def find_mutants() -> list[dict[str, Any]]:
    """Plant each mutant, and run programs until one has a race."""
    from tests.pretended_cuda.mutants import MUTANTS

    rows = []
    for mutant in MUTANTS:
        with mutant.planted():
            programs, race = _first_race(mutant.programs)
        rows.append({"name": mutant.name, "found": race is not None, "programs": programs, "race": race})
    return rows


def _first_race(kind: str) -> tuple[int, str | None]:
    """Return how many programs were run, and the race in the last of them; None where none has one."""
    count = 0
    for seed in range(MOST_MODELS):
        for tally in _programs(kind, seed):
            count += tally.programs
            if tally.races:
                return count, tally.races[0]
    return count, None


def look_at_memory(group: int, budgets: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a group of models."""
    from tests.pretended_cuda.memory import rows
    from tests.pretended_cuda.models import GROUPS

    return [{**asdict(row), "over": row.over} for case in GROUPS[group] for row in rows(case, tuple(budgets))]


def train_within_what_is_free(optimizer: str, layers: int, width: int, length: int) -> list[dict[str, Any]]:
    """Train with mem="auto"."""
    from tests.pretended_cuda.auto import trained

    return [asdict(trained(optimizer, layers, width, length))]


def compare_attention(device: str) -> list[dict[str, Any]]:
    """Which kernels are chosen, and which are assumed."""
    from tests.pretended_cuda.dispatch import attention

    return [asdict(attention(device))]


def compare_graphs(device: str) -> list[dict[str, Any]]:
    """Which ops are captured, and which are assumed."""
    from tests.pretended_cuda.dispatch import graphs

    return [asdict(graph) for graph in graphs(device)]


def run_tests() -> dict[str, Any]:
    """Run tests/test_cuda.py without its numbers."""
    from tests.pretended_cuda.without_numbers import run

    return run()


DOES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(run_programs, find_mutants, look_at_memory, train_within_what_is_free),
        *(compare_attention, compare_graphs, run_tests),
    )
}


def do(job: Job, target: Path) -> None:
    """Do a job in this process, and write what it returns to a file."""
    import torch

    from tests.pretended_cuda.log import note_allocations, note_pools

    warnings.simplefilter("ignore")
    logging.getLogger("torch._dynamo.metrics_context").disabled = True  # torch 2.11 logs errors of its own
    torch.set_num_threads(1)
    if job.part in ("races", "mutants"):
        note_allocations()
    with note_pools():
        target.write_text(json.dumps(DOES[job.does](**job.arguments)))


# --- in the process that starts them ------------------------------------------------------------------------


def jobs(parts: Sequence[str], programs: int) -> Iterator[Job]:
    """The jobs of these parts, those that take long first."""
    for part in PARTS:
        if part in parts:
            yield from {"races": lambda: _races(programs)}.get(part, lambda part=part: _others(part))()


def _races(programs: int) -> Iterator[Job]:
    for place, (kind, share) in enumerate(KINDS.items()):
        left, first = round(share * programs), 100_000 * place
        settings = {"CUDA_DEVICES": 2 if kind.endswith("cuda:1") else 1}
        while left > 0:
            count = min(AT_ONCE, left)
            arguments = {"kind": kind, "first": first, "count": count}
            yield Job(part="races", does="run_programs", arguments=arguments, settings=settings)
            left, first = left - count, first + 1000


def _others(part: str) -> Iterator[Job]:
    match part:
        case "memory":
            for group in range(GROUPS):
                yield _memory(group, BUDGETS, {})
            for group in REAL_GROUPS:
                yield _memory(group, BUDGETS_IN_BLOCKS, IN_BLOCKS)
        case "auto":
            for size, (layers, width, length) in SIZES.items():
                for optimizer in OPTIMIZERS:
                    yield Job(
                        part=part,
                        does="train_within_what_is_free",
                        arguments={"optimizer": optimizer, "layers": layers, "width": width, "length": length},
                        settings={"CUDA_DRY": 1, "CUDA_BYTES": size},
                    )
        case "mutants":
            yield Job(part=part, does="find_mutants")
        case "dispatch":
            yield Job(part="graphs", does="compare_graphs", arguments={"device": "H100"}, settings=NO_WORKSPACE)
            yield Job(part="attention", does="compare_attention", arguments={"device": "A100"}, settings=A100)
            yield Job(part="attention", does="compare_attention", arguments={"device": "H100"})
            yield Job(part="attention", does="compare_attention", arguments={"device": "B200"}, settings=B200)
        case "tests":
            yield Job(part=part, does="run_tests", settings={**NO_WORKSPACE, "CUDA_DEVICES": 2})


def _memory(group: int, budgets: Sequence[str], environment: dict[str, str]) -> Job:
    return Job(
        part="memory",
        does="look_at_memory",
        arguments={"group": group, "budgets": budgets},
        settings={"CUDA_DRY": 1},
        environment=environment,
    )


def outcome(job: Job, environment: Environment, folder: Path) -> Any:
    """Return what a job returns, from a process of its own; where it fails, None, and its last lines are printed."""
    target = Path(tempfile.mkstemp(suffix=".json", dir=folder)[1])
    variables = environment.variables(**job.settings) | job.environment | {"FXREMAT_CACHE": str(folder / "costs")}
    began = time.perf_counter()
    command = [sys.executable, "-m", "tests.pretended_cuda", "job", json.dumps(asdict(job)), str(target)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    print(f"{job}: {time.perf_counter() - began:.0f} s", flush=True)
    if done.returncode:
        print(f"{job} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}", flush=True)
        return None
    return json.loads(target.read_text())


def joined(results: list[tuple[Job, Any]]) -> dict[str, Any]:
    """The record of all jobs: lists one after the other, tallies of a kind of programs summed up."""
    record: dict[str, Any] = {}
    for job, result in results:
        if isinstance(result, list):
            record.setdefault(job.part, []).extend(result)
        elif job.part == "races":
            tallies = record.setdefault("races", {})
            for kind, tally in result.items():
                tallies[kind] = _sum(tallies.get(kind), tally)
        else:
            record[job.part] = result
    return record


def _sum(one: dict[str, Any] | None, other: dict[str, Any]) -> dict[str, Any]:
    return other if one is None else {key: one[key] + value for key, value in other.items()}


def run_all(parts: Sequence[str], programs: int, at_once: int, environment: Environment) -> dict[str, Any]:
    """Build the libraries, run the jobs, and return their record."""
    environment.build()
    todo = list(jobs(parts, programs))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as pool:
        results = list(pool.map(lambda job: outcome(job, environment, Path(folder)), todo))
    conditions = {"date": datetime.date.today().isoformat(), "python": platform.python_version()}
    pairs = list(zip(todo, results, strict=True))
    lost = [str(job) for job, result in pairs if result is None]
    return {**conditions, "lost": lost, **joined([pair for pair in pairs if pair[1] is not None])}


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says; returns 1 where a promise is not held."""
    environment = Environment(Path(sys.prefix))
    match list(arguments):
        case ["job", job, target]:
            do(Job(**json.loads(job)), Path(target))
            return 0
        case ["exec", *rest]:
            os.execve(sys.executable, [sys.executable, *rest], environment.variables())
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--programs", type=int, default=1000, help="in which races are looked for")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--out", type=Path, default=report.RECORD)
    given = parser.parse_args(arguments)
    results = run_all(given.parts.split(","), given.programs, given.jobs, environment)
    report.write(results, environment.release, given.out)
    print(report.table(results))
    return 0 if all(claim.held for claim in report.claims(results)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
