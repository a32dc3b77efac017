"""Improves a schedule by local search: changes what is offloaded and what is recomputed; the caller evaluates it.

A schedule consists of its ops without copies, and trips of values to the host (trips.py). A step of the search
tries one of

    toggle        add or remove a trip
    fetch         save block l when it first runs, instead of running it again to save it later
    recompute     do not save block l when it first runs; run it again before its saved values are read
    shorten       remove an op that recomputes, or ops that depend on it

then, while memory is exceeded, adds trips of unused values of the lowest block index (as in autocapper.py), and
keeps the result if `judge` finds it no slower. Beyond the papers, in whose relaxed model memory is freed byte
by byte during a copy, and copies do not overlap with the end of the forward.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fxremat.chains.chain import Chain
from fxremat.chains.schedule import Backward, Drop, Forward, Keep, Offload, Op, Prefetch, Schedule, Value
from fxremat.errors import InvalidSchedule
from fxremat.solvers.offload.trips import ChainTrip, needs, travel, trips

_Key = tuple[Value, int]  # a trip to the host: its value, and its index among the trips of that value


class Verdict(Protocol):
    """The figures of a simulated schedule that the search reads."""

    @property
    def time(self) -> float: ...
    @property
    def peak(self) -> int: ...


@dataclass(frozen=True)
class _State:
    plain: Schedule
    away: frozenset[_Key]


def improve(
    chain: Chain,
    schedule: Schedule,
    mem: int,
    judge: Callable[[Schedule], Verdict],
    *,
    seconds: float = 5.0,
    tries: int | None = None,
    copies: bool = True,
    seed: int = 0,
) -> Schedule:
    """Return a schedule that fits into `mem` bytes and is no slower than `schedule`, which must fit.

    Args:
        schedule: the start; may have copies. It is returned if it cannot be changed.
        judge: returns the simulation of a schedule on the machine; raises `InvalidSchedule` if it cannot run.
        seconds: time limit.
        tries: limit on the number of steps instead; with it the result is deterministic.
        copies: whether values may be offloaded.
    """
    best, rank = schedule, _rank(judge(schedule))
    try:
        state, state_rank = _read(chain, schedule), (float("inf"), 0)
    except InvalidSchedule:
        return schedule
    dice = random.Random(seed)
    until = time.monotonic() + seconds
    tried = 0
    while (tried < tries) if tries is not None else (time.monotonic() < until):
        try:
            trial = state if tried == 0 else _step(chain, state, dice, copies)
            found = _repair(chain, trial, mem, copies)
            verdict = judge(_written(chain, found, mem))
        except InvalidSchedule:
            tried += 1
            continue
        tried += 1
        if verdict.peak <= mem and _rank(verdict) <= state_rank:
            state, state_rank = found, _rank(verdict)
            if state_rank < rank:
                best, rank = _written(chain, state, mem), state_rank
    return best


def _rank(verdict: Verdict) -> tuple[float, int]:
    return verdict.time, verdict.peak


def _read(chain: Chain, schedule: Schedule) -> _State:
    """Split a schedule into its ops without copies, and the trips to the host that its copies make."""
    ops: list[Op] = []
    fetched: dict[Value, int] = {}  # value -> number of ops before its copy back
    dropped: dict[Value, int] = {}  # value -> index of its drop in `ops`
    step = 0
    for op in schedule.ops:
        match op:
            case Offload():
                continue
            case Prefetch(value):
                if value in dropped:
                    ops[dropped.pop(value)] = Offload(value)  # the value comes back later, so this was no real drop
                fetched[value] = step
                continue
            case Drop(value):
                dropped[value] = len(ops)
            case Forward(number, keep):
                dropped.pop(Value("A" if keep is Keep.ALL else "a", number), None)
        if not isinstance(op, Drop):
            step += 1
        ops.append(op)
    plain = Schedule(tuple(op for op in ops if not isinstance(op, Offload)))
    needs(chain, plain)  # raises an error if the ops are valid only together with the copies
    away = set()
    for key, trip in _keyed(chain, plain).items():
        since = fetched.get(trip.value)
        if since is not None and trip.start < since <= trip.end:
            away.add(key)
    return _State(plain, frozenset(away))


def _keyed(chain: Chain, plain: Schedule) -> dict[_Key, ChainTrip]:
    counts: dict[Value, int] = {}
    keyed = {}
    for trip in trips(chain, plain):
        counts[trip.value] = counts.get(trip.value, -1) + 1
        keyed[trip.value, counts[trip.value]] = trip
    return keyed


def _written(chain: Chain, state: _State, mem: int) -> Schedule:
    keyed = _keyed(chain, state.plain)
    chosen = [trip for key, trip in keyed.items() if key in state.away]
    need = needs(chain, state.plain)
    for trip in chosen:
        need[trip.away] -= trip.size
    return travel(state.plain, chosen, need, mem)


def _repair(chain: Chain, state: _State, mem: int, copies: bool) -> _State:
    """Add trips of unused values until the schedule fits. Raises `InvalidSchedule` if that is impossible."""
    need = needs(chain, state.plain)  # raises an error if the ops are no valid schedule
    keyed = _keyed(chain, state.plain) if copies else {}
    away = {key for key in state.away if key in keyed}
    for key in away:
        need[keyed[key].away] -= keyed[key].size
    idle = sorted(
        (key for key in keyed if key not in away), key=lambda key: (key[0].index, key[0].kind, key[1])
    )
    while need.max() > mem:
        peak = int(need.argmax())
        first = next((key for key in idle if keyed[key].away.start <= peak < keyed[key].away.stop), None)
        if first is None:
            raise InvalidSchedule(f"it needs {need.max()} bytes, {need.max() - mem} more than there are")
        idle.remove(first)
        away.add(first)
        need[keyed[first].away] -= keyed[first].size
    return _State(state.plain, frozenset(away))


def _step(chain: Chain, state: _State, dice: random.Random, copies: bool) -> _State:
    """Return a randomly changed schedule, which may be invalid."""
    kinds = [_shorten, _fetch, _recompute]
    if copies and dice.random() < 0.5:
        keys = sorted(_keyed(chain, state.plain), key=str)
        if keys:
            return _State(state.plain, state.away ^ {dice.choice(keys)})
    trial = dice.choice(kinds)(chain, state, dice)
    return _State(_tidied(trial.plain), trial.away)


def _tidied(plain: Schedule) -> Schedule:
    """Return the schedule without drops of values that are not stored."""
    device, ops = {Value("a", 0)}, []
    for op in plain.ops:
        match op:
            case Forward(number, keep):
                device.add(Value("A" if keep is Keep.ALL else "a", number))
                if keep is Keep.NONE:
                    device.discard(Value("a", number - 1))
            case Backward(number):
                device -= {Value("A", number), Value("a", number - 1)}
            case Drop(value):
                if value not in device:
                    continue
                device.remove(value)
        ops.append(op)
    return Schedule(tuple(ops))


def _shorten(chain: Chain, state: _State, dice: random.Random) -> _State:
    """Remove a random forward that is not the first of its block, and up to a few ops after it."""
    ops = list(state.plain.ops)
    seen: set[int] = set()
    again = []
    for place, op in enumerate(ops):
        if isinstance(op, Forward):
            if op.block in seen:
                again.append(place)
            seen.add(op.block)
    if not again:
        return state
    place = dice.choice(again)
    count = dice.choice((1, 1, 1, 2, 4))
    del ops[place : place + count]
    return _State(Schedule(tuple(ops)), state.away)


def _fetch(chain: Chain, state: _State, dice: random.Random) -> _State:
    """Let a random block save its values in an earlier run and offload them, instead of running again later."""
    ops = list(state.plain.ops)
    number = dice.randint(1, len(chain))
    runs = [place for place, op in enumerate(ops) if isinstance(op, Forward) and op.block == number]
    if len(runs) < 2:
        return state
    last, place = runs[-1], dice.choice(runs[:-1])
    early, late = ops[place], ops[last]
    assert isinstance(early, Forward)
    assert isinstance(late, Forward)
    del ops[last]
    ops[place] = Forward(number, Keep.ALL, late.option)
    if early.keep is Keep.NONE and dice.random() < 0.7:
        ops.insert(place + 1, Drop(Value("a", number - 1)))
    return _State(Schedule(tuple(ops)), state.away | {(Value("A", number), 0)})


def _recompute(chain: Chain, state: _State, dice: random.Random) -> _State:
    """Let a random block save its values only in a recomputation right before they are read."""
    ops = list(state.plain.ops)
    number = dice.randint(1, len(chain))
    saves = [
        place
        for place, op in enumerate(ops)
        if isinstance(op, Forward) and op.block == number and op.keep is Keep.ALL
    ]
    if not saves:
        return state
    place = saves[-1]
    save = ops[place]
    block = dice.choice((number, number + 1))
    reader = next((k for k, op in enumerate(ops) if op == Backward(block)), None)
    if reader is None:
        return state
    ops.insert(reader, save)
    ops[place] = Forward(number, dice.choice((Keep.CHECKPOINT, Keep.NONE)))
    user = next((k for k in range(place + 1, reader) if isinstance(ops[k], Forward)), None)
    if user is not None and dice.random() < 0.7:
        after = ops[user]
        assert isinstance(after, Forward)
        if after.keep is Keep.CHECKPOINT and after.block == number + 1:
            ops[user] = Forward(after.block, Keep.NONE)
        else:
            ops.insert(user + 1, Drop(Value("a", number)))
    return _State(Schedule(tuple(ops)), state.away - {(Value("A", number), 0)})
