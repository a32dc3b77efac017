"""A lower bound on the time of any program of a step graph within a budget, by linear programming.

The LP looks at the step while a few backward ops b_1 < b_2 < ... < b_p run; window w is the time from b_w to
the next of them. Its variables are fractions from 0 to 1, relaxed from the decisions of a program, which are 0
or 1:

    s[v,i]    forward value v is alive while b_i runs
    x[f,w]    forward op f runs in window w at least once

    minimize  sum of all ops once + sum seconds(f) x[f,w]
    alive     s[v,i] <= s[v,i-1] + x[maker(v),i-1]                   from the second instant on
    run       x[f,w] <= s[u,w] + x[maker(u),w]                       for every u that f reads
    read      1 <= s[u,w] + x[maker(u),w]                            for every u that the backward ops of window w read
    memory    s[u,i] = 1 for every u that b_i reads
              sum bytes(v) s[v,i] + gradients alive at b_i + what b_i writes + its workspace <= M

Every program that recomputes forward values and runs the backward in its captured order satisfies all of these,
whichever ops it runs again and how often. Ours; the relaxation is that of Checkmate (Jain et al., MLSys 2020) on few
stages.
Cost: an LP of about (values + ops) p variables, HiGHS; a second or two for a GPT of 12 layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from fxremat.step.costs import Costs
from fxremat.step.step_graph import Op, Origin, StepGraph

# approximate number of backward ops during which memory is limited; evenly spaced, besides the two with most
# memory
INSTANTS = 8
_Variable = tuple[str, int, int]  # ("alive", value, instant) or ("runs", op, window)


def lower_bound(graph: StepGraph, costs: Costs, budget: int, *, instants: int = INSTANTS) -> float:
    """Return a lower bound on the seconds of any program within `budget` bytes; infinite if provably none fits."""
    once = sum(costs.seconds)
    fixed = _fixed(graph, costs)
    rows = (_Rows(graph, costs, budget, marks, fixed) for marks in _watched(graph, fixed, instants))
    return once + max((program.least() for program in rows), default=0.0)


def _watched(graph: StepGraph, fixed: dict[int, int], instants: int) -> Iterator[list[int]]:
    """Yield two lists of backward ops during which memory is limited: several ops, and only the first one."""
    ops = [op.index for op in graph.backward_ops]
    if not ops:
        return
    step = max(1, len(ops) // instants)
    tight = sorted(ops, key=lambda op: -fixed[op])
    yield sorted({*ops[::step], *tight[:2]})
    yield [ops[0]]


def _fixed(graph: StepGraph, costs: Costs) -> dict[int, int]:
    """Return for each backward op the bytes alive while it runs that recomputation cannot free.

    These are gradients, outputs and the op's workspace.
    """
    sizes = costs.sizes.values
    pinned = graph.pinned
    last: dict[int, int] = {}
    for op in graph.backward_ops:
        last |= dict.fromkeys((*op.reads, *op.writes), op.index)
    tangents = {v.index for v in graph.values if v.origin is Origin.TANGENT}
    held = pinned | (tangents & graph.held_tangents) | (tangents - last.keys())
    alive = {v.index for v in graph.values if v.origin is Origin.FORWARD} & pinned | tangents
    level = sum(sizes[value] for value in alive) + costs.sizes.root
    needs = {}
    for op in graph.backward_ops:
        level += sum(sizes[value] for value in op.writes)
        needs[op.index] = level + costs.sizes.workspace[op.index]
        ended = {value for value in (*op.reads, *op.writes) if last[value] == op.index} - held
        level -= sum(sizes[v] for v in ended if graph.values[v].origin in (Origin.BACKWARD, Origin.TANGENT))
    return needs


@dataclass
class _Rows:
    """The rows and columns of the linear program; a variable gets its column when it first occurs."""

    graph: StepGraph
    costs: Costs
    budget: int
    marks: list[int]
    fixed: dict[int, int]
    columns: dict[_Variable, int] = field(default_factory=dict)
    entries: list[tuple[int, int, float]] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        pinned = self.graph.pinned
        forward = [v for v in self.graph.values if v.origin is Origin.FORWARD and v.index not in pinned]
        self.maker = {v.index: v.producer for v in forward if v.producer is not None}

    def least(self) -> float:
        """Solve the LP; return a lower bound on the seconds spent on recomputation."""
        for instant in range(len(self.marks)):
            self._memory(instant)
            self._window(instant)
        return self._solve()

    def _at_most(self, limit: float, *terms: tuple[float, _Variable]) -> None:
        """Add the constraint: the sum of factor * variable over the terms is at most `limit`."""
        for factor, variable in terms:
            column = self.columns.setdefault(variable, len(self.columns))
            self.entries.append((len(self.limits), column, factor))
        self.limits.append(limit)

    def _memory(self, instant: int) -> None:
        op = self.graph.ops[self.marks[instant]]
        read = {value for value in op.reads if value in self.maker}
        room = self.budget - self.fixed[op.index] - sum(self.costs.sizes.values[value] for value in read)
        others = [value for value in self.maker if value not in read and self.costs.sizes.values[value]]
        terms = [(float(self.costs.sizes.values[value]), ("alive", value, instant)) for value in others]
        self._at_most(float(room), *terms)
        for value in read:
            self._at_most(-1.0, (-1.0, ("alive", value, instant)))
        if instant:
            for value in self.maker:
                self._at_most(0.0, (1.0, ("alive", value, instant)), *self._there(value, instant - 1))

    def _there(self, value: int, window: int) -> list[tuple[float, _Variable]]:
        """Return the LP terms -s - x: the value is alive when the window begins, or is recomputed within it."""
        return [(-1.0, ("alive", value, window)), (-1.0, ("runs", self.maker[value], window))]

    def _window(self, window: int) -> None:
        for index in sorted(set(self.maker.values())):
            op = self.graph.ops[index]
            for value in self._of_the_forward(op.again_reads):
                self._at_most(0.0, (1.0, ("runs", index, window)), *self._there(value, window))
        for value in {v for op in self._backwards(window) for v in self._of_the_forward(op.reads)}:
            self._at_most(-1.0, *self._there(value, window))

    def _of_the_forward(self, values: tuple[int, ...]) -> list[int]:
        return [value for value in values if value in self.maker]

    def _backwards(self, window: int) -> tuple[Op, ...]:
        """Return the backward ops after the `window`-th one at which memory is limited, up to the next one, included.
        """
        end = self.marks[window + 1] + 1 if window + 1 < len(self.marks) else len(self.graph.ops)
        return self.graph.ops[self.marks[window] + 1 : end]

    def _solve(self) -> float:
        """Return the LP's optimum, the least seconds of recomputation; infinite if infeasible, 0.0 if not solved."""
        if not self.entries:  # there is nothing to recompute, so only fixed bytes have to be within the budget
            return 0.0 if min(self.limits, default=0.0) >= 0 else math.inf
        from scipy.optimize import linprog  # the import takes a second, so it is done only here
        from scipy.sparse import coo_array

        seconds = np.zeros(len(self.columns))
        for (kind, index, _), place in self.columns.items():
            if kind == "runs":
                seconds[place] = self.costs.seconds[index]
        rows, columns, factors = zip(*self.entries, strict=True)
        matrix = coo_array((factors, (rows, columns)), shape=(len(self.limits), len(self.columns))).tocsr()
        # some rows have coefficients in bytes and others in fractions, so each is scaled to a largest
        # coefficient of 1
        weight = 1 / np.maximum(1.0, abs(matrix).max(axis=1).toarray().ravel())
        found = linprog(
            seconds / max(seconds.max(), 1e-30),
            A_ub=matrix.multiply(weight[:, None]).tocsr(),
            b_ub=np.array(self.limits) * weight,
            bounds=(0.0, 1.0),
            method="highs",
        )
        if found.status == 2:
            return math.inf
        return max(0.0, float(found.fun or 0.0) * seconds.max() * (1 - 1e-6)) if found.status == 0 else 0.0
