"""What the tests of the offloading solvers share: chains in whole units, links, and searches without a table."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from hypothesis import strategies as st

from fxremat.chain import Chain
from fxremat.errors import InvalidSchedule
from fxremat.platform import Platform
from fxremat.schedule import Backward, Forward, Keep, Offload, Op, Prefetch, Schedule, Value
from fxremat.script import read
from fxremat.solvers import keep_all
from tests.ticks import tick

speeds = st.sampled_from([0.1, 1 / 3, 1.0, 2.5, 10.0])


def machine(mem: int | None, speed: float = 1.0, back: float | None = None) -> Platform:
    return Platform(memory=mem, to_host=speed, from_host=speed if back is None else back)


def fastest_pofo(chain: Chain, mem: int) -> float | None:
    """The least time of what POFO searches, link synchronized at the turn, at one byte a second. Tiny chains."""
    times = []
    for forward, values, backward in _parts(chain, 1, "a"):
        for away in product((False, True), repeat=len(values)):
            off = {at: value for (at, value), goes in zip(values, away, strict=True) if goes}
            ops: list[Op] = []
            for at, op in enumerate(forward):
                ops += [Offload(off[at])] if at in off else []
                ops.append(op)
            ops += [Prefetch(value) for value in reversed(off.values())]
            schedule = Schedule((*ops, *backward))
            if max(read(chain, schedule).base) <= mem:
                times.append(tick(chain, schedule, mem, fluid=True, synchronized=True)[0])
    return min(times, default=None)


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
    """Whether a schedule can run at all in `mem` bytes, at any speed of the link."""
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
