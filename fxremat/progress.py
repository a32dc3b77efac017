"""What is said while planning goes on: bars on a terminal, and lines for whoever listens to the logger "fxremat".

    with bars(shown=options.progress):                      one switch for every bar within
        with planning("1460 ops within 4.0 GiB") as planned:
            ...
            for op in progress(ops, "measuring ops"):
                ...
            planned(plan.headline)

Bars appear on stderr where that is a terminal, past two seconds, and are gone when done. The log has one line of level
INFO when planning begins and one when it ends; no handler and no level is set, so that nothing is printed unless asked
for: `logging.basicConfig(level=logging.INFO)`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextvars import ContextVar
from typing import TypeVar

from tqdm import tqdm

_T = TypeVar("_T")

logger = logging.getLogger("fxremat")
logger.addHandler(logging.NullHandler())
_shown: ContextVar[bool] = ContextVar("_shown", default=True)


@contextlib.contextmanager
def bars(*, shown: bool) -> Iterator[None]:
    """Show the bars of what runs within, or none of them; an outer `shown=False` holds."""
    token = _shown.set(shown and _shown.get())
    try:
        yield
    finally:
        _shown.reset(token)


def progress(steps: Iterable[_T], what: str, *, total: int | None = None) -> Generator[_T]:
    """The same steps, with a bar named `what` on stderr while they are taken.

    >>> list(progress(range(3), "nothing to see"))
    [0, 1, 2]
    """
    # disable=None: off where stderr is no terminal
    disable = None if _shown.get() else True
    with tqdm(steps, desc=f"fxremat: {what}", total=total, delay=2, leave=False, disable=disable) as bar:
        yield from bar


@contextlib.contextmanager
def planning(what: str) -> Iterator[Callable[[str], None]]:
    """Log that `what` is being planned, and how it ended after how many seconds.

    The value is to be called with what the plan achieves; an exception is logged by its first line.
    """
    began = time.perf_counter()
    achieved: list[str] = []
    logger.info("planning %s", what)
    try:
        yield achieved.append
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        logger.info("no plan after %.1f s: %s", time.perf_counter() - began, reason)
        raise
    logger.info("planned in %.1f s: %s", time.perf_counter() - began, "; ".join(achieved) or what)
