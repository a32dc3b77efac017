"""The definition of a valid schedule of a join (several chains that meet), of its memory and of its time.

    each branch has its own stored values, at first its a_0, and its own phase
    turn       the outputs of all branches are replaced by their gradients: at B1 of the trunk, or at Loss
    before it  a branch has no gradient; it holds the `Block.held_bytes` of its last block
    after it   a branch in phase t holds Chain.phase_sizes[t]
    trunk      its input is the output of every branch, a_n or A_n, so that `input_bytes` and
               `input_grad_bytes` of its chain are not used; its weight gradients stay to the end

    op         needs               memory while it runs                          afterwards
    Loss       all outputs         all + the gradients of all outputs            the gradients; no a_n
    0:B1       all outputs, A_1    all + those gradients + its scratch           the gradients; no a_n, no A_1
    0:Fnone1   all outputs         all + a_1 + scratch                           a_1; no a_n

and every other op as in simulate.py, where "stored" and "phase" are those of all branches and the trunk
together.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from fxremat.chains.chain import Chain, Join
from fxremat.chains.join_schedule import JoinOp, JoinSchedule, Loss, On
from fxremat.chains.schedule import Backward, Drop, Forward, Keep, Op, Value
from fxremat.errors import InvalidSchedule


@dataclass(frozen=True)
class JoinTimeline:
    """The simulated memory and time of a join's schedule; `memory[i]` belongs to `schedule.ops[i]`."""

    schedule: JoinSchedule
    peak: int  # peak bytes
    time: float  # seconds of the step
    memory: tuple[int, ...]  # bytes during each operation, including all that is stored


def simulate_join(join: Join, schedule: JoinSchedule) -> JoinTimeline:
    """Simulate a schedule of a join: memory at every op, and the time.

    Raises `InvalidSchedule`, with the op and what it lacks.

    >>> from fxremat.chains.chain import Block
    >>> block = Block(forward_time=1.0, backward_time=2.0, output_bytes=1, saved_bytes=3)
    >>> join = Join(branches=(Chain(blocks=(block,), input_bytes=1),) * 2)
    >>> simulate_join(join, JoinSchedule.parse("1:Fall1 2:Fall1 Loss 1:B1 2:B1")).memory
    (5, 8, 10, 11, 7)
    """
    device = _Device(join)
    memory = []
    time = 0.0
    for place, op in enumerate(schedule.ops, start=1):
        try:
            used, seconds = device.run(op)
        except InvalidSchedule as error:
            raise InvalidSchedule(f"op {place}, {op}: {error}") from None
        memory.append(used)
        time += seconds
    for number, branch in device.chains():
        if branch.phase != 0:
            raise InvalidSchedule(f"the schedule ends before all backwards of branch {number} have run")
    return JoinTimeline(schedule, max(*memory, device.used), time, tuple(memory))


@dataclass
class _Branch:
    """The simulated memory of one branch of a join, or of its trunk."""

    chain: Chain
    stored: dict[Value, int] = field(default_factory=dict)  # value -> its bytes
    options: dict[int, int] = field(default_factory=dict)  # block -> the option with which its values were saved
    phase: int | None = None  # number of the block whose backward is next; None: the branch has no gradient yet
    constant: int = 0  # bytes in use until the next backward ends, besides stored values

    @property
    def used(self) -> int:
        return self.constant + sum(self.stored.values())

    @property
    def ends(self) -> tuple[Value, Value]:
        return Value("a", len(self.chain)), Value("A", len(self.chain))

    def enter(self, phase: int) -> None:
        self.phase, self.constant = phase, self.chain.phase_sizes[phase]


