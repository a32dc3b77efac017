"""Large neighbourhood search for a faster set of recomputations within a budget.

A skeleton (`search.skeleton`) is a fixed order of executions, of which recomputations are optional; a choice
says which of them happen. `search.replay` computes peak and time of a choice, in pages of 64 executions.

Each change first adds some recomputations in one part of the program, which frees memory. Then it removes as
many as the budget allows, starting with those that take most seconds per byte, in a randomly perturbed order. A
change that does not improve the choice is undone.

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

PATIENCE = 500  # the search ends after this many consecutive changes without improvement
OVERHEAD = 50  # cost of one change besides simulating it, in units of simulated pages (64 executions)
STRETCH = 0.1  # one change adds at most this fraction of the optional executions
NOISE = 1.0  # largest standard deviation of the logarithm of the random factor on seconds per byte
MANY = 1500  # number of values by which the time to simulate a page doubles
FAR = 1 << 62  # bytes; more than any excess over a budget


def improve(tape: Tape, choice: Bits, budget: int, work: int, seed: int) -> tuple[int, float]:
    """Improve the choice of recomputations in place: make it faster, or, if it exceeds the budget, reduce the excess.

    About `work` pages of executions are simulated, fewer if nothing more is found; `seed` seeds all random
    decisions. Returns the peak in bytes and the time in seconds; neither gets worse, unless the peak exceeded
    the budget (in bytes).
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
    """Tell whether a simulated choice exceeds the budget by less than the best so far, or by the same in less time."""
    excess, least = pages.excess.sum(), best.excess.sum()
    return bool(excess < least or (excess == least and pages.times.sum() < best.times.sum() - TINY))


def _take_in(choice: Bits, places: Ints, rng: np.random.Generator) -> int:
    """Add recomputations from a random range of `places` to the choice.

    Return the index of the page after the last one.
    """
    width = max(3, int(places.size * STRETCH * rng.random() ** 2))
    first = int(rng.integers(max(1, places.size - width + 1)))
    stretch = places[first : first + width]
    choice[stretch[rng.random(stretch.size) < rng.random()]] = 1
    return int(stretch[-1]) // PAGE + 1


def _order(worth: Floats, happening: Ints, noise: float, rng: np.random.Generator) -> Ints:
    """Sort recomputations that happen by seconds per byte (`worth`), descending, with random noise."""
    ordered: Ints = happening[
        np.argsort(-worth[happening] * np.exp(noise * rng.standard_normal(happening.size)))
    ]
    return ordered


def _worth(tape: Tape) -> Floats:
    """Return for each execution its seconds per byte that it writes."""
    sizes = np.where(tape.writes < tape.seeds, tape.sizes[tape.writes], 0)
    total = np.concatenate(([0], np.cumsum(sizes)))
    worth: Floats = tape.seconds / (1 + total[tape.write_from[1:]] - total[tape.write_from[:-1]])
    return worth
