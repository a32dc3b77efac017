"""Writes the allocations that a plan predicts in the format of `torch.cuda.memory._snapshot()`.

    plan.save_snapshot("plan.pickle")       pytorch.org/memory_viz opens it, and `python -m torch.cuda._memory_viz`

The format is that of the docstring of `torch.cuda.memory._snapshot`, of `torch.cuda._memory_viz` and of the viewer's
`MemoryViz.js` (torch 2.13). The viewer reads pickles up to protocol 4. It colors by the category of an allocation, and
requires a category "unknown" if there are any.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fxremat.planned_step import PlannedStep
from fxremat.show.addresses import Addresses
from fxremat.show.labels import label_of, microseconds, printable, source_of
from fxremat.show.moments import Moments
from fxremat.step.kinds import Life
from fxremat.step.step_graph import StepGraph

BASE = 1 << 40  # address of the segment; the viewer converts addresses to floats, in which this one is exact
_PROTOCOL = 4
_STREAM = 0
_POOL = (0, 0)

Frames = list[dict[str, object]]


def snapshot(plan: PlannedStep) -> dict[str, Any]:
    """Return a snapshot of a planned step: all allocations with times and sources, and the final state."""
    running = plan.running
    replay = _Replay(running.graph, Moments.of(running.chosen, running.costs))
    replay.run()
    return {"device_traces": [replay.events()], "segments": replay.segments()}


def save_snapshot(plan: PlannedStep, path: str | os.PathLike[str]) -> None:
    """Write the snapshot of a planned step to a file."""
    with open(path, "wb") as file:
        pickle.dump(snapshot(plan), file, protocol=_PROTOCOL)


@dataclass(eq=False)
class _Block:
    """An allocation with its assigned address."""

    life: Life
    address: int
    frames: Frames


@dataclass(eq=False)
class _Replay:
    """Replays the allocations of a step moment by moment; at each moment, ended allocations are freed first."""

    joint: StepGraph
    moments: Moments
    addresses: Addresses = field(default_factory=Addresses)
    alive: list[_Block] = field(default_factory=list)
    trace: list[dict[str, object]] = field(default_factory=list)

    def run(self) -> None:
        """Process all moments. O(allocations log allocations + allocations x free extents)."""
        count = len(self.moments.moments)
        begins: list[list[Life]] = [[] for _ in range(count + 1)]
        ends: list[list[_Block]] = [[] for _ in range(count + 1)]
        for life in self.moments.lives:
            begins[min(life.first, count)].append(life)
        for place in range(count + 1):
            at = self._time(place)
            for block in ends[place]:
                self._free(block, at)
            for life in begins[place]:
                block = self._allocate(life, at)
                if life.last < count:
                    ends[life.last + 1].append(block)
                else:
                    self.alive.append(block)

    def _time(self, place: int) -> int:
        """Return the start of the moment with index `place` in microseconds; if there is none, the end of the step."""
        found = self.moments.moments
        if place < len(found):
            return int(microseconds(self.moments, found[place])[0])
        return int(max((microseconds(self.moments, moment)[1] for moment in found), default=0.0))

    def _allocate(self, life: Life, at: int) -> _Block:
        block = _Block(life, BASE + self.addresses.take(life.bytes), _frames(self.joint, life))
        self._note("alloc", block, at, category=life.kind.value)
        return block

    def _free(self, block: _Block, at: int) -> None:
        self.addresses.give_back(block.address - BASE, block.life.bytes)
        for action in ("free_requested", "free_completed"):
            self._note(action, block, at)

    def _note(self, action: str, block: _Block, at: int, **more: str) -> None:
        self.trace.append(_event(action, block.address, block.life.bytes, at, block.frames, **more))

    def events(self) -> list[dict[str, object]]:
        """Return all events in the snapshot's format; the first allocates the segment. [] without allocations."""
        if not self.addresses.end:
            return []
        first = _event("segment_alloc", BASE, self.addresses.end, 0, [], category="unknown")
        return [first, *self.trace]

    def segments(self) -> list[dict[str, object]]:
        """Return one segment, with the blocks that are allocated at the end of the step and the gaps between them."""
        if not self.addresses.end:
            return []
        in_use = sum(block.life.bytes for block in self.alive)
        return [
            {
                "device": 0,
                "address": BASE,
                "total_size": self.addresses.end,
                "allocated_size": in_use,
                "active_size": in_use,
                "requested_size": in_use,
                "stream": _STREAM,
                "segment_type": "large",
                "segment_pool_id": _POOL,
                "frames": [],
                "blocks": _blocks(self.alive, BASE + self.addresses.end),
            }
        ]


def _blocks(alive: Sequence[_Block], end: int) -> list[dict[str, object]]:
    """Return the segment's blocks up to address `end`, in order: allocated blocks, and the gaps between them."""
    found, address = [], BASE
    for block in sorted(alive, key=lambda block: block.address):
        if block.address > address:
            found.append(_block(address, block.address - address, "inactive", []))
        found.append(_block(block.address, block.life.bytes, "active_allocated", block.frames))
        address = block.address + block.life.bytes
    if end > address:
        found.append(_block(address, end - address, "inactive", []))
    return found


def _block(address: int, size: int, state: str, frames: Frames) -> dict[str, object]:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames}


def _event(action: str, address: int, size: int, at: int, frames: Frames, **more: str) -> dict[str, object]:
    what = {"action": action, "addr": address, "size": size, "stream": _STREAM, "time_us": at}
    return what | {"frames": frames, "pool_id": _POOL} | more


def _frames(joint: StepGraph, life: Life) -> Frames:
    """Return stack frames for an allocation: its label as the innermost frame, then its code line.

    Semicolons are replaced, since they separate frames in flame graphs.
    """
    label = label_of(joint, life).replace(";", ",")
    found: Frames = [{"filename": "fxremat", "line": 0, "name": label}]
    if frame := source_of(joint, life).frame:
        file, function = (printable(text).replace(";", ",") for text in (frame.file, frame.function))
        found.append({"filename": file, "line": frame.line, "name": function})
    return found
