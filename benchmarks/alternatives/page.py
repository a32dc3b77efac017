"""docs/alternatives.md: the verdict, who wins at every budget, and every point; docs/alternatives.svg beside it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ..policy_table import policy_table
from ..readme import RESULTS as FOLDER
from ..readme import ROOT
from . import picture
from .rows import Measured, Ours, Point, Record
from .strategies import FAMILIES
from .verdict import Cell, cells, claims, least_alternative, least_ours

RESULTS = FOLDER / "alternatives.json"
PAGE = ROOT / "docs" / "alternatives.md"

INTRODUCTION = """# fxremat beside the alternatives

Nine models are trained for one step in less memory by every means there is: checkpoints placed by hand, torch's own
`activation_memory_budget`, and fxremat. All of a model's points run in one process with one thread, on the same
kernels, and the timed ones take turns. Written by `python -m benchmarks.alternatives` from what it measured.

* *peak*: bytes the allocator handed out during forward and backward, above those at the start, every `.grad` None
  then; in percent of plain PyTorch's. *second meter*: the same seen from the tensors, which leaves workspaces out.
* *time*: process CPU time of a step over plain PyTorch's, the least of the rounds of each. With a `~`: the rough time
  of two steps, of points that another beats by far in time without more memory; they took no part in the rounds.
  fxremat and those that nothing beats by 5 % after some rounds took part in twice as many more.
* *loss, gradients, buffers*: beside those of plain PyTorch after one step from the same seed. Equal is bit for bit;
  close is within 1e-4, or three times what the last bit of the parameters does to them; wrong is neither.
"""

STRATEGIES = """## What was compared

* `checkpoint`: `torch.utils.checkpoint` (non-reentrant) on every block, every second or third, or on smaller or
  larger parts.
* `checkpoint_sequential`: torch's function on the blocks, with several numbers of segments.
* `nested`: checkpoints inside checkpoints: 2 or 3 deep with even parts, or halves of halves; a UNet by its levels.
* `selective`: `create_selective_checkpoint_contexts` on every block: attention, matrix products and convolutions are
  kept, or of the products every second one (as torchtitan does), the rest is computed again.
* `torch_budget`: `torch._functorch.config.activation_memory_budget` from 1 to 0, through `torch.compile` with
  `backend="aot_eager"`, which keeps plain PyTorch's operators.
* `torch_budget_decomposed`: the same with `backend="aot_eager_decomp_partition"`, which decomposes as inductor does.

Blocks are what a user would take: transformer layers, residual, Inception and mixer blocks, dense layers, a UNet's
double convolutions, a convolution with its norm and ReLU in the siamese towers. An encoder-decoder's two stacks, the
stages of a DenseNet and both uses of the siamese tower are segmented each by itself. A UNet has no chain of blocks:
`checkpoint_sequential` is left out there.
"""


POLICIES = """## Beside other graph passes

The passes of others on the same joint graphs of five of these models, with the same estimated costs, counted in the
same way: storages from when they are made to their last use, and the seconds of all ops that run. Nothing runs, and
BatchNorms stay whole. Written by `python -m benchmarks.policies`.

* `greedy`, `ILP`: torchtitan's `auto_perf_maxing` (pytorch/torchtitan#3975, #4636), written anew from its authors'
  description, without offloading; torch's partitioner follows its marks.
* `knapsack`: torch's `activation_memory_budget` with its "dp" solver and the same seconds, the best of eleven ratios.

