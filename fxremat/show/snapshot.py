"""Writes the allocations that a plan predicts in the format of `torch.cuda.memory._snapshot()`.

    plan.save_snapshot("plan.pickle")       pytorch.org/memory_viz opens it, and `python -m torch.cuda._memory_viz`

The format is that of the docstring of `torch.cuda.memory._snapshot`, of `torch.cuda._memory_viz` and of the viewer's
`MemoryViz.js` (torch 2.13). The viewer reads pickles up to protocol 4. It colors by the category of an allocation, and
requires a category "unknown" if there are any.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
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


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """An allocation of a planned step, from the moment with the number `first` to that with the number `last`."""

    first: int
    last: int
    bytes: int
    category: str  # decides the color in the viewer
    frames: Frames  # the innermost one first


def snapshot(plan: PlannedStep) -> dict[str, Any]:
    """Return a snapshot of a planned step: all allocations with times and sources, and the final state."""
    running = plan.running
    moments = Moments.of(running.chosen, running.costs)
    ends = [microseconds(moments, moment) for moment in moments.moments]
    times = [int(begin) for begin, _ in ends] + [int(max((end for _, end in ends), default=0.0))]
    return snapshot_of(times, [_allocation(running.graph, life) for life in moments.lives])


def snapshot_of(times: Sequence[int], allocations: Iterable[Allocation]) -> dict[str, Any]:
    """Return the snapshot of some allocations.

    Args:
        times: microseconds at which each moment begins, and at which the last one ends.
    """
    replay = _Replay(times, allocations)
    replay.run()
    return {"device_traces": [replay.events()], "segments": replay.segments()}


def save_snapshot(plan: PlannedStep, path: str | os.PathLike[str]) -> None:
    """Write the snapshot of a planned step to a file."""
    write(snapshot(plan), path)


def write(snapshot: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a snapshot to a file."""
    with open(path, "wb") as file:
        pickle.dump(snapshot, file, protocol=_PROTOCOL)


@dataclass(eq=False)
class _Block:
    """An allocation with the address that it was assigned."""

    what: Allocation
    address: int


@dataclass(eq=False)
class _Replay:
    """Replays the allocations of a step moment by moment; at each moment, ended allocations are freed first."""

    times: Sequence[int]
    allocations: Iterable[Allocation]
    addresses: Addresses = field(default_factory=Addresses)
    alive: list[_Block] = field(default_factory=list)
    trace: list[dict[str, object]] = field(default_factory=list)

    def run(self) -> None:
        """Process the moments once. O(allocations log allocations + allocations * free extents)."""
        count = len(self.times) - 1
        begins: list[list[Allocation]] = [[] for _ in self.times]
        ends: list[list[_Block]] = [[] for _ in self.times]
        for what in self.allocations:
            begins[min(what.first, count)].append(what)
        for place, at in enumerate(self.times):
            for block in ends[place]:
                self._free(block, at)
            for what in begins[place]:
                block = self._allocate(what, at)
                if what.last < count:
                    ends[what.last + 1].append(block)
                else:
                    self.alive.append(block)

    def _allocate(self, what: Allocation, at: int) -> _Block:
        block = _Block(what, BASE + self.addresses.take(what.bytes))
        self._note("alloc", block, at, category=what.category)
        return block

    def _free(self, block: _Block, at: int) -> None:
        self.addresses.give_back(block.address - BASE, block.what.bytes)
        for action in ("free_requested", "free_completed"):
            self._note(action, block, at)

    def _note(self, action: str, block: _Block, at: int, **more: str) -> None:
        self.trace.append(_event(action, block.address, block.what.bytes, at, block.what.frames, **more))

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
        in_use = sum(block.what.bytes for block in self.alive)
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
        found.append(_block(block.address, block.what.bytes, "active_allocated", block.what.frames))
        address = block.address + block.what.bytes
    if end > address:
        found.append(_block(address, end - address, "inactive", []))
    return found


def _block(address: int, size: int, state: str, frames: Frames) -> dict[str, object]:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames}


def _event(action: str, address: int, size: int, at: int, frames: Frames, **more: str) -> dict[str, object]:
    what = {"action": action, "addr": address, "size": size, "stream": _STREAM, "time_us": at}
    return what | {"frames": frames, "pool_id": _POOL} | more


def _allocation(joint: StepGraph, life: Life) -> Allocation:
    frame = source_of(joint, life).frame
    frames = frames_of(label_of(joint, life), *((frame.file, frame.line, frame.function) if frame else ()))
    return Allocation(first=life.first, last=life.last, bytes=life.bytes, category=life.kind.value, frames=frames)


def frames_of(label: str, file: str = "", line: int = 0, function: str = "") -> Frames:
    """Return the label of an allocation as the innermost frame, and the line of its source, if there is one.

    Semicolons are replaced, since they separate frames in flame graphs.
    """
    found: Frames = [{"filename": "fxremat", "line": 0, "name": label.replace(";", ",")}]
    if file:
        file, function = (printable(text).replace(";", ",") for text in (file, function))
        found.append({"filename": file, "line": line, "name": function})
    return found
