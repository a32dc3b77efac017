"""A rewrite of `parameter.data = value` in dynamo's graph, such as a momentum encoder's update, to a copy.

    parameter.data = value      dynamo: an op which AOTAutograd does not differentiate around
                             -> parameter.data.copy_(value)

Both give the parameter the same values, but a copy shows wherever the old storage is seen. So only assignments stay
that are the first to touch a parameter in the graph, except for reads of `parameter.data` that are over by then.
"""

from __future__ import annotations

import torch
from torch import fx

from fxremat.errors import CaptureError
from fxremat.graphs.names import place_of, source_of
from fxremat.torch_private import assigns_data, lowers_a_version, reads_data, storage_of


def copy_assigned_data(graph: fx.Graph) -> None:
    """Rewrite the assignments to `.data` of a graph's inputs that may be copies. O(nodes)."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node in filter(assigns_data, list(graph.nodes)):
        if not _may_copy(node, place):
            continue
        for user in list(node.users):
            graph.erase_node(user)
        parameter, value = node.args
        with graph.inserting_before(node):
            data = graph.call_method("detach", (parameter,))
            made = graph.call_method("copy_", (data, value))
        for new in (data, made):
            new.meta |= {**node.meta, "example_value": value.meta["example_value"]}
        graph.erase_node(node)


def refuse_assignments(graph: fx.Graph, error: AssertionError) -> None:
    """Raise `CaptureError` that names an assignment to `.data`, if this error is AOTAutograd's about it."""
    assigned = next(filter(assigns_data, graph.nodes), None)
    if assigned is None or "set_ on a graph input" not in str(error):
        return
    raise CaptureError(
        f"a tensor that the graph reads gets other memory by an assignment to .data{source_of(assigned)}: write into "
        "its memory instead, as in tensor.data.copy_(value)",
        place=place_of(assigned),
    ) from error


def _may_copy(node: fx.Node, place: dict[fx.Node, int]) -> bool:
    """Tell whether copying gives what `parameter.set_(value)` gives, whoever looks at the parameter."""
    parameter, value = node.args
    if not isinstance(parameter, fx.Node) or not isinstance(value, fx.Node) or parameter.op != "placeholder":
        return False
    new = value.meta.get("example_value")
    earlier = [user for user in parameter.users if place[user] < place[node]]
    reads = [user for user in earlier if reads_data(user)]
    if not isinstance(new, torch.Tensor) or len(reads) != len(earlier) or not all(map(lowers_a_version, node.users)):
        return False
    if not reads:
        return False  # the sizes that it had are not known
    old: torch.Tensor = reads[0].meta["example_value"]
    same = (old.shape, old.stride(), old.dtype, old.device) == (new.shape, new.stride(), new.dtype, new.device)
    return same and storage_of(old) != storage_of(new) and not _seen_later(reads, old, place[node], place)


def _seen_later(reads: list[fx.Node], old: torch.Tensor, now: int, place: dict[fx.Node, int]) -> bool:
    """Tell whether a node after the assignment uses the old storage, directly or through views."""
    stack, seen = list(reads), set[fx.Node]()
    while stack:
        node = stack.pop()
        seen.add(node)
        for user in node.users:
            shown = user.meta.get("example_value")
            shows = isinstance(shown, torch.Tensor) and storage_of(shown) == storage_of(old)
            if place[user] > now:
                return True
            stack += [user] if shows and user not in seen else []
    return False
