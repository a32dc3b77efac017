"""The plan of a model that is several graphs as data: a program for each call of a step, within one budget."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Self

from fxremat.cost.device_memory import DeviceMemory
from fxremat.search.call_programs import CallProgram
from fxremat.search.paths import Node, Path
from fxremat.step.step_graph import StepGraph
from fxremat.units import format_bytes, format_count, format_seconds

_NAME, _COUNT = 30, 11  # columns of a name, and of a number of calls
_MOST = 24  # lines of calls that are printed
_FUNCTIONS = 4  # functions that stay Python that are printed
_INDENT = 18  # columns before a figure
_WIDTH = 100  # columns of a line with a figure, at most
_PATHS = 4  # paths that are printed


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedCall:
    """One call of a captured graph in a step, with the program that runs it.

    A program is the order in which ops run, recomputations included.
    """

    name: str  # name of the module whose parameters the call takes; without parameters, the code line of its first op
    graph: StepGraph
    program: CallProgram
    saved: int  # bytes that it keeps from its forward to its backward, besides inputs and outputs
    before: int  # bytes alive when it begins that belong to no call
    fastest: float  # seconds if nothing runs again
    node: Node  # its place in the tree of known paths, with what was measured there

    @property
    def shown_again(self) -> str:
        """The number of ops of the forward that run again, as text; an op may do so several times."""
        repeated = sum(count > 1 for count in Counter(self.program.order.ops).values())
        return f"{repeated} of {self.graph.forward_count} ops" if repeated else "nothing"


@dataclass(frozen=True)
class Moment:
    """A part of a step: the forward or the backward of a call, or what comes behind one of these until the next."""

    call: int  # the number of the call in the step, from 0
    phase: str  # "forward", "backward" or "between"
    seconds: float
    held: int  # the calls up to this number, exclusive, have saved something for their backward
    saved: int  # bytes that these have saved
    between: int  # bytes that belong to no call: inputs, outputs, ops that stay Python, the loss, gradients
    working: int  # bytes that the call needs meanwhile, at most

    @property
    def peak(self) -> int:
        """The most bytes that are allocated meanwhile."""
        return self.saved + self.between + self.working


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownPath:
    """A sequence of graph calls that some steps made, such as one side of a branch."""

    calls: int
    share: float  # fraction of all steps that made these calls
    peak: int | None  # peak bytes, at the largest sizes; None: nothing fits into the budget

    def beside(self, other: KnownPath) -> KnownPath:
        """Return these calls together with the same ones at other sizes."""
        peaks = (self.peak, other.peak)
        peak = None if None in peaks else max(filter(None, peaks), default=0)
        return replace(self, share=self.share + other.share, peak=peak)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedGraphs:
    """The plan for a model that is several graphs, on the path of the last step, with all figures about it.

    Bytes are above what was allocated when the model's forward began. Other sequences of calls, such as the
    other side of a branch, are planned too (`paths`).
    """

    model: str  # the name of the model's class
    broken_at: str  # code line at which the first graph ends; "": unknown
    python: tuple[str, ...]  # functions that call graphs but run as Python code, with their lines
    budget: int
    predicted_peak: int
    keep_all_peak: int  # peak bytes without any recomputation, which budgets in percent refer to
    minimum: int  # smallest budget in bytes with which all known sequences of calls can run
    calls: tuple[PlannedCall, ...]
    paths: tuple[KnownPath, ...]
    weights: int = 0  # bytes of parameters that live on the host
    estimated: str = ""  # what is estimated, and for which device, if it was not measured
    # the memory of everything else on a device that the user named to plan for; None: the user named none
    on_device: DeviceMemory | None = None

    @classmethod
    def of(
        cls,
        path: Path,
        names: Sequence[str],
        graphs: Sequence[StepGraph],
        *,
        model: str,
        broken_at: str,
        python: tuple[str, ...],
        budget: int,
        keep_all_peak: int,
        minimum: int,
        paths: tuple[KnownPath, ...],
        weights: int = 0,
        updates: int = 0,
        estimated: str = "",
    ) -> Self:
        """Return the plan of a path; `names` and `graphs` are those of its calls.

        Args:
            updates: bytes on the device during `optimizer.step()`, where that moves parameters from and to the host.
        """
        calls = tuple(
            PlannedCall(
                name=name,
                graph=graph,
                program=program,
                saved=saved,
                before=node.before,
                fastest=node.everything.time,
                node=node,
            )
            for name, graph, node, program, saved in zip(
                names, graphs, path.nodes, path.programs, path.saved, strict=True
            )
        )
        return cls(
            model=model,
            broken_at=broken_at,
            python=python,
            budget=budget,
            predicted_peak=max(path.peak, updates),
            keep_all_peak=keep_all_peak,
            minimum=minimum,
            calls=calls,
            paths=paths,
            weights=weights,
            estimated=estimated,
        )

    @property
    def graphs(self) -> int:
        """Number of different graphs that the step calls."""
        return len({id(call.graph) for call in self.calls})

    @property
    def predicted_time(self) -> float:
        """Seconds of all graph calls, without the Python code between them."""
        return sum(call.program.time for call in self.calls)

    @property
    def keep_all_time(self) -> float:
        """Seconds of all graph calls without any recomputation."""
        return sum(call.fastest for call in self.calls)

    @property
    def hosted(self) -> int:
        """Bytes of saved values that wait on the host when the forward has ended."""
        return sum(call.program.hosted for call in self.calls)

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """The step from its first call to the backward of that call; the largest peak is `predicted_peak`."""
        found, saved = [], 0
        for number, call in enumerate(self.calls):
            program, node = call.program, call.node
            seconds = program.forward_time
            found.append(Moment(number, "forward", seconds, number, saved, node.before, program.forward))
            saved += call.saved
            found.append(Moment(number, "between", 0.0, number + 1, saved, node.after, 0))
        for number, call in reversed(list(enumerate(self.calls))):
            program, node = call.program, call.node
            if not node.idle:
                seconds, working = program.time - program.forward_time, node.backward(program)
                found.append(Moment(number, "backward", seconds, number + 1, saved, node.back, working))
            saved -= call.saved
            if not node.idle:
                found.append(Moment(number, "between", 0.0, number, saved, node.behind, 0))
        return tuple(found)

    @property
    def headline(self) -> str:
        """A one-line summary of the plan, for logs."""
        return (
            f"{self._counted}: peak {format_bytes(self.predicted_peak)} of {format_bytes(self.budget)} allowed, time "
            f"{format_seconds(self.predicted_time)}, {self.predicted_time / self.keep_all_time:.2f}x of keeping "
            f"everything; the least budget is {format_bytes(self.minimum)}"
        )

    @property
    def _counted(self) -> str:
        return f"{format_count(self.graphs, 'graph')}, {format_count(len(self.calls), 'call')} a step"

    def describe(self, *, full: bool = False) -> str:
        """Return the plan as text of at most 100 columns; `full` adds the calls that do not fit on a page.

        If the user named a device and its memory size is known, the last lines tell whether the step fits there.
        """
        return "\n".join(self._lines(len(self.calls) if full else _MOST))

    def _lines(self, most: int) -> Iterator[str]:
        yield f"fxremat plan of {self.model}, {self._counted}"
        for name, figure in self.facts:
            yield from _wrapped(name, figure)
        yield ""
        yield f"{'modules':{_NAME}}{'calls':>{_COUNT}}{'saved each':>14}{'runs again each':>20}"
        for row in self.rows[:most]:
            yield _row(row)
        if len(self.rows) > most:
            yield f"and {sum(map(len, self.rows[most:]))} calls more"
        if self.on_device and self.on_device.device.memory is not None:
            yield from ("", str(self.on_device.device))
            for name, figure in self.on_device.facts(
                budget=self.budget, peak=self.predicted_peak, least=self.minimum
            ):
                yield from _wrapped(name, figure)

    @property
    def rows(self) -> list[list[PlannedCall]]:
        """The calls, with those that follow each other and run the same program of the same graph together."""
        return [list(group) for _, group in groupby(self.calls, key=lambda call: (id(call.graph), call.program))]

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The figures of the plan as text, each with its name."""
        return list(self._facts())

    def _facts(self) -> Iterator[tuple[str, str]]:
        if self.broken_at:
            yield "broken at", self.broken_at
        spared = format_bytes(self.keep_all_peak - self.predicted_peak)
        slower = self.predicted_time / self.keep_all_time
        before = format_bytes(max(call.before for call in self.calls))
        yield "budget", format_bytes(self.budget)
        yield "predicted peak", f"{format_bytes(self.predicted_peak)}, {spared} less than keeping everything"
        yield "predicted time", f"{format_seconds(self.predicted_time)} in graphs, {slower:.3f}x of keeping everything"
        if self.estimated:
            yield "estimated", self.estimated
        of_all = ", for all known paths" if len(self.paths) > 1 else ""
        yield "least budget", f"{format_bytes(self.minimum)}{of_all}"
        yield "between graphs", f"{before} at most when a call begins: inputs, outputs, and ops that stay Python"
        if self.hosted:
            copying = sum(1 for call in self.calls if call.program.hosted)
            calls = format_count(copying, "call")
            yield "offloads", f"{format_bytes(self.hosted)} of what {calls} saved wait on the host"
        if self.weights:
            yield "weights", f"{format_bytes(self.weights)} live on the host; each call brings those that it reads"
        for function in self.python[:_FUNCTIONS]:
            yield "stays Python", f"{function}: only what it calls is planned"
        if len(self.paths) > 1:
            shown = [f"{format_count(path.calls, 'call')} in {path.share:.0%}" for path in self.paths[:_PATHS]]
            more = ["..."] if len(self.paths) > _PATHS else []
            yield "paths", f"{len(self.paths)} are known: {', '.join([*shown, *more])}"


