"""Mistakes that the tests of the solvers must notice: each is one edit of one file, and the test that fails on it.

`tests/test_mistakes.py` applies them one by one to a copy of the sources.
"""

from typing import NamedTuple


class Mistake(NamedTuple):
    """Replace `right`, which occurs once in `file`, by `wrong`, and `test` fails."""

    file: str  # below fxremat/
    right: str
    wrong: str
    test: str  # a file below tests/, or file::test


MISTAKES: list[Mistake] = []
