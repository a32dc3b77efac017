"""A program as a joint graph whose ops are its units (compiled regions, or single ops): `fused_program`.

All code for captured steps (liveness, measuring, lowering, pictures) works on such a graph unchanged. Each of
its ops runs once, in order; its values are those that one unit computes and another reads.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fxremat.fusion.units import Units
from fxremat.graphs.captured import Captured, captured_of, read_joint
from fxremat.graphs.names import module_of
from fxremat.graphs.nodes import tensors_of
from fxremat.graphs.region import Kernels, Region
from fxremat.passes.in_place import note_overwriting
from fxremat.passes.lower_as_one import GROUP, lower_as_one
from fxremat.step.layout import Layout
from fxremat.step.program import Order, Program, Role
from fxremat.step.source import common_module


@dataclass(frozen=True, kw_only=True, eq=False)
class FusedLayout(Layout):
    """The blocks of a program whose ops are compiled regions and single ops; it has only the blocks' names."""

    block_names: tuple[str, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        return self.block_names


def fused_program(
    program: Program, units: Units, kernels: Kernels, emitted: fx.GraphModule | None = None
) -> Program:
    """Return a program whose ops are the units of `program`, that is compiled regions and single ops.

    Each unit runs once. O(steps); nothing is compiled yet.

    Args:
        emitted: the step as one graph, whose nodes are marked with their unit (`GROUP`), and which is rewritten here;
            None: the one that the program's steps give.
    """
    if emitted is None:
        graph = lower_as_one(program, [unit.steps for unit in units])
        emitted = fx.GraphModule(captured_of(program.layout.graph).module, graph)
    joint = _joint_of(program, units, kernels, emitted)
    steps = [program.steps[unit.steps[0]] for unit in units]
    groups = [node.meta.get(GROUP) for node in joint.nodes]
    blocks = [0 if group is None else steps[group].block for group in groups]
    layout = FusedLayout(
        graph=joint, blocks=(), held=frozenset(), block_names=tuple(program.layout.names)
    )
    order = Order(
        layout=layout, ops=tuple(range(len(joint.ops))), blocks=tuple(blocks), split=joint.forward_count
    )
    straight = order.program()
    roles = [
        _role(program, units, group) if group is not None else step.role
        for group, step in zip(groups, straight.steps, strict=True)
    ]
    named = [replace(step, role=role) for step, role in zip(straight.steps, roles, strict=True)]
    return replace(straight, steps=tuple(named))


def _role(program: Program, units: Units, group: int) -> Role:
    """Return the role of a unit (group of steps): backward if any of its steps belongs to the backward."""
    roles = {program.steps[position].role for position in units[group].steps}
    return next(role for role in (Role.BACKWARD, Role.FORWARD, Role.RECOMPUTE) if role in roles)


def _joint_of(program: Program, units: Units, kernels: Kernels, emitted: fx.GraphModule) -> Captured:
    captured = captured_of(program.layout.graph)
    root, graph = emitted, emitted.graph
    members: list[list[fx.Node]] = [[] for _ in units]
    for node in graph.nodes:
        if GROUP in node.meta:
            members[node.meta[GROUP]].append(node)
    last = _last_readers(graph)
    first_late = next((g for g, unit in enumerate(units) if unit.steps[0] >= program.split), len(units))
    for place, (unit, nodes) in enumerate(zip(units, members, strict=True)):
        if unit.compiled:
            _put_region(root, nodes, _Uses(place, last, first_late), kernels)
    graph.eliminate_dead_code()
    note_overwriting(graph)
    graph.lint()
    module = fx.GraphModule(root, graph, class_name="Step")
    return read_joint(module, len(captured.forward_outputs))


FOR_EVER = 1 << 60  # larger than the index of any unit


def _last_readers(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return node -> index of the last unit (group of steps) that reads it; `FOR_EVER` if the step returns it."""
    last: dict[fx.Node, int] = {}
    for node in graph.nodes:
        group = node.meta.get(GROUP, FOR_EVER)
        for parent in node.all_input_nodes:
            last[parent] = max(last.get(parent, -1), group)
    return last


@dataclass(frozen=True)
class _Uses:
    """Which of its inputs a unit (a group of steps that is compiled) may free or overwrite."""

    group: int  # index of the unit
    last: dict[fx.Node, int]  # node -> index of the last unit (compiled region or single op) that reads it
    first_late: int  # index of the first unit of the backward

    def dies(self, node: fx.Node) -> bool:
        """Tell whether a node's tensor may be freed after this group of steps: no later group and no caller needs it.
        """
        given = node.op == "placeholder" and not node.name.startswith("tangents")
        # autograd keeps the gradient of a loss alive
        root = node.op == "placeholder" and node.meta["val"].numel() == 1
        return self.last[node] == self.group and node.op != "get_attr" and not given and not root

    def may_overwrite(self, node: fx.Node) -> bool:
        """Tell whether this group of steps may overwrite a node's tensor.

        It may if the tensor may be freed after the group, and was computed in this graph.
        """
        made = node.meta.get(GROUP)
        return self.dies(node) and made is not None and (made < self.first_late) == (self.group < self.first_late)


def _put_region(root: torch.nn.Module, nodes: Sequence[fx.Node], uses: _Uses, kernels: Kernels) -> None:
    """Replace the nodes of one group of steps by a call of a compiled `Region`.

    Seeds of random numbers become inputs of the region, so that regions which differ only in their seeds are
    equal.
    """
    seeds = [node for node in nodes if _is_seed(node)]
    nodes = [node for node in nodes if node not in seeds]
    for node in reversed(seeds):
        nodes[0].prepend(node)
    inside = set(nodes)
    inputs = list(dict.fromkeys(p for node in nodes for p in node.all_input_nodes if p not in inside))
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    if not outputs:
        return
    region = Region(
        root,
        _extracted(nodes, inputs, outputs),
        kernels,
        dying=frozenset(place for place, node in enumerate(inputs) if node not in seeds and uses.dies(node)),
        donated=frozenset(place for place, node in enumerate(inputs) if node not in seeds and uses.may_overwrite(node)),
    )
    graph = nodes[0].graph
    with graph.inserting_before(nodes[0]):
        call = graph.call_function(region, tuple(inputs))
        call.meta = _described(nodes, outputs)
        for place, output in enumerate(outputs):
            readers = [user for user in output.users if user not in inside]
            item = graph.call_function(operator.getitem, (call, place))
            item.meta = dict(output.meta)
            uses.last[item] = uses.last[output]
            for user in readers:
                user.replace_input_with(output, item)
    for node in reversed(nodes):
        graph.erase_node(node)


def _is_seed(node: fx.Node) -> bool:
    """Tell whether a node selects one of the seeds for dropout masks."""
    return node.target is torch.ops.aten.select.int and all(
        user.target is torch.ops.fxremat.seeded_mask.default for user in node.users
    )


def _extracted(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> fx.Graph:
    """Return a copy of these nodes as a separate graph; equal groups of nodes give equal graphs."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for place, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"i{place}")
        copies[node].meta = {"val": node.meta["val"]}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = {"val": node.meta["val"]}
    graph.output(tuple(copies[node] for node in outputs))
    return graph


def _described(nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> dict[str, Any]:
    """Return the `meta` of a compiled group's node: that of its largest output, with all outputs and a common module.
    """
    largest = max(outputs, key=lambda node: sum(t.nbytes for t in tensors_of(node) if t is not None))
    module = common_module(module_of(node) for node in nodes if node.target is not operator.getitem)
    path = "L['self']" + "".join(f"[{part!r}]" for part in module.split(".") if module)
    return dict(largest.meta) | {
        "val": tuple(node.meta["val"] for node in outputs),
        "nn_module_stack": {"unit": (path, "")} if module else {},
        "fwd_nn_module_stack": {},
        "is_gradient_acc": False,
    }
