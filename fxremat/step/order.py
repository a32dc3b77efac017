"""The order of ops that a schedule of blocks executes, replayed on sets of bits.

A schedule consists of operations on blocks:

    Fck l, Fnone l, Fall l[o]   the ops of block l that compute the values to be stored, if not available already
    B l                         the backward ops of block l, each after the recomputations that it needs

The schedule decides which values can be read; `step.program` numbers their versions. A survey replays hundreds of
schedules of one layout, in which a block finds the same values in memory again and again: what its forward or backward
ran then is remembered, so that most operations of a schedule are one look-up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fxremat.chains.schedule import Backward, Drop, Forward, Keep, Op, Schedule
from fxremat.errors import InvalidSchedule
from fxremat.step.layout import Layout, Ran
from fxremat.step.program import Order, Program
from fxremat.step.step_graph import bits_of


def order_of(layout: Layout, schedule: Schedule) -> Order:
    """Return the order in which a schedule of blocks executes ops.

    O(operations of the schedule) where a block ran before with the same values in memory, else O(reads of its ops).

    Raises:
        InvalidSchedule: an op needs a value that the schedule does not keep.
    """
    replay = Replay(layout)
    for op in schedule.ops:
        replay.execute(op)
    return replay.order()


def rematerialize(layout: Layout, schedule: Schedule) -> Program:
    """Expand a schedule into the program that it executes. O(steps * reads). Raises what `order_of` raises."""
    return order_of(layout, schedule).program()


class Counts:
    """Counts of the stored items that contain each value, all values at once: bit k of each is in the k-th digit."""

    def __init__(self) -> None:
        self._digits: list[int] = []

    def add(self, values: int) -> None:
        """Count each of these values once more."""
        for place, digit in enumerate(self._digits):
            self._digits[place] = digit ^ values
            values &= digit
        if values:
            self._digits.append(values)

    def subtract(self, values: int) -> None:
        """Count each of these values, which were counted before, once less."""
        for place, digit in enumerate(self._digits):
            self._digits[place] = digit ^ values
            values &= ~digit

    @property
    def one(self) -> int:
        """The values that are counted exactly once."""
        first, more = self._digits[0] if self._digits else 0, 0
        for digit in self._digits[1:]:
            more |= digit
        return first & ~more

    @property
    def positive(self) -> int:
        """The values that are counted at least once."""
        positive = 0
        for digit in self._digits:
            positive |= digit
        return positive


@dataclass(slots=True)
class Replay:
    """The state while a schedule is replayed: the values in memory, the items that are stored, and the order so far.

    An item is ("a", block), the output of a block, or ("A", block), all that its backward reads; blocks count from 0,
    and sets of values are bits.

    Args:
        layout: the step as a chain of blocks.
        current: the values that are available, besides those that no op computes.
        ran: ops that ran at least once.
    """

    layout: Layout
    current: int = 0
    ran: int = 0
    ops: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    split: int | None = None  # the number of ops that ran before the first backward; None: there was none
    _covers: Counts = field(default_factory=Counts)  # how many stored items contain a value
    _stored: dict[tuple[str, int], int] = field(default_factory=dict)
    _waiting: tuple[int, ...] = ()  # backward ops that wait for a gradient which is not computed yet

    def execute(self, op: Op) -> None:
        """Run one operation of a schedule, except copies, which raise `InvalidSchedule`.

        `transfers.activations.trips_of` runs schedules with copies.
        """
        match op:
            case Forward(block, keep, option):
                self.forward(block - 1, keep, option)
            case Backward(block):
                self.backward(block - 1)
            case Drop(value):
                self.discard(value.kind, value.index - 1)
            case _:
                raise InvalidSchedule(f"{op} needs a host to go to: compile with offload=True")

    def order(self) -> Order:
        """Return the order so far. Raises `InvalidSchedule` if backward ops still wait for a gradient."""
        if self._waiting:
            name = self.layout.graph.ops[self._waiting[0]].name
            raise InvalidSchedule(f"the schedule ends before {name} has the gradients that it reads")
        split = len(self.ops) if self.split is None else self.split
        return Order(layout=self.layout, ops=tuple(self.ops), blocks=tuple(self.blocks), split=split)

    def only_in(self, kind: str, block: int) -> int:
        """Return the values of a stored item that no other one contains; none for ("a", -1), the chain's input.

        Raises:
            InvalidSchedule: the item is not stored.
        """
        if block < 0:
            return 0
        if (kind, block) not in self._stored:
            raise InvalidSchedule(f"Off({kind}{block + 1}): it is not stored")
        return self._stored[kind, block] & self._covers.one

    def restore(self, kind: str, block: int, values: int) -> bool:
        """Store an item again, of which these values came back from the host; tell whether it was not stored."""
        if (kind, block) in self._stored:
            return False
        self.current |= values
        self._store((kind, block), values)
        return True

    def forward(self, block: int, keep: Keep, option: int = 0) -> None:
        """Run the forward of a block, and store its output; with `Keep.ALL`, the values of a save option instead.

        `Keep.NONE` also discards the block's input.
        """
        saved, bits = self.layout.blocks[block].saved, self.layout.bits[block]
        if keep is Keep.ALL and option >= len(saved):
            raise InvalidSchedule(f"block {block + 1} has {len(saved)} options, not {option + 1}")
        kept = option if keep is Keep.ALL else -1
        self._take((block, kept, self.current & bits.near_forward, self.ran & bits.span), block, kept)
        if keep is Keep.ALL:
            self._store(("A", block), bits.saved[option] | bits.boundary)
        else:
            self._store(("a", block), bits.boundary)
        if keep is Keep.NONE:
            self.discard("a", block - 1)
        self._free(bits.made)

    def backward(self, block: int) -> None:
        """Run the backward of a block, then discard the block's input and the values saved for it.

        An op that reads a gradient which a later backward computes (parts of the model share weights) waits for it.
        """
        if self.split is None:
            self.split = len(self.ops)
        bits = self.layout.bits[block]
        near = bits.near_backward, bits.span
        if self._waiting:  # ops that wait may belong to other blocks, and read their values
            near = -1, -1
        self._take((block, self._waiting, self.current & near[0], self.ran & near[1]), block, None)
        self.discard("A", block)
        self.discard("a", block - 1)
        self.discard("a", block)
        self._free(bits.made)

    def discard(self, kind: str, block: int) -> None:
        """Discard the stored output ("a") or save set ("A") of a block; do nothing if it is not stored."""
        if values := self._stored.pop((kind, block), 0):
            self._covers.subtract(values)
            self._free(values)

    def _take(self, key: tuple[object, ...], block: int, kept: int | None) -> None:
        """Run the forward of a block for one of its save options, or its backward if `kept` is None.

        Args:
            key: all that decides which ops this runs.
        """
        ran = self.layout.ran.get(key)
        if ran is None:
            runner = _Runner(self.layout, block, self.current, self.ran, self._waiting)
            runner.backward() if kept is None else runner.forward(kept)
            made, new = runner.current & ~self.current, runner.ran & ~self.ran
            ran = self.layout.ran[key] = Ran(tuple(runner.ops), made, new, tuple(runner.waiting))
        self.ops += ran.ops
        self.blocks += [block] * len(ran.ops)
        self.current |= ran.made
        self.ran |= ran.ran
        if kept is None:  # a forward leaves what waits as it is, and its key does not have it
            self._waiting = ran.waiting

    def _store(self, item: tuple[str, int], values: int) -> None:
        self._covers.add(values)
        self.discard(*item)  # replaces an item that is stored already; values in both the old and the new one stay
        self._stored[item] = values

    def _free(self, values: int) -> None:
        """Free those of the values that no stored item contains, and that are not held whatever is stored."""
        self.current &= ~values | self._covers.positive | self.layout.held_bits


class _Runner:
    """Runs the forward or backward of one block op by op."""

    def __init__(self, layout: Layout, block: int, current: int, ran: int, waiting: Sequence[int]) -> None:
        self.layout, self.block, self.bits = layout, block, layout.graph.bits
        self.current, self.ran, self.waiting = current, ran, [*waiting]
        self.ops: list[int] = []

    def forward(self, kept: int) -> None:
        """Compute the values of a save option, or those of the block's output if `kept` is -1."""
        layout, block = self.layout, self.block
        first = not self.ran & layout.bits[block].ops
        if first:
            for index in layout.blocks[block].forward:  # ops without outputs, such as assertions, run only once
                if not self.bits.writes[index]:
                    self._run(index)
        self._need(bits_of(layout.needs[block, kept, first]) & self.bits.computed)

    def backward(self) -> None:
        """Run the backward ops of the block, and those that waited before, unless gradients that they read are missing.
        """
        self._run_ready([*self.waiting, *self.layout.blocks[self.block].backward])
        if self.waiting:
            self._run_ready(self.waiting)

    def _run_ready(self, backward: Iterable[int]) -> None:
        """Run these backward ops, except those that read a gradient which a later backward computes: they wait.

        Random ops keep their order: one waits while an earlier one does.
        """
        self.waiting, ops = list[int](), self.layout.graph.ops
        for index in backward:
            behind = ops[index].random and any(ops[other].random for other in self.waiting)
            if behind or self.bits.reads[index] & self.bits.gradients & ~self.current:
                self.waiting.append(index)
            else:
                self._run(index)

    def _run(self, index: int) -> None:
        if missing := self._missing(index):
            self._need(missing)
        self.current |= (self.bits.again_writes if self.ran >> index & 1 else self.bits.writes)[index]
        self.ran |= 1 << index
        self.ops.append(index)

    def _missing(self, index: int) -> int:
        """Return the values that an op reads and that are not available."""
        return (self.bits.again_reads if self.ran >> index & 1 else self.bits.reads)[index] & ~self.current

    def _need(self, wanted: int) -> None:
        """Compute the wanted values by running ops of the block in forward order."""
        for index in self._makers(wanted):
            self._run(index)

    def _makers(self, wanted: int) -> list[int]:
        """List the ops, in forward order, that compute the wanted values and all missing inputs of these."""
        graph, forward = self.layout.graph, self.layout.blocks[self.block].forward
        makers, missing = set[int](), wanted & ~self.current
        while missing:
            value = missing & -missing
            missing ^= value
            producer = graph.values[value.bit_length() - 1].producer
            assert producer is not None
            if producer not in makers:
                makers.add(producer)
                missing |= self._missing(producer)
        ordered = sorted(makers)
        for index in (ordered[0], ordered[-1]) if ordered else ():
            if not forward or index < forward[0] or index > forward[-1]:
                name = graph.ops[index].name
                raise InvalidSchedule(f"block {self.block + 1} needs {name}, which belongs to another block")
        return ordered