At each budget, in percent of the peak of keeping everything: the time over that of keeping everything, and in
brackets the peak that was reached, then the least peak of fxremat's plans that take no longer. The last column is the
longest pass at one budget; of `knapsack`, at all ratios.
"""


def write(records: Sequence[Record], results: Path) -> None:
    """Page and picture of the records; in docs if they are those of `RESULTS`, else beside them."""
    page_path = PAGE if results.resolve() == RESULTS.resolve() else results.with_suffix(".md")
    page_path.write_text(page(records), encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: it takes matplotlib (the extra `plot`)")
    else:
        picture.draw(records, page_path.with_suffix(".svg"))


def page(records: Sequence[Record]) -> str:
    """The page in Markdown, from the verdict to every point and the conditions."""
    parts = [
        INTRODUCTION,
        "![peak against time](alternatives.svg)\n",
        "Hollow: gradients or buffers are wrong. Faint: a rough time only. Dotted: the floor, see below.\n",
        "## Verdict\n",
        *_verdict(records),
        "\nfxremat's time over that of the fastest alternative within the budget:\n",
        *ratios(records),
        "\n## The least memory\n",
        *_least_memory(records),
        "\n## Faults\n",
        *_faults(records),
        "\n" + STRATEGIES,
        *_policies(),
        "## Budget by budget\n",
        *_cells(records),
        "\n## Every point\n",
        _meters(records),
        *(line for record in records for line in _points(record)),
        "## Conditions\n",
        *_conditions(records),
    ]
    return "\n".join(parts) + "\n"


def _policies() -> Iterator[str]:
    if (record := FOLDER / "policies.json").exists():
        yield POLICIES
        yield from policy_table(json.loads(record.read_text(encoding="utf-8")))
        yield ""


def summary(records: Sequence[Record]) -> str:
    """For the end of a run."""
    return "\n".join([*ratios(records), "", *map(str, claims(records))])


def _verdict(records: Sequence[Record]) -> Iterator[str]:
    yield "| wanted | found | holds |"
    yield "|---|---|---|"
    for claim in claims(records):
        yield f"| {claim.wanted} | {claim.found} | {'yes' if claim.holds else '**no**'} |"


def ratios(records: Sequence[Record]) -> Iterator[str]:
    """A row a model, a column a budget."""
    every = cells(records)
    percents = sorted({cell.ours.percent or 0 for cell in every}, reverse=True)
    yield "| model | " + " | ".join(f"{percent:g} %" for percent in percents) + " |"
    yield "|---" * (len(percents) + 1) + "|"
    for record in records:
        mine = {cell.ours.percent: cell for cell in every if cell.record is record}
        yield f"| {record.model} | " + " | ".join(_ratio(mine.get(percent)) for percent in percents) + " |"
    yield "\n*alone*: only fxremat fits; *lost*: only an alternative does; -: neither."


def _ratio(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.ratio is None:
        return "alone" if cell.ours.measured else "lost" if cell.best else "-"
    return f"{cell.ratio:.2f}" if cell.ratio <= 1 else f"**{cell.ratio:.2f}**"


def _least_memory(records: Sequence[Record]) -> Iterator[str]:
    yield "Peaks in percent of plain PyTorch's. The floor is the one op that needs most: what it reads and writes, its"
    yield "workspace, and the parameter gradients that are there by then. No schedule of the same ops gets below.\n"
    yield "| model | plain | floor | fxremat | over the floor | least alternative | which |"
    yield "|---|---|---|---|---|---|---|"
    for record in records:
        ours, other, floor = least_ours(record), least_alternative(record), record.floor
        over = f"{ours.peak / floor:.2f}x" if ours and floor else "-"
        least = f"{record.share(other[1].peak):.1f} % | {other[0].name}" if other else "- | -"
        yield (
            f"| {record.model} | {record.plain.peak / 1e6:.0f} MB | {_share(record, floor)} "
            f"| {_peak(record, ours)} | {over} | {least} |"
        )


def _faults(records: Sequence[Record]) -> Iterator[str]:
    """A row a family: how many of its points are not what plain PyTorch computes."""
    yield "| | points | failed | wrong loss | wrong gradients | wrong buffers |"
    yield "|---|---|---|---|---|---|"
    rows: list[Point | Ours] = []
    for record in records:
        rows += [*record.points, *record.ours]
    for family in (*FAMILIES, "fxremat"):
        mine = [row for row in rows if row.name.startswith(f"{family}:") and (row.measured or row.failure)]
        if mine:
            yield f"| `{family}` | {len(mine)} | {sum(bool(row.failure) for row in mine)} | {_wrong(mine)} |"
    yield "\nA checkpoint runs BatchNorm's forward twice, and its statistics move twice. Graphs that draw dropout again"
    yield "draw other masks than the forward did; decomposed ones draw other masks than plain PyTorch to begin with."


def _wrong(rows: Iterable[Point | Ours]) -> str:
    got = [row.measured for row in rows if row.measured]
    kinds = ([one.loss for one in got], [one.gradients for one in got], [one.buffers for one in got])
    return " | ".join(str(kind.count("wrong")) for kind in kinds)


def _cells(records: Sequence[Record]) -> Iterator[str]:
    yield "Spent: what fxremat measured, of what it was given.\n"
    yield "| model | budget | fastest alternative | peak | time | fxremat's peak | spent | time | ratio | planning |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for cell in cells(records):
        record, best, ours = cell.record, cell.best_measured, cell.ours.measured
        name = "-" if cell.best is None else cell.best.name
        spent = f"{100 * ours.peak / cell.ours.mem:.1f} %" if ours else "-"
        planning = f"{cell.ours.planning_seconds:.1f} s" if ours else "-"
        yield (
            f"| {record.model} | {cell.ours.percent:g} % | {name} | {_peak(record, best)} | {_time(record, best)} "
            f"| {_peak(record, ours)} | {spent} | {_time(record, ours)} | {_ratio(cell)} | {planning} |"
        )


def _meters(records: Sequence[Record]) -> str:
    every = [got for record in records for _, got in (*record.working, *record.running)]
    shares = [got.storages / got.peak for got in every]
    over = sum(got.storages > got.peak for got in every)
    return (
        f"The second meter reads {min(shares):.1%} to {max(shares):.1%} of the first, "
        f"and more at {over} of {len(every)} points.\n"
    )


def _points(record: Record) -> Iterator[str]:
    yield f"<details><summary>{record.model}: plain PyTorch takes {record.plain.peak / 1e6:.1f} MB</summary>\n"
    yield "| | peak | second meter | time | loss | gradients | buffers |"
    yield "|---|---|---|---|---|---|---|"
    rows: list[Point | Ours] = [*record.points, *record.ours]
    for row in rows:
        if row.measured is not None:
            yield f"| {row.name} | {_figures(record, row.measured)} |"
        elif row.failure:
            yield f"| {row.name} | failed: {row.failure.replace('|', '/')} |"
    yield "\n</details>\n"


def _figures(record: Record, got: Measured) -> str:
    cells = (_peak(record, got), f"{record.share(got.storages):.1f} %", _time(record, got))
    return " | ".join((*cells, got.loss, got.gradients, got.buffers))


def _peak(record: Record, got: Measured | None) -> str:
    return _share(record, None if got is None else got.peak)


def _share(record: Record, size: int | None) -> str:
    return "-" if size is None else f"{record.share(size):.1f} %"


def _time(record: Record, got: Measured | None) -> str:
    if got is None:
        return "-"
    return f"{'~' if got.seconds is None else ''}{record.slowdown(got):.3f}x"


def _conditions(records: Sequence[Record]) -> Iterator[str]:
    yield "One thread. Load is that of the machine, the average of a minute, before and after.\n"
    yield "| model | date | processor | torch | rounds | plain step | load | minutes | planning from nothing |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for record in records:
        c, seconds = record.conditions, record.plain.seconds or record.plain.rough
        yield (
            f"| {record.model} | {c['date']} | {c['cpu']}, {c['cores']} cores | {c['torch']} | {c['rounds']} "
            f"| {seconds:.3f} s | {c['load_before']} to {c['load_after']} | {c['minutes']} "
            f"| {record.first_planning_seconds:.1f} s |"
        )
