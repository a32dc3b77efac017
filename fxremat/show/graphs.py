"""The plan of a model that is several graphs as a page, and as a memory snapshot of PyTorch.

The picture has the step from left to right: the calls of its graphs, and their backwards. From the bottom up it stacks
what belongs to no call (inputs, outputs, ops that stay Python, gradients), what each call has saved for its backward,
one color for each graph, and what the running call needs at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Any

from fxremat.planned_graphs import Moment, PlannedCall, PlannedGraphs
from fxremat.show.axes import size_ticks, vertical_axis
from fxremat.show.page import asset
from fxremat.show.palette import COLORS
from fxremat.show.snapshot import Allocation, frames_of, snapshot_of
from fxremat.units import format_bytes, format_seconds

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1080, 320, 90, 20, 14, 30  # pixels
NARROW = 0.15  # of the mean width of a forward or backward: the width of what is between two calls
MOST_ROWS = 200  # rows of the table of calls


def page(plan: PlannedGraphs) -> str:
    """Return a self-contained HTML page that shows the plan. O(calls^2) rectangles, of those that can be seen."""
    title = escape(f"{plan.model}: a plan of fxremat")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<style>\n{asset('page.css')}\n</style>\n</head>\n<body>\n"
        f'<header><h1>{escape(plan.headline)}</h1><p class="quiet">A plan of fxremat for {escape(plan.model)}</p>'
        f"</header>\n<main>\n<section><h2>Memory over the step</h2>\n{''.join(_legend(plan))}\n"
        f"{''.join(picture(plan))}\n</section>\n<section><h2>In figures</h2>\n{''.join(_facts(plan))}\n</section>\n"
        f"<section><h2>Calls</h2>\n{''.join(_table(plan))}\n</section>\n{''.join(_paths(plan))}"
        f"<section><details><summary>As text</summary><pre>{escape(plan.describe())}</pre></details></section>\n"
        "</main>\n</body>\n</html>\n"
    )


def _colors(plan: PlannedGraphs) -> dict[int, str]:
    """Return a color for each graph, by its `id`: those that save most have one of their own."""
    saved: dict[int, int] = {}
    for call in plan.calls:
        saved[id(call.graph)] = saved.get(id(call.graph), 0) + call.saved
    largest = sorted(saved, key=saved.__getitem__, reverse=True)[:COLORS]
    return {
        graph: f"var(--module-{largest.index(graph)})" if graph in largest else "var(--module-other)" for graph in saved
    }


def _legend(plan: PlannedGraphs) -> Iterator[str]:
    colors = _colors(plan)
    names: dict[str, list[str]] = {}
    for call in plan.calls:
        shown = names.setdefault(colors[id(call.graph)], [])
        shown += [call.name] if call.name not in shown else []
    yield '<ul id="legend" aria-label="Colors">'
    labels = [("var(--temporary)", "between graphs"), *((color, _some(shown)) for color, shown in names.items())]
    for color, label in (*labels, ("var(--workspace)", "what the running call needs")):
        yield f'<li><i style="background: {color}"></i>{escape(label)}</li>'
    yield "</ul>"


def _some(names: Sequence[str]) -> str:
    return f"saved by {names[0]}" if len(names) == 1 else f"saved by {names[0]} to {names[-1]}"


def picture(plan: PlannedGraphs) -> Iterator[str]:
    """Yield the memory over the step as SVG."""
    most = max(plan.budget, plan.predicted_peak, 1)
    size = f'viewBox="0 0 {LEFT + WIDTH + RIGHT} {TOP + HEIGHT + BOTTOM}"'
    yield f'<svg {size} role="img" aria-label="Memory over the step" style="width: 100%; font: 12px system-ui">'
    yield from vertical_axis(size_ticks(most), most, left=LEFT, right=LEFT + WIDTH, top=TOP, height=HEIGHT)
    colors, places = _colors(plan), list(_places(plan.moments))
    for moment, (x, width) in zip(plan.moments, places, strict=True):
        level = 0
        for color, amount, label in _stacked(plan, moment, colors):
            yield _bar(x, width, level, amount, most, color, label)
            level += amount
    yield from _phases(plan.moments, places)
    y = TOP + HEIGHT * (1 - plan.budget / most)
    ends = f'x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}"'
    yield f'<line {ends} stroke="var(--text)" stroke-dasharray="7 4"/>'
    yield f'<text x="{LEFT + WIDTH}" y="{y - 3:.1f}" text-anchor="end" fill="var(--text)">budget</text></svg>'


def _places(moments: Sequence[Moment]) -> Iterator[tuple[float, float]]:
    """Yield where each moment begins in the picture, and its width, in pixels: as wide as it takes seconds."""
    timed = [moment.seconds for moment in moments if moment.phase != "between"]
    mean = sum(timed) / max(1, len(timed)) or 1.0
    shares = [NARROW * mean if moment.phase == "between" else max(moment.seconds, NARROW * mean) for moment in moments]
    x, scale = float(LEFT), WIDTH / (sum(shares) or 1.0)
    for share in shares:
        yield x, share * scale
        x += share * scale


def _stacked(plan: PlannedGraphs, moment: Moment, colors: dict[int, str]) -> Iterator[tuple[str, int, str]]:
    """Yield what is alive at a moment from the bottom up: color, bytes and label. Equal neighbours are one."""
    yield "var(--temporary)", moment.between, "between graphs"
    for graph, calls in groupby(plan.calls[: moment.held], key=lambda call: id(call.graph)):
        together = list(calls)
        yield colors[graph], sum(call.saved for call in together), _some([together[0].name, together[-1].name])
    name = f"{moment.phase} of {plan.calls[moment.call].name}"
    yield "var(--workspace)", moment.working, name


def _bar(x: float, width: float, level: int, amount: int, most: int, color: str, label: str) -> str:
    height = HEIGHT * amount / most
    if height < 0.05:
        return ""
    y = TOP + HEIGHT * (1 - level / most) - height
    title = f"<title>{escape(label)}: {format_bytes(amount)}</title>"
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{color}">{title}</rect>'


def _phases(moments: Sequence[Moment], places: Sequence[tuple[float, float]]) -> Iterator[str]:
    """Yield the words "forward" and "backward" below their parts of the step."""
    for phase in ("forward", "backward"):
        spans = [place for moment, place in zip(moments, places, strict=True) if moment.phase == phase]
        if spans:
            middle = (spans[0][0] + spans[-1][0] + spans[-1][1]) / 2
            where = f'x="{middle:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle"'
            yield f'<text {where} fill="var(--quiet)">{phase}</text>'


def _facts(plan: PlannedGraphs) -> Iterator[str]:
    yield "<dl>"
    for name, figure in plan.facts:
        yield f"<dt>{escape(name)}</dt><dd>{escape(figure)}</dd>"
    yield "</dl>"


def _table(plan: PlannedGraphs) -> Iterator[str]:
    yield '<table><thead><tr><th class="text">modules</th><th>calls</th><th>saved each</th>'
    yield "<th>runs again each</th><th>seconds each</th></tr></thead><tbody>"
    rows = plan.rows
    for row in rows[:MOST_ROWS]:
        figures = (str(len(row)), format_bytes(max(c.saved for c in row)), row[0].shown_again, _seconds(row))
        yield f'<tr><td class="text">{escape(_name(row))}</td>{"".join(f"<td>{cell}</td>" for cell in figures)}</tr>'
    yield "</tbody></table>"
    if len(rows) > MOST_ROWS:
        yield f'<p class="quiet">and {sum(map(len, rows[MOST_ROWS:]))} calls more</p>'


def _name(row: Sequence[PlannedCall]) -> str:
    return row[0].name if len(row) == 1 else f"{row[0].name} to {row[-1].name}"


def _seconds(row: Sequence[PlannedCall]) -> str:
    return format_seconds(sum(call.program.time for call in row) / len(row))


def _paths(plan: PlannedGraphs) -> Iterator[str]:
    if len(plan.paths) < 2:
        return
    yield '<section><h2>Paths</h2><table><thead><tr><th class="text">of steps</th>'
    yield "<th>calls</th><th>peak</th></tr></thead><tbody>"
    for path in plan.paths:
        peak = "no programs fit" if path.peak is None else format_bytes(path.peak)
        yield f'<tr><td class="text">{path.share:.0%}</td><td>{path.calls}</td><td>{peak}</td></tr>'
    yield "</tbody></table></section>\n"


def snapshot(plan: PlannedGraphs) -> dict[str, Any]:
    """Return the planned memory as a memory snapshot of PyTorch: what calls save and need, and what is between them."""
    times, elapsed = [0], 0.0
    for moment in plan.moments:
        elapsed += moment.seconds * 1e6
        times.append(max(times[-1] + 1, int(elapsed)))
    return snapshot_of(times, _allocations(plan))


def _allocations(plan: PlannedGraphs) -> Iterator[Allocation]:
    moments = plan.moments
    for place, moment in enumerate(moments):
        if moment.between:
            yield _allocation(place, place, moment.between, "between graphs", "between graphs")
        if moment.working:
            label = f"{moment.phase} of {plan.calls[moment.call].name}"
            yield _allocation(place, place, moment.working, "running call", label)
    for number, call in enumerate(plan.calls):
        held = [place for place, moment in enumerate(moments) if moment.held > number]
        if call.saved and held:
            yield _allocation(held[0], held[-1], call.saved, "saved", f"saved by {call.name}")


def _allocation(first: int, last: int, size: int, category: str, label: str) -> Allocation:
    return Allocation(first=first, last=last, bytes=size, category=category, frames=frames_of(label))
