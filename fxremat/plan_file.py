"""Saves plans to files and loads them, and checks that a loaded plan belongs to the step captured here.

    {"format": 2, "sha256": "...", "plan": {"is": "PlanData", ...}}

A plan belongs to steps of the same ops on values of the same sizes (`StepGraph.digest`), on the same device, with the
same PyTorch and the same settings (`cost.environment`): its bytes were measured there.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fxremat.chains.join_schedule import JoinSchedule
from fxremat.chains.schedule import Schedule
from fxremat.chains.simulate_join import JoinTimeline
from fxremat.cost.environment import environment
from fxremat.cost.layouts import Strides
from fxremat.errors import PlanMismatch
from fxremat.graphs.accounting import device_of
from fxremat.graphs.captured import Captured, places_of
from fxremat.passes.compress import Compression
from fxremat.passes.lower import Handles
from fxremat.planned_step import Means, WeightBudget
from fxremat.search.candidate import (
    Candidate,
    Communicating,
    FromJoin,
    FromSchedule,
    Frontier,
    Refined,
    Transferred,
)
from fxremat.slices.rewrite import SlicedRegion, Slicing
from fxremat.step.as_json import Instead, Unreadable, read, written
from fxremat.step.communicating import Communication, ProgramWithCommunication
from fxremat.step.costs import Costs, Link
from fxremat.step.layout import BlockLayout, Layout
from fxremat.step.liveness import Memory, Sizes
from fxremat.step.program import Order, Program, Role, Step, Transfer
from fxremat.step.source import Frame, Source
from fxremat.step.step_graph import Kind, Op, Origin, StepGraph, Value
from fxremat.step.transferred import ProgramWithTransfers
from fxremat.units import shortened

FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class PlanData:
    """The part of a plan that is written to files; fields mean the same as those of `PlannedStep`."""

    budget: int
    chosen: Candidate
    alternatives: Frontier
    costs: Costs
    device: str
    timed: str
    link: Link | None
    slices: tuple[SlicedRegion, ...]
    slicing: Slicing | None
    weights: WeightBudget | None
    environment: Mapping[str, Any]
    means: tuple[Means, ...] = ()
    compression: Compression | None = None
    more_ways: bool = False
    layouts: Mapping[str, Strides] = field(default_factory=dict)

    @property
    def graph(self) -> StepGraph:
        """The graph of the training step that the plan was made for."""
        return self.chosen.layout.graph

    def on(self, captured: Captured, name: str) -> PlanData:
        """Return this plan, read from a file, for a step captured in this process.

        Its ops and values are replaced by those of the captured step.

        Args:
            name: the name of the plan, for messages.

        Raises:
            PlanMismatch: the captured step differs from the plan's, or device, PyTorch or settings do.
        """
        here = as_plain(environment(device_of(captured)))
        for what, before in self.environment.items():
            if here.get(what) != before:
                known, found = _shown(what, before), _shown(what, here.get(what))
                raise PlanMismatch(f"{name} was made for {known}, and here is {found}")
        # graph of the step as it was captured, before ops were replaced by slices
        kept = self.alternatives.keep_all.layout.graph
        if captured.digest != kept.digest:
            raise PlanMismatch(f"{name} is of another step: {_difference(kept, captured)}")
        captured = captured.dropping(places_of(captured, kept.dropped_outputs))
        here = {captured.digest: captured}
        rewritten = [self.slicing.of(captured).joint] if self.slicing else []
        rewritten += [self.compression.of(captured)] if self.compression else []
        here |= {joint.digest: joint for joint in rewritten}
        if self.graph.digest not in here:
            raise PlanMismatch(f"{name} rewrites the step otherwise than this fxremat would: make it again")
        moved: PlanData = read(written(self, SHARED, NUMBERS), CLASSES, {StepGraph: lambda known: here[known.digest]})
        return moved


# classes whose objects are written to a file once, even if several objects refer to them
SHARED = (StepGraph, Layout, Program, Order)
NUMBERS: Instead = {Captured: lambda captured: captured.step}  # how a captured step is written: without its fx nodes
CLASSES = (
    *(PlanData, Candidate, Frontier, FromSchedule, FromJoin, Refined, Transferred, Communicating, Costs, Sizes, Link),
    *(SlicedRegion, Slicing, Compression, WeightBudget, Handles, Means),
    *(StepGraph, Op, Value, Origin, Kind, Source, Frame, Layout, BlockLayout, Order, Program, Step, Transfer, Role),
    *(ProgramWithTransfers, ProgramWithCommunication, Communication, Memory, Schedule, JoinSchedule, JoinTimeline),
)


def _shown(what: str, value: object) -> str:
    return str(value) if what in ("device", "measuring") else f"{what} {value}"


def _difference(one: StepGraph, other: StepGraph) -> str:
    """Return a clause that describes the first difference between a plan's step and the captured step."""
    if one.model != other.model:
        return f"it was made for {one.model}, and this is {other.model}"
    if len(one.ops) != len(other.ops):
        return f"it has {len(one.ops)} ops, and this step of {other.model} has {len(other.ops)}"
    pairs = zip(one.ops, other.ops, strict=True)
    differing = [(a, b) for a, b in pairs if replace(a, name=b.name, sequence=b.sequence) != b]
    if not differing:
        return f"values of {other.model} are of other sizes, or another part of them is returned"
    a, b = differing[0]
    return f"its {a.name} is {a.key}, and here {b.name} is {b.key}" if a.key != b.key else f"{a.name} differs"