def _wrapped(name: str, figure: str) -> list[str]:
    return textwrap.wrap(figure, _WIDTH, initial_indent=f"{name:{_INDENT}}", subsequent_indent=" " * _INDENT)


def _row(calls: Sequence[PlannedCall]) -> str:
    first = calls[0]
    name = named(first.name, calls[-1].name if len(calls) > 1 else "", _NAME - 1)
    saved = format_bytes(max(call.saved for call in calls))
    return f"{name:{_NAME}}{len(calls):>{_COUNT}}{saved:>14}{first.shown_again:>20}"


def named(first: str, last: str, most: int) -> str:
    """Return the name of the first and last module of a row, without outer modules as far as `most` columns need that.

    >>> named("model.visual.blocks.0.attn.qkv", "", 29), named("model.blocks.0.up", "model.blocks.11.down", 29)
    ('...visual.blocks.0.attn.qkv', '...0.up to ...11.down')
    """
    if not last:
        return inner(first, most)
    together = f"{first} to {last}"
    each = (most - len(" to ")) // 2
    return together if len(together) <= most else f"{inner(first, each)} to {inner(last, each)}"


def inner(name: str, most: int) -> str:
    """Return the inner modules of a module's name that have room in `most` columns, after an ellipsis if some do not.
    """
    if len(name) <= most:
        return name
    parts = name.split(".")
    tails = (f"...{'.'.join(parts[place:])}" for place in range(1, len(parts)))
    return next((tail for tail in tails if len(tail) <= most), f"...{name[3 - most :]}")
