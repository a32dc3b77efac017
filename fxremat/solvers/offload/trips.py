"""Trips to the host: when values of a schedule could be offloaded, and the schedule in which some of them are.

A value can be offloaded between two ops that read it, or between the op that computes it and one that reads it:
that is a `ChainTrip`. With trips, a schedule has

    Off(v)    right after the op that computes v, once even if v has several trips
    Pre(v)    as soon as v fits into memory until it is read, in the order in which values are read
    Drop(v)   at the start of a further trip, since v is already on the host

If several values could use the same memory, `simulate` gives it to the first of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxremat.chains.chain import Chain
from fxremat.chains.resolved import read
from fxremat.chains.schedule import Backward, Drop, Forward, Keep, Offload, Op, Prefetch, Schedule, Value
from fxremat.solvers.sizes import Ints


@dataclass(frozen=True, kw_only=True)
class ChainTrip:
    """A value that could be on the host between two ops; ops have indices from 0, drops not counted."""

    value: Value
    size: int  # bytes
    made: int  # index of the op that computes the value; -1 for the chain's input
    start: int  # index of the last op before the trip that computes or reads the value
    end: int  # index of the op that reads the value next

    @property
    def away(self) -> slice:
        """Indices of the moments (in what `needs` returns) at which the trip frees memory."""
        return slice(3 * self.start + 3, 3 * self.end + 2)


@dataclass
class _Item:
    value: Value
    size: int
    made: int
    last: int


def trips(chain: Chain, schedule: Schedule) -> list[ChainTrip]:
    """Return the trips to the host and back that would free memory in a schedule that has none, by their ends."""
    device = {Value("a", 0): _Item(Value("a", 0), chain.input_bytes, -1, -1)}
    found: list[ChainTrip] = []
    step = 0

    def read_by(value: Value) -> None:
        item = device[value]
        if item.last < step - 1 and item.size:
            found.append(ChainTrip(value=value, size=item.size, made=item.made, start=item.last, end=step))
        item.last = step

    def read_input(block: int) -> None:
        small = Value("a", block - 1)
        read_by(small if small in device else Value("A", block - 1))

    for op in schedule.ops:
        match op:
            case Drop(value):
                device.pop(value)
                continue
            case Forward(number, keep, option):
                block = chain.blocks[number - 1]
                read_input(number)
                value = Value("A" if keep is Keep.ALL else "a", number)
                size = block.choices[option].saved_bytes if keep is Keep.ALL else block.output_bytes
                device[value] = _Item(value, size, step, step)
                if keep is Keep.NONE:
                    device.pop(Value("a", number - 1), None)
            case Backward(number):
                read_by(Value("A", number))
                read_input(number)
                device.pop(Value("A", number))
                device.pop(Value("a", number - 1), None)
        step += 1
    return found


def needs(chain: Chain, schedule: Schedule) -> Ints:
    """Return the bytes needed at each moment; copies to the host are instant, copies from it as late as possible."""
    return np.array(read(chain, schedule).base, dtype=np.int64)


def travel(
    schedule: Schedule, chosen: Sequence[ChainTrip], need: Ints, mem: int, *, in_part: bool = False
) -> Schedule:
    """Add the copies of chosen trips to the host to a schedule without copies.

    `need`: the bytes that the schedule then needs at each moment; `mem`: the budget in bytes. With `in_part`,
    the copy back of a value starts as soon as one byte of it fits, which suits simulation with
    accounting="fluid"; otherwise it starts when all of the value fits.
    """
    before: dict[int, list[Op]] = {}  # index of the op before which ops are inserted -> the ops
    sent: set[tuple[Value, int]] = set()
    ordered = sorted(chosen, key=lambda trip: (trip.end, trip.start, trip.value.kind))
    for trip in ordered:
        if (trip.value, trip.made) in sent:
            before.setdefault(trip.start + 1, []).append(Drop(trip.value))
        else:
            sent.add((trip.value, trip.made))
            before.setdefault(trip.made + 1, []).append(Offload(trip.value))
    slot = 0
    for trip in ordered:
        full = np.flatnonzero(need[trip.away] + (1 if in_part else trip.size) > mem)
        slot = max(slot, trip.start + 1, (trip.away.start + int(full[-1])) // 3 + 1 if full.size else 0)
        before.setdefault(slot, []).append(Prefetch(trip.value))
    ops: list[Op] = []
    step = 0
    for op in schedule.ops:
        if not isinstance(op, Drop):
            ops += before.get(step, ())
            step += 1
        ops.append(op)
    return Schedule(tuple(ops))
