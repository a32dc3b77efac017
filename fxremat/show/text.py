"""Describes a plan as text of at most `WIDTH` columns.

    the five lines that people need first: budget, peak, time, least budget and why, what is done to fit
    a tree by module: what is saved, recomputed and offloaded, and the seconds
    the schedule

The full form has all modules, a line for each block, and the entire schedule.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from fxremat.chains.chain import Block
from fxremat.chains.schedule import Forward, Keep, Op
from fxremat.graphs.accounting import outer_gradients
from fxremat.planned_step import Compiled, PlannedStep
from fxremat.search.floor import floor_of
from fxremat.show.modules import ModuleNode, Share, modules_of
from fxremat.show.table import WIDTH, clipped
from fxremat.show.tree import Figures, Row, all_rows, ranges, rows_of, what_it_does
from fxremat.slices.rewrite import SlicedRegion
from fxremat.step.communicating import ProgramWithCommunication
from fxremat.step.order import rematerialize
from fxremat.step.program import Role
from fxremat.step.step_graph import Kind
from fxremat.step.transferred import ProgramWithTransfers
from fxremat.transfers.activations import most_on_host
from fxremat.units import format_bytes, format_ratio, format_seconds

_INDENT = 18  # column in which the figures of the summary begin
_NUMBERS, _NAME = 7, 22  # widths of the columns of block numbers and of names
_FEW = 4  # maximum number of names shown of a list
_FEW_BYTES = 0.01  # fraction of a peak; smaller parts are not mentioned
TIMES = {1: "once", 2: "twice"}
_LINES = 16  # maximum lines of the schedule in the short form
ROWS = 24  # maximum rows of the table of modules in the short form
_MODULE, _COUNT, _FIGURE = 45, 8, 11  # widths of the columns of module names, of counts, and of figures
_WAITING = 1e-3  # fraction of the time without recomputation; less waiting is a rounding error, and not shown


@dataclass(frozen=True, kw_only=True)
class BlockRow:
    """A table row of a block (consecutive ops of the model): its costs and what it saves, as text."""

    number: int  # index of the block, from 1
    name: str
    forward: str
    backward: str
    output: str
    saved: str
    keeps: str
    again: str  # number of recomputed ops


HEADS = BlockRow(
    number=0,
    name="modules",
    forward="forward",
    backward="backward",
    output="output",
    saved="saved",
    keeps="keeps [option]",
    again="runs again",
)


def describe(plan: PlannedStep, *, full: bool = False) -> str:
    """Describe a plan as text: summary, modules, and schedule.

    With `full`, it lists all modules, each block, and the whole schedule.
    """
    tree = modules_of(plan)
    blocks = [_blocks(block_rows(plan))] if full else []
    parts = (_summary(plan, tree), _modules(plan, tree, full), *blocks, _schedule(plan, full))
    return "\n\n".join("\n".join(lines) for lines in parts)


def block_rows(plan: PlannedStep) -> list[BlockRow]:
    """Return a row for each block (run of consecutive ops) of the plan."""
    option = {op.block: op.option for op in plan.chosen.schedule.ops if _keeps(op)}
    steps = plan.op_by_op.program.steps
    again = Counter(step.block + 1 for step in steps if step.role is Role.RECOMPUTE)
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


def _blocks(rows: Sequence[BlockRow]) -> Iterator[str]:
    yield _line("block", HEADS)
    yield from (_line(str(row.number), row) for row in rows)


def _line(number: str, row: BlockRow) -> str:
    columns = (
        f"  {number:>{_NUMBERS}}  {clipped(row.name, _NAME):{_NAME}}{row.forward:>8}{row.backward:>9}"
        f"{row.output:>11}{row.saved:>11} {row.keeps:16} {row.again}"
    )
    return clipped(columns.rstrip(), WIDTH)


def shortened_lines(lines: Sequence[str], note: str) -> Iterator[str]:
    """Yield the lines; of more than `_LINES` lines, only the first and last ones, with `note` between them."""
    if len(lines) <= _LINES:
        yield from lines
        return
    half = _LINES // 2
    yield from lines[:half]
    yield f"  ... {len(lines) - 2 * half} more lines; {note} ..."
    yield from lines[-half:]


def _modules(plan: PlannedStep, tree: ModuleNode, full: bool) -> Iterator[str]:
    """Yield lines of a table of what each module saves, recomputes and offloads, and its additional seconds."""
    model = plan.graph.model
    rows = all_rows(tree, model) if full else rows_of(tree, ROWS, model)
    yield from table(rows, ("saved", "recomputed", "offloaded", "extra time"), what_it_does)
    waiting = waiting_seconds(plan, tree.total)
    beyond = (
        (_waiting_for(plan, less=waiting < 0), abs(waiting)),
        ("running in slices", slicing_seconds(plan)),
        ("storing in fewer bytes", compressing_seconds(plan)),
    )
    for what, seconds in beyond:
        if abs(seconds) > _WAITING * plan.keep_all_time:
            yield f"  {what:{_MODULE + _COUNT - 2 + 3 * _FIGURE}}{format_seconds(seconds):>{_FIGURE}}"


def table(rows: Sequence[Row], heads: Sequence[str], figures: Figures) -> Iterator[str]:
    """Yield a header line and a line for each row; a row of several equal modules has the figures of one of them."""
    counts = "each of" if any(row.count > 1 for row in rows) else ""
    yield f"{'  module':{_MODULE}}{counts:>{_COUNT}}" + "".join(f"{head:>{_FIGURE}}" for head in heads)
    yield from (_row(row, figures) for row in rows)


def _row(row: Row, figures: Figures) -> str:
    label = "  " * (row.depth + 1) + row.label
    if len(label) > _MODULE:
        label = f"{'  ' * (row.depth + 1)}..{row.label[len(label) - _MODULE + 2 :]}"
    count = f"{row.count} x" if row.count > 1 else ""
    return f"{label:{_MODULE}}{count:>{_COUNT}}" + "".join(f"{_figure(x):>{_FIGURE}}" for x in figures(row.each))


def _figure(amount: float) -> str:
    """Format bytes, which are integers, or seconds."""
    if not amount:
        return "-"
    return format_bytes(amount) if isinstance(amount, int) else format_seconds(amount)


def waiting_seconds(plan: PlannedStep, total: Share) -> float:
    """Return the seconds that a plan waits for copies or other ranks beyond the step without recomputation.

    `total` has the figures of all modules together.
    """
    rewritten = slicing_seconds(plan) + compressing_seconds(plan)
    return plan.op_by_op.predicted_time - plan.keep_all_time - rewritten - total.extra


def slicing_seconds(plan: PlannedStep) -> float:
    """Return the seconds by which all ops, run once each, take longer in slices than unsliced; 0.0 without slices."""
    return _rewriting_seconds(plan) if plan.slices else 0.0


def compressing_seconds(plan: PlannedStep) -> float:
    """Return the seconds by which all ops, run once each, take longer with tensors compressed; 0.0 if none are."""
    return _rewriting_seconds(plan) if plan.compression else 0.0


def _rewriting_seconds(plan: PlannedStep) -> float:
    return plan.costs.time_of(range(len(plan.graph.ops))) - plan.keep_all_time


def _waiting_for(plan: PlannedStep, *, less: bool) -> str:
    """Name what a plan waits for; `less`: the step without recomputation waits longer."""
    if plan.chosen.communication or less:
        awaited = "other ranks" if plan.chosen.communication else "copies"
        return f"waiting for {awaited}, {'less' if less else 'more'} than with everything kept"
    return "waiting for copies, and updates of weights" if plan.weights else "waiting for copies"


def _summary(plan: PlannedStep, tree: ModuleNode) -> Iterator[str]:
    yield clipped(f"fxremat plan for {plan.device} ({plan.timed} times)", WIDTH)
    yield from labelled(facts(plan, tree))


def labelled(facts: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield lines with the label and text of each fact, wrapped."""
    for label, fact in facts:
        before = f"  {label:{_INDENT - 2}}"
        yield from textwrap.wrap(fact, WIDTH, initial_indent=before, subsequent_indent=" " * _INDENT)


