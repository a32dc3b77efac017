"""Compares the plans of one step on several devices, and finds the largest input that fits into a budget.

    fxremat.compare(model, inputs, ["A100", "H200"], mem="40GiB")                           a `Comparison`
    python -m fxremat plan package.module:factory --mem 40GiB --device A100,H200 --largest batch

The least budget grows with the batch, so that the largest batch is found by doubling, then by bisection; one capture
with symbolic sizes serves all batches.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from fxremat.budget import AUTO_MARGIN
from fxremat.cost.device_memory import DeviceMemory
from fxremat.cost.devices import Device
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.plan_of_graphs import PlanOfGraphs
from fxremat.plans import Plan
from fxremat.runtime.target_kernels import captured_alike
from fxremat.runtime.varying import positional
from fxremat.settings import Search
from fxremat.units import Auto, format_bytes, format_seconds, parse_budget, parse_bytes, shortened

Devices = Sequence[str] | Sequence[Device] | Sequence[str | Device]

SHARES = (80, 60, 40)  # budgets, in percent of the peak without recomputation, for which a comparison shows times
Make = Callable[[int], tuple[nn.Module, Any]]  # returns a model and its inputs for a size, such as a batch size

PROBES = (2, 3, 5)  # sizes for which the model is made, to find out which input sizes depend on them
EVERYTHING = 2**52  # a budget in bytes that exceeds any step's memory
GUESSES = 6  # maximum number of guesses at the largest size; the first guess is exact if memory is linear in the size
SHARED = tuple(f"{share}%" for share in SHARES)
HEADS = ("device", "memory", "keep all", "", *SHARED, "least", "", "fits", "planned", "", "fits")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The plan of a step on one device, and whether it fits there beside parameters and optimizer state.

    Attributes:
        points: (peak in bytes, time in seconds) of the plans that are known for the device, fastest first.
    """

    device: Device
    plan: Plan | PlanOfGraphs
    points: tuple[tuple[int, float], ...]

    @property
    def on_device(self) -> DeviceMemory:
        """The memory of everything else on the device: parameters, buffers, inputs, and the optimizer's state."""
        assert self.plan.on_device is not None, "the plan is for a device by name"
        return self.plan.on_device

    @property
    def held(self) -> int:
        """Bytes of the parameters, buffers and inputs, which are not part of a plan's peak."""
        return self.on_device.given

    @property
    def left(self) -> int | None:
        """Bytes of the device's memory that are free at the peak of the planned step and of the optimizer's update.

        Less than 0: the step does not fit. None: the device's memory is not stated.
        """
        return None if self.device.memory is None else self.on_device.left(self.plan.predicted_peak)

    @property
    def left_at_least(self) -> int | None:
        """Bytes of the device's memory that are free if the step runs with the smallest budget that works.

        Negative: the step does not fit at all. None: the device's memory size is unknown.
        """
        return None if self.device.memory is None else self.on_device.left(self.plan.minimum)

    def seconds_at(self, share: float) -> float | None:
        """Return the seconds of the fastest plan with at most `share` percent of the peak without recomputation.

        None if no plan fits.
        """
        budget = int(self.plan.keep_all_peak * share / 100)
        return next((time for peak, time in self.points if peak <= budget), None)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The estimates of one step on several devices; prints as a table."""

    estimates: tuple[Estimate, ...]

    @property
    def plans(self) -> Mapping[str, Plan | PlanOfGraphs]:
        """Device name -> the plan for that device."""
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
    return (
        estimate.device.name,
        "?" if estimate.device.memory is None else format_bytes(estimate.device.memory),
        *(format_bytes(plan.keep_all_peak), format_seconds(plan.keep_all_time)),
        *("-" if time is None else format_seconds(time) for time in times),
        *(format_bytes(plan.minimum), format_seconds(min(estimate.points)[1]), memory.fits(plan.minimum)),
        *(format_bytes(plan.predicted_peak), format_seconds(plan.predicted_time), memory.fits(plan.predicted_peak)),
    )


def _advice(estimates: Iterable[Estimate]) -> Iterator[str]:
    """Yield a hint, with a budget that fits, for each device on which another plan fits, but not the present one."""
    for estimate in estimates:
        if (estimate.left or 0) < 0 <= (estimate.left_at_least or 0):
            free = format_bytes(estimate.on_device.free)
            yield f'{estimate.device}: a budget of up to {free} fits; "auto" is what is left.'


def distinct_devices(devices: Devices) -> tuple[Device, ...]:
    """Return the devices that are given by name or as they are, each once.

    Raises `FxrematError` if there are none, or if two have one name.
    """
    if isinstance(devices, str):
        raise FxrematError(f"devices is {devices!r}; it is a list of names or Devices, such as [{devices!r}]")
    if not isinstance(devices, Iterable):
        raise FxrematError(f"devices is {shortened(devices)}; it is a list of names or Devices")
    known = [Device.named(device) for device in devices]
    if not known:
        raise FxrematError('devices is empty; name devices to compare, such as ["A100", "H200"]')
    different = tuple(dict.fromkeys(known))
    if len({device.name for device in different}) < len(different):
        raise FxrematError("two different devices have one name; each needs its own")
    return different


def compared(devices: Sequence[Device], mem: int | str, plan_for: Callable[..., Plan], search: Search) -> Comparison:
    """Plan a step for each device, and return the comparison; devices that run the same kernels share a captured graph.

    A budget of "auto" is the memory left on each device; if that is too little, the smallest budget that works
    is used.

    Args:
        plan_for: captures and plans with `costs` for a device; takes other options too.

    Raises the errors of planning.
    """
    auto = isinstance(parse_budget(mem), Auto)
    plans: dict[Device, Plan] = {}
    for device in devices:
        alike = next((plan for known, plan in plans.items() if captured_alike(known, device)), None)
        if alike is None:
            first = ("100%", replace(search, seconds=0.0)) if auto else (mem, search)
            alike = plan_for(costs=device, mem=first[0], search=first[1])
        is_known = alike.device == device.name and not auto
        plans[device] = alike if is_known else _within_or_least(alike, mem, auto=auto, costs=device, search=search)
    found = (Estimate(device=device, plan=plan, points=tuple(plan.frontier)) for device, plan in plans.items())
    return Comparison(estimates=tuple(found))


def estimate_of_graphs(
    device: Device, mem: int | str, within: Callable[[int | str], PlanOfGraphs | None]
) -> Estimate | None:
    """Return the estimate of a step of several graphs on a device; None if it could not be measured.

    Args:
        mem: the budget; "auto" is what the device has left, or the least budget where that is too little.
        within: returns the plan for a budget; None if the step could not be measured.

    Raises:
        BudgetTooSmall: the step does not fit into a budget given in bytes or percent.
    """
    if (least := within("min")) is None:
        return None
    if isinstance(parse_budget(mem), Auto) and least.on_device is not None:
        mem = max(least.minimum, least.on_device.auto)
    plans = [least]
    for share in SHARED:
        with contextlib.suppress(BudgetTooSmall):
            plans += filter(None, [within(share)])
    if (plan := within(mem)) is None:
        return None
    points = {(each.predicted_peak, each.predicted_time) for each in (plan, *plans)}
    return Estimate(device=device, plan=plan, points=tuple(sorted(points, key=lambda point: (point[1], point[0]))))


def _within_or_least(known: Plan, mem: int | str, *, auto: bool, **options: Any) -> Plan:
    try:
        return _another(known, mem, **options)
    except BudgetTooSmall as error:
        if not auto:
            raise
        return _another(known, error.minimum, **options)


def _another(known: Plan, mem: int | str, **options: Any) -> Plan:
    """Plan the captured step of a plan again, within `mem` and with other options."""
    assert known.step is not None
    made: Plan = known.step.plan(mem, **options)
    return made


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The largest size of an input, such as the batch, with which a step fits into a budget."""

    size: int
    least: int  # smallest budget in bytes that works at that size
    # smallest budget in bytes that works at the next size; None: the next size is beyond the limit of the
    # search
    next_least: int | None

    def __str__(self) -> str:
        fits = f"{self.size} (the least budget is {format_bytes(self.least)}"
        if self.next_least is None:
            return f"{fits}); larger ones were not tried"
        return f"{fits}; of {self.size + 1} it is {format_bytes(self.next_least)})"


