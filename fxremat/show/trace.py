"""Writes the step that a plan predicts as a trace in Chrome's Trace Event Format, which ui.perfetto.dev opens.

    plan.save_trace("plan.json")
    lanes       ops, recomputed ops, copies to the host and back, collectives; each event has its module, code
                line and bytes
    counters    bytes of each kind of memory; their sum is the allocated memory

Times are in microseconds; if no op takes time, each moment lasts one microsecond. Copies and collectives have
simulated times.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fxremat.planned_step import PlannedStep
from fxremat.show.labels import microseconds, printable, value_name
from fxremat.show.moments import LOSS, Moments
from fxremat.step.kinds import MemoryKind
from fxremat.step.program import Program, Role, Transfer

OPS, AGAIN, OUT, BACK, LINK = 1, 2, 3, 4, 5  # indices of the lanes; the format calls lanes threads
LANES = {
    OPS: "ops",
    AGAIN: "ops that run again",
    OUT: "copies to the host",
    BACK: "copies from the host",
    LINK: "communication",
}
_PROCESS = 1
# roles of steps that describe what is copied to the host; the first that exists is used
_LEAVES = (Role.OFFLOAD, Role.RELEASE, Role.UPDATE)

Event = dict[str, Any]


def trace(plan: PlannedStep) -> dict[str, Any]:
    """Return the trace of a planned step. O(events log events)."""
    running = plan.running
    moments = Moments.of(running.chosen, running.costs)
    spans = [*_ops(running, moments), *_copies(running), *_collectives(running)]
    spans.sort(key=lambda event: (event["tid"], event["ts"], event["dur"]))
    return {
        "traceEvents": [*_names(plan, spans), *spans, *_counters(moments), *_split(moments)],
        "displayTimeUnit": "ms",
        "otherData": {
            "plan": plan.headline,
            "device": plan.device,
            "times": plan.timed,
            "schedule": str(plan.schedule),
        },
    }


def save_trace(plan: PlannedStep, path: str | os.PathLike[str]) -> None:
    """Write the trace of a planned step to a file, as JSON."""
    with open(path, "w", encoding="ascii") as file:
        json.dump(trace(plan), file, allow_nan=False)


def _names(plan: PlannedStep, spans: Sequence[Event]) -> Iterator[Event]:
    """Yield events that name the process and each lane that has events."""
    yield _metadata("process_name", 0, name=f"{printable(plan.graph.model)} on {plan.device} ({plan.timed} times)")
    for lane in sorted({OPS, *(event["tid"] for event in spans)}):
        yield _metadata("thread_name", lane, name=LANES[lane])
        yield _metadata("thread_sort_index", lane, sort_index=lane)


def _metadata(kind: str, lane: int, **what: object) -> Event:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": lane, "ts": 0, "args": what}


def _span(lane: int, name: str, kind: str, start: float, end: float, **about: object) -> Event:
    """Return a complete ("X") event; start and end are rounded to nanoseconds, so that events do not overlap."""
    begin = round(start, 3)
    length = round(max(0.0, round(end, 3) - begin), 3)
    what = {"ph": "X", "name": printable(name), "cat": kind, "pid": _PROCESS, "tid": lane, "ts": begin, "dur": length}
    return what | {"args": {key: value for key, value in about.items() if value not in ("", None)}}




def _ops(plan: PlannedStep, moments: Moments) -> Iterator[Event]:
    """Yield an event for each execution on the device: ops, updates of weights, and the loss outside the model."""
    joint = plan.graph
    apart = plan.chosen.communication is not None
    for moment in moments.moments:
        start, end = microseconds(moments, moment)
        if moment.op is not None:
            if not (apart and joint.ops[moment.op].communicates):
                lane = AGAIN if moment.role == Role.RECOMPUTE.value else OPS
                name = joint.ops[moment.op].name
                yield _span(lane, name, moment.role, start, end, **_about_op(plan, moment.op, moment.block))
        elif moment.role in (LOSS, Role.UPDATE.value):
            updated = "weights" if moment.value is None else value_name(joint, moment.value)
            name = "loss outside the model" if moment.role == LOSS else f"update of {updated}"
            yield _span(OPS, name, moment.role, start, end)


def _about_op(plan: PlannedStep, op: int, block: int) -> dict[str, object]:
    joint, sizes = plan.graph, plan.costs.sizes
    source = joint.sources[op]
    return {
        "module": printable(source.module),
        "source": printable(str(source.frame)) if source.frame else "",
        "block": block + 1,
        "bytes written": sum(sizes.values[value] for value in joint.ops[op].writes),
        "bytes of workspace": max(0, sizes.workspace[op]),
    }


def _copies(plan: PlannedStep) -> Iterator[Event]:
    """Yield an event for each copy to or from the host, at its simulated time."""
    plan = plan.running
    transfers = plan.chosen.transfers
    if transfers is None:
        return
    steps = {(s.role, s.trip): s for s in transfers.program.steps if isinstance(s, Transfer)}
    for (role, trip), (start, end) in transfers.copies.items():
        back = role is Role.PREFETCH
        roles = (Role.PREFETCH, Role.WAIT) if back else _LEAVES
        step = next((steps[which, trip] for which in roles if (which, trip) in steps), None)
        name, about = _about_copy(plan, transfers.program, step) if step else (f"trip {trip}", {})
        yield _span(BACK if back else OUT, name, role.value, start * 1e6, end * 1e6, **about)


def _about_copy(plan: PlannedStep, program: Program, step: Transfer) -> tuple[str, dict[str, object]]:
    joint = plan.graph
    versions = (*step.reads, *step.writes)
    value = program.version_of[versions[0]] if versions else step.state_of
    if value is None:
        return f"trip {step.trip}", {}
    name = value_name(joint, value)
    size = abs(step.takes) if step.state_of is not None else plan.costs.sizes.values[value]
    source = joint.value_sources[value]
    about: dict[str, object] = {"module": printable(source.module), "bytes": size, "trip": step.trip}
    return f"optimizer state of {name}" if step.state_of is not None else name, about


def _collectives(plan: PlannedStep) -> Iterator[Event]:
    """Yield an event for each collective, from its begin on the network to its end."""
    found = plan.chosen.communication
    for one in found.collectives if found else ():
        about = {"module": printable(plan.graph.sources[one.op].module), "waited for in us": one.waited * 1e6}
        size = sum(plan.costs.sizes.values[value] for value in plan.graph.ops[one.op].writes)
        yield _span(LINK, one.name, "collective", one.begins * 1e6, one.ends * 1e6, bytes=size, **about)




def _counters(moments: Moments) -> Iterator[Event]:
    """Yield counter events with the bytes of each kind of memory, at each moment and at the end of the step."""
    count = len(moments.moments)
    kinds = [kind for kind in MemoryKind if any(life.kind is kind for life in moments.lives)]
    change = {kind: [0] * (count + 2) for kind in kinds}
    for life in moments.lives:
        change[life.kind][min(life.first, count)] += life.bytes
        change[life.kind][min(life.last, count) + 1] -= life.bytes
    now = dict.fromkeys(kinds, 0)
    starts = [microseconds(moments, moment)[0] for moment in moments.moments]
    end = max((microseconds(moments, moment)[1] for moment in moments.moments), default=0.0)
    for place, start in enumerate((*starts, end)):
        now = {kind: size + change[kind][place] for kind, size in now.items()}
        yield {
            "ph": "C", "name": "memory", "pid": _PROCESS, "tid": 0, "ts": round(start, 3),
            "args": {kind.value: size for kind, size in now.items()},
        }  # fmt: skip


def _split(moments: Moments) -> Iterable[Event]:
    """Return an event that marks where the backward begins, across all lanes."""
    if not moments.split < len(moments.moments):
        return ()
    start = microseconds(moments, moments.moments[moments.split])[0]
    what = {"ph": "i", "name": "backward begins", "cat": "split", "s": "p"}
    return ({**what, "pid": _PROCESS, "tid": OPS, "ts": round(start, 3)},)
