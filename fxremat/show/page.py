"""A plan as a page that is complete in itself: HTML, SVG and style sheets, no scripts, nothing to load.

    figures    budget, peak and time, as the text of the plan has them
    picture    memory over time, by what it consists of (`show.kinds`), with the budget; below it the blocks that run
    table      a row for each block: a block in the picture leads to its row and back; pointing at one marks the other
    schedule   as text
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, groupby

from fxremat.planned_step import PlannedStep
from fxremat.show.axes import horizontal_axis, size_ticks, time_ticks, vertical_axis
from fxremat.show.lanes import lanes_picture, planned_lanes
from fxremat.show.modules import module_tree
from fxremat.show.text import block_rows, facts
from fxremat.step.kinds import MemoryKind, bytes_by_kind, host_bytes
from fxremat.units import format_bytes, format_seconds

LEFT, WIDTH, RIGHT = 80, 1000, 20  # pixels
TOP, HEIGHT, STRIP, BELOW = 24, 320, 20, 24
COLORS: Mapping[MemoryKind, tuple[str, str]] = {
    MemoryKind.WEIGHTS: ("#9aa0a6", "weights and optimizer state"),
    MemoryKind.KEPT: ("#3b6ea5", "kept for the backward"),
    MemoryKind.TEMPORARY: ("#a9c9e8", "temporary values of the forward"),
    MemoryKind.RECOMPUTED: ("#e8862e", "recomputed"),
    MemoryKind.OFFLOADED: ("#9b6fc0", "offloaded: leaving, or back"),
    MemoryKind.RESULTS: ("#2f7d4f", "gradients to return"),
    MemoryKind.GRADIENTS: ("#8fce9f", "gradients on their way"),
    MemoryKind.OUTSIDE: ("#cdb84a", "the loss outside the model"),
    MemoryKind.WORKSPACE: ("#cc5f6c", "workspace of kernels"),
}
BUDGET, HOST = "#c0392b", "#5b2c83"
STYLE = """
body { font: 15px/1.4 sans-serif; margin: 2em; color: #222; max-width: 1140px; }
table { border-collapse: collapse; font-size: 13px; } th, td { padding: 2px 10px; text-align: right; }
th { border-bottom: 1px solid #999; } td.text, th.text { text-align: left; }
.facts th { border: 0; text-align: left; vertical-align: top; font-weight: normal; color: #555; }
.facts td { text-align: left; } tr:target, tr:hover { background: #ffe9a8; }
svg { font: 12px sans-serif; display: block; } pre { font-size: 12px; white-space: pre-wrap; }
.legend span { display: inline-block; margin-right: 1.2em; } .legend i { display: inline-block; width: 12px;
height: 12px; margin-right: 5px; vertical-align: -1px; } .legend i.line { height: 0; vertical-align: 4px; }
a { color: #22558c; text-decoration: none; } a rect:hover, a:target rect { fill: #ffcf4a; }
"""
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>fxremat plan</title>
<style>{style}</style></head>
<body><h1>{title}</h1>
{facts}
<h2>Memory over time</h2>
{legend}
{picture}
{lanes}
<h2>Blocks</h2>
{table}
<h2>Schedule</h2>
<pre>{schedule}</pre></body></html>
"""


def page(plan: PlannedStep) -> str:
    """The page of a plan."""
    chart = _Chart.of(plan)
    return PAGE.format(
        style=STYLE + "\n".join(_links(len(plan.chain))),
        title=escape(f"fxremat plan for {plan.device} ({plan.timed} times)"),
        facts=_facts(plan),
        legend=_legend(chart),
        picture=chart.svg(),
        lanes=_lanes(plan),
        table=_table(plan),
        schedule=escape(str(plan.schedule)),
    )


def _facts(plan: PlannedStep) -> str:
    rows = (f"<tr><th>{escape(label)}</th><td>{escape(fact)}</td></tr>" for label, fact in facts(plan, module_tree(plan.chosen, plan.costs)))
    return f'<table class="facts">{"".join(rows)}</table>'


def _lanes(plan: PlannedStep) -> str:
    if not plan.chosen.transfers:
        return ""
    return f"<h2>Ops and copies</h2>{lanes_picture({'planned': planned_lanes(plan)}, budget=plan.budget)}"


def _links(blocks: int) -> Iterator[str]:
    """Pointing at a block in the picture marks its row, and the other way round."""
    for number in range(1, blocks + 1):
        yield f"body:has(.b{number}:hover) #block-{number} {{ background: #ffe9a8; }}"
        marked = (f"body:has(#block-{number}:{how}) .b{number}" for how in ("hover", "target"))
        yield f"{', '.join(marked)} {{ fill: #ffcf4a; }}"


def _table(plan: PlannedStep) -> str:
    heads = (
        ("block", "text"), ("ends with", "text"), ("forward", ""), ("backward", ""), ("output", ""), ("saved", ""),
        ("keeps [option]", "text"), ("runs again", "text"),
    )  # fmt: skip
    head = "".join(f'<th class="{kind}">{name}</th>' for name, kind in heads)
    rows = []
    for row in block_rows(plan):
        link = f'<a href="#ops-{row.number}">{row.number}</a>'
        numbers = "".join(f"<td>{cell}</td>" for cell in (row.forward, row.backward, row.output, row.saved))
        rows.append(
            f'<tr id="block-{row.number}"><td class="text">{link}</td><td class="text">{escape(row.name)}</td>{numbers}'
            f'<td class="text">{row.keeps}</td><td class="text">{row.again}</td></tr>'
        )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _legend(chart: _Chart) -> str:
    entries = [
        f'<span><i style="background: {color}"></i>{text}</span>'
        for kind, (color, text) in COLORS.items()
        if any(chart.kinds[kind])
    ]
    entries.append(f'<span><i class="line" style="border-top: 2px dashed {BUDGET}"></i>budget</span>')
    if any(chart.hosted):
        entries.append(f'<span><i class="line" style="border-top: 2px dotted {HOST}"></i>waits on the host</span>')
    return f'<p class="legend">{"".join(entries)}</p>'


def _blocks(plan: PlannedStep) -> Iterator[tuple[int, str]]:
    """Number and name of each step's block; a transfer shows as part of the op before it."""
    blocks = plan.chain.blocks
    place = 0
    for step in plan.program.steps:
        if step.op is not None and 0 <= step.block < len(blocks):
            place = step.block
        yield place + 1, blocks[place].name


@dataclass(frozen=True, kw_only=True)
class _Chart:
    """Memory by kind over time, step by step."""

    kinds: Mapping[MemoryKind, Sequence[int]]
    hosted: Sequence[int]
    names: Sequence[str]  # of the steps
    blocks: Sequence[tuple[int, str]]  # number from 1, and name, of each step
    starts: Sequence[float]  # seconds, or numbers of steps where no op takes time
    ends: Sequence[float]
    timed: bool
    split: float
    budget: int

    @classmethod
    def of(cls, plan: PlannedStep) -> _Chart:
        program, sizes = plan.program, plan.costs.sizes
        ops = program.layout.joint.ops
        seconds = [
            step.seconds if step.op is None else plan.costs.seconds[step.op] for step in program.steps
        ]
        timed = any(seconds)
        if not timed:
            seconds = [1.0] * len(seconds)
        ends = list(accumulate(seconds))
        starts = [0.0, *ends[:-1]]
        if timed and plan.chosen.transfers and len(plan.chosen.transfers.starts) == len(seconds):
            starts = list(plan.chosen.transfers.starts)
            ends = [*starts[1:], max(plan.predicted_time, starts[-1] + seconds[-1])]
        return cls(
            kinds=bytes_by_kind(program, sizes),
            hosted=host_bytes(program, sizes),
            names=[
                f"{step.role.value}{'' if step.op is None else ' ' + ops[step.op].name}"
                for step in program.steps
            ],
            blocks=list(_blocks(plan)),
            starts=starts,
            ends=ends,
            timed=timed,
            split=starts[program.split] if program.split < len(starts) else ends[-1] if ends else 0.0,
            budget=plan.budget,
        )

    @property
    def total(self) -> list[int]:
        """Bytes while each step runs."""
        return [sum(sizes) for sizes in zip(*self.kinds.values(), strict=True)]

    @property
    def end(self) -> float:
        """Second at which the last step ends."""
        return max(self.ends, default=0.0) or 1.0

    @property
    def top(self) -> float:
        """The bytes at the upper edge: the budget, too, unless it is far above."""
        most = max([*self.total, *self.hosted], default=0) or 1
        return 1.04 * (self.budget if most <= self.budget <= 2 * most else most)

    def svg(self) -> str:
        """The picture."""
        bottom = TOP + HEIGHT
        tall = bottom + STRIP + BELOW
        ticks = time_ticks(self.end) if self.timed else [(0.0, "0 ops"), (self.end, f"{self.end:.0f} ops")]
        grid = vertical_axis(
            size_ticks(self.top), self.top, left=LEFT, right=LEFT + WIDTH, top=TOP, height=HEIGHT
        )
        parts = [
            *grid,
            *self._areas(),
            *self._host_line(),
            *self._turn_line(),
            *self._budget_line(),
            *self._titles(),
            *self._strip(bottom),
            *horizontal_axis(ticks, self.end, left=LEFT, width=WIDTH, y=bottom + STRIP),
        ]
        size = f'viewBox="0 0 {LEFT + WIDTH + RIGHT} {tall}" width="{LEFT + WIDTH + RIGHT}" height="{tall}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>'

    def _x(self, moment: float) -> float:
        return LEFT + WIDTH * moment / self.end

    def _y(self, size: float) -> float:
        return TOP + HEIGHT * (1 - size / self.top)

    def _edge(self, sizes: Sequence[float]) -> list[str]:
        """The points along the top of the steps."""
        return [
            f"{self._x(moment):.1f},{self._y(size):.1f}"
            for start, end, size in zip(self.starts, self.ends, sizes, strict=True)
            for moment in (start, end)
        ]

    def _areas(self) -> Iterator[str]:
        """One area for each kind, stacked; a thin edge shows what is there for no time at all."""
        below = [0] * len(self.starts)
        for kind, (color, text) in COLORS.items():
            if not any(self.kinds[kind]):
                continue
            above = [low + size for low, size in zip(below, self.kinds[kind], strict=True)]
            points = " ".join([*self._edge(above), *reversed(self._edge(below))])
            yield (
                f'<polygon class="kind" points="{points}" fill="{color}" stroke="{color}" stroke-width="0.4">'
                f"<title>{text}</title></polygon>"
            )
            below = above

    def _host_line(self) -> Iterator[str]:
        if any(self.hosted):
            points = " ".join(self._edge(self.hosted))
            yield f'<polyline points="{points}" fill="none" stroke="{HOST}" stroke-width="2" stroke-dasharray="2 3"/>'

    def _budget_line(self) -> Iterator[str]:
        label = f"budget {format_bytes(self.budget)}"
        if self.budget > self.top:
            place = f'x="{LEFT + WIDTH}" y="{TOP - 8}" text-anchor="end"'
            yield f'<text {place} fill="{BUDGET}">{label}, above the picture</text>'
            return
        y = self._y(self.budget)
        yield (
            f'<line class="budget" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="{BUDGET}" '
            f'stroke-width="1.5" stroke-dasharray="6 4"/>'
            f'<text x="{LEFT + WIDTH}" y="{y - 5:.1f}" text-anchor="end" fill="{BUDGET}">{label}</text>'
        )

    def _turn_line(self) -> Iterator[str]:
        x = self._x(self.split)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{TOP + HEIGHT}" stroke="#444" stroke-dasharray="1 3"/>'
        yield f'<text x="{x - 6:.1f}" y="{TOP - 8}" text-anchor="end" fill="#555">forward</text>'
        yield f'<text x="{x + 6:.1f}" y="{TOP - 8}" fill="#555">backward</text>'

    def _titles(self) -> Iterator[str]:
        """What runs, and how much is there, where one points."""
        for place, total in enumerate(self.total):
            x, width = self._x(self.starts[place]), self._x(self.ends[place]) - self._x(self.starts[place])
            number, block = self.blocks[place]
            title = f"{self.names[place]} (block {number}, {block}): {format_bytes(total)}"
            if self.timed:
                title += f" at {format_seconds(self.starts[place])}"
            yield (
                f'<rect class="step" x="{x:.2f}" y="{TOP}" width="{max(width, 0.3):.2f}" height="{HEIGHT}" '
                f'fill-opacity="0"><title>{escape(title)}</title></rect>'
            )

    def _strip(self, top: float) -> Iterator[str]:
        """Which block runs when; the first time of a block is what its row leads to."""
        seen: set[int] = set()
        for (number, name), places in groupby(range(len(self.blocks)), key=self.blocks.__getitem__):
            run = list(places)
            x, end = self._x(self.starts[run[0]]), self._x(self.ends[run[-1]])
            anchor = "" if number in seen else f' id="ops-{number}"'
            seen.add(number)
            shade = "#c9d6e4" if number % 2 else "#e4ebf2"
            label = f'<text x="{(x + end) / 2:.1f}" y="{top + 14}" text-anchor="middle">{number}</text>'
            if end - x < 8 * len(str(number)) + 4:  # no room
                label = ""
            yield (
                f'<a href="#block-{number}"{anchor}><rect class="b{number}" x="{x:.1f}" y="{top}" '
                f'width="{max(end - x, 0.5):.1f}" height="{STRIP}" fill="{shade}" stroke="#fff" stroke-width="0.5">'
                f"<title>block {number}: {escape(name)}</title></rect>{label}</a>"
            )