def facts(plan: PlannedStep, tree: ModuleNode, *, exact: bool = True) -> Iterator[tuple[str, str]]:
    """Yield (label, text) facts about a plan; `exact` adds the smallest working budget in bytes."""
    yield "budget", format_bytes(plan.budget) + (" of reserved bytes" if plan.reserving else "")
    yield "predicted peak", _peak(plan)
    if plan.predicted_reserved is not None:
        yield "reserved", _reserved(plan, plan.predicted_reserved)
    if plan.costs.sizes.unsplit:
        yield "allocator", "1 MiB more is counted for each tensor above 1 MiB; expandable_segments:True saves that"
    yield "predicted time", _time(plan)
    yield "least budget", _least(plan, exact)
    if plan.costs.sizes.outside:
        aside = format_bytes(plan.costs.sizes.outside)
        if outer_gradients(plan.captured):
            yield "loss outside", f"{aside} for it and its gradients, as measured or assumed; loss= says better"
        else:
            yield "between", f"{aside} for what runs between forward and backward, as measured; loss= says better"
    if plan.graph.dropped_outputs:
        size = format_bytes(sum(plan.costs.sizes.values[value] for value in plan.graph.dropped_outputs))
        yield "outputs", f"{size} of them count as dropped before the backward, as in model(...).loss.backward()"
    if tree.total.recomputed:
        again = f"{_counted(plan.op_by_op.program.recomputed, 'op')} run again, {format_bytes(tree.total.recomputed)}"
        yield "recomputes", f"{again} in {format_seconds(tree.total.extra)}: {most_in(tree, 'recomputed')}"
    transfers = plan.running.chosen.transfers
    if transfers and not plan.weights:
        where = most_in(tree, "offloaded") if tree.total.offloaded else ""
        yield "offloads", _transfers(transfers, plan.running) + (f"; {where}" if where else "")
    if not tree.total.recomputed and not transfers:
        yield "keeps", "everything: no op runs again"
    if plan.weights:
        yield "weights", _weights(plan)
    if plan.chosen.communication:
        yield "communication", _communication(plan.chosen.communication)
    yield from _means(plan)
    if plan.sizes:
        yield "sizes", f"{plan.sizes}; others with plan.at(...)"
    if plan.assumed:
        yield "kernels", plan.assumed


