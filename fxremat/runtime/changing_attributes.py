"""Tells which attributes of a model change from call to call, so that each call is captured and planned again.

dynamo compares Python values that a model reads with those of the captured call. Integers become inputs of the graph
once they have changed, but not where sizes are fixed; so do other numbers, unless an op needs them as they are, such as
the probability of a dropout; flags and texts never do, nor lengths of containers. A list, dict or set that grows is
left to Python, where the model may be several graphs.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sized
from dataclasses import dataclass, field

from torch import nn

log = logging.getLogger(__name__)

MANY_CAPTURES = 3  # so many captures for known input sizes, each with another value of an attribute, are told once
CHANGING = (
    "%s is captured and planned again at each call, since %s of it has another value each time: keep what the model "
    "counts in a buffer (a tensor), and what it collects outside of its forward%s"
)
ANNEALED = (
    "%s is captured and planned again at each call, since %s of it has another value each time, and an op needs it as "
    "a fixed number, as a dropout its probability: change it less often, once an epoch for instance, or use a tensor"
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
    _lengths: dict[str, int] = field(default_factory=dict)
    _changed: Counter[str] = field(default_factory=Counter)
    _grown: Counter[str] = field(default_factory=Counter)
    _told: bool = False

    def look(self, model: nn.Module, captures: int, *, fixed: bool, whole: bool) -> None:
        """Warn, once, if calls are captured again and again beside attributes that change.

        Args:
            captures: number of captures so far for input sizes that had been planned for.
            fixed: numbers are taken as fixed.
            whole: the model has to be one graph, which containers that grow cannot end.
        """
        if captures == self.captures:
            return
        kinds = (bool, str, int, float) if fixed else (bool, str, float)
        first = not self.captures
        self.captures, before, self._values = captures, self._values, _values_of(model, kinds)
        lengths, self._lengths = self._lengths, {name: len(held) for name, held in _containers_of(model)}
        if not first:
            self.calls += 1
            self._changed.update(name for name, value in self._values.items() if before.get(name) != value)
            self._grown.update(name for name, length in self._lengths.items() if lengths.get(name, length) < length)
        changed = _often(self._changed)
        floats = [name for name in changed if not fixed and type(self._values.get(name)) is float]
        many = [name for name in changed if name not in floats]
        many += [f"len({name})" for name in _often(self._grown) if whole]
        if self._told:
            return
        if many:
            self._told = True
            log.warning(CHANGING, type(model).__name__, ", ".join(many), FIXED if fixed else "")
        elif floats:  # if anything else changes, these may be inputs of the graph
            self._told = True
            log.warning(ANNEALED, type(model).__name__, ", ".join(floats))
        elif self.calls >= MOST_CALLS:
            self._told = True
            log.warning(AGAIN, type(model).__name__, self.calls)

    def growing(self, model: nn.Module) -> frozenset[int]:
        """Return the `id` of each container of the model that grows from call to call, so that each call is captured.
        """
        if not (names := _often(self._grown)):
            return frozenset()
        return frozenset(id(held) for name, held in _containers_of(model) if name in names)


def _often(counted: Counter[str]) -> list[str]:
    return sorted(name for name, count in counted.items() if count >= MANY_CAPTURES)


def _values_of(model: nn.Module, kinds: Collection[type]) -> dict[str, object]:
    """Return the attributes of a model's modules that are of these types, by dotted name."""
    return {name: value for name, value in _attributes(model) if type(value) in kinds and name != "training"}


def _containers_of(model: nn.Module) -> Iterator[tuple[str, Sized]]:
    """Yield the containers among the attributes of a model's modules, with their dotted names."""
    for name, value in _attributes(model):
        if isinstance(value, list | dict | set | deque) and not name.rpartition(".")[2].startswith("_"):
            yield name, value


def _attributes(model: nn.Module) -> Iterator[tuple[str, object]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            yield (f"{path}.{name}" if path else name), value
