"""A model as a chain of blocks (consecutive ops between two cuts): sizes in bytes and times in seconds.

    a_l   the output of block l (a_0: the chain's input)        output_bytes, input_bytes
    A_l   all that the backward of block l reads, a_l included,
          the block's input excluded                            saved_bytes
    d_l   the gradient of a_l                                   grad_bytes, input_grad_bytes

A block may have several save sets (`Option`) from which its backward can start: the smaller the set, the more
the backward has to recompute. All numbers are checked at construction.
"""

import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeVar, cast

from fxremat.errors import InvalidChain
from fxremat.units import shortened

_T = TypeVar("_T")
_MOST_BYTES = 2**53  # largest size allowed, so that sums over a chain fit into 64 bits
_MOST_SECONDS = 1e100  # largest time allowed, so that sums over a schedule stay finite


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to save a block: the bytes that its forward keeps, and the time and memory of its backward from them."""

    saved_bytes: int
    backward_time: float
    backward_scratch: int = 0
    # bytes allocated during the forward that saves with this option, besides what it saves; None: as in the
    # block
    save_scratch: int | None = None

    def __post_init__(self) -> None:
        _check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of a chain: the seconds of its forward and backward, and the bytes that it outputs and saves."""

    name: str = ""
    forward_time: float
    backward_time: float
    output_bytes: int
    saved_bytes: int
    grad_bytes: int = None  # type: ignore[assignment]  # None becomes output_bytes
    forward_scratch: int = 0  # bytes allocated during a forward without saving, besides input and output
    # bytes allocated during the backward, besides saved values and the gradient that it writes
    backward_scratch: int = 0
    weight_bytes: int = 0
    weight_grad_bytes: int = 0  # bytes of weight gradients, kept from the backward to the end of the step
    # bytes in use from the next block's backward to the end of this one's (last block: from the forward on)
    held_bytes: int = 0
    save_scratch: int = None  # type: ignore[assignment]  # scratch of the forward that saves; None: forward_scratch
    options: tuple[Option, ...] = ()  # options 1, 2, ...; option 0 consists of the block's own fields

    def __post_init__(self) -> None:
        where = f"block {shortened(self.name)}: " if self.name else ""
        if not isinstance(self.name, str):
            raise InvalidChain(f"name is {shortened(self.name)}; a block's name is text")
        try:
            _default(self, "grad_bytes", self.output_bytes)
            _default(self, "save_scratch", self.forward_scratch)
            _check_numbers(self)
            object.__setattr__(self, "options", self._distinct(tuple(self.options)))
            for option in self.choices:
                if option.saved_bytes < self.output_bytes:
                    raise InvalidChain(
                        f"saved_bytes is {option.saved_bytes}, below output_bytes {self.output_bytes}; "
                        "what a block saves includes its output"
                    )
        except InvalidChain as error:
            raise InvalidChain(f"{where}{error}") from None

    @cached_property
    def choices(self) -> tuple[Option, ...]:
        """All options to save the block, with defaults filled in; option 0 consists of the block's own fields."""
        return (self._own(), *self.options)

    def _own(self) -> Option:
        return Option(
            saved_bytes=self.saved_bytes,
            backward_time=self.backward_time,
            backward_scratch=self.backward_scratch,
            save_scratch=self.save_scratch,
        )

    def _distinct(self, options: tuple[Option, ...]) -> tuple[Option, ...]:
        """Return the options with defaults filled in, without a first one that equals option 0."""
        for option in options:
            if not isinstance(option, Option):
                raise InvalidChain(f"options holds {shortened(option)}; each must be an Option")
        filled = tuple(
            Option(
                saved_bytes=option.saved_bytes,
                backward_time=option.backward_time,
                backward_scratch=option.backward_scratch,
                save_scratch=self.save_scratch if option.save_scratch is None else option.save_scratch,
            )
            for option in options
        )
        return filled[1:] if filled and filled[0] == self._own() else filled


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A chain of blocks 1..n, and the size of its input.

    >>> block = Block(forward_time=1.0, backward_time=2.0, output_bytes=4, saved_bytes=9)
    >>> chain = Chain(blocks=(block, block), input_bytes=4)
    >>> Chain.from_json(chain.to_json()) == chain
    True
    """

    blocks: tuple[Block, ...]
    input_bytes: int
    input_grad_bytes: int = None  # type: ignore[assignment]  # None becomes input_bytes
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        if not self.blocks:
            raise InvalidChain("blocks is empty; a chain has at least one block")
        for block in self.blocks:
            if not isinstance(block, Block):
                raise InvalidChain(f"blocks holds {shortened(block)}; each must be a Block")
        if not isinstance(self.name, str):
            raise InvalidChain(f"name is {shortened(self.name)}; a chain's name is text")
        _default(self, "input_grad_bytes", self.input_bytes)
        _check_numbers(self)

    def __len__(self) -> int:
        return len(self.blocks)

    @cached_property
    def output_sizes(self) -> tuple[int, ...]:
        """Bytes of the block outputs a_0..a_n, where a_0 is the chain's input."""
        return (self.input_bytes, *(block.output_bytes for block in self.blocks))

    @cached_property
    def grad_sizes(self) -> tuple[int, ...]:
        """Bytes of the gradients d_0..d_n of the block outputs."""
        return (self.input_grad_bytes, *(block.grad_bytes for block in self.blocks))

    @cached_property
    def phase_sizes(self) -> tuple[int, ...]:
        """For t = 0..n, the bytes in use in any schedule between the backwards t + 1 and t.

        phase[t] = d_t + held_t + the weight gradients of the blocks after t.
        """
        phases = []
        weight_grads = 0
        for block in reversed(self.blocks):
            phases.append(block.grad_bytes + block.held_bytes + weight_grads)
            weight_grads += block.weight_grad_bytes
        phases.append(self.input_grad_bytes + weight_grads)
        return tuple(reversed(phases))

    @cached_property
    def least_time(self) -> float:
        """Lower bound on any schedule's seconds: each forward and backward once, with the fastest backwards."""
        return math.fsum(b.forward_time + min(o.backward_time for o in b.choices) for b in self.blocks)

    @classmethod
    def from_json(cls, source: str | Mapping[str, Any]) -> "Chain":
        """Return the chain that a JSON text or object describes.

        Raises `InvalidChain`, with the block and field.
        """
        data = _object(source, "a chain")
        entries = data.get("blocks")
        if not isinstance(entries, Sequence) or isinstance(entries, str):
            raise InvalidChain('a chain needs "blocks", a list of objects')
        blocks = tuple(_read_block(entry, place) for place, entry in enumerate(entries, start=1))
        return _build(cls, data | {"blocks": blocks})

    def to_json(self) -> str:
        """Return JSON text from which `from_json` makes this chain."""
        return json.dumps(_written(self))


