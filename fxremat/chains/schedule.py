"""A schedule of a chain of blocks: what to run, keep and drop, in order, as small frozen operations.

    Fck1        forward of block 1, keeping its input
    Fnone2      forward of block 2, discarding its input
    Fall3       forward of block 3, saving all that its backward needs
    Fall3[1]    forward of block 3, saving the smaller set of values of its option 1
    B3          backward of block 3
    Drop(a2)    free a value: a2 is the output of block 2, A2 is what Fall2 saved
    Off(A1)     copy to the host;  Pre(A1)  copy back

`str(schedule)` joins the tokens with blanks and `Schedule.parse` is its inverse.
"""

import re
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from fxremat.errors import InvalidSchedule
from fxremat.units import shortened


class Keep(Enum):
    """The values that a block's forward leaves: its output ("none"), also its input ("ck"), or all for backward."""

    NONE = "none"
    CHECKPOINT = "ck"
    ALL = "all"


@dataclass(frozen=True)
class Value:
    """A tensor of a chain.

    `a3` is the output of block 3 (`a0`: the chain's input), `A3` is everything that the backward of block 3
    needs.
    """

    kind: Literal["a", "A"]
    index: int

    def __str__(self) -> str:
        return f"{self.kind}{self.index}"


@dataclass(frozen=True)
class Forward:
    """The forward of a block; with Keep.ALL, `option` selects which set of values to save."""

    block: int
    keep: Keep = Keep.NONE
    option: int = 0

    def __post_init__(self) -> None:
        if self.option and self.keep is not Keep.ALL:
            raise InvalidSchedule(f"F{self.keep.value}{self.block} saves nothing, so it has no option")

    def __str__(self) -> str:
        return f"F{self.keep.value}{self.block}" + (f"[{self.option}]" if self.option else "")


@dataclass(frozen=True)
class Backward:
    """The backward of `block`."""

    block: int

    def __str__(self) -> str:
        return f"B{self.block}"


@dataclass(frozen=True)
class Drop:
    """Freeing a stored value."""

    value: Value

    def __str__(self) -> str:
        return f"Drop({self.value})"


@dataclass(frozen=True)
class Offload:
    """A copy of a stored value to the host."""

    value: Value

    def __str__(self) -> str:
        return f"Off({self.value})"


@dataclass(frozen=True)
class Prefetch:
    """A copy of a value back from the host."""

    value: Value

    def __str__(self) -> str:
        return f"Pre({self.value})"


Op = Forward | Backward | Drop | Offload | Prefetch

_BLOCK = "[1-9][0-9]{0,8}"
_TOKEN = re.compile(
    rf"F(?P<keep>none|ck|all)(?P<forward>{_BLOCK})(?:\[(?P<option>0|{_BLOCK})\])?"
    rf"|B(?P<backward>{_BLOCK})"
    rf"|(?P<verb>Drop|Off|Pre)\((?:a(?P<small>0|{_BLOCK})|A(?P<large>{_BLOCK}))\)"
)
_VERBS: dict[str, type[Drop] | type[Offload] | type[Prefetch]] = {
    "Drop": Drop,
    "Off": Offload,
    "Pre": Prefetch,
}
_FORMS = "Fck1 Fnone2 Fall3 Fall3[1] B3 Drop(a2) Off(A1) Pre(A1)"


@dataclass(frozen=True)
class Schedule:
    """The operations of a training step, in execution order.

    >>> schedule = Schedule.parse("Fck1 Fall2 B2 Fall1 B1")
    >>> schedule.ops[1], str(schedule) == "Fck1 Fall2 B2 Fall1 B1"
    (Forward(block=2, keep=<Keep.ALL: 'all'>, option=0), True)
    """

    ops: tuple[Op, ...]

    def __str__(self) -> str:
        return " ".join(map(str, self.ops))

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Return the schedule that `text` describes. Raises `InvalidSchedule`, with the first unknown token."""
        if not isinstance(text, str):
            raise InvalidSchedule(f"the schedule is {shortened(text)}; it is a text such as 'Fck1 Fall2 B2 Fall1 B1'")
        return cls(tuple(_parse_op(token, place) for place, token in enumerate(text.split(), start=1)))


def _parse_op(token: str, place: int) -> Op:
    match = _TOKEN.fullmatch(token)
    if match is None or (match["option"] and match["keep"] != "all"):
        raise InvalidSchedule(f"unknown token {shortened(token)} at place {place}; tokens look like {_FORMS}")
    if match["forward"]:
        return Forward(int(match["forward"]), Keep(match["keep"]), int(match["option"] or 0))
    if match["backward"]:
        return Backward(int(match["backward"]))
    value = Value("A", int(match["large"])) if match["large"] else Value("a", int(match["small"]))
    return _VERBS[match["verb"]](value)
