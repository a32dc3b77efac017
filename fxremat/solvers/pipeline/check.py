"""Checks that a pipeline plan can run as it says, by an independent simulation of each micro-batch.

    order      forward of stage s, copy, forward of stage s + 1, .., backward of stage s + 1, copy, backward of stage s
    devices    each runs one forward or backward at a time; the link of each pair of devices makes one copy at a time
    memory     at every start: copies of the weights; what each micro-batch saves between the start of its forward
               and the end of its backward; what the running micro-batch needs in addition; tensors passed between
               two stages of one device; and, always, buffers on both sides of borders between devices
    orders     run one after the other as `PipelinePlan.orders` lists them, no device waits for ever, and no more
               micro-batches are in flight than the plan says

It shares no code with the planners. It simulates as many micro-batches as fill the pipeline several times.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from fxremat.errors import InvalidSchedule
from fxremat.solvers.pipeline.model import PipelinePlan, Work, WorkKind

_TINY = 1e-6  # fraction of a tick or of the memory; smaller differences are rounding errors
_MORE = 8  # number of micro-batches beyond those that fill the pipeline


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The result of the simulation: micro-batches in flight, and memory."""

    in_flight: tuple[int, ...]  # for each stage, the most micro-batches between forward and backward
    memory: tuple[float, ...]  # bytes of each device


@dataclass(frozen=True)
class Span:
    """A forward, backward or copy of one micro-batch in the simulation, with its start and end in seconds."""

    start: float
    end: float
    place: int  # index of the stage; for a copy, of the stage before the border
    microbatch: int
    what: str  # "F" (forward), "B" (backward), "forth" (copy of an output) or "back" (copy of a gradient)


def check(plan: PipelinePlan) -> Measured:
    """Simulate the plan. Raises `InvalidSchedule`, whose message describes the first problem."""
    _check_shape(plan)
    _check_one_microbatch(plan)
    found = list(spans(plan, enough(plan)))
    _check_resources(plan, found)
    flights = _in_flight(plan, found)
    memory = _memory(plan, found)
    for stage, (count, said) in enumerate(zip(flights, plan.in_flight, strict=True)):
        if count != said:
            raise InvalidSchedule(f"stage {stage} has {count} micro-batches in flight; the plan says {said}")
    for device, (size, told) in enumerate(zip(memory, plan.memory, strict=True)):
        if size > told + _TINY * plan.machines.memory:
            raise InvalidSchedule(f"device {device} takes {size:.0f} bytes; the plan says {told:.0f}")
        if size > plan.machines.memory * (1 + _TINY):
            raise InvalidSchedule(f"device {device} takes {size:.0f} bytes of {plan.machines.memory:.0f}")
    _check_orders(plan, enough(plan))
    return Measured(in_flight=tuple(flights), memory=tuple(memory))


def _check_shape(plan: PipelinePlan) -> None:
    """Check that the stages are the chain's layers, in order, on existing devices."""
    after = 0
    for number, stage in enumerate(plan.stages):
        if stage.first != after or stage.last < stage.first:
            raise InvalidSchedule(
                f"stage {number} has layers {stage.first}..{stage.last}; {after} comes next"
            )
        if not 0 <= stage.device < plan.machines.devices:
            raise InvalidSchedule(f"stage {number} is on device {stage.device} of {plan.machines.devices}")
        after = stage.last + 1
    if after != len(plan.layers.layers):
        raise InvalidSchedule(f"the stages end before layer {after} of {len(plan.layers.layers)}")
    if plan.skip is not None and plan.skip < 1:
        raise InvalidSchedule(f"every {plan.skip + 1}-th slot stays empty: nothing runs")


def _remote(plan: PipelinePlan, border: int) -> bool:
    return plan.stages[border].device != plan.stages[border + 1].device


