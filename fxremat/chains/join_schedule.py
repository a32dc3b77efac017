"""A schedule of a join as text: the operations of its branches, its trunk and its loss, in order.

    1:Fck3      forward of block 3 of branch 1; each token of a chain's schedule may follow the colon
    0:Fall1     forward of block 1 of the trunk
    Loss        without a trunk: the last values of all branches become their gradients

`str(schedule)` joins the tokens with blanks and `JoinSchedule.parse` is its inverse.
"""

import re
from dataclasses import dataclass

from fxremat.chains.schedule import Op, Schedule
from fxremat.errors import InvalidSchedule
from fxremat.units import shortened


@dataclass(frozen=True)
class On:
    """An operation on one branch, or on the trunk, of a join."""

    branch: int  # 1, 2, ...; 0: the trunk
    op: Op

    def __str__(self) -> str:
        return f"{self.branch}:{self.op}"


@dataclass(frozen=True)
class Loss:
    """The loss of a join without a trunk, in which all branches meet: their last values become their gradients."""

    def __str__(self) -> str:
        return "Loss"


JoinOp = On | Loss
_TOKEN = re.compile(r"(?P<branch>0|[1-9][0-9]{0,8}):(?P<op>\S+)")


@dataclass(frozen=True)
class JoinSchedule:
    """The operations of a join's step, in the order in which they run.

    >>> schedule = JoinSchedule.parse("1:Fnone1 2:Fck1 Loss 2:B1")
    >>> str(schedule.ops[1]), str(schedule)
    ('2:Fck1', '1:Fnone1 2:Fck1 Loss 2:B1')
    """

    ops: tuple[JoinOp, ...]

    def __str__(self) -> str:
        return " ".join(map(str, self.ops))

    @classmethod
    def parse(cls, text: str) -> "JoinSchedule":
        """Return the schedule that `text` spells. Raises `InvalidSchedule`, which names the first unknown token."""
        return cls(tuple(_parse_op(token, place) for place, token in enumerate(text.split(), start=1)))


def _parse_op(token: str, place: int) -> JoinOp:
    if token == "Loss":
        return Loss()
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise InvalidSchedule(f"unknown token {shortened(token)} at place {place}; tokens look like 1:Fck3 0:B2 Loss")
    try:
        return On(int(match["branch"]), Schedule.parse(match["op"]).ops[0])
    except InvalidSchedule as error:
        raise InvalidSchedule(f"place {place}: {error}") from None
