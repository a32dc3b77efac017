"""Collects the data that the HTML page of a plan shows, as plain numbers and texts.

    modules, sources, types   lists of texts; values and ops refer to their indices
    values, ops               name, module, source, type: one list each, by index
    groups                    the group of each module; each group's color, or -1, and shade
    colors                    for each color, the modules drawn in it, as text
    points                    the frontier: peak in bytes, seconds, and index in `plans`, or -1
    plans                     for some points, including the chosen one: moments, allocations in the order in
                              which they are stacked, copies, and rows of the table of modules

Allocations are stacked by module (`group_of`; weights at the bottom, the model's own ops on top), then by kind,
then by the moment at which they begin. Text is not escaped here; the code that inserts it into the page does
that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from fxremat.planned_step import PlannedStep
from fxremat.search.candidate import Candidate
from fxremat.show.headline import headline, measured
from fxremat.show.labels import source_of, value_name
from fxremat.show.modules import Share, module_tree, modules_of
from fxremat.show.moments import Moments
from fxremat.show.palette import palette
from fxremat.show.text import facts
from fxremat.show.tree import OWN, Row, all_rows
from fxremat.step.costs import Costs
from fxremat.step.kinds import Life, MemoryKind, host_bytes
from fxremat.step.program import Role
from fxremat.step.source import Source
from fxremat.step.step_graph import StepGraph
from fxremat.units import format_bytes

KINDS = {
    MemoryKind.WEIGHTS: "weights and optimizer state",
    MemoryKind.KEPT: "saved for the backward, or returned",
    MemoryKind.TEMPORARY: "temporary values of the forward",
    MemoryKind.RECOMPUTED: "recomputed",
    MemoryKind.OFFLOADED: "offloaded: leaving, or back",
    MemoryKind.RESULTS: "gradients to return",
    MemoryKind.GRADIENTS: "gradients on their way",
    MemoryKind.OUTSIDE: "the loss outside the model",
    MemoryKind.WORKSPACE: "workspace of kernels",
}
LANES = {Role.OFFLOAD: "to the host", Role.PREFETCH: "from the host"}
COMMUNICATION = "between ranks"
DRAWN = 9  # maximum number of points of the frontier whose plans are drawn
MOST_LIVES = 200_000  # approximate maximum number of allocations of all plans of a page together

Data = dict[str, Any]


def page_data(plan: PlannedStep) -> Data:
    """Return all data of the page of a plan. O(points x moments)."""
    running, model = plan.running, plan.graph.model
    drawn = _drawn(running)
    modules = Numbers(_with_outer(s.module for s in (*running.graph.sources, *running.graph.value_sources)))
    moments = [Moments.of(candidate, running.costs) for candidate in drawn]
    return {
        "model": model,
        "title": f"{model}: a plan of fxremat",
        "headline": headline(plan, running.chosen),
        "about": f"A plan of fxremat for a budget of {format_bytes(plan.budget)}{measured(plan)}",
        "budget": plan.budget,
        "keep_all": [plan.keep_all_peak, plan.keep_all_time],
        "facts": [list(fact) for fact in facts(plan, modules_of(plan), exact=False)],
        "kinds": [[kind.value, text] for kind, text in KINDS.items()],
        **_texts(running.graph, modules),
        **_colors(modules, moments, model),
        "points": _points(running, drawn),
        "plans": [
            {"headline": headline(plan, candidate), **_plan(candidate, shown, running.costs, modules)}
            for candidate, shown in zip(drawn, moments, strict=True)
        ],
        "chosen": drawn.index(running.chosen),
    }


class Numbers(dict[str, int]):
    """Maps each text to a number, from 0 in the order of the first look-up."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        for text in texts:
            self[text]

    def __missing__(self, text: str) -> int:
        self[text] = number = len(self)
        return number


def group_of(module: str) -> str:
    """Return the group of a module, which is its layer or its first-level module; the picture stacks memory by group.

    >>> group_of("transformer.h.3.mlp.c_fc"), group_of("lm_head"), group_of("")
    ('transformer.h.3', 'lm_head', '')
    """
    match = re.match(r"(?:[^.]*\.)*?[0-9]+(?=\.|$)", module)
    return match[0] if match else module.partition(".")[0]


