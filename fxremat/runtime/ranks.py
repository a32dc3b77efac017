"""The ranks that run a captured step together, and a check that all of them have captured the same graph.

A step's collectives name the process groups that they run over; all ranks that can be reached through those
groups plan together. Their graphs are compared op by op first: ranks with different graphs would wait for each
other forever in the first collective that only one of them runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from fxremat.agreement import ALONE, Agreement
from fxremat.errors import FxrematError
from fxremat.graphs.captured import Captured
from fxremat.graphs.collectives import groups_of
from fxremat.step.step_graph import Origin
from fxremat.torch_private import group_named, ranks_of_group


def ranks_of(joint: Captured, called_with: str) -> Agreement:
    """Return the ranks that run this step together and can communicate; `ALONE` if it has no collectives with others.

    Args:
        called_with: the shapes of the inputs, for the message.

    Raises:
        FxrematError: the ranks have captured different graphs.
    """
    names = list(dict.fromkeys(name for node in joint.nodes for name in groups_of(node)))
    if not names:
        return ALONE
    groups = [tuple(ranks_of_group(group_named(name))) for name in names]
    mine = (_digest(joint, names), called_with)
    graphs: dict[int, tuple[str, str]] = {}
    for group in dict.fromkeys(groups):
        if len(group) > 1:
            together = Agreement(_name(group), group)
            known = together.gathered((together.rank, mine, graphs), "comparing the ranks' graphs")
            for rank, graph, others in known:
                graphs |= {rank: graph, **others}
    if not graphs:
        return ALONE
    if len({digest for digest, _ in graphs.values()}) > 1:
        raise FxrematError(f"the ranks' graphs differ: {_difference(graphs)}")
    everyone = tuple(sorted(graphs))
    return Agreement(f"planning of {_name(everyone)}", everyone)


def _name(ranks: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, ranks))}"


def _difference(graphs: dict[int, tuple[str, str]]) -> str:
    shapes = {called_with: rank for rank, (_, called_with) in sorted(graphs.items(), reverse=True)}
    if len(shapes) == 1:
        return "every rank must run the same model, in the same mode, with the same options"
    by_rank = sorted((rank, shape) for shape, rank in shapes.items())
    called = ", ".join(f"rank {rank} was called with {shape}" for rank, shape in by_rank)
    return f"{called}; give every rank inputs of the same shapes (pad, or drop_last)"


def _digest(joint: Captured, groups: Sequence[str]) -> str:
    """Return a digest, equal for graphs with the same ops on values of the same sizes; input sizes do not count.

    They may differ, since ranks have shards of different sizes if a parameter cannot be divided evenly.
    """
    numbers = {name: str(number) for number, name in enumerate(groups)}
    ops = [
        (op.target, op.reads, op.writes, [numbers[name] for name in groups_of(node)])
        for op, node in zip(joint.ops, joint.nodes, strict=True)
    ]
    sizes = [value.bytes for value in joint.values if value.origin is not Origin.PRIMAL]
    return hashlib.sha256(repr((ops, sizes, joint.forward_count)).encode()).hexdigest()
