"""Bytes that Inductor's kernels read and write in a training step: whole graphs of fxremat beside torch.compile.

    python -m benchmarks.traffic             counts, and writes benchmarks/results/traffic.json
    python -m benchmarks.traffic gpt unet    only these models
    python -m benchmarks.readme              puts the table into docs/kernels.md

On a GPU, ops that are no matrix products take as long as their reads and writes. Inductor counts these for each graph
that it compiles (`GraphLowering.count_bytes`), from the graph alone, so that neither the machine nor its load matters:

    torch.compile        its own forward and backward
    torch's partition    fxremat's forward and backward of `fusion.torch_partition`, the first that `whole_graphs` tries
    least traffic        those of `fusion.min_cut`, which cuts between captured ops
    keep all             those that recompute nothing
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import fx
from torch._inductor import compile_fx, config, metrics

from fxremat.cost.devices import Device
from fxremat.cost.estimate import estimate
from fxremat.fusion.joint import fused_program
from fxremat.fusion.min_cut import least_traffic
from fxremat.fusion.torch_partition import TorchPartition
from fxremat.fusion.units import Units, by_phase
from fxremat.graphs.captured import captured_of, read_joint
from fxremat.graphs.region import Kernels, compile_all, forget_kernels, regions_of
from fxremat.ops.decompositions import DECOMPOSITIONS
from fxremat.passes.pipelines import PIPELINES, normalize
from fxremat.search.survey import survey
from fxremat.step.program import Program

from . import models, report
from .capture import joint_graph
from .models.case import Autocast, Case

NAMES = ("gpt", "encoder_decoder", "mixer", "resnet", "unet", "deep_chain")
WAYS = ("torch's partition", "least traffic", "keep all")
RESULT = Path(__file__).parent / "results" / "traffic.json"
KERNELS = Kernels(settings={}, decompositions=DECOMPOSITIONS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Count for each model, and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", default=list(NAMES))
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args(arguments)
    rows = {}
    for name in asked.models:
        rows[name] = counted(models.get(name))
        print(name, {way: f"{size / 1e6:.0f} MB" for way, size in rows[name].items()}, flush=True)
    asked.out.write_text(json.dumps({"conditions": report.machine(), "rows": rows}, indent=1) + "\n")


def counted(case: Case) -> dict[str, int]:
    """Return the bytes that each way reads and writes, under autocast to bfloat16."""
    batch = case.batch()
    stock = torch.compile(Autocast(case.model()), dynamic=False)
    found = {"torch.compile": moved(lambda: stock(*batch).backward())}
    module, outputs = joint_graph(Autocast(case.model()), *batch)
    graph = read_joint(normalize(module, PIPELINES["inductor from seeds"]), outputs)
    keep_all = survey(graph, estimate(graph, Device.named("cpu")), effort=0.0).keep_all
    order = least_traffic(graph, keep_all.order()).program()
    found["least traffic"] = moved(lambda: compile_phases(order, by_phase(order)))
    straight = keep_all.program()
    found["keep all"] = moved(lambda: compile_phases(straight, by_phase(straight)))
    phases = TorchPartition(graph, keep_all.order()).phases()
    assert phases is not None, "not a forward and a backward"
    found["torch's partition"] = moved(lambda: compile_phases(phases.order.program(), phases.units, phases.emitted))
    return found


def compile_phases(program: Program, units: Units, emitted: fx.GraphModule | None = None) -> None:
    """Compile the forward and the backward of a program as a region each."""
    forget_kernels()
    fused = fused_program(program, units, KERNELS, emitted)
    for region in compile_all(regions_of(captured_of(fused.layout.graph).module.graph)):
        if region.given_up:
            raise SystemExit(region.given_up)


def moved(compiling: Callable[[], object]) -> int:
    """Return the bytes that the graphs which a function compiles read and write, as Inductor counts them."""
    metrics.reset()
    with _counting(), config.patch(force_disable_caches=True):
        torch._dynamo.reset()
        compiling()
    return int(metrics.num_bytes_accessed)


@contextmanager
def _counting() -> Iterator[None]:
    """Let Inductor count, which it does where its log of metrics is on; what it logs goes nowhere."""
    log = compile_fx.inductor_metrics_log
    level, propagate = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.setLevel(level)
        log.propagate = propagate


def table(record: str) -> str:
    """A row a model: megabytes by torch.compile, and the ratio of each of fxremat's ways to it."""
    found = json.loads(record)
    lines = [f"| model | torch.compile | {' | '.join(WAYS)} |", "|---|---|---|---|---|"]
    for name, row in found["rows"].items():
        stock = row["torch.compile"]
        ratios = [f"{row[way] / stock:.3f}x" for way in WAYS]
        lines.append(f"| {name} | {stock / 1e6:.0f} MB | {' | '.join(ratios)} |")
    about = found["conditions"]
    return "\n".join([*lines, "", f"torch {about['torch']}, counted on {about['date']}."])


if __name__ == "__main__":
    main()