def _means(plan: PlannedStep) -> Iterator[tuple[str, str]]:
    """Yield facts about slices, kernels, and what the planner chose from."""
    for region, count in Counter(map(_of_region, plan.slices)).items():
        yield "in slices", f"{count} x {region}" if count > 1 else region
    if plan.compression:
        yield "compressed", str(plan.compression)
    if plan.means:
        yield "means", "; ".join(map(str, plan.means))
    if plan.not_sliced:
        yield "whole" if plan.slices else "no slices", "; ".join(plan.not_sliced)
    if plan.compiled:
        yield "kernels", _kernels(plan, plan.compiled)
    if plan.not_compiled:
        yield "kernels", f"PyTorch's, op by op: {plan.not_compiled}"


def _peak(plan: PlannedStep) -> str:
    share = format_ratio(plan.predicted_peak, plan.keep_all_peak, ".1%")
    whole = f"{share} of the {format_bytes(plan.keep_all_peak)} of keeping everything in the captured graph"
    many = plan.gradient_bytes >= _FEW_BYTES * plan.predicted_peak > 0
    gradients = f"; {format_bytes(plan.gradient_bytes)} of it are gradients to return" if many else ""
    return f"{format_bytes(plan.predicted_peak)}, {whole}{gradients}"


def _reserved(plan: PlannedStep, reserved: int) -> str:
    segments = "expandable segments" if plan.allocator and plan.allocator.expandable else "segments of fixed sizes"
    return f"{format_bytes(reserved)} from the device, in {segments} of PyTorch's allocator"


def _kernels(plan: PlannedStep, compiled: Compiled) -> str:
    """Describe what Inductor compiled, and the time and memory of running op by op instead."""
    alone = len(compiled.chosen.program().steps) - compiled.regions
    ops = _counted(compiled.ops, "op")
    regions = f"{_counted(compiled.regions, 'region')}, {compiled.distinct} of them distinct"
    by_op = plan.op_by_op
    regions += ", as torch.compile cuts the step" if compiled.by_torch else ""
    beside = ", with nothing on the host," if compiled.chosen.transfers else ""
    return (
        f"Inductor's for {ops} in {regions}, compiled in {format_seconds(compiled.seconds)}; {_counted(alone, 'op')} "
        f"as they are; op by op{beside} this would take {format_seconds(by_op.predicted_time)} and "
        f"{format_bytes(by_op.predicted_peak)}"
    )


