"""A schedule matched with its chain: what runs when, which copy of a value it reads, and how long each stays.

Nothing here depends on time. Op c (c = 0, 1, ...) is the c-th forward or backward; tokens that take no time
(drops and copies) belong to the slot before the op that follows them. Moments in the order of the schedule have
these numbers:

    3c       op c - 1 has ended (c = 0: the step begins)
    3c + 1   the tokens of slot c have been read, op c has not started
    3c + 2   op c runs

`ResolvedSchedule.base` is the memory at each of them, if copies to the host took no time and copies from the
host came as late as the order allows. The simulation adds values that have not left yet, and those that have
come early.

A value that is offloaded stays readable until the next Pre(v) or recomputation of v: it leaves the device when
both its copy and the last op that reads it have ended. An op whose input is stored both as a (a block's output)
and as A (all that the block saves) reads the one that is not leaving, and a if there is a choice.
"""

from dataclasses import dataclass, field
from itertools import accumulate

from fxremat.chains.chain import Block, Chain
from fxremat.chains.schedule import Backward, Drop, Forward, Keep, Offload, Op, Prefetch, Schedule, Value
from fxremat.errors import InvalidSchedule


@dataclass(eq=False)
class Stored:
    """A value that is on the device from moment `born` to moment `gone`; the module's docstring numbers moments."""

    size: int
    option: int  # the save option of a stored set of values ("A")
    born: int
    gone: int = -1  # -1: the value stays to the end
    # the copy from the host that brings the value to the device; None: an op computes the value
    coming: "LinkCopy | None" = None
    # the copy to the host after which the value may be freed; None: the value stays on the device
    leaving: "LinkCopy | None" = None
    touched: bool = False  # True once an op or a token has used the value


@dataclass(eq=False)
class LinkCopy:
    """A copy of a value between device and host."""

    token: int  # index of the copy's token in the text of the schedule
    value: Value
    stored: Stored
    outward: bool  # True: to the host; False: from the host
    after: "LinkCopy | None"  # the copy that must have ended before this copy starts, if any
    due: int = -1  # for a copy from the host, the moment at which the copy must have ended


@dataclass(frozen=True)
class OpRun:
    """A forward or backward of the schedule, with what it waits for."""

    token: int  # index of the op's token in the text of the schedule
    seconds: float
    needs: tuple[LinkCopy, ...]  # copies of the op's operands from the host, which must have ended before the op starts


@dataclass(frozen=True)
class Token:
    """An operation of the schedule that takes no time: a drop, or a copy that is appended to its queue."""

    token: int  # index of the token in the schedule
    copy: LinkCopy | None  # None: the token is a drop
    freed: int  # bytes that a drop frees


@dataclass(frozen=True)
class ResolvedSchedule:
    """A schedule matched with its chain: everything about its execution except times."""

    steps: list[OpRun]  # op number c, a forward or backward, is steps[c]
    slots: list[list[Token]]  # slots[c]: the tokens before op c; the last list has those after all ops
    copies: list[LinkCopy]  # all copies, in the order of the schedule
    base: list[int]  # bytes at every moment, with instant copies to the host and copies from it as late as possible


def read(chain: Chain, schedule: Schedule) -> ResolvedSchedule:
    """Find what each op of a schedule reads, waits for and frees, and the memory at every moment, without times.

    Raises `InvalidSchedule`, with the op and what it lacks.
    """
    reader = _Reader(chain)
    for token, op in enumerate(schedule.ops):
        try:
            reader.take(token, op)
        except InvalidSchedule as error:
            raise InvalidSchedule(f"op {token + 1}, {op}: {error}") from None
    if reader.phase != 0:
        raise InvalidSchedule(
            f"the schedule ends before B{reader.phase}; it must run every backward down to B1"
        )
    for copy in reader.copies:
        if not copy.outward and not copy.stored.touched:
            place = f"op {copy.token + 1}, {schedule.ops[copy.token]}"
            raise InvalidSchedule(f"{place}: nothing reads {copy.value} before the step ends")
    return reader.script()