def as_plain(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return an environment (device, versions, settings) as it reads after a round trip through JSON."""
    plain: dict[str, Any] = read(written(found), ())
    return plain


def without_the_rest(frontier: Frontier, chosen: Candidate) -> Frontier:
    """Return a frontier reduced to what a file needs beside the chosen candidate.

    Schedules lose their order of ops, which can be derived. Candidates with other slices than the chosen one
    are dropped. If the chosen plan has copies to the host or communication, which make candidates large, only
    the chosen candidate and the one with the lowest peak remain.
    """
    graphs = (chosen.layout.graph, frontier.keep_all.layout.graph)
    candidates = tuple(each for each in frontier.candidates if each.layout.graph in graphs)
    frontier = replace(frontier, candidates=candidates)
    if chosen.transfers or chosen.communication:
        least = frontier.candidates[-1]
        return replace(frontier, candidates=tuple(dict.fromkeys([chosen, least])))

    def short(candidate: Candidate) -> Candidate:
        origin = candidate.origin
        if candidate is chosen or not isinstance(origin, FromSchedule):
            return candidate
        return replace(candidate, origin=replace(origin, known=None))

    return frontier.each(short)


def save(plan: PlanData, path: str | os.PathLike[str]) -> None:
    """Write a plan to a file atomically. Raises `OSError`."""
    content = json.dumps(written(plan, SHARED, NUMBERS), separators=(",", ":"))
    file = {"format": FORMAT, "sha256": _digest(content)}
    write_whole(Path(path), f"{json.dumps(file)[:-1]}, \"plan\": {content}}}\n".encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically, even if other threads or processes write the same file. Raises `OSError`."""
    new = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        new.write_bytes(content)
        new.replace(path)
    except OSError as error:
        error.filename, error.filename2 = os.fspath(path), None  # not those of the temporary file
        raise
    finally:
        new.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> PlanData:
    """Read a plan from a file. Raises `OSError`, and `PlanMismatch` if the file contains no plan or was edited."""
    if not isinstance(path, str | os.PathLike):
        raise PlanMismatch(f"the path of a plan is {shortened(path)}; it is a str or a Path")
    name = os.fspath(path)
    try:
        file = json.loads(Path(path).read_text())
        kind, known = file["format"], file["sha256"]
        content = file["plan"]
    except (ValueError, KeyError, TypeError):
        raise PlanMismatch(f"{name} holds no plan: write one with plan.save(path)") from None
    if kind != FORMAT:
        raise PlanMismatch(f"{name} is a plan of format {kind}, and this fxremat reads {FORMAT}: make it again")
    if _digest(json.dumps(content, separators=(",", ":"))) != known:
        raise PlanMismatch(f"{name} is not as it was written: make the plan again, and save it")
    try:
        found = read(content, CLASSES)
    except Unreadable as error:
        raise PlanMismatch(f"{name} holds no plan: {error}") from None
    if not isinstance(found, PlanData):
        raise PlanMismatch(f"{name} holds no plan")
    return found


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


NAMES = tuple(each.name for each in fields(PlanData) if each.name != "environment")
