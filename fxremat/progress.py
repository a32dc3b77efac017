"""What is said while planning goes on: bars on a terminal, and lines for whoever listens to the logger "fxremat".

    with bars(shown=options.progress):                      one switch for every bar within
        with planning("1460 ops within 4.0 GiB") as planned:
            ...
            for op in progress(ops, "measuring ops"):
                ...
            planned(plan.headline)

Bars appear past two seconds, on stderr where that is a terminal and in the cell of a notebook, and are gone when done.
The log has one line of level INFO when planning begins and one when it ends; no handler and no level is set, so that
nothing is printed unless asked for: `logging.basicConfig(level=logging.INFO)`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar

from tqdm import tqdm

_T = TypeVar("_T")

DELAY = 2.0  # seconds before a bar appears

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
    bar_of, disable = (notebook_bar() or tqdm, False) if in_notebook() else (tqdm, None)
    if not _shown.get():
        disable = True
    with bar_of(steps, desc=f"fxremat: {what}", total=total, delay=DELAY, leave=False, disable=disable) as bar:
        yield from bar


def in_notebook() -> bool:
    """Whether this is a cell of a notebook, or of a console whose kernel is another process. IPython is not imported.

    The shell of a kernel is a `ZMQInteractiveShell`, or a class made from it; that of a terminal is another one.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython and hasattr(ipython, "get_ipython") else None
    return any(base.__name__ == "ZMQInteractiveShell" for base in type(shell).__mro__)


@cache
def notebook_bar() -> type[Any] | None:
    """The bar that is a widget; None where ipywidgets are missing, and a text is all there can be.

    `tqdm.auto` would warn of that. A bar of a loop that is left early is done, too: tqdm would leave it there in red.
    """
    from tqdm import notebook

    if getattr(notebook, "IProgress", None) is None:
        return None

    class Bar(notebook.tqdm_notebook):  # type: ignore[type-arg]  # generic for type checkers alone
        __iter__ = tqdm.__iter__  # without the red that it turns to when its generator is closed

        def close(self) -> None:
            self.total = self.n
            super().close()

    return Bar


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