def largest(least_budget: Callable[[int], int], budget: int, limit: int, start: int = 1) -> Largest:
    """Return the largest size from 1 to `limit` whose smallest working budget is within `budget`.

    Args:
        least_budget: returns the bytes that the step needs at a size. It is called about 2 log2(d) times, where d is
            the distance between the answer and `start`.
        start: the size that is tried first.

    Raises:
        BudgetTooSmall: not even 1 fits.

    >>> print(largest(lambda size: 100 * size, 1050, 4096))
    10 (the least budget is 1000 B; of 11 it is 1.1 KiB)
    """
    least: dict[int, int] = {}
    # `low` is known to fit; `high` is known not to fit, or is beyond the limit
    low, high, step, size = 0, limit + 1, 1, min(start, limit)
    while high - low > 1:
        least[size] = least_budget(size)
        low, high = (size, high) if least[size] <= budget else (low, size)
        if high > limit:
            size = min(low + step, limit)
        elif low == 0:
            size = max(high - step, 1)
        else:
            size = (low + high) // 2
        step *= 2
    if low == 0:
        raise BudgetTooSmall(minimum=least[1], budget=budget)
    return Largest(size=low, least=least[low], next_least=least.get(high))


def largest_on(device: Device | None, plans: PlansOfSize, mem: int | str, limit: int) -> tuple[int, Largest]:
    """Return the budget in bytes that `mem` means on a device, and the largest size that fits into it.

    With mem="auto" the budget is the device's memory minus a margin, and parameters, inputs and optimizer state
    count as part of the step, since some of them grow with the inputs. The size is first guessed by evaluating
    known plans of other sizes; a full search for plans runs only at sizes near the guess. device=None: the
    device that the model is on.
    """
    auto = isinstance(parse_budget(mem), Auto)

    def needed(plan: Plan | PlanOfGraphs, least: int) -> int:
        memory = plan.on_device
        return memory.total - memory.left(least) if auto and memory else least

    def roughly(size: int) -> int:
        """Return the bytes needed at a size, as known plans of other sizes predict them."""
        plan = plans.at(device, size)
        return needed(plan, plan.minimum)

    @cache
    def exactly(size: int) -> int:
        """Return the bytes needed at a size, after a search for plans at this size."""
        plan = plans.at(device, size)
        known = isinstance(plan, Plan) and plan.sizes and plan.step
        return needed(plan, known.least() if known else plan.minimum)

    budget = device.memory - int(AUTO_MARGIN * device.memory) if auto and device and device.memory else parse_bytes(mem)
    near = _guess(roughly, budget, limit)
    near = _guess(roughly, budget * roughly(near) // exactly(near), limit)
    return budget, largest(exactly, budget, limit, start=near)


def _guess(least_budget: Callable[[int], int], budget: int, limit: int) -> int:
    """Guess the largest size whose least budget is within `budget`, by the secant method, in up to `GUESSES` steps."""
    if limit < PROBES[-1]:
        return min(PROBES[0], limit)
    (one, at_one), (other, at_other) = ((size, least_budget(size)) for size in PROBES[:2])
    for _ in range(GUESSES):
        slope = max(1.0, (at_other - at_one) / (other - one))
        guess = min(max(PROBES[0], int(one + (budget - at_one) / slope)), limit)
        if guess in (one, other):
            return guess
        one, at_one, other, at_other = other, at_other, guess, least_budget(guess)
    return other


class PlansOfSize:
    """Plans without recomputation of one model at different sizes, such as batch sizes.

    If only inputs depend on the size, and it can be symbolic, the model is captured once for all sizes, and once for
    all devices that run the same kernels.

    Args:
        make: returns the model and its inputs at a size.
        plan_for: plans these for a device, within a budget.
    """

    def __init__(self, make: Make, plan_for: Callable[..., Plan | PlanOfGraphs]) -> None:
        self._make, self._plan_for = make, plan_for
        self._sizes = sizes_that_change(make)
        self._captured: dict[Device | None, Plan | None] = {}  # None: the sizes cannot be symbolic for this device
        self._fixed: dict[tuple[Device | None, int], Plan | PlanOfGraphs] = {}

    def at(self, device: Device | None, size: int) -> Plan | PlanOfGraphs:
        """Return the plan without recomputation at a size for a device; None: the device that the model is on."""
        captured = self._of_all_sizes(device) if size > 1 else None
        if captured is not None and captured.step is not None and self._sizes is not None:
            with contextlib.suppress(FxrematError):  # raised if the model has a different graph at this size
                inputs = captured.step.resizable_inputs
                return captured.at(**{name: dims for name, dims in self._sizes(size).items() if name in inputs})
        if (device, size) not in self._fixed:
            costs = _costs(device)
            self._fixed[device, size] = self._plan_for(*self._make(size), mem=EVERYTHING, dynamic=False, **costs)
        return self._fixed[device, size]

    def _of_all_sizes(self, device: Device | None) -> Plan | None:
        if device not in self._captured:
            self._captured[device] = self._capture(device)
        return self._captured[device]

    def _capture(self, device: Device | None) -> Plan | None:
        for other, known in self._captured.items():
            if device is not None and other is not None and captured_alike(device, other):
                return known and _another(known, EVERYTHING, costs=device)
        if self._sizes is None:
            return None
        expected = {
            name: {dim: (2, 2 * size) for dim, size in dims.items()} for name, dims in self._sizes(2).items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ignores the warning that sizes are fixed after all
            plan = self._plan_for(*self._make(2), mem=EVERYTHING, dynamic=expected, **_costs(device))
        return plan if isinstance(plan, Plan) and plan.sizes else None


def _costs(device: Device | None) -> dict[str, Device]:
    """Return the option `costs` that plans for a device; {} for None, the device that the model is on."""
    return {} if device is None else {"costs": device}


def sizes_that_change(make: Make) -> Callable[[int], dict[str, dict[int, int]]] | None:
    """Return a function from the number that `make` takes to input sizes, as {input name: {dimension: size}}.

    None if the number changes anything else, such as the model itself, or if sizes are not linear in it.
    """
    (model, first), (_, second), (_, third) = made = [make(size) for size in PROBES]
    if any(_outline(other) != _outline(model) for other, _ in made[1:]):
        return None
    calls = [call for inputs in (first, second, third) if (call := _by_name(model, inputs)) is not None]
    if len(calls) < len(PROBES) or any(call.keys() != calls[0].keys() for call in calls):
        return None
    found: dict[str, dict[int, tuple[int, int]]] = {}
    for name in calls[0]:
        one, two, three = (call[name] for call in calls)
        if not all(isinstance(value, torch.Tensor) and value.dim() == one.dim() for value in (one, two, three)):
            if not repr(one) == repr(two) == repr(three):
                return None
            continue
        for dim, (a, b, c) in enumerate(zip(one.shape, two.shape, three.shape, strict=True)):
            if not (a > 1 and a <= b and (b - a) * (PROBES[2] - PROBES[0]) == (c - a) * (PROBES[1] - PROBES[0])):
                if not a == b == c:
                    return None
            elif a < b:
                found.setdefault(name, {})[dim] = (a, b - a)
    if not found:
        return None
    return lambda size: {
        name: {dim: least + (size - PROBES[0]) * more for dim, (least, more) in dims.items()}
        for name, dims in found.items()
    }


def _by_name(model: nn.Module, inputs: Any) -> dict[str, Any] | None:
    """Return the inputs of a call by the forward's parameter names; None if the names are unknown."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    given = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    names = positional(model.forward)
    return dict(zip(names, given, strict=False)) if len(names) >= len(given) else None


def _outline(model: nn.Module) -> list[object]:
    """Return a description of what decides a model's graph: its modules, their settings, tensor shapes and dtypes."""
    found: list[object] = []
    for name, module in model.named_modules():
        settings = {key: _shown(value) for key, value in vars(module).items() if key != "_modules"}
        found.append((name, type(module), settings))
    return found


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.requires_grad}"
    if isinstance(value, Mapping):
        return str({key: _shown(item) for key, item in value.items()})
    return repr(value)
