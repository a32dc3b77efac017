"""Helpers of the tests of offloading solvers: chains in whole units, links, and searches without a table."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from hypothesis import strategies as st

from fxremat.chains.chain import Block, Chain
from fxremat.chains.platform import Platform
from fxremat.chains.resolved import read
from fxremat.chains.schedule import Backward, Forward, Keep, Offload, Op, Prefetch, Schedule, Value
from fxremat.errors import InvalidSchedule
from fxremat.solvers import keep_all
from tests.ticks import tick

speeds = st.sampled_from([0.1, 1 / 3, 1.0, 2.5, 10.0])


def machine(mem: int | None, speed: float = 1.0, back: float | None = None) -> Platform:
    return Platform(memory=mem, to_host=speed, from_host=speed if back is None else back)


@st.composite
def lean_chains(draw: st.DrawFn, shortest: int, longest: int, unit: int = 1) -> Chain:
    """Chains that are dear to save and cheap to run again: where memory is short, all solvers have to choose.

    Sizes are multiples of `unit` bytes.
    """

    def size(most: int, least: int = 0) -> int:
        return unit * draw(st.integers(least, most))

    blocks = [
        Block(
            forward_time=draw(st.integers(1, 4)),
            backward_time=draw(st.integers(1, 6)),
            output_bytes=(output := size(4)),
            saved_bytes=output + size(9, 2),
            grad_bytes=size(2),
            forward_scratch=unit * draw(st.sampled_from([0, 0, 3, 8])),
            save_scratch=unit * draw(st.sampled_from([0, 0, 3])),
            backward_scratch=unit * draw(st.sampled_from([0, 0, 3, 8])),
        )
        for _ in range(draw(st.integers(shortest, longest)))
    ]
    return Chain(blocks=tuple(blocks), input_bytes=size(12), input_grad_bytes=0)


def fastest_pofo(chain: Chain, mem: int) -> float | None:
    """The least time of what POFO searches, link synchronized at the turn, at one byte a second. Tiny chains."""
    found = []
    for forward, values, backward in _parts(chain, 1, "a"):
        seconds = sum(_seconds(chain, op) for op in [*forward, *backward])
        for away in product((False, True), repeat=len(values)):
            off = {at: value for (at, value), goes in zip(values, away, strict=True) if goes}
            ops: list[Op] = []
            for at, op in enumerate(forward):
                ops += [Offload(off[at])] if at in off else []
                ops.append(op)
            ops += [Prefetch(value) for value in reversed(off.values())]
            found.append((seconds, Schedule((*ops, *backward))))
    best = float("inf")
    for seconds, schedule in sorted(found, key=lambda pair: pair[0]):
        if seconds >= best:
            break
        if fits(chain, schedule, mem):
            best = min(best, tick(chain, schedule, mem, fluid=True, synchronized=True)[0])
    return best if found else None


def _seconds(chain: Chain, op: Op) -> float:
    if isinstance(op, Backward):
        return min(option.backward_time for option in chain.blocks[op.block - 1].choices)
    return chain.blocks[op.block - 1].forward_time if isinstance(op, Forward) else 0.0


def _parts(chain: Chain, s: int, kind: str) -> Iterator[tuple[list[Op], list[tuple[int, Value]], list[Op]]]:
    """Every (forward ops, inputs that can travel with the op that reads them first, backward ops) from s on."""
    n = len(chain)
    if s > n:
        yield [], [], []
        return
    mine = (0, Value(kind, s - 1))
    for option in range(len(chain.blocks[s - 1].choices)):
        for forward, values, backward in _parts(chain, s + 1, "A"):
            later = [(at + 1, value) for at, value in values]
            yield (
                [Forward(s, Keep.ALL, option), *forward],
                ([mine] if s < n else []) + later,
                [*backward, Backward(s)],
            )
    for t in range(s, n):
        for forward, values, backward in _parts(chain, t + 1, "a"):
            later = [(at + t - s + 1, value) for at, value in values]
            for again in reruns(chain, s, t):
                yield [*run(s, t), *forward], [mine, *later], [*backward, *again]


def fastest_rerun(chain: Chain, s: int, t: int, kept: int, due: int, mem: int) -> float:
    """The least time to run t..s backward beside `kept` bytes if `due` bytes come meanwhile, a byte a second.

    They come as late as possible: from the last op to the first, each waits until what has to be there before
    its end fits beside it.
    """
    times = [float("inf")]
    for ops in reruns(chain, s, t):
        stored: dict[Value, int] = {}
        phase, steps = t, []  # (seconds, bytes)
        for op in ops:
            block = chain.blocks[op.block - 1]
            if isinstance(op, Backward):
                need = chain.phase_sizes[phase] + chain.grad_sizes[op.block - 1] + block.backward_scratch
                steps.append((block.backward_time, need + sum(stored.values())))
                stored.pop(Value("A", op.block))
                stored.pop(Value("a", op.block - 1), None)
                phase -= 1
            else:
                all_ = op.keep is Keep.ALL
                size = block.saved_bytes if all_ else block.output_bytes
                scratch = block.save_scratch if all_ else block.forward_scratch
                steps.append(
                    (block.forward_time, chain.phase_sizes[phase] + size + scratch + sum(stored.values()))
                )
                stored[Value("A" if all_ else "a", op.block)] = size
                if op.keep is Keep.NONE:
                    stored.pop(Value("a", op.block - 1))
        time, rest = 0.0, float(due)
        for seconds, need in reversed(steps):
            if kept + need > mem:
                time = float("inf")
                break
            wait = max(kept + need + rest - mem, 0)
            time += wait + seconds
            rest = max(rest - wait - seconds, 0)
        times.append(time)
    return min(times)


def reruns(chain: Chain, s: int, t: int) -> Iterator[list[Op]]:
    """Every persistent way to run backward t..s."""
    if s > t:
        yield []
        return
    for rest in reruns(chain, s + 1, t):
        for option in range(len(chain.blocks[s - 1].choices)):
            yield [Forward(s, Keep.ALL, option), *rest, Backward(s)]
    for j in range(s, t):
        for right in reruns(chain, j + 1, t):
            for left in reruns(chain, s, j):
                yield [*run(s, j), *right, *left]


def run(s: int, t: int) -> list[Op]:
    return [Forward(s, Keep.CHECKPOINT), *(Forward(block, Keep.NONE) for block in range(s + 1, t + 1))]


def fits(chain: Chain, schedule: Schedule, mem: int) -> bool:
    """Tell whether a schedule can run at all in `mem` bytes, at any speed of the link."""
    try:
        return max(read(chain, schedule).base) <= mem
    except InvalidSchedule:
        return False


def everything_away(chain: Chain) -> Schedule:
    """Nothing is recomputed, everything that can travel does."""
    n = len(chain)
    saves = list(keep_all.schedules(chain)[0].ops[:n])
    values = [Value("A" if number else "a", number) for number in range(n - 1)]
    ops = [op for value, save in zip(values, saves, strict=False) for op in (Offload(value), save)]
    fetches = [Prefetch(value) for value in reversed(values)]
    return Schedule((*ops, saves[-1], *fetches, *(Backward(number) for number in range(n, 0, -1))))