def _colors(modules: Numbers, drawn: Iterable[Moments], model: str) -> Data:
    """Return the group of each module, and the color and shade of each group; only the largest groups have colors."""
    groups = _groups(modules)
    shares = dict.fromkeys(groups, 0.0)
    for moments in drawn:
        for group, share in _shares(moments).items():
            shares[group] = max(shares[group], share)
    found = palette(shares, f"{model}, {OWN}")
    colors, shades = zip(*((found.color_of(group), found.shade_of(group)) for group in groups), strict=True)
    of = [groups[group_of(module)] for module in modules]
    return {"groups": {"of": of, "color": colors, "shade": shades}, "colors": found.labels}


def _shares(moments: Moments) -> dict[str, float]:
    """Return group -> how much of the picture of memory over time it fills, from 0 to 1; large groups get colors.

    This is its fraction of the area or, if that is more, a tenth of the relative height of its largest tensor.
    """
    areas: dict[str, float] = {}
    heights: dict[str, float] = {}
    for life in moments.lives:
        if life.kind is not MemoryKind.WEIGHTS:
            group = group_of(source_of(moments.program.layout.graph, life).module)
            first, last = moments.moments[life.first], moments.moments[min(life.last, len(moments.moments) - 1)]
            areas[group] = areas.get(group, 0.0) + life.bytes * (last.end - first.start)
            heights[group] = max(heights.get(group, 0.0), 0.1 * life.bytes)
    area, height = sum(areas.values()) or 1.0, max(moments.bytes, default=0) or 1
    return {group: max(areas[group] / area, heights[group] / height) for group in areas}


def _groups(modules: Iterable[str]) -> Numbers:
    """Assign numbers to the groups of modules in the order in which they are stacked.

    The group of the model's own ops is last, on top.
    """
    return Numbers([*(group_of(module) for module in modules if module), ""])


def _with_outer(paths: Iterable[str]) -> Iterable[str]:
    """Yield "" and each path, preceded by the paths of the modules that contain it; paths may be repeated."""
    yield ""
    for path in dict.fromkeys(paths):
        parts = path.split(".")
        yield from (".".join(parts[:depth]) for depth in range(1, len(parts) + 1) if path)


