"""Regions that are compiled once (`torch.compiler.nested_compile_region`), inlined into the graph that calls them.

    y = invoke_subgraph(region, "region", x, w)[0]    ->    a = linear(x, w); y = gelu(a)

AOTAutograd passes each region to the partition function as a step of its own, before the graph around it. A budget
is for the step as a whole, so that regions are planned as parts of it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from fxremat.graphs.names import module_of
from fxremat.graphs.nodes import attribute, subgraphs_of
from fxremat.passes.evaluate import evaluate
from fxremat.torch_private import copied, is_region, parameter_name

TAG = "partitioner_tag"  # key in `meta` by which AOTAutograd marks nodes of the backward


def inline_regions(module: fx.GraphModule) -> None:
    """Replace each call of a region by the ops of the region, in dynamo's graph or in a joint graph. O(nodes).

    The region's graph names the modules of its first call; other calls get the names of theirs. The graphs of the
    regions themselves stay as they are.
    """
    calls = [node for node in module.graph.nodes if is_region(node)]
    first: dict[object, fx.Node] = {}
    for call in calls:
        given = attribute(call.args[0])
        region = fx.GraphModule(given, copied(given.graph))
        inline_regions(region)
        _inline(call, region, first.setdefault(given, call))
    for call in calls:
        name = call.args[0]
        module.graph.erase_node(call)
        if not name.users:
            module.graph.erase_node(name)
    if calls:
        module.graph.lint()
        module.recompile()


def _inline(call: fx.Node, region: fx.GraphModule, first: fx.Node) -> None:
    graph, renamed = call.graph, _renamed_modules(first, call)
    made: dict[fx.Node, Any] = dict(zip(region.graph.find_nodes(op="placeholder"), call.args[2:], strict=True))
    with graph.inserting_before(call):
        for node in region.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            made[node] = copy = graph.node_copy(node, lambda argument: made[argument])
            if node.op == "get_attr":
                copy.target = _taken_over(graph.owning_module, region, str(node.target))
            if "val" in node.meta:
                # the region's fake tensors do not share memory with those of its inputs
                copy.meta["val"] = node.meta["val"] if subgraphs_of(copy) else evaluate(copy)
            if TAG in call.meta:
                copy.meta[TAG] = call.meta[TAG]
            if renamed and (name := _renamed(module_of(node), renamed)) is not None:
                path = "".join(f"._modules[{part!r}]" for part in name.split("."))
                copy.meta["nn_module_stack"] = {"": (f"L['self']{path}", nn.Module)}
    results: Any = fx.node.map_arg(region.graph.output_node().args[0], lambda node: made[node])
    for user in [*call.users]:
        assert user.target is operator.getitem
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)


def _taken_over(module: Any, region: fx.GraphModule, name: str) -> str:
    """Make what a region calls, such as a branch of a `cond`, an attribute of the graph; return the attribute's name.
    """
    found = region
    for part in name.split("."):
        found = getattr(found, part)
    taken = name.replace(".", "_")
    while hasattr(module, taken) and getattr(module, taken) is not found:
        taken += "_"
    setattr(module, taken, found)
    return taken


def _renamed_modules(first: fx.Node, call: fx.Node) -> dict[str, str]:
    """Return module of the first call -> module of another call of the same region, as far as they differ.

    The modules are those of the parameters that the calls pass, and those that call.
    """
    pairs = [(module_of(first), module_of(call))]
    for one, other in zip(first.args[2:], call.args[2:], strict=True):
        names = [parameter_name(each) if isinstance(each, fx.Node) else None for each in (one, other)]
        if names[0] and names[1]:
            pairs.append((names[0], names[1]))
    return dict(_without_common_end(*pair) for pair in pairs if pair[0] != pair[1] and all(pair))


def _without_common_end(one: str, other: str) -> tuple[str, str]:
    first, second = one.split("."), other.split(".")
    while len(first) > 1 and len(second) > 1 and first[-1] == second[-1]:
        del first[-1], second[-1]
    return ".".join(first), ".".join(second)


def _renamed(module: str, renamed: Mapping[str, str]) -> str | None:
    for old, new in renamed.items():
        if module == old or module.startswith(f"{old}."):
            return new + module.removeprefix(old)
    return None
