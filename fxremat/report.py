"""A plan as one HTML page: its text, and the memory of every step as a picture (SVG, no scripts)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

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


def page(plan: Plan) -> str:
    """The page, complete in itself."""
    bars = picture(plan.memory.during, turn=plan.program.turn, budget=plan.budget)
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