@dataclass
class _Reader:
    """A reader of schedules, which tracks what is on the device and on the host after each operation."""

    chain: Chain
    device: dict[Value, Stored] = field(init=False)
    host: dict[Value, LinkCopy] = field(init=False, default_factory=dict)
    phase: int = field(init=False)

    def __post_init__(self) -> None:
        self.phase = len(self.chain)
        start = Stored(self.chain.input_bytes, 0, 0)
        self.device = {Value("a", 0): start}
        self.all = [start]
        self.copies: list[LinkCopy] = []
        self.steps: list[OpRun] = []
        self.slots: list[list[Token]] = [[]]
        self.extra: list[int] = []  # for each op, bytes allocated during the op besides what it stores
        self.turns: list[int] = []  # indices of the backwards in `steps`

    def take(self, token: int, op: Op) -> None:
        match op:
            case Forward():
                self._forward(token, op)
            case Backward():
                self._backward(token, op)
            case Drop(value):
                self._drop(token, value)
            case Offload(value):
                self._offload(token, value)
            case Prefetch(value):
                self._prefetch(token, value)

    def _forward(self, token: int, op: Forward) -> None:
        block = self._block(op.block)
        needs = self._read_input(op.block)
        if op.keep is Keep.ALL:
            if op.option >= len(block.choices):
                raise InvalidSchedule(f"block {op.block} has options 0 to {len(block.choices) - 1}")
            option = block.choices[op.option]
            value, size, scratch = Value("A", op.block), option.saved_bytes, option.save_scratch or 0
        else:
            value, size, scratch = Value("a", op.block), block.output_bytes, block.forward_scratch
        here = 3 * len(self.steps) + 2
        needs += self._close(value, here + 1)  # a recomputed value replaces the stored one, which is freed
        self._store(value, Stored(size, op.option, here))
        if op.keep is Keep.NONE:
            needs += self._close(Value("a", op.block - 1), here + 1)
        self._step(token, block.forward_time, scratch, needs)

    def _backward(self, token: int, op: Backward) -> None:
        block = self._block(op.block)
        if self.phase != op.block:
            then = f"the next backward is B{self.phase}" if self.phase else "the step is over"
            raise InvalidSchedule(f"the gradient of a{op.block} is not there; {then}")
        saved = Value("A", op.block)
        option = block.choices[self._need(saved).option]
        needs = self._read(saved) + self._read_input(op.block)
        end = 3 * len(self.steps) + 3
        needs += self._close(saved, end) + self._close(Value("a", op.block - 1), end)
        self.turns.append(len(self.steps))
        extra = self.chain.grad_sizes[op.block - 1] + option.backward_scratch
        self._step(token, option.backward_time, extra, needs)
        self.phase = op.block - 1

    def _drop(self, token: int, value: Value) -> None:
        stored = self._settled(value)
        self.slots[-1].append(Token(token, None, 0 if stored.leaving else stored.size))
        self._close(value, 3 * len(self.steps) + 1)

    def _offload(self, token: int, value: Value) -> None:
        stored = self._settled(value)
        if stored.leaving:
            raise InvalidSchedule(f"{value} is on its way to the host already")
        stored.gone = 3 * len(self.steps) + 1
        stored.leaving = self.host[value] = self._copy(token, value, stored, stored.coming, outward=True)

    def _prefetch(self, token: int, value: Value) -> None:
        if value not in self.host:
            raise InvalidSchedule(f"{value} is not on the host")
        if value in self.device and not self.device[value].leaving:
            raise InvalidSchedule(f"{value} is on the device already")
        copy = self.host[value]
        stored = Stored(copy.stored.size, copy.stored.option, -1)
        self._store(value, stored)
        stored.coming = self._copy(token, value, stored, copy, outward=False)

    def _copy(self, token: int, value: Value, stored: Stored, after: LinkCopy | None, *, outward: bool) -> LinkCopy:
        copy = LinkCopy(token, value, stored, outward, after)
        self.copies.append(copy)
        self.slots[-1].append(Token(token, copy, 0))
        return copy

    def _step(self, token: int, seconds: float, extra: int, needs: tuple[LinkCopy, ...]) -> None:
        self.steps.append(OpRun(token, seconds, needs))
        self.extra.append(extra)
        self.slots.append([])

    def _store(self, value: Value, stored: Stored) -> None:
        self.device[value] = stored
        self.all.append(stored)

    def _read_input(self, number: int) -> tuple[LinkCopy, ...]:
        small, large = Value("a", number - 1), Value("A", number - 1)
        found = [value for value in (small, large) if value in self.device]
        if not found:
            raise InvalidSchedule(
                f"its input is not stored: neither {small} nor {large}"
                if number > 1
                else f"its input is not stored: {small} is gone"
            )
        return self._read(min(found, key=lambda value: self.device[value].leaving is not None))

    def _read(self, value: Value) -> tuple[LinkCopy, ...]:
        """Record that the next op reads a stored value; return the copies that the op has to wait for."""
        stored = self.device[value]
        here = 3 * len(self.steps) + 2
        if stored.leaving:
            stored.gone = here + 1
        return self._touch(stored, here)

    def _close(self, value: Value, gone: int) -> tuple[LinkCopy, ...]:
        """Remove a stored value at moment `gone`; return the copies that have to end before that."""
        stored = self.device.pop(value, None)
        if stored is None:
            return ()
        if not stored.leaving:
            stored.gone = gone
        return self._touch(stored, gone - 1)

    def _touch(self, stored: Stored, here: int) -> tuple[LinkCopy, ...]:
        if stored.coming is None:
            return ()
        if not stored.touched:
            stored.touched = True
            stored.coming.due = here
        return (stored.coming,)

    def _need(self, value: Value) -> Stored:
        if value not in self.device:
            raise InvalidSchedule(f"{value} is not stored")
        return self.device[value]

    def _settled(self, value: Value) -> Stored:
        stored = self._need(value)
        if stored.coming and not stored.touched:
            raise InvalidSchedule(f"{value} has been fetched from the host and not been read")
        return stored

    def _block(self, number: int) -> Block:
        if not 1 <= number <= len(self.chain):
            raise InvalidSchedule(f"there is no block {number}; the chain has blocks 1 to {len(self.chain)}")
        return self.chain.blocks[number - 1]

    def script(self) -> ResolvedSchedule:
        """Return the resolved schedule, after the last operation was read."""
        end = 3 * len(self.steps) + 1
        due = end
        for copy in reversed(self.copies):
            if not copy.outward:  # copies from the host run in the order in which they were queued
                due = copy.due = min(due, copy.due)
                copy.stored.born = due
        return ResolvedSchedule(self.steps, self.slots, self.copies, self._base(end))

    def _base(self, end: int) -> list[int]:
        change = [0] * (end + 2)
        for stored in self.all:
            change[stored.born] += stored.size
            change[stored.gone if stored.gone >= 0 else end + 1] -= stored.size
        for step, extra in enumerate(self.extra):
            change[3 * step + 2] += extra
            change[3 * step + 3] -= extra
        phases = self.chain.phase_sizes
        change[0] += phases[-1]
        for block, step in zip(range(len(self.chain), 0, -1), self.turns, strict=True):
            change[3 * step + 3] += phases[block - 1] - phases[block]
        return list(accumulate(change[: end + 1]))
