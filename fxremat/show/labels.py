"""Names of allocations and of ops, for files that other tools open.

    kept: layers.3.up, addmm_7               a life: its kind, the module and the value
    results: layers.3.up, gradient of layers.3.up.weight

Names of modules may contain any character; `printable` keeps those that every viewer reads.
"""

from __future__ import annotations

from fxremat.show.moments import Moment, Moments
from fxremat.step.kinds import Life
from fxremat.step.source import NOWHERE, Source
from fxremat.step.step_graph import Origin, StepGraph


def printable(text: str) -> str:
    """Return the text on one line, with every control character, and lone surrogate, replaced."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def value_name(joint: StepGraph, number: int) -> str:
    """Name a value: a parameter by its path, a gradient by its parameter, one of several outputs as `op[1]`."""
    value = joint.values[number]
    if number in joint.parameters:
        name = joint.parameters[number]
        return name if value.origin is Origin.PRIMAL else f"gradient of {name}"
    if value.origin is Origin.TANGENT:
        return "gradient of an output"
    op = None if value.producer is None else joint.ops[value.producer]
    return value.name if op is None or value.position is None else f"{op.name}[{value.position}]"


def source_of(joint: StepGraph, life: Life) -> Source:
    """Return where the value of an allocation, or the op of a workspace, was written: its module and line of code.

    `NOWHERE` if the allocation belongs to neither, as that of the loss outside the model.
    """
    if life.value is not None:
        return joint.value_sources[life.value]
    return joint.sources[life.op] if life.op is not None else NOWHERE


def label_of(joint: StepGraph, life: Life) -> str:
    """Label an allocation with its kind, its module, and the value or op that it belongs to."""
    where, what = source_of(joint, life).module, ""
    if life.value is not None:
        what = ("optimizer state of " if life.state else "") + value_name(joint, life.value)
    elif life.op is not None:
        what = joint.ops[life.op].name
    if not what:
        return life.kind.value
    return printable(f"{life.kind.value}: {where or joint.model}, {what}")


def microseconds(moments: Moments, moment: Moment) -> tuple[float, float]:
    """Return the start and end of a moment in microseconds; each lasts one microsecond if no op takes time."""
    unit = 1e6 if moments.timed else 1.0
    return moment.start * unit, moment.end * unit
