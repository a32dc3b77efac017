"""The origin of ops in the user's model: the module and the source line, and one name for the modules of several ops.
"""

from __future__ import annotations

import io
import os.path
import tokenize
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile

from fxremat.units import shortened

_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of Python code."""

    file: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{self.place} in {self.function}: {shortened(closed(self.code))[1:-1]}"

    @property
    def place(self) -> str:
        """The file's name without folders, and the line number, such as "net.py:31"."""
        return f"{os.path.basename(self.file)}:{self.line}"


def closed(code: str) -> str:
    """Return the first line of a statement with an ellipsis for what follows, and its open brackets closed.

    >>> closed("y = attention("), closed("y = f(x, [a,"), closed("y = f(x)")
    ('y = attention(...)', 'y = f(x, [a, ...])', 'y = f(x)')
    """
    still_open: list[str] = []
    with suppress(tokenize.TokenError, SyntaxError):  # raised at the end of an incomplete statement
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if token.string in _CLOSING:
                still_open.append(_CLOSING[token.string])
            elif still_open and token.string == still_open[-1]:
                still_open.pop()
    if not still_open:
        return code
    space = "" if code[-1:] in _CLOSING else " "
    return f"{code}{space}...{''.join(reversed(still_open))}"


@dataclass(frozen=True, slots=True)
class Source:
    """The module and the line of code that an op comes from."""

    module: str  # path of the submodule, such as "blocks.0.mlp"; "" for the model itself
    frame: Frame | None  # None: the line is not known


NOWHERE = Source(module="", frame=None)


def common_module(modules: Iterable[str]) -> str:
    """Return the innermost module that contains all of these modules.

    >>> common_module(["h.3.mlp.up", "h.3.attn"]), common_module(["h.3", "h.31"])
    ('h.3', 'h')
    """
    levels = zip(*map(_parts, modules), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))


def span_of(modules: Sequence[str], counts: Counter[str]) -> str:
    """Return one name for the modules of several ops: that of a single module, or "first..last".

    Args:
        modules: the module of each op, in order.
        counts: how many ops there are inside each module, "" included: see `ops_inside`.

    >>> counts = ops_inside(["h.0.norm", "h.0.attn", "h.0.mlp.up", "h.0.mlp.down", "h.1.norm"])
    >>> span_of(["h.0.norm", "h.0.attn"], counts), span_of(["h.0.mlp.up", "h.0.mlp.down"], counts)
    ('h.0.norm..attn', 'h.0.mlp')
    """
    outer = common_module(modules)
    if counts[outer] == len(modules):
        return outer
    depth = len(_parts(outer))
    within = [module for module in modules if len(_parts(module)) > depth]
    named = list(dict.fromkeys(_parts(module)[depth] for module in within))
    if not named:
        return outer
    if len(named) == 1:
        return span_of(within, counts)
    ends = f"{named[0]}..{named[-1]}"
    return f"{outer}.{ends}" if outer else ends


def ops_inside(modules: Iterable[str]) -> Counter[str]:
    """Count the ops inside each module, its submodules included; `modules` has the innermost module of each op."""
    counts: Counter[str] = Counter()
    for module, count in Counter(modules).items():
        parts = _parts(module)
        for depth in range(len(parts) + 1):
            counts[".".join(parts[:depth])] += count
    return counts


def _parts(module: str) -> list[str]:
    return module.split(".") if module else []
