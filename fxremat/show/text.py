"""A plan as text, at most `WIDTH` columns wide.

The short form puts blocks that take the same and do the same into one line, wherever they are in the chain: of a
transformer, a few lines instead of one for every layer. The full form has a line for each block.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import TypeGuard

from fxremat.chains.chain import Block
from fxremat.chains.schedule import Forward, Keep, Op
from fxremat.planned_step import PlannedStep
from fxremat.slices.rewrite import SlicedRegion
from fxremat.step.collectives import is_gather
from fxremat.step.communicating import ProgramWithCommunication
from fxremat.step.program import Role, rematerialize
from fxremat.step.transferred import ProgramWithTransfers
from fxremat.units import format_bytes, format_ratio, format_seconds

WIDTH = 100  # columns
_INDENT = 18  # columns of what stands before a figure of the summary
_NUMBERS, _NAME = 12, 14  # columns of the numbers of blocks, and of a name
_MANY = 4  # numbers at equal distances that are shown as a range
_FEW = 4  # names of a longer list
TIMES = {1: "once", 2: "twice"}
_LINES = 40  # of blocks in the short form, and of its schedule


@dataclass(frozen=True, kw_only=True)
class BlockRow:
    """What a block takes and does, as it is shown."""

    number: int  # from 1
    name: str
    forward: str
    backward: str
    output: str
    saved: str
    keeps: str
    again: str  # how many ops run more than once

    @property
    def looks(self) -> tuple[str, ...]:
        """Everything but number and name: blocks that agree in it share a line."""
        return self.forward, self.backward, self.output, self.saved, self.keeps, self.again


HEADS = BlockRow(
    number=0,
    name="ends with",
    forward="forward",
    backward="backward",
    output="output",
    saved="saved",
    keeps="keeps [option]",
    again="runs again",
)


def describe(plan: PlannedStep, *, full: bool = False) -> str:
    """The summary, the blocks and the schedule of a plan."""
    parts = (_summary(plan), _blocks(block_rows(plan), full), _schedule(plan, full))
    return "\n\n".join("\n".join(lines) for lines in parts)


def block_rows(plan: PlannedStep) -> list[BlockRow]:
    """A row for each block of the plan's chain."""
    option = {op.block: op.option for op in plan.chosen.schedule.ops if _keeps(op)}
    again = Counter(step.block + 1 for step in plan.program.steps if step.role is Role.RECOMPUTE)
    return [
        BlockRow(
            number=number,
            name=block.name,
            forward=format_seconds(block.forward_time),
            backward=format_seconds(block.backward_time),
            output=format_bytes(block.output_bytes),
            saved=format_bytes(block.saved_bytes),
            keeps=_kept(block, option[number]),
            again=_counted(again[number], "op") if again[number] else "",
        )
        for number, block in enumerate(plan.chain.blocks, start=1)
    ]


def _keeps(op: Op) -> TypeGuard[Forward]:
    return isinstance(op, Forward) and op.keep is Keep.ALL


def _kept(block: Block, option: int) -> str:
    return f"{format_bytes(block.choices[option].saved_bytes)} [{option}]" if option else "everything"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _blocks(rows: Sequence[BlockRow], full: bool) -> Iterator[str]:
    yield _line("block" if full else "blocks", "", HEADS)
    groups: dict[object, list[BlockRow]] = {}
    for row in rows:
        groups.setdefault(row.number if full else row.looks, []).append(row)
    lines = [line for group in groups.values() for line in _group(group)]
    yield from lines if full else shortened_lines(lines, "plan.describe(full=True) shows them")


def _group(group: Sequence[BlockRow]) -> Iterator[str]:
    """A line for blocks that look the same, and more below it if their numbers need them."""
    numbers = textwrap.wrap(ranges(row.number for row in group), _NUMBERS)
    yield _line(numbers[0], f"{len(group)} x" if len(group) > 1 else "", group[0])
    yield from (f"  {more:>{_NUMBERS}}" for more in numbers[1:])


def _line(numbers: str, count: str, row: BlockRow) -> str:
    columns = (
        f"  {numbers:>{_NUMBERS}}{count:>5}  {_clipped(row.name, _NAME):{_NAME}}{row.forward:>8}{row.backward:>9}"
        f"{row.output:>11}{row.saved:>11} {row.keeps:14} {row.again}"
    )
    return _clipped(columns.rstrip(), WIDTH)


def _clipped(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 2]}.."


def shortened_lines(lines: Sequence[str], note: str) -> Iterator[str]:
    """The lines; of more than `_LINES` the first and the last, and how many are left out."""
    if len(lines) <= _LINES:
        yield from lines
        return
    half = _LINES // 2
    yield from lines[:half]
    yield f"  ... {len(lines) - 2 * half} more lines; {note} ..."
    yield from lines[-half:]


def ranges(numbers: Iterable[int]) -> str:
    """Increasing numbers; neighbours as a range, and so are four or more at equal distances.

    >>> ranges([1, 2, 3, 5, 8, 9]), ranges([2, 4, 6, 8, 10])
    ('1-3, 5, 8-9', '2,4..10')
    """
    found, left = [], list(numbers)
    while left:
        count, distance = _run(left)
        if distance == 1 and count > 1:
            found.append(f"{left[0]}-{left[count - 1]}")
        elif count >= _MANY:
            found.append(f"{left[0]},{left[1]}..{left[count - 1]}")
        else:
            count = 1
            found.append(str(left[0]))
        del left[:count]
    return ", ".join(found)


def _run(numbers: Sequence[int]) -> tuple[int, int]:
    """How many numbers from the first on are at equal distances, and that distance."""
    distances = [after - before for before, after in pairwise(numbers)]
    equal = list(takewhile(lambda distance: distance == distances[0], distances))
    return len(equal) + 1, distances[0] if distances else 0


