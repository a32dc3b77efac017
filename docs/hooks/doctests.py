"""An extension of griffe, which reads docstrings for the reference: their doctests become blocks of code.

A docstring is Markdown there, in which a list that a doctest prints would be a link.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)  # up to the next empty line


class Doctests(griffe.Extension):
    """Puts the doctests of each docstring into blocks of code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the text of an object's docstring, before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
