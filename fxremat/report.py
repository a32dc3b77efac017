"""Plans as pictures (SVG, no scripts): a page with the memory of every step, and the lanes of ops and copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

from fxremat.errors import FxrematError
from fxremat.passes.program import Role
from fxremat.units import format_bytes

if TYPE_CHECKING:
    from fxremat.plans import Plan

WIDTH, HEIGHT = 960, 260
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>fxremat plan</title>
<style>body {{ font: 15px sans-serif; margin: 2em; }} pre {{ font-size: 13px; white-space: pre-wrap; }}</style></head>
<body><h1>fxremat plan</h1>
<p>Bytes allocated while each operation runs: forward, then (darker) backward. The line is the budget.</p>
{picture}
<pre>{text}</pre></body></html>
"""


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """What ran when: seconds from the start of the step."""

    ops: Sequence[tuple[float, float]]  # start and end
    out: Sequence[tuple[float, float]]  # copies to the host
    back: Sequence[tuple[float, float]]  # copies from the host
    memory: Sequence[tuple[float, int]]  # bytes allocated from a moment on

    @property
    def end(self) -> float:
        """When all is over."""
        return max([end for lane in (self.ops, self.out, self.back) for _, end in lane], default=0.0)


def planned_lanes(plan: Plan) -> Lanes:
    """The lanes that a plan with transfers foresees. Raises `FxrematError` for one without."""
    swapped = plan.chosen.swapped
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


LANE, GAP, LEFT = 22, 6, 150  # pixels
LANES = (("ops", "#3b6ea5"), ("out", "#c98a2b"), ("back", "#5d9a4b"))
NAMES = {"ops": "ops", "out": "to the host", "back": "from the host"}


def lanes_picture(lanes: Mapping[str, Lanes], *, budget: int) -> str:
    """Named lanes one below the other on one clock, each with its memory; the line is the budget."""
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
        top += HEIGHT / 2 + 4 * GAP
    size = f'viewBox="0 0 {LEFT + WIDTH} {top:.0f}" width="{LEFT + WIDTH}" height="{top:.0f}"'
    style = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="13"'
    return f"<svg {size} {style}>{''.join(parts)}</svg>"


def _memory(one: Lanes, top: float, end: float, most: int, budget: int) -> Iterator[str]:
    height = HEIGHT / 2
    yield f'<text x="0" y="{top + 16:.0f}">memory</text>'
    points = [*one.memory, (one.end, 0)]
    path = [f"M{LEFT},{top + height:.1f}"]
    for (start, size), (stop, _) in pairwise(points):
        y = top + height * (1 - size / most)
        path.append(f"L{LEFT + WIDTH * start / end:.1f},{y:.1f} L{LEFT + WIDTH * stop / end:.1f},{y:.1f}")
    yield f'<path d="{" ".join(path)} V{top + height:.1f} Z" fill="#8fb3d9"/>'
    line = top + height * (1 - budget / most)
    yield f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{line:.1f}" y2="{line:.1f}" stroke="#c0392b"/>'


def page(plan: Plan) -> str:
    """The page, complete in itself."""
    bars = picture(plan.memory.during, turn=plan.program.turn, budget=plan.budget)
    if plan.chosen.swapped:
        bars += f"<p>Ops and copies over time:</p>{lanes_picture({'planned': planned_lanes(plan)}, budget=plan.budget)}"
    return PAGE.format(picture=bars, text=escape(str(plan)))


def picture(memory: Sequence[int], *, turn: int, budget: int) -> str:
    """Bars of bytes, one an operation; those from `turn` on are the backward's; a line at the budget if it is near."""
    top = max(memory, default=1)
    scale = max(top, budget) if budget <= 2 * top else top
    width = WIDTH / max(1, len(memory))
    bars = []
    for position, size in enumerate(memory):
        height = HEIGHT * size / scale
        color = "#8fb3d9" if position < turn else "#3b6ea5"
        bars.append(
            f'<rect x="{position * width:.2f}" y="{HEIGHT - height:.2f}" width="{width:.2f}" '
            f'height="{height:.2f}" fill="{color}"><title>{format_bytes(size)}</title></rect>'
        )
    if budget <= 2 * top:
        line = HEIGHT - HEIGHT * budget / scale
        bars.append(f'<line x1="0" x2="{WIDTH}" y1="{line:.2f}" y2="{line:.2f}" stroke="#c0392b"/>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">{"".join(bars)}</svg>'
