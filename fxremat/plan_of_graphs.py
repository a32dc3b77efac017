"""Describes the plan of a model that dynamo captures as several graphs: what each call recomputes, in one budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from fxremat.search.call_programs import CallProgram
from fxremat.search.paths import Path
from fxremat.step.step_graph import StepGraph
from fxremat.units import format_bytes, format_seconds

_NAME, _COUNT = 30, 11  # column widths of a call's name and of the number of calls
_MOST = 24  # maximum number of lines for calls
_FUNCTIONS = 4  # maximum number of listed functions that dynamo left to Python
_INDENT = 18  # column in which figures begin


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedCall:
    """One call of a captured graph in a step, with the program that runs it.

    A program is the order in which ops run, recomputations included.
    """

    name: str  # name of the module whose parameters the call takes; without parameters, the code line of its first op
    graph: StepGraph
    program: CallProgram
    saved: int  # bytes that the call saves for its backward, besides inputs and outputs
    before: int  # bytes that are allocated when the call begins, and belong to no call of a graph
    fastest: float  # seconds without any recomputation

    @property
    def again(self) -> int:
        """Number of recomputations."""
        return len(self.program.order.ops) - len(self.graph.ops)


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownPath:
    """A sequence of graph calls that some steps made, such as one side of a branch."""

    calls: int
    share: float  # fraction of all steps that made these calls
    peak: int | None  # peak bytes; None: nothing fits into the budget


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanOfGraphs:
    """The plan of a model that is captured as several graphs, for the calls that the last step made; it prints as text.

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
    ) -> PlanOfGraphs:
        """Return the plan for one sequence of calls; `names` and `graphs` have one entry per call."""
        calls = tuple(
            PlannedCall(
                name=name,
                graph=graph,
                program=program,
                saved=saved,
                before=node.before,
                fastest=node.choices[0].time,
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
            predicted_peak=path.peak,
            keep_all_peak=keep_all_peak,
            minimum=minimum,
            calls=calls,
            paths=paths,
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
    def headline(self) -> str:
        """A one-line summary of the plan, for logs."""
        return (
            f"{self.graphs} {'graph' if self.graphs == 1 else 'graphs'}, {len(self.calls)} calls a step: peak "
            f"{format_bytes(self.predicted_peak)} of {format_bytes(self.budget)} allowed, time "
            f"{format_seconds(self.predicted_time)}, {self.predicted_time / self.keep_all_time:.2f}x of keeping "
            f"everything; the least budget is {format_bytes(self.minimum)}"
        )

    def describe(self) -> str:
        """Return the plan as text of at most 100 columns."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"fxremat plan of {self.model}, {self.graphs} graphs, {len(self.calls)} calls a step"
        if self.broken_at:
            yield f"{'broken at':{_INDENT}}{self.broken_at}"[:100]
        spared = self.keep_all_peak - self.predicted_peak
        figures = {
            "budget": format_bytes(self.budget),
            "predicted peak": f"{format_bytes(self.predicted_peak)}, {format_bytes(spared)} less than keeping "
            "everything",
            "predicted time": f"{format_seconds(self.predicted_time)} in graphs, "
            f"{self.predicted_time / self.keep_all_time:.3f}x of keeping everything",
            "least budget": format_bytes(self.minimum),
            "between graphs": f"{format_bytes(max(call.before for call in self.calls))} at most when a call begins: "
            "inputs, outputs, and ops that stay Python",
        }
        for name, figure in figures.items():
            yield f"{name:{_INDENT}}{figure}"
        for function in self.python[:_FUNCTIONS]:
            yield f"{'stays Python':{_INDENT}}{function}: only what it calls is planned"[:100]
        if len(self.paths) > 1:
            yield f"{'paths':{_INDENT}}{len(self.paths)} are known: " + ", ".join(
                f"{path.calls} calls in {path.share:.0%}" for path in self.paths[:4]
            ) + (", ..." if len(self.paths) > 4 else "")
        yield ""
        yield f"{'modules':{_NAME}}{'calls':>{_COUNT}}{'saved each':>14}{'runs again each':>20}"
        rows = [list(group) for _, group in groupby(self.calls, key=lambda call: (id(call.graph), call.program))]
        for row in rows[:_MOST]:
            yield _row(row)
        if len(rows) > _MOST:
            yield f"and {sum(map(len, rows[_MOST:]))} calls more"

    def __str__(self) -> str:
        return self.describe()

    def __repr__(self) -> str:
        return f"<fxremat plan: {self.headline}>"


def _row(calls: Sequence[PlannedCall]) -> str:
    first = calls[0]
    name = first.name if len(calls) == 1 else f"{first.name} to {calls[-1].name}"
    again = f"{first.again} of {first.graph.forward_count} ops" if first.again else "nothing"
    saved = format_bytes(max(call.saved for call in calls))
    return f"{name[-_NAME + 1 :]:{_NAME}}{len(calls):>{_COUNT}}{saved:>14}{again:>20}"
