"""A progress bar for the loops of the solvers: only on a terminal, only past two seconds, gone when done."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

_T = TypeVar("_T")


def progress(steps: Iterable[_T], what: str) -> Iterator[_T]:
    """The same steps, with a bar named `what` on stderr while they are taken.

    >>> list(progress(range(3), "nothing to see"))
    [0, 1, 2]
    """
    # disable=None: off where stderr is no terminal
    with tqdm(steps, desc=what, delay=2, leave=False, disable=None) as bar:
        yield from bar
