"""The class `Plan`: how one training step runs within a budget, printable as text and as an HTML page."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fxremat.cost.environment import environment
from fxremat.errors import FxrematError
from fxremat.graphs.accounting import device_of
from fxremat.graphs.captured import Captured
from fxremat.plan_check import PlanCheck, check
from fxremat.plan_file import NAMES, PlanData, as_plain, load, save, without_the_rest
from fxremat.planned_step import PlannedStep
from fxremat.show.difference import Difference
from fxremat.show.frontier import FrontierTable
from fxremat.show.modules import ModuleNode, modules_of
from fxremat.show.moments import Moments
from fxremat.show.notebook import framed
from fxremat.show.page import page
from fxremat.show.plot import plot
from fxremat.show.snapshot import save_snapshot, snapshot
from fxremat.show.text import describe, labelled
from fxremat.show.trace import save_trace, trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Plan(PlannedStep):
    """The plan of one training step within a budget, printable as text and as an HTML page.

    Bytes are above what was allocated when the forward began; seconds are those of the device that the plan is
    for.
    """

    @cached_property
    def modules(self) -> ModuleNode:
        """A tree of the model's modules with the bytes that each saves, recomputes and offloads, and its seconds."""
        return modules_of(self)

    @cached_property
    def moments(self) -> Moments:
        """A timeline of the step: when each op begins and ends, and what is allocated on the device meanwhile."""
        return Moments.of(self.running.chosen, self.running.costs)

    @cached_property
    def frontier(self) -> FrontierTable:
        """(peak in bytes, time in seconds) of each alternative plan, fastest first; prints as a table."""
        return FrontierTable.of(self)

    def at(self, **sizes: object) -> Plan:
        """Plan the same step for inputs of other sizes; this takes milliseconds if known programs can be reused.

            plan.at(tokens=300)            size 300 in the last symbolic dimension of the input `tokens`
            plan.at(tokens=(8, 300))       the shape of `tokens`
            plan.at(tokens={0: 8})         size 8 in dimension 0

        Sizes of other inputs that equal the present ones change together with them, unless they are given too.

        Raises:
            BudgetTooSmall: no plan fits at these sizes.
            FxrematError: the plan has no symbolic sizes, or the input has none.
        """
        if not (self.step and self.step.sizes):
            raise FxrematError(
                "this plan is of fixed sizes: with fxremat.compile(..., dynamic=True), or "
                "dynamic={'tokens': {1: (16, 512)}}, there are plans for others"
            )
        made: Plan = self.step.at(**sizes).plan()
        return made

    def within(self, mem: int | str) -> Plan:
        """Plan the same step within another budget, in any form of `mem`; nothing is captured or measured again.

        Raises:
            BudgetTooSmall: no plan fits.
            InvalidBudget: `mem` has an invalid form.
        """
        if self.step is None:
            raise FxrematError("this plan was read from a file, and has no step to plan again: capture the model")
        made: Plan = self.step.plan(mem)
        return made

    def to_html(self) -> str:
        """Return an HTML page that shows the plan, with its memory over the step as a picture."""
        return page(self)

    def snapshot(self) -> dict[str, Any]:
        """Return the planned allocations in the format of PyTorch's memory snapshots."""
        return snapshot(self)

    def save_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write the planned allocations to a file that pytorch.org/memory_viz and `torch.cuda._memory_viz` open."""
        save_snapshot(self, path)

    def trace(self) -> dict[str, Any]:
        """Return the planned step in Chrome's Trace Event Format."""
        return trace(self)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the planned step to a JSON file that ui.perfetto.dev and chrome://tracing open."""
        save_trace(self, path)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw time over peak memory of all alternative plans on `ax`, or on new matplotlib axes, and return the axes.

        Raises `FxrematError` if matplotlib is not installed (the extra `plot`).
        """
        return plot(self, self.frontier, ax)

    def check(self, runs: int = 1) -> PlanCheck:
        """Check the two graphs that the plan is lowered to: results, peak, and whether recomputed ops repeat.

        The graphs run on fake tensors. Each result must have the shape and dtype that it has in the captured
        graph, and the counted bytes must give the predicted peak (not checked with copies to the host, slices
        or compiled regions).

        Args:
            runs: 2 or more: run each recomputed op this many times on made-up data, and name those whose bits differ.

        Raises:
            FxrematError: a result or the peak differs.
        """
        return check(self, runs)

    def diff(self, other: PlannedStep) -> Difference:
        """Compare with another plan: peak, time, and what each module saves, recomputes and offloads."""
        return Difference.of(self, other)

    def __deepcopy__(self, _: dict[int, Any]) -> Plan:
        """Return the plan itself, which is immutable."""
        return self

    def __reduce_ex__(self, _: Any) -> Any:
        raise FxrematError(
            "a plan holds graphs and functions of this process, and cannot be pickled: plan.save(path) writes it to a "
            "file, which fxremat.Plan.load(path) and fxremat.compile(model, plan=path) read"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, which `Plan.load` and `fxremat.compile(model, plan=path)` read in any process.

        The plan can be used for the same step on the same kind of device with the same PyTorch: in another
        rank, another run, or on another machine.

        Raises:
            FxrematError: the plan has ops compiled by Inductor; such plans cannot be saved.
            OSError: the file cannot be written.
        """
        if self.compiled:
            raise FxrematError("a plan with compiled regions is not saved: compile again in the other process")
        save(
            PlanData(
                **{name: getattr(self, name) for name in NAMES if name != "alternatives"},
                alternatives=without_the_rest(self.alternatives, self.chosen),
                environment=self.environment or as_plain(environment(device_of(self.graph))),
            ),
            path,
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a file that `save` wrote, to be looked at or passed to `fxremat.compile(model, plan=...)`.

        Raises:
            PlanMismatch: the file holds no plan, or was changed.
            OSError: it cannot be read.
        """
        return cls.of(load(path), name=os.fspath(path))

    @classmethod
    def of(cls, data: PlanData, *, name: str = "") -> Plan:
        """Return a plan made of the data that was read from a file named `name`."""
        return cls(**{each: getattr(data, each) for each in NAMES}, environment=data.environment, saved_as=name)

    def on(self, captured: Captured) -> Plan:
        """Return this plan for an equal step captured in this process. Raises `PlanMismatch` if the step differs."""
        data = PlanData(
            **{name: getattr(self, name) for name in NAMES if name != "alternatives"},
            alternatives=without_the_rest(self.alternatives, self.chosen),
            environment=self.environment or {},
        )
        return Plan.of(data.on(captured, self.saved_as or "the plan"), name=self.saved_as)

    def describe(self, *, full: bool = False) -> str:
        """Return a description of at most 100 columns; `full` adds a line for each block and the complete schedule.

        If the user named the device and its memory size is known, the last lines tell whether the step fits
        there.
        """
        text, found = describe(self, full=full), self.on_device
        if found is None or found.device.memory is None:
            return text
        facts = found.facts(budget=self.budget, peak=self.predicted_peak, least=self.known_minimum)
        return "\n".join([text, "", str(found.device), *labelled(facts)])

    def __str__(self) -> str:
        return self.describe()

    def _repr_html_(self) -> str:
        return framed(self.to_html(), str(self))
