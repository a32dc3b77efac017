"""Costs of one of several graphs of a model at the sizes of each call, which may be others at every call.

    measured     the graph is made anew with these sizes (`SymbolicGraph.at`), and ops that need a workspace run once:
                 tens of milliseconds
    computed     bytes of values by formulas, and workspaces from sizes that were measured before: below a millisecond

Sizes are measured if they are much larger than all before. An op is run by itself if its workspace is known only at
sizes that are much larger or smaller, or if at sizes before it grew otherwise than its operands, or than their square:
so do convolutions, which take another algorithm for each size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from fxremat.cost.resized import FEW, resized, run_once
from fxremat.device import kind_of
from fxremat.errors import NotSymbolic
from fxremat.graphs.accounting import (
    apart_from_copies,
    bytes_of_floats,
    device_of,
    gradients_copied_by,
    held,
    held_beside_copies,
    largest_tensor,
    outer_gradients,
    output_position,
    rounded,
    unsplit,
)
from fxremat.graphs.captured import Captured
from fxremat.graphs.handed_in import layout, layout_of
from fxremat.graphs.nodes import SYMBOLS, tensors_of
from fxremat.graphs.symbolic import Dims, SymbolicGraph
from fxremat.step.costs import Costs, OpCost
from fxremat.step.step_graph import Op, Origin
from fxremat.torch_private import real_tensors

GROWTH = 1.25  # an op that needed no workspace is taken to need none for this many times its largest operands
NEAR = 1.125  # the workspace of an op is taken from measurements whose operands are at most by this factor apart
CONFIRMED = 4  # the number of measurements that have to confirm what was expected of such an op by earlier ones
IRREGULAR = 1000  # the number of them that one which does not confirm it outweighs, as with convolutions
MOST = 64  # number of measured sizes that are remembered

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SizedCosts:
    """The costs of a graph at certain sizes, and the bytes that gradients take which arrive in other strides."""

    costs: Costs  # without copies of gradients into the traced strides
    copies: Sequence[int]  # for each op, the bytes of such copies
    held: int  # bytes of gradients that autograd keeps alive while the backward works on copies of them
    largest: int  # bytes of the largest tensor that the graph's ops allocate
    layouts: Sequence[tuple[int, ...]]  # strides that the gradients of the graph's outputs had when it was traced

    @classmethod
    def of(cls, graph: Captured, costs: Costs) -> SizedCosts:
        """Read the costs of a graph that was made, and measured, at these sizes."""
        as_traced, copies = apart_from_copies(graph, costs)
        return cls(
            costs=as_traced,
            copies=copies,
            held=held_beside_copies(graph, device_of(graph)),
            largest=largest_tensor(graph),
            layouts=[layout_of(node.meta.get("val")) for node in graph.tangent_nodes],
        )


class CostsAtSizes:
    """The costs of a graph with symbolic sizes, at any sizes.

    Args:
        symbolic: the graph.
        joint: the graph at the sizes of the call that it was captured from.
        costs: the costs of its ops, as measured there.
    """

    def __init__(self, symbolic: SymbolicGraph, joint: Captured, costs: Costs) -> None:
        self._symbolic, self._joint, self._costs = symbolic, joint, costs
        self._device = device_of(joint)
        ops, values = len(joint.ops), len(joint.values)
        # for each of the measured sizes: `_Counted.work`; the bytes of each op's workspace, from which what it
        # overwrites is not subtracted; and the bytes of each value
        self._work, self._own = np.zeros((0, ops), dtype=np.int64), np.zeros((0, ops), dtype=np.int64)
        self._values = np.zeros((0, values), dtype=np.int64)
        # the largest of these for each op, of all sizes at which the whole graph was measured
        self._most_work, self._most_own = np.zeros(ops, dtype=np.int64), np.zeros(ops, dtype=np.int64)
        # ops that had a workspace somewhere, or outputs that took more than their shapes need; how often these took at
        # most what was expected
        self._special, self._confirmed = np.zeros(ops, dtype=bool), np.zeros(ops, dtype=np.int64)

    def at(self, dims: Dims) -> SizedCosts:
        """Return the costs at these sizes.

        Raises `NotSymbolic`: a value is sparse, so that its size is not known from its shape.
        """
        counted = self._sizes.at(dims) if self._sizes is not None else None
        return (self._computed(dims, counted) if counted else None) or self._measure(dims, counted)

    @cached_property
    def _sizes(self) -> _Sizes | None:
        """The formulas of sizes; None if there are none, so that each size is measured."""
        try:
            found = _Sizes(self._symbolic, self._joint)
        except NotSymbolic:
            return None
        self._note(found.at(self._symbolic.dims), SizedCosts.of(self._joint, self._costs))
        return found

    def _measure(self, dims: Dims, counted: _Counted | None) -> SizedCosts:
        with real_tensors():
            joint = self._symbolic.at(dims)
            found = SizedCosts.of(joint, resized(joint, self._joint, self._costs))
        if counted is not None:
            if counted.values.tolist() == [value.bytes for value in joint.values]:
                self._note(counted, found)
            else:
                self._sizes = None  # the formulas do not describe this graph
        return found

    def _note(self, counted: _Counted, found: SizedCosts) -> None:
        """Remember what ops took at these sizes."""
        values = np.array(found.costs.sizes.values)
        own = np.array(found.costs.sizes.workspace) + self._overwritten(values)
        others = values != self._held(counted.values)
        grown = [any(others[value] for value in op.writes) and not self._overwrites(op) for op in self._joint.ops]
        self._special = self._special | (own > FEW + bytes_of_floats(self._joint, self._device)) | np.array(grown, bool)
        self._most_work = np.maximum(self._most_work, counted.work)
        self._most_own = np.maximum(self._most_own, own)
        self._remember(np.flatnonzero(self._special), counted.work, own, values)

    def _remember(self, special: Iterable[int], work: Ints, own: Ints, values: Ints) -> None:
        """Remember what ops took, and whether it is at most what measurements at similar sizes predict.

        Args:
            special: of the ops that were measured, those for which it is checked.
            work: for each op, as in `_Counted`; -1 for ops that were not measured.
        """
        self._confirmed = self._confirmed.copy()
        for index in special:
            if (found := self._estimated(index, work[index])) is not None:
                holds = own[index] <= found.own and all(values[value] <= size for value, size in found.outputs.items())
                self._confirmed[index] += 1 if holds else -IRREGULAR
        self._work = np.vstack([self._work[1 - MOST :], work])
        self._own = np.vstack([self._own[1 - MOST :], own])
        self._values = np.vstack([self._values[1 - MOST :], values])

    def _computed(self, dims: Dims, counted: _Counted) -> SizedCosts | None:
        """Return the costs as they follow from what was measured at other sizes; None if they do not.

        Ops that need another workspace at each size are run, by themselves.
        """
        if (counted.work > GROWTH * self._most_work).any():
            return None
        special = map(int, np.flatnonzero(self._special))
        taken = {index: self._expected(index, counted.work[index]) for index in special}
        if unexpected := [index for index, each in taken.items() if each is None]:
            taken |= self._run(unexpected, dims, counted.work)
        values, workspace = self._held(counted.values), self._most_own.copy()
        for index, each in taken.items():
            if each is None:
                return None
            workspace[index] = each.own
            for value, size in each.outputs.items():
                values[value] = max(values[value], size)
        workspace -= self._overwritten(values)
        known, before = self._costs, self._measured_work
        scale = np.where(before > 0, counted.work / np.maximum(before, 1), 1.0)
        seconds = np.array(known.seconds) * scale
        sizes = replace(known.sizes, values=tuple(values.tolist()), workspace=tuple(workspace.tolist()))
        made = [value.origin is not Origin.PRIMAL for value in self._joint.values]
        return SizedCosts(
            costs=replace(known, seconds=tuple(seconds.tolist()), sizes=sizes),
            copies=counted.copies,
            held=counted.held,
            largest=int(counted.values[made].max(initial=0)),
            layouts=counted.layouts,
        )

    def _run(self, ops: Sequence[int], dims: Dims, work: Ints) -> dict[int, _Taken | None]:
        """Return what ops took when they ran once by themselves; None for those that cannot."""
        named = {node.name: node for node in self._symbolic.module.graph.nodes}
        nodes = self._symbolic.ops_at([named[self._joint.nodes[index].name] for index in ops], dims)
        costs = run_once(dict(zip(ops, nodes, strict=True)), self._device, self._costs.fresh)
        found = {index: self._taken(index, cost) if cost else None for index, cost in costs.items()}
        seen = np.full(len(self._joint.ops), -1)
        own, values = np.zeros(len(seen), dtype=np.int64), np.zeros(len(self._joint.values), dtype=np.int64)
        learning = [index for index in ops if self._confirmed[index] >= 0]
        for index in learning:
            if (each := found[index]) is not None:
                seen[index], own[index] = work[index], each.own
                values[[*each.outputs]] = [*each.outputs.values()]
        if learning:
            self._remember(learning, seen, own, values)
        return found

    def _taken(self, index: int, cost: OpCost) -> _Taken:
        outputs = {}
        for value in self._joint.ops[index].writes:
            position = output_position(self._joint.shown[value], self._joint.nodes[index])
            if position is not None and position < len(cost.outputs):
                outputs[value] = held(cost.outputs[position], self._device)
        own = held(cost.workspace, self._device) + bytes_of_floats(self._joint, self._device)
        return _Taken(own, {} if self._overwrites(self._joint.ops[index]) else outputs)

    def _expected(self, index: int, now: int) -> _Taken | None:
        """Return what measurements at similar sizes predict for an op, if such predictions have held; else None."""
        return self._estimated(index, now) if not now or self._confirmed[index] >= CONFIRMED else None

    def _estimated(self, index: int, now: int) -> _Taken | None:
        """Return what an op takes by measurements at similar sizes; None without any.

        Args:
            now: the bytes of the op's operands and results whose sizes may change.
        """
        work = self._work[:, index]
        near = (now / NEAR <= work) & (work <= now * NEAR)
        if not near.any():
            return None
        growth = np.maximum(1.0, now / np.maximum(work[near], 1)) ** 2
        outputs = {value: int((self._values[near, value] * growth).min()) for value in self._joint.ops[index].writes}
        return _Taken(int((self._own[near, index] * growth).min()), outputs)

    @cached_property
    def _measured_work(self) -> Ints:
        """The bytes of the operands of each op, as far as they depend on sizes, in the call that was captured."""
        assert self._sizes is not None
        return self._sizes.at(self._symbolic.dims).work

    def _overwrites(self, op: Op) -> bool:
        return op.overwrites is not None and op.index not in self._costs.fresh

    def _overwritten(self, values: Ints) -> Ints:
        """Return for each op the bytes of the operand that it overwrites, and let its result have as many."""
        taken = np.zeros(len(self._joint.ops), dtype=np.int64)
        for op in self._joint.ops:
            if op.overwrites is not None and self._overwrites(op):
                (result,) = op.writes
                values[result] = taken[op.index] = values[op.overwrites]
        return taken

    def _held(self, sizes: Ints) -> Ints:
        """Return the bytes that the allocator counts for tensors of these sizes (`accounting.held`)."""
        kind, rest = kind_of(self._device), unsplit(self._device)
        return -(-sizes // kind.block) * kind.block + np.where(sizes > kind.unsplit, rest, 0)


@dataclass(frozen=True)
class _Taken:
    """The bytes that an op takes."""

    own: int  # its workspace, from which what it overwrites is not subtracted
    outputs: Mapping[int, int]  # numbers of values -> their bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class _Counted:
    """The numbers that the formulas give for certain sizes."""

    values: Ints  # bytes of each value
    work: Ints  # for each op, bytes of the operands and results whose sizes may change
    copies: Sequence[int]  # these and the following as in `SizedCosts`
    held: int
    layouts: Sequence[tuple[int, ...]]


class _Sizes:
    """The formulas for the bytes of a graph's values, of its ops' operands, and of gradients that others pass in.

    Raises `NotSymbolic` if some of them are not determined by the sizes of the inputs.
    """

    def __init__(self, symbolic: SymbolicGraph, joint: Captured) -> None:
        self._joint, self._device = joint, device_of(joint)
        self._copied = gradients_copied_by(joint)
        by_name = {node.name: node for node in symbolic.module.graph.nodes}
        nodes = [by_name[node.name] for node in joint.nodes]
        values = _tensors_of_values(joint, nodes, [by_name[node.name] for node in joint.shown])
        copied = [by_name[node.name].meta["val"] for read in self._copied.values() for node in read]
        outer = [by_name[node.name].meta["val"] for node in outer_gradients(joint)]
        shown = [by_name[node.name].meta.get("val") for node in joint.tangent_nodes]
        tangents = [tensor for tensor in shown if isinstance(tensor, torch.Tensor)]
        self._layouts = [tensor.dim() if isinstance(tensor, torch.Tensor) else 0 for tensor in shown]
        self._at = symbolic.formulas([
            *(0 if tensor is None else tensor.untyped_storage().nbytes() for tensor in values),
            *map(_work, nodes),
            *map(_bytes, (*copied, *outer)),
            *(number for tensor in tangents for number in (*tensor.shape, *tensor.stride())),
        ])

    def at(self, dims: Dims) -> _Counted:
        """Return the numbers for these sizes."""
        numbers, joint, device = iter(self._at(dims)), self._joint, self._device
        values, work = _array(numbers, len(joint.values)), _array(numbers, len(joint.ops))
        copied = {
            op: sum(held(size, device) for size in islice(numbers, len(read))) for op, read in self._copied.items()
        }
        outer = [rounded(size, device) for size in islice(numbers, len(outer_gradients(joint)))]
        return _Counted(
            values=values,
            work=work,
            copies=[copied.get(op.index, 0) for op in joint.ops],
            held=sum(outer) if held_beside_copies(joint, device) else 0,
            layouts=[layout([*islice(numbers, dim)], [*islice(numbers, dim)]) for dim in self._layouts],
        )


def _array(numbers: Iterator[int], count: int) -> Ints:
    return np.fromiter(islice(numbers, count), dtype=np.int64, count=count)


def _tensors_of_values(
    joint: Captured, nodes: Sequence[fx.Node], shown: Sequence[fx.Node]
) -> Iterable[torch.Tensor | None]:
    """Return a tensor with the storage of each value, in a graph whose nodes have other sizes.

    Args:
        nodes: the nodes of the graph's ops there.
        shown: the nodes that show its values there.
    """
    found = [next((tensor for tensor in tensors_of(node) if tensor is not None), None) for node in shown]
    for op, node in zip(joint.ops, nodes, strict=True):
        read = {joint.values[value].position for value in op.writes}
        unread = [tensor for k, tensor in enumerate(tensors_of(node)) if tensor is not None and k not in read]
        for value in op.writes:  # what no node selects from a tuple is shown by the node of the tuple
            if shown[value] is node and isinstance(node.meta.get("val"), tuple | list):
                found[value] = unread.pop(0)
    return found


def _work(node: fx.Node) -> Any:
    """Return the bytes of those operands and results of an op whose sizes may change, perhaps as a SymInt."""
    tensors = [tensor for each in (*node.all_input_nodes, node) for tensor in tensors_of(each) if tensor is not None]
    return sum(size for size in map(_bytes, tensors) if isinstance(size, SYMBOLS))


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.numel() * tensor.element_size()
