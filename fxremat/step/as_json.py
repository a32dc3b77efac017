"""Frozen dataclasses as JSON, and back; fields may be numbers, text, tuples, sets, mappings, enums and dataclasses.

    Op(index=0, reads=(1, 2))       {"is": "Op", "index": 0, "reads": [1, 2]}
    Role.FORWARD                    {"is": "Role", "value": "forward"}
    Schedule.parse("Fall1 B1")      {"is": "Schedule", "text": "Fall1 B1"}, as any class with a `parse` method
    frozenset({2, 1})               {"set": [1, 2]}
    {1: "weight"}                   {"map": [[1, "weight"]]}

Objects of a class listed as shared are written in full once, with a number: {"is": "Layout", "number": 0, ...};
later references are {"ref": 0}. Reading creates objects of the classes that the caller lists and calls nothing
else, whatever the text contains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

Instead = Mapping[type, Callable[[Any], Any]]


class Unreadable(Exception):
    """Raised for JSON that `read` cannot turn into a value; the message says why."""


def written(value: Any, shared: Iterable[type] = (), instead: Instead | None = None) -> Any:
    """Return `value` as nested lists, dicts, numbers and strings, which `json.dumps` accepts. O(its size).

    Args:
        shared: classes whose objects are written in full only once.
        instead: for some classes, a function from an object to the one that is written instead.
    """
    return _Writer(tuple(shared), instead or {}).write(value)


class _Writer:
    def __init__(self, shared: tuple[type, ...], instead: Instead) -> None:
        self._shared, self._instead = shared, instead
        self._numbers: dict[int, int] = {}

    def write(self, value: Any) -> Any:
        value = self._instead.get(type(value), lambda value: value)(value)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, tuple | list):
            return [self.write(item) for item in value]
        if isinstance(value, frozenset | set):
            return {"set": sorted(map(self.write, value))}
        if isinstance(value, Mapping):
            return {"map": [[self.write(key), self.write(item)] for key, item in value.items()]}
        if isinstance(value, Enum):
            return {"is": type(value).__name__, "value": value.value}
        if is_dataclass(value):
            return self._dataclass(value)
        raise TypeError(f"{type(value).__name__} is not written as JSON")

    def _dataclass(self, value: Any) -> Any:
        found: dict[str, Any] = {"is": type(value).__name__}
        if hasattr(value, "parse"):
            return found | {"text": str(value)}
        if isinstance(value, self._shared):
            if id(value) in self._numbers:
                return {"ref": self._numbers[id(value)]}
            found["number"] = self._numbers[id(value)] = len(self._numbers)
        return found | {each.name: self.write(getattr(value, each.name)) for each in fields(value)}


def read(content: Any, classes: Iterable[type], instead: Instead | None = None) -> Any:
    """Rebuild the value that `written` turned into `content`. O(its size).

    Args:
        classes: dataclasses and enums that it may contain.
        instead: for some classes, a function from a rebuilt object to the one that is returned instead.

    Raises:
        Unreadable: `content` names another class, or an object's fields are not those of its class.
    """
    return _Reader({each.__name__: each for each in classes}, instead or {}).read(content)


class _Reader:
    def __init__(self, classes: Mapping[str, type], instead: Instead) -> None:
        self._classes, self._instead = classes, instead
        self._made: dict[int, Any] = {}

    def read(self, content: Any) -> Any:
        if isinstance(content, list):
            return tuple([self.read(item) for item in content])
        if not isinstance(content, dict):
            return content
        if content.keys() == {"set"}:
            return frozenset(self.read(content["set"]))
        if content.keys() == {"map"}:
            return dict(self.read(content["map"]))
        if content.keys() == {"ref"} and content["ref"] in self._made:
            return self._made[content["ref"]]
        return self._value(content)

    def _value(self, content: dict[str, Any]) -> Any:
        kind = self._classes.get(content.get("is", ""))
        if kind is None:
            raise Unreadable(f"{content.get('is', 'a mapping')} is none of its classes")
        given = {name: self.read(item) for name, item in content.items() if name not in ("is", "number")}
        try:
            made = kind.parse(given["text"]) if hasattr(kind, "parse") else kind(**given)
        except (KeyError, TypeError, ValueError) as error:
            raise Unreadable(f"{kind.__name__} cannot be made of {', '.join(given)}") from error
        made = self._instead.get(kind, lambda value: value)(made)
        if "number" in content:
            self._made[content["number"]] = made
        return made
