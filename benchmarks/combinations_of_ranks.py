"""Ways of sharing a model among processes with each feature of fxremat, trained beside the same without fxremat.

    python -m benchmarks.combinations_of_ranks                     writes benchmarks/results/combinations_of_ranks.json
    python -m benchmarks.combinations_of_ranks sharded+offload     trains this cell alone; other records stay
    python -m benchmarks.readme                                    puts the table into docs/combinations.md

Two processes of one thread each train the GPT of `benchmarks.combinations` for its few steps; the outcomes are those
of that table, of the process where they are worse. The collectives run over gloo, in threads whose memory is not
counted (benchmarks/throttle.py). A cell that has not ended after `LIMIT` seconds is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fxremat
from tests.ranks import Outcome, run_ranks

from . import combinations, throttle
from .combinations import GPT, INEXACT, TOLERANCE, Cell, line_of, local, loss_of, off_by

OUT = combinations.ROOT / "benchmarks" / "results" / "combinations_of_ranks.json"
RANKS = 2
LIMIT = 240.0  # seconds
WAYS: Mapping[str, str] = {
    "sharded": "`torch.distributed.fsdp.fully_shard` on each block and on the model",
    "replicated": "`fxremat.fully_shard(model, replicate=True)`, beside DistributedDataParallel",
    "around": "DistributedDataParallel around the compiled model",
    "tensor": "`parallelize_module` of embedding, MLPs and head",
}
FEATURES: Mapping[str, str] = {
    "alone": "without a further feature",
    **{name: combinations.FEATURES[name] for name in ("dynamic", "inductor", "offload", "hosted", "slices")},
    "clipping": combinations.FEATURES["clipping"],
    "accumulation": "gradients of two batches are reduced one by one, and added up",
    "no_sync": "gradients of two batches are added up, and the sum is reduced",
    "pipeline": "`fxremat.pipeline` of two stages",
}
# DistributedDataParallel reduces the first batch's averaged gradient once more with the second's
ROUNDED = {(way, feature) for way in WAYS for feature in INEXACT} | {("replicated", "accumulation")}
MICROBATCHES = 2
WORSE = ("bits", "rounding", "refused", "wrong", "broken")


def in_blocks(model: GPT, mesh: DeviceMesh) -> GPT:
    """Shard each block, and the rest."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def in_parallel(model: GPT, mesh: DeviceMesh) -> GPT:
    """Cut the embedding by its words, MLPs by their inner features, and the head by its outputs."""
    parts: dict[str, Any] = {"words": RowwiseParallel(input_layouts=Replicate())}
    parts["head"] = ColwiseParallel(output_layouts=Replicate())
    for number in range(len(model.blocks)):
        parts |= {f"blocks.{number}.mlp.0": ColwiseParallel(), f"blocks.{number}.mlp.2": RowwiseParallel()}
    parallelize_module(model, mesh, parts)
    return model


def seeded(features: Sequence[str]) -> GPT:
    """Return a model that is the same on every rank and in every call."""
    torch.manual_seed(0)
    return GPT(features)


