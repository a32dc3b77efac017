"""Names of what takes memory and of what runs, for files that other tools open.

    kept: layers.3.up, addmm_7               a life: its kind, the module and the value
    results: layers.3.up, gradient of layers.3.up.weight

Names of modules may hold any character; `printable` leaves those that every viewer reads.
"""

from __future__ import annotations

from fxremat.show.moments import Moment, Moments
from fxremat.step.kinds import Life
from fxremat.step.source import NOWHERE, Source
from fxremat.step.step_graph import Origin, StepGraph


def printable(text: str) -> str:
    """The text on one line, with every control character, and lone surrogate, replaced."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def value_name(joint: StepGraph, number: int) -> str:
    """What a value is called: a parameter as in the model, its gradient after it, the output of an op after that."""
    value = joint.values[number]
    if number in joint.parameters:
        name = joint.parameters[number]
        return name if value.origin is Origin.PRIMAL else f"gradient of {name}"
    if value.origin is Origin.TANGENT:
        return "gradient of an output"
    op = None if value.producer is None else joint.ops[value.producer]
    return value.name if op is None or value.position is None else f"{op.name}[{value.position}]"


def source_of(joint: StepGraph, life: Life) -> Source:
    """Where a value, or the op that a workspace is of, was written."""
    if life.value is not None:
        return joint.value_sources[life.value]
    return joint.sources[life.op] if life.op is not None else NOWHERE


def label_of(joint: StepGraph, life: Life) -> str:
    """What bytes are for: their kind, the module, and the value or op that they are of."""
    where, what = source_of(joint, life).module, ""
    if life.value is not None:
        what = ("optimizer state of " if life.state else "") + value_name(joint, life.value)
    elif life.op is not None:
        what = joint.ops[life.op].name
    if not what:
        return life.kind.value
    return printable(f"{life.kind.value}: {where or joint.model}, {what}")


def microseconds(moments: Moments, moment: Moment) -> tuple[float, float]:
    """The start and end of a moment; where no op takes time, each moment is one microsecond long."""
    unit = 1e6 if moments.timed else 1.0
    return moment.start * unit, moment.end * unit