def _summary(plan: PlannedStep) -> Iterator[str]:
    yield _clipped(f"fxremat plan for {plan.device} ({plan.timed} times)", WIDTH)
    for label, fact in facts(plan):
        before = f"  {label:{_INDENT - 2}}"
        yield from textwrap.wrap(fact, WIDTH, initial_indent=before, subsequent_indent=" " * _INDENT)


def facts(plan: PlannedStep) -> Iterator[tuple[str, str]]:
    """What to say of a plan, with a label or none."""
    share = format_ratio(plan.predicted_peak, plan.keep_all_peak, ".1%")
    slower = format_ratio(plan.predicted_time, plan.keep_all_time, ".2f")
    yield "budget", format_bytes(plan.budget)
    if plan.sizes:
        yield "sizes", f"{plan.sizes}; others with plan.at(...)"
    if plan.assumed:
        yield "kernels", plan.assumed
    yield (
        "predicted peak",
        f"{format_bytes(plan.predicted_peak)}, {share} of the {format_bytes(plan.keep_all_peak)} of keeping everything",
    )
    yield "", f"{format_bytes(plan.gradient_bytes)} of it are gradients to return"
    yield (
        "predicted time",
        (
            f"{format_seconds(plan.predicted_time)}, {slower}x of {format_seconds(plan.keep_all_time)}; "
            f"{_counted(plan.program.recomputed, 'op')} run again"
        ),
    )
    choice = "recomputed or offloaded" if plan.link else "recomputed"
    yield (
        "",
        (
            f"whatever is {choice}, it takes {format_seconds(plan.lower_bound)} or more: time / lower bound is "
            f"{format_ratio(plan.predicted_time, plan.lower_bound, '.3f')}"
        ),
    )
    for region, count in Counter(map(_of_region, plan.slices)).items():
        yield "in slices", f"{count} x {region}" if count > 1 else region
    if plan.not_sliced:
        yield "whole" if plan.slices else "no slices", "; ".join(plan.not_sliced)
    if plan.chosen.transfers and not plan.weights:
        yield "offloads", _transfers(plan.chosen.transfers)
    if plan.weights:
        yield "weights", _weights(plan)
    if plan.chosen.communication:
        yield "communication", _communication(plan.chosen.communication)
    yield "least budget", f"{format_bytes(plan.minimum)} ({plan.minimum} bytes)"


def _of_region(region: SlicedRegion) -> str:
    """A region that runs in slices, without the number of its layer."""
    how = "gradients made in the forward" if region.inside else "made again in the backward"
    cut = f"{_counted(len(region.ops), 'op')} in {region.parts} slices of {region.rows} rows"
    about = f"{_any_layer(region.where)}: {cut}"
    if not region.summed:
        return f"{about}, {how}; no gradient is a sum"
    names = list(dict.fromkeys(map(_any_layer, region.summed)))
    few = ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")
    return f"{about}, {how}; gradients added up over the slices in {' and '.join(region.summed_in)}: {few}"


def _any_layer(name: str) -> str:
    """The name of a module without the number of its layer."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _weights(plan: PlannedStep) -> str:
    joint, program = plan.program.layout.joint, plan.program
    away = {program.version_of[version] for version in program.fetched}
    sizes = [sum(joint.values[v].bytes for v in values) for values in (joint.updates_of, away)]
    everything, hosted = map(format_bytes, sizes)
    return (
        f"{len(away)} of {len(joint.updates_of)} parameters ({hosted} of {everything}) live on the host; "
        f"others, with their state, take {format_bytes(program.resident)}"
    )


def _transfers(swapped: ProgramWithTransfers) -> str:
    away = sum(step.role is Role.OFFLOAD for step in swapped.program.steps)
    shares = (
        f"{format_seconds(seconds)} {way}, {hidden:.0%} hidden behind ops"
        for way, seconds, hidden in zip(("out", "back"), swapped.copying, swapped.hidden, strict=True)
    )
    return f"{format_bytes(swapped.bytes)} in {_counted(away, 'tensor')}: {'; '.join(shares)}"


def _communication(found: ProgramWithCommunication) -> str:
    """What the ranks send each other, how much of it no op waits for, and which blocks gather how often."""
    count = _counted(len(found.collectives), "collective")
    shares = f"{format_seconds(found.seconds)} in {count}, {found.hidden:.0%} hidden behind ops"
    often = Counter(one.op for one in found.collectives if is_gather(found.program.layout.joint.ops[one.op].node))
    blocks: dict[int, int] = {}
    for step in found.program.executions:
        if step.op in often and step.role is Role.FORWARD:
            blocks[step.block + 1] = max(often[step.op], blocks.get(step.block + 1, 0))
    times = sorted(set(blocks.values()))
    gathered = (
        f"{TIMES.get(k, f'{k} times')} by {_of_blocks(sorted(b for b, n in blocks.items() if n == k))}" for k in times
    )
    return f"{shares}; parameters are gathered {', '.join(gathered)}" if blocks else shares


def _of_blocks(numbers: Sequence[int]) -> str:
    return f"block{'' if len(numbers) == 1 else 's'} {ranges(numbers)}"


def _schedule(plan: PlannedStep, full: bool) -> Iterator[str]:
    lines = textwrap.wrap(f"schedule: {plan.schedule}", WIDTH, subsequent_indent=" " * len("schedule: "))
    yield from lines if full else shortened_lines(lines, "print(plan.schedule) shows them")
    if plan.chosen.refined:
        before = Counter(s.op for s in rematerialize(plan.chosen.layout, plan.chosen.schedule).executions)
        now = Counter(step.op for step in plan.program.executions)
        yield f"refined:  {(before - now).total()} of its ops do not run again, {(now - before).total()} others do"
