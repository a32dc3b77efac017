"""Lowering to a single joint graph, in which every execution of an op, recomputations included, is a node of its own.

The graph takes primals and tangents and returns outputs and gradients, like the captured graph; `fusion.joint`
reads it. It is functional: ops that may overwrite gradients allocate new results here. Steps come in groups,
each of which may become a region compiled by Inductor. Each group makes all views that it reads, so that only
entire storages cross between groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxremat.passes.lower import Lowering
from fxremat.step.program import Program
from fxremat.step.step_graph import Origin

aten = torch.ops.aten
GROUP = "fxremat_group"  # key in the `meta` of a node: the index of its group of steps


def lower_as_one(program: Program, groups: Sequence[Sequence[int]]) -> fx.Graph:
    """Emit the steps of a program, group by group, as one graph of the captured module. O(steps).

    Args:
        groups: indices of steps in execution order, forward groups first; each step occurs once.
    """
    return _LoweringAsOne(program).emit(groups)


class _LoweringAsOne(Lowering):
    def __init__(self, program: Program) -> None:
        super().__init__(program, "", None, frozenset(range(len(program.layout.graph.ops))))
        self.backward = self.forward  # a single graph, so no value is saved for another one

    def emit(self, groups: Sequence[Sequence[int]]) -> fx.Graph:
        """Emit all groups of steps, and the outputs; return the graph."""
        joint, program, part = self.joint, self.program, self.forward
        for given in (*joint.primals, *joint.tangent_nodes):
            part.bases[self._first(given)] = self._placeholder(part, given)
        for version, value in enumerate(program.version_of):
            if joint.values[value].origin is Origin.PRIMAL and joint.shown[value].op == "get_attr":
                part.bases[version] = part.graph.node_copy(joint.shown[value])
        preserved = {value: self._preserve(value) for value in sorted(program.preserved)}
        late = False
        for place, group in enumerate(groups):
            if not late and group[0] >= program.split:
                late = True
                for value, copy in preserved.items():
                    part.bases[program.first[value]] = copy
            part.views.clear()
            last = next(iter(reversed(part.graph.nodes)), None)
            for position in group:
                self._step(part, program.steps[position])
            mark(part.graph, last, place, late=late)
        part.views.clear()
        outputs = [*joint.forward_outputs, *joint.backward_outputs]
        returned: list[Any] = [self._output(part, node) for node in outputs]
        output = part.graph.output(tuple(returned))
        captured = joint.module.graph.output_node().meta
        output.meta = {key: value for key, value in captured.items() if key == "desc"}
        return part.graph

    def _preserve(self, value: int) -> fx.Node:
        copy = super()._preserve(value)
        shown = copy.meta["val"]
        with shown.fake_mode:
            copy.meta["val"] = torch.empty_strided(shown.shape, shown.stride(), dtype=shown.dtype, device=shown.device)
        return copy


def mark(graph: fx.Graph, last: fx.Node | None, group: int, *, late: bool) -> None:
    """Record the group on all nodes after `last`, and whether they belong to the backward."""
    for node in reversed(graph.nodes):
        if node is last:
            return
        node.meta[GROUP] = group
        node.meta.pop("partitioner_tag", None)
        if late:
            node.meta["partitioner_tag"] = "is_backward"
