"""A plan: what a model will do inside its budget, and everything one may want to read about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from fxremat.chain import Chain
from fxremat.cost.table import Costs
from fxremat.join_schedule import JoinSchedule
from fxremat.passes.lanes import Link, Swapped
from fxremat.passes.liveness import Memory, live_bytes
from fxremat.passes.lower import lower
from fxremat.passes.program import Program, Role, rematerialize
from fxremat.passes.weights import Handles
from fxremat.planner import Prospect, Prospects
from fxremat.refine.bound import lower_bound
from fxremat.report import page
from fxremat.runtime.host import HostTier
from fxremat.schedule import Forward, Keep, Schedule
from fxremat.simulate import Timeline, simulate
from fxremat.simulate_join import JoinTimeline
from fxremat.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A step that updates its weights: what its budget refers to."""

    handles: Handles  # of the parameters, in the graphs
    keep_all_peak: int  # bytes with everything on the device
    minimum: int  # the least budget


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """One training step inside a budget. Printing it shows it.

    Bytes are above what was allocated when forward began; seconds are those of the device it was planned for.
    """

    budget: int  # bytes that the user allows
    chosen: Prospect
    prospects: Prospects
    costs: Costs
    device: str
    timed: str  # how times were found: "measured" or "estimated"
    tier: HostTier | None = None  # where values may wait, with offloading
    link: Link | None = None  # how fast they get there and back
    weights: Whole | None = None  # where the step updates its weights, and the budget covers them

    @property
    def predicted_peak(self) -> int:
        """Bytes, exact up to the allocator's rounding."""
        return self.chosen.peak

    @property
    def predicted_time(self) -> float:
        """Seconds of one forward and backward."""
        return self.chosen.time

    @property
    def keep_all_peak(self) -> int:
        """Bytes at the peak when everything is kept: what percentages refer to."""
        return self.weights.keep_all_peak if self.weights else self.prospects.keep_all.peak

    @property
    def keep_all_time(self) -> float:
        """Seconds of one forward and backward when everything is kept."""
        return self.prospects.keep_all.time

    @property
    def minimum(self) -> int:
        """The least budget, in bytes, that this model can be compiled with."""
        return self.weights.minimum if self.weights else self.prospects.minimum

    @property
    def frontier(self) -> tuple[tuple[int, float], ...]:
        """(peak in bytes, time in seconds) of every plan on offer, fastest first."""
        return tuple((prospect.peak, prospect.time) for prospect in self.prospects.frontier)

    @property
    def chain(self) -> Chain:
        """The model as a chain of blocks."""
        return self.chosen.chain

    @property
    def schedule(self) -> Schedule | JoinSchedule:
        """What runs, in order, block by block; a refined plan departs from it here and there (see `program`)."""
        return self.chosen.join.schedule if self.chosen.join else self.chosen.schedule

    @cached_property
    def timeline(self) -> Timeline | JoinTimeline:
        """The schedule simulated on the chain, or on the join of its towers: memory during each of its operations."""
        return self.chosen.join or simulate(self.chain, self.chosen.schedule)

    @cached_property
    def lower_bound(self) -> float:
        """Seconds that no choice of what to recompute, op by op, beats within the budget.

        Of programs that run the backward in its captured order; of others (towers that take turns), and where values
        may wait on the host, it is only known that they take no less than keeping everything.
        """
        if self.chosen.join or self.link:
            return min(self.predicted_time, self.keep_all_time)
        bound = lower_bound(self.chosen.layout.joint, self.costs, self.budget)
        return min(self.predicted_time, bound)

    @cached_property
    def program(self) -> Program:
        """What runs, op by op."""
        return self.chosen.program()

    @cached_property
    def memory(self) -> Memory:
        """Bytes alive during each step of the program."""
        return live_bytes(self.program, self.costs.sizes)

    @cached_property
    def graphs(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward graph."""
        return lower(
            self.program, self.tier.name if self.tier else "", self.weights.handles if self.weights else None
        )

    @property
    def loss_places(self) -> tuple[int, ...]:
        """Where the backward graph takes the gradients of losses, counted from the end of its inputs."""
        joint = self.chosen.layout.joint
        count = len(joint.tangents)
        return tuple(
            place - count
            for place, node in enumerate(joint.tangents)
            if joint.value_of[node] in joint.root_tangents
        )

    @property
    def forward_graph(self) -> fx.GraphModule:
        """(*inputs) -> (*outputs, *saved); `print_readable()` shows it with its blocks."""
        return self.graphs[0]

    @property
    def backward_graph(self) -> fx.GraphModule:
        """(*saved, *gradients of the outputs) -> gradients of the inputs."""
        return self.graphs[1]

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of parameter and input gradients alive at the peak."""
        at = max(range(len(self.memory.during)), key=self.memory.during.__getitem__, default=-1)
        written = (version for step in self.program.steps[: at + 1] for version in step.writes)
        alive = {self.program.version_of[version] for version in written} & self.program.layout.joint.returned
        return sum(self.costs.sizes.values[value] for value in alive)

    @property
    def headline(self) -> str:
        """The plan in a line, for logs."""
        return (
            f"peak {format_bytes(self.predicted_peak)} of {format_bytes(self.budget)} allowed, "
            f"time {_duration(self.predicted_time)}, {_ratio(self.predicted_time, self.keep_all_time):.2f}x of "
            f"keeping everything; the least budget is {format_bytes(self.minimum)}"
        )

    def to_html(self) -> str:
        """A page that shows the plan, with its memory over the step as a picture."""
        return page(self)

    def __str__(self) -> str:
        return "\n".join([*self._summary(), "", *self._blocks(), "", *self._schedule()])

    def _summary(self) -> Iterator[str]:
        share, slower = self.predicted_peak / self.keep_all_peak, self.predicted_time / self.keep_all_time
        again = self.program.recomputed
        yield f"fxremat plan for {self.device} ({self.timed} times)"
        yield f"  budget          {format_bytes(self.budget)}"
        yield (
            f"  predicted peak  {format_bytes(self.predicted_peak)}, "
            f"{share:.1%} of the {format_bytes(self.keep_all_peak)} of keeping everything"
        )
        yield f"                  {format_bytes(self.gradient_bytes)} of it are gradients to return"
        yield (
            f"  predicted time  {_duration(self.predicted_time)}, "
            f"{slower:.2f}x of {_duration(self.keep_all_time)}; {again} ops run again"
        )
        choice = "recomputed or offloaded" if self.link else "recomputed"
        yield (
            f"                  whatever is {choice}, it takes {_duration(self.lower_bound)} or more: "
            f"time / lower bound is {self.predicted_time / self.lower_bound:.3f}"
        )
        if self.chosen.swapped and not self.weights:
            yield from self._transfers(self.chosen.swapped)
        if self.weights:
            yield from self._weights()
        yield f"  least budget    {format_bytes(self.minimum)} ({self.minimum} bytes)"

    def _weights(self) -> Iterator[str]:
        joint, program = self.program.layout.joint, self.program
        away = {program.version_of[version] for version in program.fetched}
        sizes = [sum(joint.values[v].bytes for v in values) for values in (joint.updates_of, away)]
        everything, hosted = map(format_bytes, sizes)
        yield (
            f"  weights         {len(away)} of {len(joint.updates_of)} parameters ({hosted} of {everything}) "
            f"live on the host; others, with their state, take {format_bytes(program.resident)}"
        )

    def _transfers(self, swapped: Swapped) -> Iterator[str]:
        away = sum(step.role is Role.OFFLOAD for step in swapped.program.steps)
        shares = (
            f"{_duration(seconds)} {way}, {hidden:.0%} hidden behind ops"
            for way, seconds, hidden in zip(("out", "back"), swapped.copying, swapped.hidden, strict=True)
        )
        yield f"  offloads        {format_bytes(swapped.bytes)} in {away} tensors: {'; '.join(shares)}"

    def _schedule(self) -> Iterator[str]:
        yield f"schedule: {self.schedule}"
        if self.chosen.refined:
            before = Counter(s.op for s in rematerialize(self.chosen.layout, self.chosen.schedule).executions)
            now = Counter(step.op for step in self.program.executions)
            yield f"refined:  {(before - now).total()} of its ops do not run again, {(now - before).total()} others do"

    def _blocks(self) -> Iterator[str]:
        """A line a block; equal neighbours share one."""
        names = [block.name for block in self.chain.blocks]
        width = max(12, *(len(name) for name in names))
        heads = "".join(f"{head:>11}" for head in ("forward", "backward", "output", "saved"))
        yield f"  {'block':>7}  {'ends with':{width}}{heads}  what it does"
        for number, (block, does) in enumerate(zip(self.chain.blocks, self._actions(), strict=True), start=1):
            times = (_duration(block.forward_time), _duration(block.backward_time))
            sizes = (format_bytes(block.output_bytes), format_bytes(block.saved_bytes))
            columns = "".join(f"{column:>11}" for column in (*times, *sizes))
            yield f"  {number:>7}  {block.name:{width}}{columns}  {does}"

    def _actions(self) -> list[str]:
        runs: Counter[int] = Counter()
        saved: dict[int, int] = {}
        for op in self.chosen.schedule.ops:
            if isinstance(op, Forward):
                runs[op.block] += 1
                if op.keep is Keep.ALL:
                    saved[op.block] = op.option
        again: Counter[int] = Counter(
            step.block + 1 for step in self.program.steps if step.role is Role.RECOMPUTE
        )
        actions = []
        for number, block in enumerate(self.chain.blocks, start=1):
            option = saved[number]
            kept = format_bytes(block.choices[option].saved_bytes)
            how = "keeps everything" if option == 0 else f"keeps {kept} (option {option})"
            if runs[number] > 1:
                times = "once more" if runs[number] == 2 else f"{runs[number] - 1} times more"
                how = f"runs {times}, then {how}"
            ops = "1 op" if again[number] == 1 else f"{again[number]} ops"
            actions.append(how + (f"; {ops} again" if again[number] else ""))
        return actions


def _ratio(part: float, whole: float) -> float:
    """`part / whole`; of nothing, all is 1 and more is infinite."""
    if whole == 0:
        return 1.0 if part == 0 else math.inf
    return part / whole


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
