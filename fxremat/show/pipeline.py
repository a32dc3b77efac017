"""Shows a pipeline plan: as a table in text, and its periodic schedule as SVG without scripts."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from fxremat.errors import FxrematError
from fxremat.solvers.pipeline.check import Span, always, spans, stays
from fxremat.solvers.pipeline.model import PipelinePlan, WorkKind
from fxremat.solvers.pipeline.stage_costs import Job, step_seconds
from fxremat.solvers.references.pipeline.pipedream import pipedream
from fxremat.units import format_bytes

WIDTH, LEFT, LANE, GRAPH, GAP = 960, 110, 22, 46, 8  # in pixels
COLORS = {"F": "#8fb3d9", "B": "#3b6ea5", "forth": "#e0b15e", "back": "#c98a2b"}
PERIODS = 4


def baseline_period(plan: PipelinePlan) -> float | None:
    """Return the seconds per micro-batch if PipeDream partitioned the layers, for comparison.

    The partition is scheduled by 1F1B*, the best order for its stages. None if it does not fit into memory.
    """
    try:
        partition, _ = pipedream(Job(plan.layers, plan.machines))
    except FxrematError:
        return None
    return partition.period


def text(plan: PipelinePlan, microbatches: int | None = None) -> str:
    """Describe a pipeline plan: seconds per micro-batch, their lower bound, and a line for each stage and device.

    With `microbatches`, a line also tells the seconds of a step of that many micro-batches.
    """
    over = (
        f"{100 * (plan.period / plan.bound - 1):.1f} % above the bound of {plan.bound:.6g} s"
        if plan.bound
        else ""
    )
    lines = [f"period {plan.period:.6g} s for a micro-batch, {over}; found by {plan.by}"]
    if plan.skip is not None:
        lines.append(f"every {plan.skip + 1}th slot of {plan.tick:.6g} s stays empty")
    other = baseline_period(plan)
    lines.append(
        "PipeDream's partition does not fit"
        if other is None
        else f"PipeDream's partition, well scheduled: {other:.6g} s, {other / plan.period:.2f} times as long"
    )
    if microbatches is not None:
        lines.append(f"a step of {microbatches} micro-batches: {step_seconds(plan, microbatches):.6g} s")
    lines.append("stage   layers      device  forward s  backward s  in flight  kept each   recomputes")
    for number, (stage, flight) in enumerate(zip(plan.stages, plan.in_flight, strict=True)):
        layers = plan.layers.layers[stage.first : stage.last + 1]
        extra = stage.way.seconds - sum(layer.forward_time + layer.backward_time for layer in layers)
        again = f"{extra:.4g} s" if extra > 1e-9 * stage.way.seconds else "-"
        lines.append(
            f"{number:<7} {f'{stage.first + 1}..{stage.last + 1}':<11} {stage.device:<7} "
            f"{stage.way.forward_time:<10.4g} {stage.way.backward_time:<11.4g} {flight:<10} "
            f"{format_bytes(round(stage.way.kept_bytes)):<11} {again}"
        )
    for device, size in enumerate(plan.memory):
        share = size / plan.machines.memory if plan.machines.memory else 0.0
        busy = sum(stage.way.seconds for stage in plan.stages if stage.device == device) / plan.period
        lines.append(
            f"device {device}: {format_bytes(round(size))}, {100 * share:.0f} % of its memory; busy {100 * busy:.0f} %"
        )
    return "\n".join(lines)


def picture(plan: PipelinePlan) -> str:
    """Draw a few periods of the running pipeline: forwards, backwards, copies, and the memory of each device."""
    found = list(spans(plan, _deep(plan) + 3 * PERIODS + 2 * (plan.skip or 0)))
    begin = _deep(plan) * plan.tick
    end = begin + PERIODS * plan.tick
    scale = WIDTH / (end - begin)
    parts: list[str] = []
    top = 4.0
    for device in range(plan.machines.devices):
        works = [s for s in found if s.what in "FB" and plan.stages[s.place].device == device]
        parts += _lane(f"device {device}", works, begin, end, scale, top)
        top += LANE + 2
        parts += _memory(plan, found, device, begin, end, scale, top)
        top += GRAPH + GAP
    for pair in sorted({_link(plan, s) for s in found if s.what not in "FB"}):
        copies = [s for s in found if s.what not in "FB" and _link(plan, s) == pair and s.end > s.start]
        if copies:
            parts += _lane(f"link {pair[0]}-{pair[1]}", copies, begin, end, scale, top)
            top += LANE + GAP
    for number in range(PERIODS + 1):
        x = LEFT + number * plan.tick * scale
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{top:.0f}" stroke="#999" stroke-dasharray="3"/>'
        )
    parts += _legend(plan, top + 4)
    top += LANE + GAP
    size = f'viewBox="0 0 {LEFT + WIDTH + 4} {top:.0f}" width="{LEFT + WIDTH + 4}" height="{top:.0f}"'
    style = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="11"'
    return f"<svg {size} {style}>{''.join(parts)}</svg>"


def _legend(plan: PipelinePlan, top: float) -> Iterator[str]:
    """Yield SVG of the legend of colors, numbers and lines."""
    x = LEFT
    for what, name in (("F", "forward"), ("B", "backward"), ("forth", "copy forth"), ("back", "copy back")):
        yield f'<rect x="{x}" y="{top:.0f}" width="14" height="14" fill="{COLORS[what]}"/>'
        yield f'<text x="{x + 19}" y="{top + 11:.0f}">{name}</text>'
        x += 105
    words = f"numbers: micro-batches; below each device its memory; dashed: every {plan.tick:.4g} s"
    yield f'<text x="{x}" y="{top + 11:.0f}">{words}</text>'


def _deep(plan: PipelinePlan) -> int:
    """Return the number of micro-batches that have to start before the pipeline is full."""
    ends = [
        start + stage.way.backward_time
        for start, stage in zip(plan.backward_starts, plan.stages, strict=True)
    ]
    return int((max(ends) - min(plan.forward_starts)) / plan.tick) + 1


def _link(plan: PipelinePlan, span: Span) -> tuple[int, int]:
    ends = sorted((plan.stages[span.place].device, plan.stages[span.place + 1].device))
    return ends[0], ends[1]


def _lane(name: str, works: list[Span], begin: float, end: float, scale: float, top: float) -> Iterator[str]:
    yield f'<text x="0" y="{top + 15:.0f}">{escape(name)}</text>'
    for span in works:
        start, stop = max(span.start, begin), min(span.end, end)
        if stop - start <= 0:
            continue
        x, width = LEFT + (start - begin) * scale, (stop - start) * scale
        kind = {"F": WorkKind.FORWARD.value, "B": WorkKind.BACKWARD.value}.get(span.what, span.what)
        title = f"{kind} of {span.place}, micro-batch {span.microbatch}: {span.start:.4g} to {span.end:.4g} s"
        color = "white" if span.what == "B" else "black"
        yield (
            f'<rect x="{x:.1f}" y="{top:.0f}" width="{width:.1f}" height="{LANE}" fill="{COLORS[span.what]}" '
            f'stroke="white"><title>{title}</title></rect>'
        )
        if width > 12:
            yield (
                f'<text x="{x + width / 2:.1f}" y="{top + 15:.0f}" text-anchor="middle" fill="{color}">'
                f"{span.microbatch}</text>"
            )


def _memory(
    plan: PipelinePlan, found: list[Span], device: int, begin: float, end: float, scale: float, top: float
) -> Iterator[str]:
    """Yield SVG of a device's bytes over time; the top line is all memory of the device."""
    changes = [(begin, 0.0), (end, 0.0)]
    for start, stop, at, size in stays(plan, found):
        if at == device and stop > start:
            changes += [(start, size), (stop, -size)]
    held, points = always(plan, device), []
    for moment, change in sorted(changes):
        x = LEFT + (min(max(moment, begin), end) - begin) * scale
        points.append((x, held))
        held += change
        points.append((x, held))
    room = plan.machines.memory or 1.0
    line = " ".join(f"L{x:.1f},{top + GRAPH * (1 - size / room):.1f}" for x, size in points)
    yield f'<path d="M{LEFT},{top + GRAPH} {line} V{top + GRAPH} Z" fill="#d9e4ef"/>'
    yield f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{top}" y2="{top}" stroke="#c0392b"/>'
    most = format_bytes(round(plan.memory[device]))
    yield f'<text x="0" y="{top + 15:.0f}" fill="#555">{most}</text>'