def models(way: str, features: Sequence[str], mesh: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    """Return the model that is trained without fxremat, and the one to be compiled."""
    plain, ours = seeded(features), seeded(features)
    if way == "sharded":
        return in_blocks(plain, mesh), in_blocks(ours, mesh)
    if way == "tensor":
        return in_parallel(plain, mesh), in_parallel(ours, mesh)
    parallel = DistributedDataParallel(plain, process_group=mesh.get_group())
    return parallel, ours if way == "around" else fxremat.fully_shard(ours, mesh, replicate=True)


def cell_of_rank(rank: int, world: int, way: str, feature: str) -> Cell:
    """Train one cell, or several features joined by "+", as one of its processes."""
    os.environ["FXREMAT_CACHE"] = tempfile.mkdtemp(prefix="fxremat-")
    throttle.register()
    throttle.set_link(bytes_per_second=1e12)
    mesh = DeviceMesh.from_group(dist.new_group(list(range(world)), backend="throttled"), "cpu")
    features = {"alone": (), "pipeline": ("outside",)}.get(feature, tuple(feature.split("+")))
    models_of = models(way, features, mesh)

    def around(compiled: nn.Module) -> nn.Module:
        return DistributedDataParallel(compiled, process_group=mesh.get_group()) if way == "around" else compiled

    if feature == "pipeline":
        for module in (part for model in models_of for part in model.modules()):
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # each stage draws from the generator of its rank
        cell = pipelined(models_of[0], around(models_of[1]))
    else:
        cell = combinations.compared(features, *models_of, 1 if way == "tensor" else 1 + rank, around)
    if cell.outcome == "wrong" and (way, feature) in ROUNDED and cell.off <= TOLERANCE[False] and (cell.peak or 0) <= 1:
        cell = replace(cell, outcome="rounding")
    return replace(cell, features=(way, feature))


def pipelined(plain: nn.Module, ours: nn.Module) -> Cell:
    """Train a pipeline of a stage on each rank on parameters that the ranks share; all ranks have the same batches."""
    given = combinations.batches(())
    start = {name: local(parameter).clone() for name, parameter in ours.named_parameters()}
    try:
        pipe = fxremat.pipeline(
            ours,
            given[0],
            mem="64MiB",
            devices=RANKS,
            microbatches=MICROBATCHES,
            loss_fn=loss_of,
            example_target=given[0],
            effort=0.0,
        )
        mine = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        for tokens in given:
            mine.zero_grad()
            pipe.step(tokens, tokens)
            mine.step()
    except fxremat.FxrematError as error:
        return Cell((), "refused", why=line_of(error))
    except Exception as error:
        return Cell((), "broken", why=line_of(error))
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for tokens in given:
        theirs.zero_grad()
        for part in tokens.chunk(MICROBATCHES):
            (loss_of(plain(part), part) / MICROBATCHES).backward()
        theirs.step()
    trained_by = {name.removeprefix("module."): local(parameter) for name, parameter in plain.named_parameters()}
    off = max(off_by(local(mine), trained_by[name], start[name]) for name, mine in pipe.named_parameters())
    return Cell((), "bits" if off == 0 else "rounding" if off <= TOLERANCE[False] else "wrong", off)


def trained(way: str, feature: str) -> Cell:
    """Train one cell in processes of its own."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ended = run_ranks(cell_of_rank, RANKS, Path(folder), way, feature, limit=LIMIT, errors=True)
    return replace(worst([_cell(way, feature, one) for one in ended]), seconds=time.monotonic() - began)


def _cell(way: str, feature: str, ended: Outcome) -> Cell:
    if isinstance(ended.value, Cell):
        return ended.value
    return Cell((way, feature), "broken", why=next(iter(reversed(ended.error.strip().splitlines())), "no result"))


def worst(cells: Sequence[Cell]) -> Cell:
    """Return the worst of the cells of all ranks, with the largest difference and peak of any.

    Ranks of which some are refused and others train have not been refused together: that is broken.
    """
    found = max(cells, key=lambda cell: WORSE.index(cell.outcome))
    peaks = [cell.peak for cell in cells if cell.peak is not None]
    found = replace(found, off=max(cell.off for cell in cells), peak=max(peaks, default=None))
    if {cell.outcome == "refused" for cell in cells} == {True, False} and found.outcome == "refused":
        return replace(found, outcome="broken", why=f"refused on some ranks alone: {found.why}")
    return found


def every() -> Iterator[tuple[str, str]]:
    """Yield each way with each feature."""
    for way in WAYS:
        for feature in FEATURES:
            yield way, feature


def page(record: str) -> str:
    """Return the table of a record as Markdown, with the reasons of what is refused below it."""
    found = json.loads(record)
    cells = {tuple(cell["features"]): cell for cell in found["cells"]}
    lines = [f"| | {' | '.join(FEATURES)} |", "|---" * (len(FEATURES) + 1) + "|"]
    for way in WAYS:
        lines.append(f"| **{way}** | {' | '.join(combinations.shown(cells.get((way, name))) for name in FEATURES)} |")
    lines += ["", combinations.summary(found), ""]
    lines += [f"* **{name}**: {what}." for name, what in WAYS.items()]
    lines += [f"* **{name}**: {what}." for name, what in FEATURES.items()]
    return "\n".join([*lines, *combinations.reasons(found)])


def main() -> None:
    """Train the cells of the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cell", nargs="*", help=f"one of {', '.join(WAYS)} and one of {', '.join(FEATURES)}, with +")
    given = [tuple(text.split("+")) for text in parser.parse_args().cell]
    if unknown := sorted("+".join(names) for names in set(given) - set(every())):
        parser.error(f"no cell {', '.join(unknown)}; there are {', '.join('+'.join(names) for names in every())}")
    cells = []
    for way, feature in given or every():
        cells.append(cell := trained(way, feature))
        combinations.tell(cell)
    combinations.write(OUT, cells, every(), kept=bool(given))


if __name__ == "__main__":
    from benchmarks import combinations_of_ranks  # whose functions other processes find by their module

    combinations_of_ranks.main()
