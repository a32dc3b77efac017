"""Ways to train a model on a device: all on it, or values or weights on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxremat.cost.devices import Device
from fxremat.cost.estimate import STREAMED
from fxremat.errors import BudgetTooSmall
from fxremat.fitting.ledger import WAITING, Ledger, Resident, budget_for_step, ledger_of, total_of
from fxremat.fitting.loaded import Loaded
from fxremat.fitting.optimizers import memory_of
from fxremat.fitting.resident import by_name, rounding_of
from fxremat.fitting.settings import Training
from fxremat.fitting.steps import EstimatedStep
from fxremat.search.candidate import Candidate, Frontier, exchanged
from fxremat.search.survey import survey
from fxremat.step.costs import Costs, Link, ParameterUpdate
from fxremat.transfers.activations import most_on_host
from fxremat.transfers.offloading import with_offloading
from fxremat.transfers.weight_updates import best_within
from fxremat.units import format_bytes

LARGE = 1500  # ops: of larger steps, one way to cut them into blocks is tried
SLOTS = 500, 150  # steps of memory in the tables of a step, and of a large one
HOSTED = ("adamw", "sgd")  # optimizers that update parameters that live on the host


@dataclass(frozen=True, kw_only=True, eq=False)
class Way:
    """One way to train within the device's memory."""

    how: str  # "": all is on the device; else what waits on the host: "activations" or "weights"
    candidate: Candidate
    ledger: Ledger
    slowdown: float  # seconds of forward and backward, as a multiple of recomputing nothing
    budget: int  # bytes that `fxremat.compile` is given
    on_host: int = 0  # bytes of host memory that hold what waits there


@dataclass(frozen=True, kw_only=True, eq=False)
class Room:
    """A step, what the device holds besides, and the frontier of its programs."""

    device: Device
    step: EstimatedStep
    resident: Resident
    frontier: Frontier

    @property
    def least(self) -> int:
        """The least total of all programs that keep everything on the device, in bytes."""
        return total_of(self.frontier.minimum, self.resident)

    @property
    def everything(self) -> int:
        """The total of the program that recomputes nothing, in bytes."""
        return total_of(self.frontier.keep_all.peak, self.resident)

    def fits(self, total: int) -> bool:
        """Tell whether the device has so many bytes."""
        assert self.device.memory is not None
        return total <= self.device.memory


def frontier_of(step: EstimatedStep) -> Frontier:
    """Return the frontier of a step's programs, by estimate; some 6 s for 4,000 ops."""
    large = len(step.graph.ops) > LARGE
    return survey(step.graph, step.costs, slots=SLOTS[large], effort=0.0, ways=1 if large else None)


def on_the_device(room: Room) -> Way | None:
    """Return the fastest program that fits with everything on the device; None if there is none."""
    return _chosen(room, room.frontier, "")


def with_activations_on_host(room: Room) -> Way | None:
    """Return the fastest program that fits, where activations may wait on the host; None if there is none."""
    if not room.fits(total_of(0, room.resident)):
        return None
    link = _link(room.device)
    return _chosen(room, with_offloading(room.frontier, room.step.costs, link), "activations")


def _chosen(room: Room, frontier: Frontier, how: str) -> Way | None:
    if not room.fits(total_of(0, room.resident)):
        return None
    budget = budget_for_step(room.device, room.resident)
    try:
        candidate = frontier.within(budget)
    except BudgetTooSmall:
        return None
    costs = room.step.costs
    waiting = most_on_host(candidate.program(), costs, _link(room.device)) if candidate.transfers else 0
    return Way(
        how=how if candidate.transfers else "",
        candidate=candidate,
        ledger=ledger_of(candidate, costs.sizes, room.resident),
        slowdown=candidate.time / frontier.keep_all.time,
        budget=min(budget, _whole_mib(frontier.keep_all.peak)),
        on_host=waiting,
    )


def with_weights_on_host(room: Room, loaded: Loaded, training: Training) -> Way | str:
    """Return the fastest program that fits, where weights and optimizer state may live on the host; else why not."""
    if reason := _refused(training):
        return reason
    units = _updates(room, loaded, training)
    graph = room.step.graph
    gradients = {gradient for _, gradient in by_name(room.step).values()}
    updated = replace(
        graph,
        returned=graph.returned - gradients,
        updates_of=dict(by_name(room.step).values()),
    )
    moved = room.frontier.each(exchanged(updated))
    parts = dict(room.resident.parts)
    parts["weights"] -= sum(unit.bytes for unit in units)
    parts["optimizer state"] -= sum(unit.waiting if _later(training) else unit.state_bytes for unit in units)
    parts.pop(WAITING, None)  # those of updates in `optimizer.step()` are with their parameters
    resident = Resident(parts=parts, gradients=0, update=0, outputs=0)
    budget, costs = budget_for_step(room.device, resident), _with_weights(room.step.costs, units)
    try:
        best = best_within(moved, units, costs, _link(room.device), budget, values_too=True)
    except BudgetTooSmall as error:
        return f"with weights on the host {format_bytes(total_of(error.minimum, resident))} at least"
    program = best.candidate.program()
    away = sum(unit.held for unit in units if unit.value in best.choice.hosted)
    return Way(
        how="weights",
        candidate=best.candidate,
        ledger=ledger_of(best.candidate, costs.sizes, replace(resident, update=best.step_bytes)),
        slowdown=best.candidate.time / (room.frontier.keep_all.time + sum(unit.seconds for unit in units)),
        budget=budget,
        on_host=away + most_on_host(program, costs, _link(room.device)),
    )


def _refused(training: Training) -> str:
    """Return why weights cannot live on the host; "" where they can."""
    if training.devices > 1:
        return "weights that live on the host are planned for one device"
    if training.optimizer not in HOSTED:
        return f"{training.optimizer} does not update weights that live on the host; {' and '.join(HOSTED)} do"
    return ""


def _with_weights(costs: Costs, units: Sequence[ParameterUpdate]) -> Costs:
    sizes = list(costs.sizes.values)
    for unit in units:
        sizes[unit.value] = unit.bytes
    return replace(costs, sizes=replace(costs.sizes, values=tuple(sizes)))


def _updates(room: Room, loaded: Loaded, training: Training) -> list[ParameterUpdate]:
    """Return the cost of each parameter's update: all that it reads and writes, at the device's bandwidth."""
    rounding, device = rounding_of(room.device), room.device
    parameters = dict(loaded.model.named_parameters())
    known: dict[tuple[object, ...], tuple[int, int]] = {}
    units = []
    for name, (value, _) in by_name(room.step).items():
        if name not in parameters:
            continue
        tensor = parameters[name]
        kind = (tuple(tensor.shape), tensor.dtype)
        if kind not in known:
            memory = memory_of(training.optimizer, {name: tensor}, rounding)
            known[kind] = memory.state, memory.update
        state, update = known[kind]
        size = rounding(tensor.numel() * tensor.element_size())
        seconds = device.launch + (3 * size + 2 * state) / (STREAMED * device.bandwidth)
        unit = ParameterUpdate(value=value, bytes=size, state_bytes=state, workspace=update, seconds=seconds)
        units.append(unit.in_the_optimizers_step if _later(training) else unit)
    return units


def _later(training: Training) -> bool:
    """Tell whether parameters on the host are updated in `optimizer.step()`, from the gradients of many backwards."""
    return training.accumulate > 1


def _whole_mib(size: int) -> int:
    return -(-size // 2**20) * 2**20


def _link(device: Device) -> Link:
    return Link(to_host=device.link, from_host=device.link, in_powers=True)
