"""Large neighbourhood search for a faster choice among the executions of a skeleton.

A skeleton is a fixed order of executions of which some, recomputations, are optional (`search.skeleton`); a choice says
which happen. Replaying computes its peak and time, page by page of 64 executions (`search.replay`).

Each change first adds some recomputations in one part of the program, which frees memory, and then removes as many as
the budget allows, in a randomly perturbed order of seconds per byte. A change that is no improvement is undone.
(P. Shaw, Using constraint programming and local search methods to solve vehicle routing problems, 1998.)
"""

from __future__ import annotations

import numpy as np

from fxremat.search.replay import (
    PAGE,
    TINY,
    Bits,
    Floats,
    Ints,
    Pages,
    Tape,
    blank_pages,
    copy_pages,
    replay,
    replay_again,
    spend,
)

PATIENCE = 500  # changes without improvement after which a search ends early
OVERHEAD = 50  # pages that could be replayed in the time that a change takes besides its replays
STRETCH = 0.1  # share of the optional executions that one change may add, at most
NOISE = 1.0  # at most: the standard deviation of the logarithm of the factor that perturbs seconds per byte
MANY = 1500  # values of a tape: with so many, replaying a page takes twice as long
FAR = 1 << 62  # bytes: more than anything exceeds a budget by


def improve(tape: Tape, choice: Bits, budget: int, work: int, seed: int) -> tuple[int, float]:
    """Make a choice faster within a budget in bytes, in place; if it does not fit, make it exceed the budget by less.

    The search replays about `work` pages, fewer if nothing more is found; `seed` decides all that is random. Returns
    the peak in bytes and the time in seconds; neither is worse than before unless the peak was above the budget.
    """
    rng = np.random.default_rng(seed)
    places, worth = np.flatnonzero(tape.optional), _worth(tape)
    best, best_pages, pages, spare = choice.copy(), *(blank_pages(tape) for _ in range(3))
    count = pages.peaks.size
    work //= 1 + tape.sizes.size // MANY
    replay(tape, best, best_pages, budget)
    in_vain, noise, high = 0, 0.0, count
    while work > 0 and in_vain < PATIENCE and (best_pages.runs[places] == 1).any():
        choice[:] = best
        copy_pages(best_pages, pages, 0, count)
        if in_vain:
            high = _take_in(choice, places, rng)
            work -= high - replay_again(tape, choice, best_pages, pages, high, budget, FAR)
        order = _order(worth, places[pages.runs[places] == 1], noise, rng)
        work -= spend(tape, choice, pages, spare, order, budget) + OVERHEAD
        in_vain, noise = in_vain + 1, NOISE * rng.random()
        if _better(pages, best_pages):
            in_vain = 1
            best[:] = choice * np.maximum(pages.runs, 1 - tape.optional)
            copy_pages(pages, best_pages, 0, count)
    choice[:] = best
    return int(best_pages.peaks.max()), float(best_pages.times.sum())


def _better(pages: Pages, best: Pages) -> bool:
    """Tell whether the replayed choice of `pages` exceeds the budget by less than `best`, or equally in less time."""
    excess, least = pages.excess.sum(), best.excess.sum()
    return bool(excess < least or (excess == least and pages.times.sum() < best.times.sum() - TINY))


def _take_in(choice: Bits, places: Ints, rng: np.random.Generator) -> int:
    """Choose some more of the recomputations in a random stretch of `places`; return the page after the stretch."""
    width = max(3, int(places.size * STRETCH * rng.random() ** 2))
    first = int(rng.integers(max(1, places.size - width + 1)))
    stretch = places[first : first + width]
    choice[stretch[rng.random(stretch.size) < rng.random()]] = 1
    return int(stretch[-1]) // PAGE + 1


def _order(worth: Floats, happening: Ints, noise: float, rng: np.random.Generator) -> Ints:
    """Sort the recomputations that happen by seconds per byte (`worth`), descending, randomly perturbed by `noise`."""
    ordered: Ints = happening[
        np.argsort(-worth[happening] * np.exp(noise * rng.standard_normal(happening.size)))
    ]
    return ordered


def _worth(tape: Tape) -> Floats:
    """Return the seconds of each execution per byte that it writes."""
    sizes = np.where(tape.writes < tape.seeds, tape.sizes[tape.writes], 0)
    total = np.concatenate(([0], np.cumsum(sizes)))
    worth: Floats = tape.seconds / (1 + total[tape.write_from[1:]] - total[tape.write_from[:-1]])
    return worth