def _seconds(plan: PipelinePlan, border: int, what: str) -> float:
    """Return the seconds of a copy between stages `border` and `border` + 1; `what`: "forth" or "back"."""
    layer = plan.layers.layers[plan.stages[border].last]
    if plan.machines.bandwidth is None or not _remote(plan, border):
        return 0.0
    return (layer.output_bytes if what == "forth" else layer.grad_bytes) / plan.machines.bandwidth


def first_microbatch(plan: PipelinePlan) -> Iterator[Span]:
    """Yield every forward, backward and copy of micro-batch 0, each after those it depends on."""
    last = len(plan.stages) - 1
    for place, stage in enumerate(plan.stages):
        start = plan.forward_starts[place]
        yield Span(start, start + stage.way.forward_time, place, 0, "F")
        if place < last and _remote(plan, place):
            start = plan.forth_starts[place]
            yield Span(start, start + _seconds(plan, place, "forth"), place, 0, "forth")
    for place in range(last, -1, -1):
        if place < last and _remote(plan, place):
            start = plan.back_starts[place]
            yield Span(start, start + _seconds(plan, place, "back"), place, 0, "back")
        start = plan.backward_starts[place]
        yield Span(start, start + plan.stages[place].way.backward_time, place, 0, "B")


def _check_one_microbatch(plan: PipelinePlan) -> None:
    for before, after in pairwise(first_microbatch(plan)):
        if after.start < before.end - _TINY * plan.tick:
            raise InvalidSchedule(
                f"{after.what} of {after.place} starts at {after.start:.6g} s, before {before.what} of "
                f"{before.place} ends at {before.end:.6g} s"
            )


def enough(plan: PipelinePlan) -> int:
    """Return a number of micro-batches after which the simulated schedule only repeats itself."""
    once = list(first_microbatch(plan))
    deep = (max(span.end for span in once) - min(span.start for span in once)) / plan.tick
    if not deep < 1000:
        raise InvalidSchedule(
            f"a micro-batch takes {deep:.0f} ticks from its first forward to its last backward"
        )
    return 2 * int(deep) + 2 * ((plan.skip or 0) + 1) + _MORE


def spans(plan: PipelinePlan, microbatches: int) -> Iterator[Span]:
    """Yield every forward, backward and copy of the first `microbatches` micro-batches."""
    for span in first_microbatch(plan):
        for number in range(microbatches):
            slot = number if plan.skip is None else number + number // plan.skip
            late = slot * plan.tick
            yield Span(span.start + late, span.end + late, span.place, number, span.what)


def _check_resources(plan: PipelinePlan, found: list[Span]) -> None:
    lanes: dict[object, list[Span]] = defaultdict(list)
    for span in found:
        device = plan.stages[span.place].device
        if span.what in "FB":
            lanes[f"device {device}"].append(span)
        else:
            low, high = sorted((device, plan.stages[span.place + 1].device))
            lanes[f"the link of devices {low} and {high}"].append(span)
    for name, lane in lanes.items():
        busy = sorted((s for s in lane if s.end > s.start), key=lambda span: span.start)
        for before, after in pairwise(busy):
            if after.start < before.end - _TINY * plan.tick:
                raise InvalidSchedule(
                    f"{name} is used twice at {after.start:.6g} s: {before.what} of {before.place}, "
                    f"micro-batch {before.microbatch}, and {after.what} of {after.place}, {after.microbatch}"
                )


def stays(plan: PipelinePlan, found: list[Span]) -> Iterator[tuple[float, float, int, float]]:
    """Yield (start, end, device, bytes) of every value that a device stores for some time."""
    starts = {(s.what, s.place, s.microbatch): s for s in found}
    for span in found:
        stage = plan.stages[span.place]
        if span.what == "F":
            end = starts["B", span.place, span.microbatch].end
            yield span.start, end, stage.device, stage.way.kept_bytes
        if span.what in "FB":
            more = max(0.0, stage.way.peak_bytes - stage.way.kept_bytes)
            yield span.start, span.end, stage.device, more
        if span.what == "F" and span.place + 1 < len(plan.stages) and not _remote(plan, span.place):
            size = plan.layers.layers[stage.last].output_bytes
            yield span.end, starts["F", span.place + 1, span.microbatch].start, stage.device, size
        if span.what == "B" and span.place and not _remote(plan, span.place - 1):
            size = plan.layers.layers[stage.first - 1].grad_bytes
            yield span.end, starts["B", span.place - 1, span.microbatch].start, stage.device, size


