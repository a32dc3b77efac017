"""Draws a timeline as SVG without scripts: lanes of ops and of copies, with the memory below them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from fxremat.errors import FxrematError
from fxremat.planned_step import PlannedStep
from fxremat.show.axes import horizontal_axis, size_ticks, time_ticks, vertical_axis
from fxremat.step.program import Role
from fxremat.units import format_bytes

WIDTH, HEIGHT = 960, 260


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """The events of a step, in seconds from the start of the step."""

    ops: Sequence[tuple[float, float]]  # (start, end) of each op
    out: Sequence[tuple[float, float]]  # (start, end) of each copy to the host
    back: Sequence[tuple[float, float]]  # (start, end) of each copy from the host
    memory: Sequence[tuple[float, int]]  # (time, bytes that are allocated from then on)

    @property
    def end(self) -> float:
        """Seconds from the start to the end of the last event."""
        return max([end for lane in (self.ops, self.out, self.back) for _, end in lane], default=0.0)


def planned_lanes(plan: PlannedStep) -> Lanes:
    """Return the ops, copies and memory of a plan that offloads. Raises `FxrematError` if it does not."""
    plan = plan.running
    swapped = plan.chosen.transfers
    if swapped is None:
        raise FxrematError("this plan offloads nothing: it has one lane, and plan.to_html() shows its memory")
    steps = list(zip(swapped.program.steps, swapped.starts, strict=True))
    ends = [start + (0.0 if step.op is None else plan.costs.seconds[step.op]) for step, start in steps]
    return Lanes(
        ops=[(start, end) for (step, start), end in zip(steps, ends, strict=True) if step.op is not None],
        out=[span for (role, _), span in swapped.copies.items() if role is Role.OFFLOAD],
        back=[span for (role, _), span in swapped.copies.items() if role is Role.PREFETCH],
        memory=list(zip(swapped.starts, swapped.memory.during, strict=True)),
    )


LANE, GAP, LEFT, RIGHT = 22, 6, 150, 30  # in pixels
LANES = (("ops", "#3b6ea5"), ("out", "#c98a2b"), ("back", "#5d9a4b"))
NAMES = {"ops": "ops", "out": "to the host", "back": "from the host"}


def lanes_picture(lanes: Mapping[str, Lanes], *, budget: int) -> str:
    """Draw several named timelines below each other on one time axis, each with its memory; the red line is the budget.
    """
    end = max(one.end for one in lanes.values()) or 1.0
    most = max([budget, *(size for one in lanes.values() for _, size in one.memory)])
    parts, top = [], 0.0
    for name, one in lanes.items():
        parts.append(f'<text x="0" y="{top + 16:.0f}" font-weight="bold">{escape(name)}</text>')
        top += LANE
        for lane, color in LANES:
            parts.append(f'<text x="0" y="{top + 16:.0f}">{NAMES[lane]}</text>')
            for start, stop in getattr(one, lane):
                x, width = LEFT + WIDTH * start / end, max(0.5, WIDTH * (stop - start) / end)
                parts.append(
                    f'<rect x="{x:.1f}" y="{top:.0f}" width="{width:.1f}" height="{LANE}" fill="{color}"/>'
                )
            top += LANE + GAP
        parts += _memory(one, top, end, most, budget)
        top += HEIGHT / 2
        parts += horizontal_axis(time_ticks(end), end, left=LEFT, width=WIDTH, y=top)
        top += 6 * GAP
    size = f'viewBox="0 0 {LEFT + WIDTH + RIGHT} {top:.0f}" width="{LEFT + WIDTH + RIGHT}" height="{top:.0f}"'
    style = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="13"'
    return f"<svg {size} {style}>{''.join(parts)}</svg>"


def _memory(one: Lanes, top: float, end: float, most: int, budget: int) -> Iterator[str]:
    height = HEIGHT / 2
    yield f'<text x="0" y="{top + 16:.0f}">memory</text>'
    yield from vertical_axis(size_ticks(most), most, left=LEFT, right=LEFT + WIDTH, top=top, height=height)
    points = [*one.memory, (one.end, 0)]
    path = [f"M{LEFT},{top + height:.1f}"]
    for (start, size), (stop, _) in pairwise(points):
        y = top + height * (1 - size / most)
        path.append(f"L{LEFT + WIDTH * start / end:.1f},{y:.1f} L{LEFT + WIDTH * stop / end:.1f},{y:.1f}")
    yield f'<path d="{" ".join(path)} V{top + height:.1f} Z" fill="#8fb3d9"/>'
    line = top + height * (1 - budget / most)
    yield f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{line:.1f}" y2="{line:.1f}" stroke="#c0392b"/>'
    place = f'x="{LEFT + WIDTH}" y="{line - 4:.1f}" text-anchor="end"'
    yield f'<text {place} fill="#c0392b">budget {format_bytes(budget)}</text>'
