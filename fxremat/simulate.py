"""The one definition of a valid schedule, its memory and its time.

    stored    values a_i and A_i on the device, at first {a_0}
    phase k   the gradient d_k is stored; k = n until B_n has run, in the end k = 0

    op        needs               memory while it runs                        leaves
    Fnone_l   input l             stored + phase + a_l + scratch              a_l, without a_{l-1}
    Fck_l     input l             stored + phase + a_l + scratch              a_l
    Fall_l    input l             stored + phase + A_l[o] + its scratch       A_l[o]
    B_l       d_l, A_l, input l   stored + phase + d_{l-1} + its scratch      phase l-1, less A_l, a_{l-1}
    Drop(v)   v                   stored + phase                              all but v

"input l" is a_{l-1} or A_{l-1}; what a phase holds is `Chain.phase_sizes`. The peak also counts the end of
the step, when d_0 and all weight gradients are held. Solvers do not import this file: none grades itself.
"""

from dataclasses import dataclass, field

from fxremat.chain import Block, Chain
from fxremat.errors import InvalidSchedule
from fxremat.platform import Platform
from fxremat.schedule import Backward, Drop, Forward, Keep, Offload, Op, Prefetch, Schedule, Value
from fxremat.units import format_bytes


@dataclass(frozen=True)
class Timeline:
    """What a schedule costs; `memory[i]` and `starts[i]` belong to `schedule.ops[i]`."""

    schedule: Schedule
    peak: int  # bytes
    time: float  # seconds
    memory: tuple[int, ...]  # bytes, while the op runs, everything stored included
    starts: tuple[float, ...]  # seconds from the start of the step

    def __str__(self) -> str:
        lines = [f"peak {format_bytes(self.peak)}, time {self.time:.6g} s, {len(self.memory)} operations"]
        width = max((len(str(op)) for op in self.schedule.ops), default=0)
        for op, start, memory in zip(self.schedule.ops, self.starts, self.memory, strict=True):
            bar = "#" * round(40 * memory / self.peak) if self.peak else ""
            lines.append(f"{start:12.6g} s  {op!s:{width}}  {format_bytes(memory):>10}  {bar}")
        return "\n".join(lines)


def simulate(chain: Chain, schedule: Schedule, platform: Platform | None = None) -> Timeline:
    """Run `schedule` on paper. Raises `InvalidSchedule` that names the op and what it lacks.

    >>> from fxremat.chain import Block
    >>> block = Block(forward_time=1.0, backward_time=2.0, output_bytes=4, saved_bytes=9)
    >>> chain = Chain(blocks=(block, block), input_bytes=4)
    >>> timeline = simulate(chain, Schedule.parse("Fck1 Fall2 B2 Fall1 B1"))
    >>> timeline.peak, timeline.time, timeline.memory
    (25, 7.0, (12, 21, 25, 17, 21))
    """
    device = _Device(chain)
    memory, starts = [], []
    time = 0.0
    for place, op in enumerate(schedule.ops, start=1):
        starts.append(time)
        try:
            used, seconds = device.run(op)
        except InvalidSchedule as error:
            raise InvalidSchedule(f"op {place}, {op}: {error}") from None
        memory.append(used)
        time += seconds
    if device.phase != 0:
        raise InvalidSchedule(
            f"the schedule ends before B{device.phase}; it must run every backward down to B1"
        )
    return Timeline(
        schedule=schedule,
        peak=max(*memory, device.used),
        time=time,
        memory=tuple(memory),
        starts=tuple(starts),
    )


@dataclass
class _Device:
    """The memory of the device between two ops."""

    chain: Chain
    stored: dict[Value, int] = field(init=False)  # with the bytes of each
    options: dict[int, int] = field(init=False, default_factory=dict)  # with which A_l was saved
    phase: int = field(init=False)
    used: int = field(init=False)

    def __post_init__(self) -> None:
        self.phase_sizes = self.chain.phase_sizes
        self.phase = len(self.chain)
        self.stored = {Value("a", 0): self.chain.input_bytes}
        self.used = self.chain.input_bytes + self.phase_sizes[self.phase]

    def run(self, op: Op) -> tuple[int, float]:
        """Run one op; the memory while it runs, and its time."""
        match op:
            case Forward():
                return self._forward(op)
            case Backward():
                return self._backward(op)
            case Drop(value):
                used = self.used
                self._need(value)
                self._free(value)
                return used, 0.0
            case Offload() | Prefetch():
                raise InvalidSchedule("transfers to and from the host cannot be simulated yet")

    def _forward(self, op: Forward) -> tuple[int, float]:
        block = self._block(op.block)
        self._need_input(op.block)
        if op.keep is Keep.ALL:
            if op.option >= len(block.choices):
                raise InvalidSchedule(f"block {op.block} has options 0 to {len(block.choices) - 1}")
            option = block.choices[op.option]
            value, size, scratch = Value("A", op.block), option.saved_bytes, option.save_scratch or 0
            self.options[op.block] = op.option
        else:
            value, size, scratch = Value("a", op.block), block.output_bytes, block.forward_scratch
        used = self.used + size + scratch
        self._free(value)  # a value computed anew replaces the stored one, once it is there
        self.stored[value] = size
        self.used += size
        if op.keep is Keep.NONE:
            self._free(Value("a", op.block - 1))
        return used, block.forward_time

    def _backward(self, op: Backward) -> tuple[int, float]:
        block = self._block(op.block)
        if self.phase != op.block:
            then = f"the next backward is B{self.phase}" if self.phase else "the step is over"
            raise InvalidSchedule(f"the gradient of a{op.block} is not there; {then}")
        self._need(Value("A", op.block))
        self._need_input(op.block)
        option = block.choices[self.options[op.block]]
        used = self.used + self.chain.grad_sizes[op.block - 1] + option.backward_scratch
        self._free(Value("A", op.block))
        self._free(Value("a", op.block - 1))
        self.used += self.phase_sizes[op.block - 1] - self.phase_sizes[op.block]
        self.phase = op.block - 1
        return used, option.backward_time

    def _block(self, number: int) -> Block:
        if not 1 <= number <= len(self.chain):
            raise InvalidSchedule(f"there is no block {number}; the chain has blocks 1 to {len(self.chain)}")
        return self.chain.blocks[number - 1]

    def _need(self, value: Value) -> None:
        if value not in self.stored:
            raise InvalidSchedule(f"{value} is not stored")

    def _need_input(self, number: int) -> None:
        small, large = Value("a", number - 1), Value("A", number - 1)
        if small not in self.stored and large not in self.stored:
            raise InvalidSchedule(
                f"its input is not stored: neither {small} nor {large}"
                if number > 1
                else f"its input is not stored: {small} is gone"
            )

    def _free(self, value: Value) -> None:
        self.used -= self.stored.pop(value, 0)