@dataclass(frozen=True, kw_only=True)
class Join:
    """Several chains (branches) that end in a common chain, the trunk, or meet only in the loss."""

    branches: tuple[Chain, ...]
    trunk: Chain | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "branches", tuple(self.branches))
        if not self.branches or not all(isinstance(branch, Chain) for branch in self.branches):
            raise InvalidChain("branches must hold at least one Chain, and nothing else")
        if not isinstance(self.trunk, Chain | None):
            raise InvalidChain(f"trunk is {shortened(self.trunk)}; it is a Chain or None")

    @classmethod
    def from_json(cls, source: str | Mapping[str, Any]) -> "Join":
        """Return the join that `{"branches": [chain, ...], "trunk": chain or null}` describes."""
        data = _object(source, "a join")
        branches = data.get("branches")
        if not isinstance(branches, Sequence) or isinstance(branches, str):
            raise InvalidChain('a join needs "branches", a list of chains')
        trunk = data.get("trunk")
        return _build(
            cls,
            data
            | {
                "branches": tuple(Chain.from_json(branch) for branch in branches),
                "trunk": None if trunk is None else Chain.from_json(trunk),
            },
        )

    def to_json(self) -> str:
        """Return JSON text from which `from_json` makes this join."""
        trunk = None if self.trunk is None else _written(self.trunk)
        return json.dumps({"branches": [_written(branch) for branch in self.branches], "trunk": trunk})


