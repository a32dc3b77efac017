"""Tells which attributes of a model change from call to call, so that each call is captured and planned again.

dynamo compares Python values that a model reads with those of the captured call. Integers become inputs of the graph
once they have changed, but not where sizes are fixed; flags, texts and the lengths of containers never do.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from torch import nn

log = logging.getLogger(__name__)

MANY_CAPTURES = 3  # so many captures for known input sizes, each with another value of an attribute, are told once
CHANGING = (
    "%s is captured and planned again at each call, since %s of it has another value each time: keep what the model "
    "counts in a buffer (a tensor), and what it collects outside of its forward%s"
)
MOST_CALLS = 12  # so many calls that capture for known input sizes are told once, whatever changed
AGAIN = (
    "%s was captured and planned again in %d calls, for input sizes that were planned for before: something else "
    "differs from call to call, such as how inputs are nested, or a Python number among them. TORCH_LOGS=recompiles "
    "tells what"
)
FIXED = "; numbers that change are taken as fixed with these options"


@dataclass
class ChangingAttributes:
    """Compares a model's attributes after each capture that known input sizes did not need."""

    captures: int = 0  # of these, so far
    calls: int = 0  # number of calls with such captures, without the first, which captures all graphs
    _values: dict[str, object] = field(default_factory=dict)
    _changed: Counter[str] = field(default_factory=Counter)
    _told: bool = False

    def look(self, model: nn.Module, captures: int, *, fixed: bool) -> None:
        """Warn, once, if calls are captured again and again beside attributes that change.

        Args:
            captures: number of captures so far for input sizes that had been planned for.
            fixed: numbers are taken as fixed.
        """
        if self._told or captures == self.captures:
            return
        kinds = (bool, str, int, float) if fixed else (bool, str)
        first = not self.captures
        self.captures, before, self._values = captures, self._values, _values_of(model, kinds)
        if not first:
            self.calls += 1
            self._changed.update(name for name, value in self._values.items() if before.get(name) != value)
        many = sorted(name for name, count in self._changed.items() if count >= MANY_CAPTURES)
        if many:
            self._told = True
            log.warning(CHANGING, type(model).__name__, ", ".join(many), FIXED if fixed else "")
        elif self.calls >= MOST_CALLS:
            self._told = True
            log.warning(AGAIN, type(model).__name__, self.calls)


def _values_of(model: nn.Module, kinds: Collection[type]) -> dict[str, object]:
    """Return the attributes of a model's modules that are of these types, and lengths of its containers, by name."""
    found: dict[str, object] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            dotted = f"{path}.{name}" if path else name
            if type(value) in kinds and name != "training":
                found[dotted] = value
            elif isinstance(value, list | set | deque) or (isinstance(value, dict) and not name.startswith("_")):
                found[f"len({dotted})"] = len(value)
    return found
