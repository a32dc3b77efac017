"""Shows the progress of planning: bars on a terminal, and log lines of the logger "fxremat".

    with bars(shown=options.progress):                      one switch for every bar within
        with planning("1460 ops within 4.0 GiB") as planned:
            ...
            for op in progress(ops, "measuring ops"):
                ...
            planned(plan.headline)

Bars appear after two seconds, on stderr if that is a terminal and in the cell of a notebook, and vanish when done. The
log has one line of level INFO when planning begins, one every ten seconds while it or the capture before it continues,
and one when it ends; no handler and no level is set, so that of these nothing is printed unless asked for:
`logging.basicConfig(level=logging.INFO)`. Warnings are printed on stderr, as Python does where logging is not set up.
The command line prints the lines in between on stderr.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from tqdm import tqdm

_T = TypeVar("_T")

DELAY = 2.0  # seconds before a bar appears
EVERY = 10.0  # seconds between two progress lines

logger = logging.getLogger("fxremat")
ticks = logger.getChild("progress")  # the logger of the periodic progress lines
_stages: list[_Stage] = []  # stages that are running now, innermost last
_tellers: list[_Stage] = []  # stages of the `telling` contexts now open; only the outermost has a thread that logs
_shown: ContextVar[bool] = ContextVar("_shown", default=True)


@dataclass(eq=False)
class _Stage:
    """A part of planning that is running, such as "measuring ops"."""

    what: str
    total: int | None = None  # number of steps; None: unknown
    taken: int = 0  # number of steps begun

    def __str__(self) -> str:
        return self.what if self.total is None else f"{self.what}, {self.taken} of {self.total}"


@contextlib.contextmanager
def telling(what: str) -> Iterator[None]:
    """Within this context, log every `EVERY` seconds which stage of planning runs, and for how long.

    Of nested contexts, only the outermost starts a thread for that.
    """
    stage, done, began = _Stage(what), threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(EVERY):
            under_way = (_stages[-1:] or [stage])[0]  # another thread may end the last stage at any time
            ticks.info("%s; %.0f s so far", str(under_way), time.monotonic() - began)

    thread = None if _tellers else threading.Thread(target=tell, daemon=True, name="fxremat progress")
    _stages.append(stage)
    _tellers.append(stage)
    if thread:
        thread.start()
    try:
        yield
    finally:
        _stages.remove(stage)
        _tellers.remove(stage)
        done.set()
        if thread:
            thread.join()


@contextlib.contextmanager
def shown_on_stderr() -> Iterator[None]:
    """Within this context, print the periodic progress lines on stderr, except while a bar is shown."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("fxremat: %(message)s"))
    handler.addFilter(lambda _: not getattr(tqdm, "_instances", ()))
    before, ticks.propagate = (ticks.level, ticks.propagate), False
    ticks.setLevel(logging.INFO)
    ticks.addHandler(handler)
    try:
        yield
    finally:
        ticks.removeHandler(handler)
        ticks.level, ticks.propagate = before


@contextlib.contextmanager
def bars(*, shown: bool) -> Iterator[None]:
    """Show or hide the bars of everything in this context; an outer `shown=False` prevails."""
    token = _shown.set(shown and _shown.get())
    try:
        yield
    finally:
        _shown.reset(token)


def progress(steps: Iterable[_T], what: str, *, total: int | None = None) -> Generator[_T]:
    """Yield the items of `steps`, and show a bar named `what` on stderr; total=None: the number of steps is unknown.

    >>> list(progress(range(3), "nothing to see"))
    [0, 1, 2]
    """
    bar_of, disable = (notebook_bar() or tqdm, False) if in_notebook() else (tqdm, None)
    if not _shown.get():
        disable = True
    stage = _Stage(what, total)
    _stages.append(stage)
    try:
        with bar_of(steps, desc=f"fxremat: {what}", total=total, delay=DELAY, leave=False, disable=disable) as bar:
            for step in bar:
                stage.taken += 1
                yield step
    finally:
        _stages.remove(stage)


def in_notebook() -> bool:
    """Tell whether this code runs in a notebook, or in a console with a kernel process; IPython is not imported.

    The shell of a kernel is a `ZMQInteractiveShell`, or a class derived from it; that of a terminal is another one.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython and hasattr(ipython, "get_ipython") else None
    return any(base.__name__ == "ZMQInteractiveShell" for base in type(shell).__mro__)


@cache
def notebook_bar() -> type[Any] | None:
    """Return the class of progress bars for notebooks; None if ipywidgets is missing, where only text is possible.

    `tqdm.auto` would warn if it is missing. A bar of a loop that ends early is shown as complete; tqdm would
    leave it red.
    """
    from tqdm import notebook

    if getattr(notebook, "IProgress", None) is None:
        return None

    class Bar(notebook.tqdm_notebook):  # type: ignore[type-arg]  # generic for type checkers alone
        __iter__ = tqdm.__iter__  # unlike tqdm_notebook's, does not turn the bar red when its generator is closed

        def close(self) -> None:
            self.total = self.n
            super().close()

    return Bar


@contextlib.contextmanager
def planning(what: str) -> Iterator[Callable[[str], None]]:
    """Within this context, `what` is being planned: log the beginning and, after how many seconds, the end.

    The caller passes a summary of the plan to the function that the context yields. If an exception ends the
    context, its first line is logged.
    """
    began = time.perf_counter()
    achieved: list[str] = []
    logger.info("planning %s", what)
    try:
        with telling(f"planning {what}"):
            yield achieved.append
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        logger.info("no plan after %.1f s: %s", time.perf_counter() - began, reason)
        raise
    logger.info("planned in %.1f s: %s", time.perf_counter() - began, "; ".join(achieved) or what)