def _default(data: Any, field: str, value: object) -> None:
    if getattr(data, field) is None:
        object.__setattr__(data, field, value)


def _check_numbers(data: Any) -> None:
    """Check the fields that are times or sizes, and convert them to float or int."""
    for field in fields(data):
        value = getattr(data, field.name)
        if field.name.endswith("_time"):
            object.__setattr__(data, field.name, _seconds(field.name, value))
        elif field.name.endswith(("_bytes", "_scratch")) and (
            value is not None or field.name not in _LEFT_OPEN.get(type(data).__name__, ())
        ):
            object.__setattr__(data, field.name, _size(field.name, value))


def _seconds(name: str, value: object) -> float:
    try:
        seconds = math.nan if isinstance(value, bool | str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not 0 <= seconds <= _MOST_SECONDS:
        raise InvalidChain(f"{name} is {shortened(value)}; a time is a finite number of seconds, 0 or more")
    return seconds


def _size(name: str, value: object) -> int:
    try:
        size = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        size = -1
    if not 0 <= size <= _MOST_BYTES:
        raise InvalidChain(f"{name} is {shortened(value)}; a size is a whole number of bytes from 0 to 2**53")
    return size


def _object(source: object, what: str) -> dict[str, Any]:
    if isinstance(source, str):
        try:
            source = json.loads(source)
        except ValueError as error:
            raise InvalidChain(f"{what} must be JSON: {error}") from None
        except RecursionError:
            raise InvalidChain(f"{what} must be JSON of a few levels; this is nested too deeply") from None
    if not isinstance(source, Mapping):
        raise InvalidChain(f"{what} is a JSON object, not {type(source).__name__}")
    return dict(source)


def _read_block(entry: object, place: int) -> Block:
    try:
        data = _object(entry, "a block")
        options = data.get("options", ())
        if not isinstance(options, Sequence) or isinstance(options, str):
            raise InvalidChain(f"options is {shortened(options)}; it is a list of objects")
        return _build(
            Block, data | {"options": tuple(_build(Option, _object(o, "an option")) for o in options)}
        )
    except InvalidChain as error:
        raise InvalidChain(f"block {place}: {error}") from None


def _build(cls: type[_T], data: dict[str, Any]) -> _T:
    """Return `cls(**data)`. Raises `InvalidChain` for an unknown or missing field."""
    known = {field.name for field in fields(cast(Any, cls))}
    if unknown := sorted(str(key) for key in data.keys() - known):
        raise InvalidChain(f"unknown field {shortened(unknown[0])}; the fields are {', '.join(sorted(known))}")
    required = [name for name in _REQUIRED.get(cls.__name__, ()) if data.get(name) is None]
    if required:
        raise InvalidChain(f"{required[0]} is missing")
    return cls(**data)


# class -> fields that may be None there; a Block fills them in for its options
_LEFT_OPEN = {"Option": ("save_scratch",)}
_REQUIRED = {
    "Block": ("forward_time", "backward_time", "output_bytes", "saved_bytes"),
    "Option": ("saved_bytes", "backward_time"),
    "Chain": ("input_bytes",),
}


def _written(data: Chain | Block | Option) -> dict[str, Any]:
    """Return `data` as a dict for JSON, without empty names, empty lists of options, and None."""
    entry: dict[str, Any] = {}
    for field in fields(data):
        value = getattr(data, field.name)
        if field.name in ("blocks", "options"):
            value = [_written(item) for item in value]
        if value not in ("", [], None):
            entry[field.name] = value
    return entry
