"""Step graphs that are numbers alone, without a model: made by hand or at random, in microseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from fxremat.step.layout import Layout
from fxremat.step.liveness import Sizes
from fxremat.step.program import Order, Program
from fxremat.step.source import NOWHERE
from fxremat.step.step_graph import Kind, Op, Origin, StepGraph, Value


def op(reads: Sequence[int], writes: Sequence[int], **facts: Any) -> Callable[[int], Op]:
    """An op of the forward, named after its number, whose second execution is as the first unless `facts` differ."""
    plain = {"backward": False, "random": False, "anchored": False, "again_reads": reads, "again_writes": writes}
    plain |= {"target": "op", "key": "op", "kind": Kind.KERNEL, "overwrites": None, "sequence": None}

    def numbered(index: int) -> Op:
        known = plain | facts
        again = {name: tuple(known.pop(name)) for name in ("again_reads", "again_writes")}
        return Op(index=index, name=f"op{index}", reads=tuple(reads), writes=tuple(writes), **again, **known)

    return numbered


def graph_of(origins: Sequence[Origin], ops: Sequence[Callable[[int], Op]], **sets: Any) -> StepGraph:
    """A step graph whose values are numbered as their origins are; `sets` are fields that are not empty."""
    made = tuple(numbered(index) for index, numbered in enumerate(ops))
    producer = {value: item.index for item in made for value in item.writes}
    values = [
        Value(index, f"v{index}", 0, origin, producer.get(index), position=None, type="", whole=True)
        for index, origin in enumerate(origins)
    ]
    none = ("root_tangents", "output_values", "kept_outputs", "mutated_primals", "updates", "returned")
    facts: dict[str, Any] = {
        **dict.fromkeys(none, frozenset[int]()),
        "forward_count": sum(not item.backward for item in made),
        "tangents": tuple(index for index, origin in enumerate(origins) if origin is Origin.TANGENT),
        "holds_gradients": False,
        "sources": (NOWHERE,) * len(made),
        "parameters": {},
        "model": "model",
        "device": "cpu",
    }
    return StepGraph(values=tuple(values), ops=made, **(facts | sets))


def _some(draw: Any, items: Sequence[int], least: int = 0, most: int = 3) -> tuple[int, ...]:
    """Some of the items, each once, in any order."""
    chosen = draw(st.lists(st.sampled_from(items), unique=True, min_size=least, max_size=most)) if items else []
    return tuple(chosen)


@st.composite
def joints(draw: Any) -> StepGraph:
    """Joint graphs of one to five forward ops and as many backward ones, with all that a joint graph may have."""
    origins = [Origin.PRIMAL] * draw(st.integers(1, 3))
    primals = range(len(origins))
    origins += [Origin.TANGENT] * draw(st.integers(0, 2))
    tangents = range(len(primals), len(origins))
    ops, made = [], {Origin.FORWARD: [], Origin.BACKWARD: []}
    for origin, values in made.items():
        for _ in range(draw(st.integers(1, 5))):
            known = [*primals, *made[Origin.FORWARD], *made[Origin.BACKWARD]]
            reads = _some(draw, known + [*tangents] * (origin is Origin.BACKWARD), most=4)
            writes = tuple(range(len(origins), len(origins) + draw(st.integers(0, 2))))
            origins += [origin] * len(writes)
            values += writes
            facts = {
                "backward": origin is Origin.BACKWARD,
                "random": draw(st.booleans()),
                "again_reads": _some(draw, reads, most=4),
                "again_writes": _some(draw, writes),
            }
            ops.append(op(reads, writes, **facts))
    forward, late = made.values()
    kept = frozenset(_some(draw, forward))
    return graph_of(
        origins,
        ops,
        root_tangents=frozenset(_some(draw, tangents)),
        kept_outputs=kept,
        dropped_outputs=frozenset(_some(draw, sorted(kept))),
        mutated_primals=frozenset(_some(draw, primals)),
        updates=frozenset(_some(draw, forward)) - kept,
        returned=frozenset(_some(draw, late)),
    )


@st.composite
def orders(draw: Any) -> Order:
    """Orders of a random joint graph in which ops run again at any time after their first execution."""
    joint = draw(joints())
    ops: list[int] = []
    for index in range(len(joint.ops)):
        if index == joint.forward_count:
            split = len(ops)
        ops.append(index)
        ops += _some(draw, range(index + 1), most=2)
    blocks = tuple(draw(st.lists(st.integers(0, 9), min_size=len(ops), max_size=len(ops))))
    return Order(Layout(graph=joint, blocks=(), held=frozenset()), tuple(ops), blocks, split)


@st.composite
def sizes_of(draw: Any, program: Program) -> Sizes:
    """Bytes of everything that a program may hold."""
    joint, small = program.layout.graph, st.integers(0, 50)
    return Sizes(
        values=[draw(small) for _ in joint.values],
        workspace=[draw(st.integers(-20, 50)) for _ in joint.ops],
        seed=draw(st.sampled_from([0, 7])),
        outside=draw(st.integers(0, 200)),
        root=draw(small),
    )