def _most(held: list[tuple[float, float, float]], tiny: float) -> float:
    """Return the largest total size at any time of the (start, end, size) in `held`.

    Intervals that only touch do not overlap; differences of `tiny` seconds are rounding errors.
    """
    events = []
    for start, end, size in held:
        if end - start > 2 * tiny:
            events += [(start + tiny, 1, size), (end - tiny, 0, -size)]
    most = total = 0.0
    for _, _, size in sorted(events):
        total += size
        most = max(most, total)
    return most


def _in_flight(plan: PipelinePlan, found: list[Span]) -> list[int]:
    ends = {(s.place, s.microbatch): s.end for s in found if s.what == "B"}
    alive: list[list[tuple[float, float, float]]] = [[] for _ in plan.stages]
    for span in found:
        if span.what == "F":
            alive[span.place].append((span.start, ends[span.place, span.microbatch], 1.0))
    # at least 1, even if the stage takes no time
    return [max(1, round(_most(held, _TINY * plan.tick))) for held in alive]


def _memory(plan: PipelinePlan, found: list[Span]) -> list[float]:
    held = list(stays(plan, found))
    memory = []
    for device in range(plan.machines.devices):
        here = [(start, end, size) for start, end, at, size in held if at == device]
        memory.append(always(plan, device) + _most(here, _TINY * plan.tick))
    return memory


def always(plan: PipelinePlan, device: int) -> float:
    """Return the bytes that are always allocated on a device: weights, and buffers for copies to other devices."""
    size = 0.0
    for number, stage in enumerate(plan.stages):
        if stage.device != device:
            continue
        layers = plan.layers.layers[stage.first : stage.last + 1]
        size += plan.machines.copies * sum(layer.weight_bytes for layer in layers)
        for border in (number - 1, number):
            if 0 <= border < len(plan.stages) - 1 and _remote(plan, border):
                layer = plan.layers.layers[plan.stages[border].last]
                size += layer.output_bytes + layer.grad_bytes
    return size


def _check_orders(plan: PipelinePlan, microbatches: int) -> None:
    """Check that each device can run in the order that the plan lists.

    No more micro-batches may be in flight then than the plan says.
    """
    queues = [list(reversed(works)) for works in plan.orders(microbatches)]
    done: set[Work] = set()
    alive: Counter[int] = Counter()
    while any(queues):
        waiting = True
        for queue in queues:
            while queue and _needs(plan, queue[-1]) <= done:
                work = queue.pop()
                done.add(work)
                waiting = False
                alive[work.stage] += 1 if work.kind is WorkKind.FORWARD else -1
                if alive[work.stage] > plan.in_flight[work.stage]:
                    raise InvalidSchedule(
                        f"done in order, stage {work.stage} has {alive[work.stage]} in flight"
                    )
        if waiting:
            raise InvalidSchedule(
                f"done in order, every device waits: {[queue[-1] for queue in queues if queue]}"
            )


def _needs(plan: PipelinePlan, work: Work) -> set[Work]:
    """Return the forwards or backwards that `work` directly depends on."""
    last = len(plan.stages) - 1
    if work.kind is WorkKind.FORWARD:
        return {Work(work.stage - 1, WorkKind.FORWARD, work.microbatch)} if work.stage else set()
    if work.stage == last:
        return {Work(last, WorkKind.FORWARD, work.microbatch)}
    return {Work(work.stage + 1, WorkKind.BACKWARD, work.microbatch)}
