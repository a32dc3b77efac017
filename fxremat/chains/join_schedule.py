"""A schedule of a join (chains that meet in a trunk or in the loss) as text: the operations of all chains in order.

    1:Fck3      forward of block 3 of branch 1; any token of a chain's schedule may follow the colon
    0:Fall1     forward of block 1 of the trunk
    Loss        without a trunk: the outputs of all branches are replaced by their gradients

`str(schedule)` joins the tokens with blanks and `JoinSchedule.parse` is its inverse.
"""

import re
from dataclasses import dataclass

from fxremat.chains.schedule import Op, Schedule
from fxremat.errors import InvalidSchedule
from fxremat.units import shortened


@dataclass(frozen=True)
class On:
    """An operation on one branch of a join (chains that meet), or on the blocks after the branches (trunk)."""

    branch: int  # 1, 2, ...; 0: the blocks after the branches
    op: Op

    def __str__(self) -> str:
        return f"{self.branch}:{self.op}"


@dataclass(frozen=True)
class Loss:
    """The loss of a join without a trunk, where all branches meet: their outputs are replaced by their gradients."""

    def __str__(self) -> str:
        return "Loss"


JoinOp = On | Loss
_TOKEN = re.compile(r"(?P<branch>0|[1-9][0-9]{0,8}):(?P<op>\S+)")


@dataclass(frozen=True)
class JoinSchedule:
    """The operations of a join's training step, in execution order.

    >>> schedule = JoinSchedule.parse("1:Fnone1 2:Fck1 Loss 2:B1")
    >>> str(schedule.ops[1]), str(schedule)
    ('2:Fck1', '1:Fnone1 2:Fck1 Loss 2:B1')
    """

    ops: tuple[JoinOp, ...]

    def __str__(self) -> str:
        return " ".join(map(str, self.ops))

    @classmethod
    def parse(cls, text: str) -> "JoinSchedule":
        """Return the schedule that `text` describes. Raises `InvalidSchedule`, with the first unknown token."""
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
