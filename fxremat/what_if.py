"""The same step planned for several devices, and the largest input that a budget allows.

    fxremat.plan(model, inputs, mem="40GiB", cost="estimate", device=["A100", "H200"])      a `Comparison`
    python -m fxremat plan package.module:factory --mem 40GiB --cost estimate --device A100,H200 --largest batch

A budget grows with a batch, so that the largest batch is found by doubling, then by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fxremat.cost.devices import Device
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.plans import Plan
from fxremat.step.joint import Origin
from fxremat.units import format_bytes, format_seconds

Devices = list[str] | list[Device] | list[str | Device] | tuple[str | Device, ...]

SHARES = (80, 60, 40)  # percent of what keeping everything takes, for which a comparison shows times
SHARED = tuple(f"{share}%" for share in SHARES)
HEADS = ("device", "memory", "keep all", "", *SHARED, "least", "", "planned", "", "fits")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a step takes on one device."""

    device: Device
    plan: Plan

    @property
    def held(self) -> int:
        """Bytes of the parameters, buffers and inputs that the step reads, which no plan counts."""
        joint, sizes = self.plan.joint, self.plan.costs.sizes.values
        given = (v for v in joint.values if v.origin is Origin.PRIMAL and v.node.op == "placeholder")
        return sum(sizes[value.index] for value in given)

    @property
    def left(self) -> int | None:
        """Bytes of the device's memory beside `held` and the plan's peak, for optimizer state and all else.

        Less than 0: the step does not fit. None: the device's memory is not stated.
        """
        memory = self.device.memory
        return None if memory is None else memory - self.held - self.plan.predicted_peak

    def seconds_at(self, share: float) -> float | None:
        """Seconds of the fastest program within a share (in percent) of the peak of keeping everything; None: none."""
        budget = int(self.plan.keep_all_peak * share / 100)
        return next((time for peak, time in self.plan.frontier if peak <= budget), None)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One step on several devices. Printing it shows a table."""

    estimates: tuple[Estimate, ...]

    @property
    def plans(self) -> Mapping[str, Plan]:
        """The plan for each device, by the device's name."""
        return {estimate.device.name: estimate.plan for estimate in self.estimates}

    def __str__(self) -> str:
        rows = [HEADS, *(_row(estimate) for estimate in self.estimates)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(f"{c:>{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        held = format_bytes(max(estimate.held for estimate in self.estimates))
        notes = (
            "Times are estimates. A share is of the peak of keeping everything; -: less than the least budget.",
            f"fits: beside {held} of parameters, buffers and inputs, and the planned peak, what is left of the",
            "device's memory, for the optimizer's state and all else: neither is counted.",
        )
        return "\n".join((*lines, "", *notes))


def _row(estimate: Estimate) -> tuple[str, ...]:
    plan, memory = estimate.plan, estimate.device.memory
    times = (estimate.seconds_at(share) for share in SHARES)
    least = min(plan.alternatives.candidates, key=lambda candidate: candidate.peak)
    return (
        estimate.device.name,
        "?" if memory is None else format_bytes(memory),
        *(format_bytes(plan.keep_all_peak), format_seconds(plan.keep_all_time)),
        *("-" if time is None else format_seconds(time) for time in times),
        *(format_bytes(plan.minimum), format_seconds(least.time)),
        *(format_bytes(plan.predicted_peak), format_seconds(plan.predicted_time)),
        _fits(estimate.left),
    )


def _fits(left: int | None) -> str:
    if left is None:
        return "?"
    return f"{format_bytes(left)} left" if left >= 0 else f"no: {format_bytes(-left)} over"


def compared(devices: Devices, plan_for: Callable[[str | Device], Plan]) -> Comparison:
    """The comparison of a plan for each device. Raises `FxrematError` where there is none, and what planning raises."""
    known = [Device.named(device) for device in devices]
    if not known:
        raise FxrematError('device is an empty list; name devices to compare, such as ["A100", "H200"]')
    different = tuple(dict.fromkeys(known))
    if len({device.name for device in different}) < len(different):
        raise FxrematError("two different devices have one name; each needs its own")
    return Comparison(
        estimates=tuple(Estimate(device=device, plan=plan_for(device)) for device in different)
    )


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The largest size of an input, such as a batch, with which a step fits into a budget."""

    size: int
    least: int  # bytes of the least budget at that size
    next_least: int | None  # bytes of the least budget at the next size; None: the size is the limit of the search

    def __str__(self) -> str:
        fits = f"{self.size} (the least budget is {format_bytes(self.least)}"
        if self.next_least is None:
            return f"{fits}); larger ones were not tried"
        return f"{fits}; of {self.size + 1} it is {format_bytes(self.next_least)})"


def largest(least_budget: Callable[[int], int], budget: int, limit: int) -> Largest:
    """The largest size from 1 to `limit` whose least budget, which grows with it, is within the budget.

    Args:
        least_budget: bytes that the step needs at a size. It is called about 2 log2 of the answer times.

    Raises:
        BudgetTooSmall: not even 1 fits.

    >>> print(largest(lambda size: 100 * size, 1050, 4096))
    10 (the least budget is 1000 B; of 11 it is 1.07 KiB)
    """
    fitting = {1: least_budget(1)}
    if fitting[1] > budget:
        raise BudgetTooSmall(minimum=fitting[1], budget=budget)
    low, high, above = 1, limit + 1, None
    while high - low > 1:
        middle = min(2 * low, limit) if above is None else (low + high) // 2
        least = least_budget(middle)
        if least <= budget:
            low, fitting[middle] = middle, least
        else:
            high, above = middle, least
    return Largest(size=low, least=fitting[low], next_least=above)