class _Device:
    """The simulated device memory between two operations."""

    def __init__(self, join: Join) -> None:
        self.branches = [
            _Branch(chain, {Value("a", 0): chain.input_bytes}, constant=chain.blocks[-1].held_bytes)
            for chain in join.branches
        ]
        self.trunk = None
        if join.trunk is not None:
            self.trunk = _Branch(join.trunk)
            self.trunk.enter(len(join.trunk))

    def chains(self) -> Iterator[tuple[int, _Branch]]:
        """Yield (number, branch) for every branch, the trunk first, with number 0."""
        if self.trunk is not None:
            yield 0, self.trunk
        yield from enumerate(self.branches, start=1)

    @property
    def used(self) -> int:
        return sum(branch.used for _, branch in self.chains())

    def run(self, op: JoinOp) -> tuple[int, float]:
        """Simulate one operation; return the bytes of all branches and the trunk during it, and its seconds."""
        match op:
            case Loss():
                return self._loss(), 0.0
            case On(number, inner):
                branch = dict(self.chains()).get(number)
                if branch is None:
                    raise InvalidSchedule(f"there is no branch {number}" if number else "there is no trunk")
                return self._on(branch, inner)

    def _on(self, branch: _Branch, op: Op) -> tuple[int, float]:
        match op:
            case Forward():
                return self._forward(branch, op)
            case Backward(block):
                return self._backward(branch, block)
            case Drop(value):
                used = self.used
                if value not in branch.stored:
                    raise InvalidSchedule(f"{value} is not stored")
                del branch.stored[value]
                return used, 0.0
            case _:
                raise InvalidSchedule("joins do not move values to and from the host")

    def _loss(self) -> int:
        if self.trunk is not None:
            raise InvalidSchedule("the branches meet in the trunk, not in a loss")
        if any(branch.phase is not None for branch in self.branches):
            raise InvalidSchedule("the loss has run before")
        self._need_ends()
        used = self.used + sum(branch.chain.grad_sizes[-1] for branch in self.branches)
        self._turn()
        return used

    def _turn(self) -> None:
        for branch in self.branches:
            branch.stored.pop(branch.ends[0], None)
            branch.enter(len(branch.chain))

    def _forward(self, branch: _Branch, op: Forward) -> tuple[int, float]:
        self._need_input(branch, op.block)
        block = branch.chain.blocks[op.block - 1]
        if op.keep is Keep.ALL:
            if op.option >= len(block.choices):
                raise InvalidSchedule(f"block {op.block} has options 0 to {len(block.choices) - 1}")
            option = block.choices[op.option]
            value, size, scratch = Value("A", op.block), option.saved_bytes, option.save_scratch or 0
            branch.options[op.block] = op.option
        else:
            value, size, scratch = Value("a", op.block), block.output_bytes, block.forward_scratch
        used = self.used + size + scratch
        branch.stored[value] = size
        if op.keep is Keep.NONE:
            self._free_input(branch, op.block)
        return used, block.forward_time

    def _backward(self, branch: _Branch, number: int) -> tuple[int, float]:
        if branch.phase != number:
            raise InvalidSchedule(f"the gradient of a{number} is not there")
        saved = Value("A", number)
        if saved not in branch.stored:
            raise InvalidSchedule(f"{saved} is not stored")
        self._need_input(branch, number)
        option = branch.chain.blocks[number - 1].choices[branch.options[number]]
        first_of_trunk = branch is self.trunk and number == 1
        if first_of_trunk:
            written = sum(other.chain.grad_sizes[-1] for other in self.branches)
        else:
            written = branch.chain.grad_sizes[number - 1]
        used = self.used + written + option.backward_scratch
        del branch.stored[saved]
        branch.enter(number - 1)
        if first_of_trunk:
            # the gradient of the trunk's input is stored as the gradients of the branches' outputs
            branch.constant -= branch.chain.input_grad_bytes
            self._turn()
        else:
            self._free_input(branch, number)
        return used, option.backward_time

    def _free_input(self, branch: _Branch, number: int) -> None:
        if branch is self.trunk and number == 1:
            for other in self.branches:
                other.stored.pop(other.ends[0], None)
        branch.stored.pop(Value("a", number - 1), None)

    def _need_input(self, branch: _Branch, number: int) -> None:
        if not 1 <= number <= len(branch.chain):
            raise InvalidSchedule(
                f"there is no block {number}; the chain has blocks 1 to {len(branch.chain)}"
            )
        if branch is self.trunk and number == 1:
            self._need_ends()
            return
        small, large = Value("a", number - 1), Value("A", number - 1)
        if small not in branch.stored and large not in branch.stored:
            raise InvalidSchedule(f"its input is not stored: neither {small} nor {large}")

    def _need_ends(self) -> None:
        for number, branch in enumerate(self.branches, start=1):
            small, large = branch.ends
            if small not in branch.stored and large not in branch.stored:
                raise InvalidSchedule(f"branch {number} has not ended: neither {small} nor {large} is stored")
