"""Fills a table over intervals of blocks (s, t) tile by tile, with several threads.

A row of (s, t) depends on the rows of the intervals within it. Rows in one tile of (s, t) read nearly the same
other rows, which stay in the cache. A tile depends only on tiles nearer to the diagonal, so the tiles at one
distance from it are independent, and are filled by several threads.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from fxremat.progress import progress

TILE = 8  # side length of a tile in blocks
_FEW = 64  # number of blocks below which threads cost more time than they save


def fill_tiles_by_diagonal(n: int, what: str, fill: Callable[[int, int, int], None]) -> None:
    """Call fill(distance, worker, workers) for increasing distances from the diagonal, on several threads.

    A call fills every `workers`-th tile at the distance. `what` names the progress bar. `fill` is compiled code
    that releases the interpreter lock.
    """
    workers = min(len(os.sched_getaffinity(0)), 4) if hasattr(os, "sched_getaffinity") and n > _FEW else 1
    with ThreadPoolExecutor(workers) as pool:
        for distance in progress(range((n - 1) // TILE + 1), what):
            for done in [pool.submit(fill, distance, worker, workers) for worker in range(workers)]:
                done.result()