def _time(plan: PlannedStep) -> str:
    if plan.compiled:
        ratio = format_ratio(plan.predicted_time, plan.keep_all_time, ".2f")
        return f"{format_seconds(plan.predicted_time)}, {ratio}x of keeping everything op by op"
    slower = format_ratio(plan.predicted_time, plan.keep_all_time, ".2f")
    bound = f"it takes {format_seconds(plan.lower_bound)} or more {whatever_is(plan)}"
    ratio = format_ratio(plan.predicted_time, plan.lower_bound, ".3f")
    times = f"{format_seconds(plan.predicted_time)}, {slower}x of {format_seconds(plan.keep_all_time)}"
    return f"{times}; {bound}: time / lower bound is {ratio}"


def whatever_is(plan: PlannedStep) -> str:
    """Return the condition of the plan's lower bound, such as "whatever is recomputed"."""
    return f"whatever is {'recomputed or offloaded' if plan.link else 'recomputed'}"


def _least(plan: PlannedStep, exact: bool) -> str:
    minimum = plan.known_minimum
    least = format_bytes(minimum) + (f" ({minimum} bytes)" if exact else "")
    if plan.more_ways:
        least += f" or less{' (plan.minimum searches for it)' if plan.step else ''}"
    smallest = plan.alternatives.candidates[-1]
    if plan.weights or minimum < plan.alternatives.minimum or smallest.layout.graph is not plan.graph:
        return least
    return f"{least}, where {floor_of(smallest.program(), plan.costs)}"


def most_in(tree: ModuleNode, column: str) -> str:
    """Name the modules with the most bytes in a field of `Share`, such as "saved"; numbered layers are added up."""
    sizes: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    for node in tree.walk():
        if own := getattr(node.own, column):
            name = _any_layer(node.path) or "the model's own ops"
            sizes[name] += own
            modules[name] += 1
    names = [
        f"{name} ({modules[name]} x, {format_bytes(size)})" if modules[name] > 1 else f"{name} ({format_bytes(size)})"
        for name, size in sizes.most_common(_FEW)
    ]
    more = len(sizes) - _FEW
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


def _of_region(region: SlicedRegion) -> str:
    """Describe a group of ops that runs in slices; its layer's number is omitted."""
    how = "gradients made in the forward" if region.inside else "made again in the backward"
    cut = f"{_counted(len(region.ops), 'op')} in {region.parts} slices of {region.rows} rows"
    about = f"{_any_layer(region.where)}: {cut}"
    if not region.summed:
        return f"{about}, {how}; no gradient is a sum"
    names = list(dict.fromkeys(map(_any_layer, region.summed)))
    few = ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")
    return f"{about}, {how}; gradients added up over the slices in {' and '.join(region.summed_in)}: {few}"


def _any_layer(name: str) -> str:
    """Return the path of a module with its first layer number replaced by "*", such as "blocks.*.mlp"."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name, count=1)


def _weights(plan: PlannedStep) -> str:
    joint, program = plan.program.layout.graph, plan.program
    away = {program.version_of[version] for version in program.fetched}
    sizes = [sum(joint.values[v].bytes for v in values) for values in (joint.updates_of, away)]
    everything, hosted = map(format_bytes, sizes)
    return (
        f"{len(away)} of {len(joint.updates_of)} parameters ({hosted} of {everything}) live on the host; "
        f"others, with their state, take {format_bytes(program.resident)}"
    )


def _transfers(swapped: ProgramWithTransfers, plan: PlannedStep) -> str:
    away = sum(step.role is Role.OFFLOAD for step in swapped.program.steps)
    shares = (
        f"{format_seconds(seconds)} {way}, {hidden:.0%} hidden behind ops"
        for way, seconds, hidden in zip(("out", "back"), swapped.copying, swapped.hidden, strict=True)
    )
    most = most_on_host(swapped.program, plan.costs, plan.link) if plan.link and plan.link.in_powers else 0
    pinned = f" ({format_bytes(most)} of pinned memory, taken in powers of two)" if most else ""
    return f"{format_bytes(swapped.bytes)} in {_counted(away, 'tensor')}{pinned}: {'; '.join(shares)}"


def _communication(found: ProgramWithCommunication) -> str:
    """Describe a plan's collectives: their seconds, how much of them ops hide, and how often blocks gather parameters.
    """
    count = _counted(len(found.collectives), "collective")
    shares = f"{format_seconds(found.seconds)} in {count}, {found.hidden:.0%} hidden behind ops"
    often = Counter(one.op for one in found.collectives if found.program.layout.graph.ops[one.op].kind is Kind.GATHER)
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
        now = Counter(step.op for step in plan.op_by_op.program.executions)
        yield f"refined:  {(before - now).total()} of its ops do not run again, {(now - before).total()} others do"
