"""The order in which a table over intervals (s, t) is filled: tiles by distance from the diagonal.

A row of (s, t) needs the rows of the intervals within it. Rows in one tile of (s, t) read nearly the same others, which
stay in the cache; a tile needs those between it and the diagonal, so the tiles of one distance are independent and are
filled by several threads.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from fxremat.progress import progress

TILE = 8  # blocks on each side of a tile
_FEW = 64  # below so many blocks, threads cost more than they save


def fill_tiles_by_diagonal(n: int, what: str, fill: Callable[[int, int, int], None]) -> None:
    """Call fill(distance, worker, workers), which fills every `workers`-th tile, for all distances in turn.

    `what` names the progress bar. `fill` is compiled code that releases the interpreter lock.
    """
    workers = min(len(os.sched_getaffinity(0)), 4) if hasattr(os, "sched_getaffinity") and n > _FEW else 1
    with ThreadPoolExecutor(workers) as pool:
        for distance in progress(range((n - 1) // TILE + 1), what):
            for done in [pool.submit(fill, distance, worker, workers) for worker in range(workers)]:
                done.result()
