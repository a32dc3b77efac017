"""The same step planned for several devices, and the largest input that a budget allows.

    fxremat.plan(model, inputs, mem="40GiB", cost="estimate", device=["A100", "H200"])      a `Comparison`
    python -m fxremat plan package.module:factory --mem 40GiB --cost estimate --device A100,H200 --largest batch

A budget grows with a batch, so that the largest batch is found by doubling, then by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from fxremat.cost.device_memory import DeviceMemory
from fxremat.cost.devices import Device
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.plans import Plan
from fxremat.runtime.target_kernels import captured_alike
from fxremat.units import Auto, format_bytes, format_seconds, parse_budget

Devices = list[str] | list[Device] | list[str | Device] | tuple[str | Device, ...]

SHARES = (80, 60, 40)  # percent of what keeping everything takes, for which a comparison shows times
SHARED = tuple(f"{share}%" for share in SHARES)
HEADS = ("device", "memory", "keep all", "", *SHARED, "least", "", "fits", "planned", "", "fits")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a step takes on one device."""

    device: Device
    plan: Plan

    @property
    def on_device(self) -> DeviceMemory:
        """What else the device holds: parameters, buffers, inputs, and the optimizer's state."""
        assert self.plan.on_device is not None, "the plan is for a device by name"
        return self.plan.on_device

    @property
    def held(self) -> int:
        """Bytes of the parameters, buffers and inputs that the step reads, which no plan counts."""
        return self.on_device.given

    @property
    def left(self) -> int | None:
        """Bytes of the device's memory that are free at the worst moment of the planned step and its update.

        Less than 0: it does not fit. None: the device's memory is not stated.
        """
        return None if self.device.memory is None else self.on_device.left(self.plan.predicted_peak)

    @property
    def left_at_least(self) -> int | None:
        """The same for the program that needs the least memory."""
        return None if self.device.memory is None else self.on_device.left(self.plan.minimum)

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
        held = max((estimate.on_device for estimate in self.estimates), key=lambda memory: memory.given + memory.state)
        notes = (
            "Times are estimates. A share is of the peak of keeping everything; -: less than the least budget.",
            f"fits: what is left beside {held},",
            "and the peak of the step, or the gradients and temporaries of the update where these are more.",
        )
        return "\n".join((*lines, "", *notes, *_advice(self.estimates)))


def _row(estimate: Estimate) -> tuple[str, ...]:
    plan, memory = estimate.plan, estimate.on_device
    times = (estimate.seconds_at(share) for share in SHARES)
    least = min(plan.alternatives.candidates, key=lambda candidate: candidate.peak)
    return (
        estimate.device.name,
        "?" if estimate.device.memory is None else format_bytes(estimate.device.memory),
        *(format_bytes(plan.keep_all_peak), format_seconds(plan.keep_all_time)),
        *("-" if time is None else format_seconds(time) for time in times),
        *(format_bytes(plan.minimum), format_seconds(least.time), memory.fits(plan.minimum)),
        *(format_bytes(plan.predicted_peak), format_seconds(plan.predicted_time), memory.fits(plan.predicted_peak)),
    )


def _advice(estimates: Iterable[Estimate]) -> Iterator[str]:
    """A line for each device on which a step fits, but not as it is planned."""
    for estimate in estimates:
        if (estimate.left or 0) < 0 <= (estimate.left_at_least or 0):
            free = format_bytes(estimate.on_device.free)
            yield f'{estimate.device}: a budget of up to {free} fits; "auto" is what is left.'


def compared(devices: Devices, mem: int | str, plan_for: Callable[..., Plan], effort: float) -> Comparison:
    """Return the comparison of a plan for each device. Those that run the same kernels share one capture.

    A budget of "auto" is what each device has left; where that is too little, the least budget is shown.

    Args:
        plan_for: captures and plans for `device`; takes other options too.

    Raises `FxrematError` where there is no device, and what planning raises.
    """
    known = [Device.named(device) for device in devices]
    if not known:
        raise FxrematError('device is an empty list; name devices to compare, such as ["A100", "H200"]')
    different = tuple(dict.fromkeys(known))
    if len({device.name for device in different}) < len(different):
        raise FxrematError("two different devices have one name; each needs its own")
    auto = isinstance(parse_budget(mem), Auto)
    estimates: list[Estimate] = []
    for device in different:
        alike = next((e.plan for e in estimates if captured_alike(e.device, device)), None)
        if alike is None:
            alike = plan_for(device=device, **{"mem": "100%", "effort": 0} if auto else {"mem": mem, "effort": effort})
        plan = alike if alike.device == device.name and not auto else _another(alike, mem, device, effort, auto=auto)
        estimates.append(Estimate(device=device, plan=plan))
    return Comparison(estimates=tuple(estimates))


def _another(known: Plan, mem: int | str, device: Device, effort: float, *, auto: bool) -> Plan:
    """The plan of a captured step for another device."""
    assert known.another is not None
    try:
        found: Plan = known.another(mem, device=device, effort=effort)
    except BudgetTooSmall as error:
        if not auto:
            raise
        found = known.another(error.minimum, device=device, effort=effort)
    return found


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