def _drawn(plan: PlannedStep) -> list[Candidate]:
    """Return the candidate plans that are drawn, fastest first: some of the frontier, and the chosen one.

    If the budget includes weights, or the frontier's plans have other slices, only the chosen one is drawn.
    """
    lives = max(1, len(plan.program.steps) * 2)
    count = min(DRAWN, MOST_LIVES // lives)
    others = [] if plan.weights or count < 2 else plan.alternatives.spread(count)
    others = [candidate for candidate in others if candidate.layout.graph is plan.graph]
    if all(candidate is not plan.chosen for candidate in others):
        others = [*others, plan.chosen]
    return sorted(others, key=lambda candidate: (candidate.time, -candidate.peak))


def _points(plan: PlannedStep, drawn: Sequence[Candidate]) -> list[list[float]]:
    numbers = {id(candidate): number for number, candidate in enumerate(drawn)}
    candidates = list({id(c): c for c in (*plan.alternatives.candidates, *drawn)}.values())
    if plan.weights:
        candidates = list(drawn)
    candidates.sort(key=lambda candidate: (candidate.time, -candidate.peak))
    return [[c.peak, _short(c.time), numbers.get(id(c), -1)] for c in candidates]


def _texts(joint: StepGraph, modules: Numbers) -> Data:
    sources, types = Numbers([""]), Numbers([""])

    def columns(found: Sequence[Source]) -> tuple[list[int], list[int]]:
        return [modules[s.module] for s in found], [sources[str(s.frame or "")] for s in found]

    value_modules, value_sources = columns(joint.value_sources)
    op_modules, op_sources = columns(joint.sources)
    texts: Data = {
        "values": {
            "name": [value_name(joint, value.index) for value in joint.values],
            "module": value_modules,
            "source": value_sources,
            "type": [types[value.type] for value in joint.values],
        },
        "ops": {"name": [op.name for op in joint.ops], "module": op_modules, "source": op_sources},
    }
    return texts | {"modules": list(modules), "sources": list(sources), "types": list(types)}


def _plan(candidate: Candidate, moments: Moments, costs: Costs, modules: Numbers) -> Data:
    joint = candidate.layout.graph
    roles = Numbers()
    lives = _stacked(moments.lives, joint, modules)
    kinds = {kind: number for number, kind in enumerate(KINDS)}
    rows = all_rows(module_tree(candidate, costs), joint.model, _compared)
    return {
        "peak": candidate.peak,
        "time": candidate.time,
        "timed": moments.timed,
        "split": moments.split,
        "starts": [_short(moment.start) for moment in moments.moments],
        "ends": [_short(moment.end) for moment in moments.moments],
        "role": [roles[moment.role] for moment in moments.moments],
        "roles": list(roles),
        "op": [_number(moment.op) for moment in moments.moments],
        "value": [_number(moment.value) for moment in moments.moments],
        "block": [moment.block for moment in moments.moments],
        "blocks": list(candidate.layout.names),
        "copies": _copies(candidate),
        "host": _on_the_host(moments, costs),
        "lives": {
            "kind": [kinds[life.kind] for life in lives],
            "first": [life.first for life in lives],
            "last": [min(life.last, len(moments.moments) - 1) for life in lives],
            "bytes": [life.bytes for life in lives],
            "value": [_number(None if life.state else life.value) for life in lives],
            "op": [_number(life.op) for life in lives],
        },
        "rows": [_row(row, modules) for row in rows],
    }


def _stacked(lives: Iterable[Life], joint: StepGraph, modules: Numbers) -> list[Life]:
    """Sort allocations in the order in which the picture stacks them, from the bottom up."""
    groups = _groups(modules)
    kinds = list(KINDS)

    def key(life: Life) -> tuple[int, ...]:
        group = -1 if life.kind is MemoryKind.WEIGHTS else groups[group_of(source_of(joint, life).module)]
        return group, kinds.index(life.kind), life.first, life.last

    return sorted(lives, key=key)


def _copies(candidate: Candidate) -> list[list[Any]]:
    """Return (lane, start, end) of each copy to the host and back, and of each collective."""
    found: list[list[Any]] = []
    if candidate.transfers:
        for (role, _), (start, end) in candidate.transfers.copies.items():
            found.append([LANES[role], _short(start), _short(end)])
    if candidate.communication:
        for one in candidate.communication.collectives:
            found.append([COMMUNICATION, _short(one.begins), _short(one.ends)])
    return found


def _on_the_host(moments: Moments, costs: Costs) -> list[int]:
    """Return the bytes of offloaded activations on the host at each moment; [] if none are offloaded."""
    hosted = list(host_bytes(moments.program, costs.sizes))
    if not any(hosted):
        return []
    split = moments.program.split
    return hosted if len(hosted) == len(moments.moments) else [*hosted[:split], hosted[split - 1], *hosted[split:]]


def _compared(share: Share) -> tuple[float, ...]:
    """Return the figures in which modules must be equal to share a row.

    Their seconds may differ, and are shown as an average.
    """
    return share.saved, share.recomputed, share.offloaded, share.gradients, share.extra


def _shown(share: Share) -> tuple[float, ...]:
    """Return the figures of a module that the page's table has columns for."""
    return share.saved, share.recomputed, share.offloaded, share.gradients, share.seconds, share.extra


def _row(row: Row, modules: Numbers) -> list[Any]:
    """Return a table row as a list: depth, label, number of modules, indices of the modules, figures per module."""
    paths = [] if row.label == OWN else [modules[path] for path in row.paths]
    return [row.depth, row.label, row.count, paths, *map(_short, _shown(row.each))]


def _number(number: int | None) -> int:
    return -1 if number is None else number


def _short(amount: float) -> float:
    """Return bytes unchanged, and seconds rounded to nine digits, to keep the page small."""
    return amount if isinstance(amount, int) else float(f"{amount:.9g}")
