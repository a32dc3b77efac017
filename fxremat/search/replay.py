"""Compiled replay: exact peak and time of a choice of recomputations, and fast updates after small changes.

A skeleton (`search.skeleton`) is a fixed order of executions, some of them optional; a choice says which may
happen. The replay runs backwards: a value is alive from the moment a reader is met until an execution that
writes it is met; an optional execution none of whose outputs is alive does not happen. The memory model is that
of `step.liveness`.

The set of alive values is stored every PAGE executions. After one decision of a choice is changed, the replay
starts at its page and ends as soon as the alive values equal the stored ones: the results of the remaining
pages stay valid.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxremat.jit import jit

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bits = NDArray[np.uint8]

PAGE = 64  # executions per page
TINY = 1e-12  # seconds; smaller differences are rounding errors


class Tape(NamedTuple):
    """Possible executions of ops as arrays, for simulation of their memory.

    Execution i reads the values reads[read_from[i] : read_from[i + 1]], and writes likewise.
    """

    optional: Bits
    read_from: Ints
    reads: Ints
    write_from: Ints
    writes: Ints
    sizes: Ints  # bytes of each value
    extra: Ints  # for each execution, bytes allocated only during it, besides what it reads and writes
    seconds: Floats
    seeds: int  # values from this index on are saved generator states, which occupy memory only if they are read


class Pages(NamedTuple):
    """The results of a simulation, in pages of `PAGE` executions; page p begins with execution PAGE * p."""

    runs: Bits  # for each possible execution of an op, 1 if it runs
    alive: Bits  # [pages + 1, values]: whether each value is alive before each page, and at the end
    levels: Ints  # [pages + 1]: bytes alive before each page, and at the end
    peaks: Ints  # [pages]: largest number of bytes alive during the executions of each page
    excess: Ints  # [pages]: bytes above the budget, summed over the executions of each page
    times: Floats  # [pages]: total seconds of the executions of each page


def blank_pages(tape: Tape) -> Pages:
    """Allocate arrays for the results of a simulation."""
    count = (tape.optional.size + PAGE - 1) // PAGE
    return Pages(
        np.zeros(tape.optional.size, np.uint8),
        np.zeros((count + 1, tape.sizes.size), np.uint8),
        np.zeros(count + 1, np.int64),
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        np.zeros(count, np.float64),
    )


@jit
def replay(tape: Tape, choice: Bits, pages: Pages, budget: int) -> tuple[int, float]:
    """Simulate the chosen executions, write results to `pages`, and return peak in bytes and time in seconds.

    O(reads + writes).
    """
    count, peak, time = pages.peaks.size, 0, 0.0
    for value in range(tape.sizes.size):
        pages.alive[count, value] = 0
    pages.levels[count] = 0
    for page in range(count - 1, -1, -1):
        _page(tape, choice, pages, page, budget)
        peak = max(peak, pages.peaks[page])
        time += pages.times[page]
    return peak, time


@jit
def _page(tape: Tape, choice: Bits, pages: Pages, page: int, budget: int) -> None:
    """Simulate one page of executions backwards, given the values alive after it, and store the results in `pages`."""
    runs, alive = pages.runs, pages.alive[page]
    _copy(pages.alive[page + 1], alive, 0, alive.size)
    level, peak, excess, time = pages.levels[page + 1], 0, 0, 0.0
    for i in range(min(choice.size, (page + 1) * PAGE) - 1, page * PAGE - 1, -1):
        runs[i] = choice[i] and (not tape.optional[i] or _wanted(tape, alive, i))
        if not runs[i]:
            continue
        time += tape.seconds[i]
        here, leaving = tape.extra[i], 0
        for k in range(tape.write_from[i], tape.write_from[i + 1]):
            value = tape.writes[k]
            if alive[value]:
                leaving += tape.sizes[value]
                alive[value] = 0
            elif value < tape.seeds:
                here += tape.sizes[value]
        for k in range(tape.read_from[i], tape.read_from[i + 1]):
            value = tape.reads[k]
            if not alive[value]:
                alive[value] = 1
                level += tape.sizes[value]
        peak = max(peak, level + here)
        excess += max(0, level + here - budget)
        level -= leaving
    pages.levels[page], pages.peaks[page], pages.excess[page], pages.times[page] = level, peak, excess, time


@jit
def _wanted(tape: Tape, alive: Bits, i: int) -> bool:
    """Tell whether a value that execution i writes is read before it is written again."""
    wanted = False
    for k in range(tape.write_from[i], tape.write_from[i + 1]):
        wanted = wanted or alive[tape.writes[k]] == 1
    return wanted


@jit
def copy_pages(source: Pages, target: Pages, low: int, high: int) -> None:
    """Copy the results of pages low..high - 1, with the sets of values alive before and after each page."""
    _copy(source.runs, target.runs, low * PAGE, min(high * PAGE, source.runs.size))
    for page in range(low, high + 1):
        _copy(source.alive[page], target.alive[page], 0, source.alive.shape[1])
        target.levels[page] = source.levels[page]
    for page in range(low, high):
        target.peaks[page] = source.peaks[page]
        target.excess[page] = source.excess[page]
        target.times[page] = source.times[page]


@jit
def _copy(source: Bits, target: Bits, low: int, high: int) -> None:
    """Copy entries low..high - 1. A slice assignment would add half a second of compilation, for its checks of shapes.
    """
    for k in range(low, high):
        target[k] = source[k]


@jit
def replay_again(
    tape: Tape, choice: Bits, old: Pages, new: Pages, high: int, budget: int, allowed: int
) -> int:
    """Simulate a changed choice into `new`, backwards from page `high - 1` until the alive values equal those in `old`.

    Return the lowest simulated page, below which pages stay as in `old`; -1 as soon as the simulated pages
    exceed the budget by more than `allowed` bytes.
    """
    _copy(old.alive[high], new.alive[high], 0, old.alive.shape[1])
    new.levels[high] = old.levels[high]
    for page in range(high - 1, -1, -1):
        _page(tape, choice, new, page, budget)
        allowed -= new.excess[page]
        if allowed < 0:
            return -1
        if new.levels[page] == old.levels[page] and _equal(new.alive[page], old.alive[page]):
            return page
    return 0


@jit
def _equal(one: Bits, other: Bits) -> bool:
    equal = True
    for k in range(one.size):
        equal = equal and one[k] == other[k]
    return equal


@jit
def spend(tape: Tape, choice: Bits, pages: Pages, spare: Pages, places: Ints, budget: int) -> int:
    """Remove those recomputations at `places` from a choice, one by one, whose removal costs no time and still fits.

    `choice`, and `pages` with its simulation results, change in place. If the choice exceeds the budget
    already, a removal must not increase the excess. Returns the number of simulated pages.
    """
    work, excess = 0, 0
    for page in range(pages.excess.size):
        excess += pages.excess[page]
    for i in places:
        if not pages.runs[i]:
            continue
        choice[i] = 0
        high = i // PAGE + 1
        allowed = excess
        for page in range(high, pages.excess.size):
            allowed -= pages.excess[page]
        low = replay_again(tape, choice, pages, spare, high, budget, allowed)
        work += high - max(low, 0)
        if low >= 0:
            more, longer = 0, 0.0
            for page in range(low, high):
                more += spare.excess[page] - pages.excess[page]
                longer += spare.times[page] - pages.times[page]
            if more <= 0 and longer <= TINY:
                copy_pages(spare, pages, low, high)
                excess += more
                continue
        choice[i] = 1
    return work
