"""Names allocations and ops in files that other tools open.

    kept: layers.3.up, addmm_7               kind of the allocation, module, and value
    results: layers.3.up, gradient of layers.3.up.weight

Names of modules may contain any character; `printable` replaces those that some viewers cannot read.
"""

from __future__ import annotations

from fxremat.show.moments import Moment, Moments
from fxremat.step.kinds import Life
from fxremat.step.source import NOWHERE, Source
from fxremat.step.step_graph import Origin, StepGraph


def printable(text: str) -> str:
    """Replace control characters, line breaks and lone surrogates in a text by "?"."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def value_name(joint: StepGraph, number: int) -> str:
    """Name a value of the graph.

    A parameter is named by its path, a gradient by its parameter, and one of several outputs as `op[1]`.
    """
    value = joint.values[number]
    if number in joint.parameters:
        name = joint.parameters[number]
        return name if value.origin is Origin.PRIMAL else f"gradient of {name}"
    if value.origin is Origin.TANGENT:
        return "gradient of an output"
    op = None if value.producer is None else joint.ops[value.producer]
    return value.name if op is None or value.position is None else f"{op.name}[{value.position}]"


def source_of(joint: StepGraph, life: Life) -> Source:
    """Return the module and code line of the value that an allocation stores, or of the op whose workspace it is.

    `NOWHERE` if it belongs to neither, such as the memory of a loss outside the model.
    """
    if life.value is not None:
        return joint.value_sources[life.value]
    return joint.sources[life.op] if life.op is not None else NOWHERE


def label_of(joint: StepGraph, life: Life) -> str:
    """Return a label for an allocation: its kind, its module, and the value or op that it belongs to."""
    where, what = source_of(joint, life).module, ""
    if life.value is not None:
        what = ("optimizer state of " if life.state else "") + value_name(joint, life.value)
    elif life.op is not None:
        what = joint.ops[life.op].name
    if not what:
        return life.kind.value
    return printable(f"{life.kind.value}: {where or joint.model}, {what}")


def microseconds(moments: Moments, moment: Moment) -> tuple[float, float]:
    """Return the start and end of a moment in microseconds; if no op takes time, each moment lasts one microsecond."""
    unit = 1e6 if moments.timed else 1.0
    return moment.start * unit, moment.end * unit
