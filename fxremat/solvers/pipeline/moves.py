"""Improves a known allocation by random moves, and searches all allocations of a short chain.

    moves         a border between stages moves by one or two layers; a stage moves to another device; two stages
                  swap devices; a stage is split, and one part moves to another device; a stage recomputes more or less

A move is kept if `modulo` finds a schedule with a shorter period, or with the same period and more evenly
loaded devices. If the number of micro-batches of a step is given, the seconds of a step count instead: fewer
stages may be worth a longer period. Moves are drawn from a generator with a fixed seed, so that the same job
always has the same answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product
from math import inf

from fxremat.solvers.pipeline.model import PlannedStage, Way
from fxremat.solvers.pipeline.modulo import Pattern, best_pattern, pattern_at
from fxremat.solvers.pipeline.stage_costs import Job

SHORT = 7  # maximum number of layers of a short chain
_MOST_WAYS = 64  # maximum combinations of what stages recompute that are tried for one allocation
_GAIN = 1e-4  # relative gain below which a move is rejected
_STEPS = 600  # maximum number of task placements in the search for one schedule
# multiples of the best tick (the time between slots) tried if the number of micro-batches is given
_TICKS = (1.0, 1.0, 1 - 1e-3, 1.02, 1.1)

Piece = tuple[int, int, int, int]  # first layer, last layer, device, index of what the stage recomputes


def improved(
    job: Job, start: Pattern, *, tries: int, floor: float, microbatches: int | None = None, seed: int = 0
) -> Pattern:
    """Return the best periodic schedule after `tries` random moves from `start`, which may be `start` itself.

    The search ends early if the period reaches the lower bound `floor`. If `microbatches` is given, the seconds
    of a step with that many micro-batches are minimized, not the period.
    """
    draw = random.Random(seed)
    best = start
    pieces, spread = _pieces(job, start.stages), inf
    for _ in range(tries):
        if microbatches is None and best.period <= floor * (1 + _GAIN):
            break
        moved = pieces
        for _ in range(draw.choice((1, 1, 2, 3))):
            moved = _joined(job, _moved(job, moved, draw))
        uneven = _spread(job, moved)
        if moved == pieces:
            continue
        ahead = 1.0 if uneven < spread * (1 - _GAIN) else 1 - _GAIN
        tick = best.tick * (ahead if microbatches is None else draw.choice(_TICKS))
        found = pattern_at(job, _stages(job, moved), tick, skip=best.skip, steps=_STEPS)
        if found is None:
            continue
        if microbatches is None or found.seconds(microbatches) <= best.seconds(microbatches) * ahead:
            best, pieces, spread = found, moved, uneven
    return best


def _spread(job: Job, pieces: Sequence[Piece]) -> float:
    """Return how unevenly devices are loaded, as the sum of squared seconds.

    Evenly loaded allocations are usually closer to better ones.
    """
    loads = [0.0] * job.machines.devices
    for first, last, device, way in pieces:
        loads[device] += job.ways(first, last)[way].seconds
    return sum(load * load for load in loads)


def _pieces(job: Job, stages: Sequence[PlannedStage]) -> list[Piece]:
    return [(s.first, s.last, s.device, job.ways(s.first, s.last).index(s.way)) for s in stages]


def _stages(job: Job, pieces: Sequence[Piece]) -> list[PlannedStage]:
    return [PlannedStage(first=i, last=j, device=d, way=job.ways(i, j)[w]) for i, j, d, w in pieces]


def _moved(job: Job, pieces: list[Piece], draw: random.Random) -> list[Piece]:
    """Return an allocation of stages after one random move; unchanged if that move is impossible."""
    place = draw.randrange(len(pieces))
    first, last, device, way = pieces[place]
    other = draw.randrange(job.machines.devices)
    match draw.randrange(6):
        case 0 | 1 if place + 1 < len(pieces):
            end = last + draw.choice((-2, -1, 1, 2))
            _, after, neighbour, its = pieces[place + 1]
            if first <= end < after:
                pair = [(first, end, device, way), (end + 1, after, neighbour, its)]
                return pieces[:place] + pair + pieces[place + 2 :]
        case 2:
            return [*pieces[:place], (first, last, other, way), *pieces[place + 1 :]]
        case 3:
            swap = {device: other, other: device}
            return [(i, j, swap.get(d, d), w) for i, j, d, w in pieces]
        case 4 if last > first:
            cut = draw.randrange(first, last)
            left, right = (device, other) if draw.random() < 0.5 else (other, device)
            pair = [(first, cut, left, way), (cut + 1, last, right, way)]
            return pieces[:place] + pair + pieces[place + 1 :]
        case 5 if job.options is not None:
            way = draw.randrange(len(job.ways(first, last)))
            return [*pieces[:place], (first, last, device, way), *pieces[place + 1 :]]
    return pieces


def _joined(job: Job, pieces: list[Piece]) -> list[Piece]:
    """Merge neighbouring stages on one device into one stage."""
    found: list[Piece] = []
    for first, last, device, way in pieces:
        if found and found[-1][2] == device:
            first, way = found[-1][0], max(way, found.pop()[3])
        found.append((first, last, device, way))
    return [(i, j, d, min(w, len(job.ways(i, j)) - 1)) for i, j, d, w in found]


def best_of_all(job: Job, *, below: float, floor: float) -> Pattern | None:
    """Return the best periodic schedule over all allocations of a chain of at most `SHORT` layers.

    None for longer chains, or if no period is below `below`; `floor` is a lower bound on the period.
    """
    best: Pattern | None = None
    if job.count > SHORT:
        return None
    for devices in _sharings(job.count, job.machines.devices):
        for stages in _variants(job, devices):
            for skip in (0, 1, 2, 3):
                limit = (best.period if best else below) / (1 + 1 / skip if skip else 1)
                if limit <= floor * (1 + _GAIN) / (1 + 1 / skip if skip else 1):
                    break
                best = best_pattern(job, stages, below=limit, skip=skip, steps=_STEPS) or best
    return best


def _sharings(count: int, devices: int) -> Iterator[tuple[int, ...]]:
    """Yield each assignment of layers to devices, as the device of each layer, without those that only rename devices.
    """

    def grown(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(chosen) == count:
            yield chosen
            return
        for device in range(min(devices, max(chosen, default=-1) + 2)):
            yield from grown((*chosen, device))

    return grown(())


def _variants(job: Job, devices: Sequence[int]) -> Iterator[list[PlannedStage]]:
    """Yield ways to form stages if the device of each layer is given: runs of neighbours, or one layer each.

    What the stages recompute is varied, up to a number of combinations.
    """
    runs: list[tuple[int, int]] = []
    for layer, device in enumerate(devices):
        if runs and devices[layer - 1] == device:
            runs[-1] = (runs[-1][0], layer)
        else:
            runs.append((layer, layer))
    yield from _in_all_ways(job, devices, runs)
    if len(runs) < job.count:
        yield from _in_all_ways(job, devices, [(layer, layer) for layer in range(job.count)])


def _in_all_ways(
    job: Job, devices: Sequence[int], runs: Sequence[tuple[int, int]]
) -> Iterator[list[PlannedStage]]:
    choices: list[tuple[Way, ...]] = [job.ways(*run) for run in runs]
    for number, ways in enumerate(product(*choices)):
        if number == _MOST_WAYS:
            return
        yield [
            PlannedStage(first=i, last=j, device=devices[i], way=way)
            for (i, j), way in zip(runs, ways, strict=True)
        ]
