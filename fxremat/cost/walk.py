"""A run of a training step op by op on real values, so that each op can be measured when its inputs exist.

    order    the ops to run, by number: each once as captured, or some repeatedly as in a program that recomputes
    visit    a function that gets each op with its real arguments, runs it, and returns its result; a compiled region
             gets a list with the only references to values that die there
    known    a function that tells of which ops no result is needed

Values are freed right after their last use in this order. Parameters and inputs are the tensors that the step
was captured with; missing data (fake tensors, gradients that autograd would pass in, results of known ops) is made up
when it is first read, and freed too. AOTAutograd's graphs are functional, so parameters, buffers and inputs stay as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fxremat.cost.layouts import otherwise_than_shown
from fxremat.cost.made_up import Call, value_like, weights_like
from fxremat.graphs.accounting import output_position
from fxremat.graphs.batch_norm import again_call
from fxremat.graphs.captured import Captured
from fxremat.graphs.nodes import attribute
from fxremat.step.step_graph import Kind, Op, Origin
from fxremat.torch_private import input_place, is_real

aten = torch.ops.aten

Visit = Callable[[Op, Call], Any]
Known = Callable[[Op], bool]


def given_inputs(joint: Captured, inputs: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Return the real tensors among the inputs of a captured graph, as number of the input's value -> tensor.

    Inputs of the graph without a real tensor of the same shape and dtype in `inputs` are left out.
    """
    found = {}
    for primal in joint.primals:
        place = input_place(primal)
        given: Any = inputs[place] if place is not None and place < len(inputs) else None
        shown = primal.meta["val"]
        if is_real(given) and given.shape == shown.shape and given.dtype == shown.dtype:
            found[joint.value_of[primal]] = given
    return found


class Walk:
    """Runs a step op by op on real tensors, and keeps the values that are currently alive.

    Args:
        given: number of an input's value -> real tensor; data is made up for missing ones.
        order: the numbers of the ops to run.
    """

    def __init__(self, joint: Captured, given: Mapping[int, torch.Tensor], order: Sequence[int]) -> None:
        self.joint = joint
        self.given = given
        self.order = order
        self.values: dict[int, Any] = {}
        # traced views that real layouts do not allow; the walk uses copies instead
        self.impossible_views: list[fx.Node] = []
        self._addresses: dict[int, int] = {}  # live value -> address of its storage

    def run(self, visit: Visit, known: Known = lambda op: False) -> None:
        """Run every op of the order that is not known through `visit`.

        If an op raises, free all values and raise the same error.
        """
        try:
            self._visit_all(visit, known)
        except BaseException:
            self.values.clear()
            self._addresses.clear()
            raise

    def _visit_all(self, visit: Visit, known: Known) -> None:
        ran: set[int] = set()
        freed = _last_uses(self.joint, self.order)
        for index, dead in zip(self.order, freed, strict=True):
            op, again = self.joint.ops[index], index in ran
            if not known(op):
                call = self._call(op, again=again)
                if op.kind is Kind.REGION:
                    self._free(dead)  # the call has the only references
                self._write(op, visit(op, call), again=again)
            ran.add(index)
            self._free(dead)
            for value in dead:
                self._addresses.pop(value, None)

    def _free(self, values: Iterable[int]) -> None:
        for value in values:
            self.values.pop(value, None)

    def shares(self, tensor: torch.Tensor, besides: int) -> bool:
        """Tell whether an input of the step, or an alive value other than `besides`, shares the tensor's storage."""
        address = _address(tensor)
        if address in self._given_addresses:
            return True
        return any(held == address and value != besides for value, held in self._addresses.items())

    def allocated(self, inputs: Iterable[Any]) -> int:
        """Return the bytes of the storages of all alive values and of the inputs of a call, but those of the step."""
        storages = {_address(x): x.untyped_storage().nbytes() for x in (*self.values.values(), *inputs) if _address(x)}
        return sum(size for address, size in storages.items() if address not in self._given_addresses)

    @cached_property
    def _given_addresses(self) -> set[int | None]:
        return set(map(_address, self.given.values())) - {None}

    def _call(self, op: Op, *, again: bool) -> Call:
        node = self.joint.nodes[op.index]
        target, args = again_call(node) if again else (node.target, node.args)
        given: Sequence[Any] = fx.node.map_arg(args, self._show)
        if op.kind is Kind.REGION:
            given = list(given)
        return Call(target, given, fx.node.map_arg(node.kwargs, self._show))

    def _write(self, op: Op, result: Any, *, again: bool) -> None:
        for value in op.again_writes if again else op.writes:
            position = output_position(self.joint.shown[value], self.joint.nodes[op.index])
            if position is not None:
                self._hold(value, result[position] if isinstance(result, tuple | list) else result)

    def _hold(self, value: int, made: Any) -> None:
        self.values[value] = made
        self._addresses.pop(value, None)
        if (address := _address(made)) is not None:
            self._addresses[value] = address

    def _show(self, node: fx.Node) -> Any:
        """Return the tensor or number of a node of the joint graph: a value, or a view of one."""
        value = self.joint.value_of.get(node)
        if value is None:
            return node.meta.get("val")  # the value is neither a tensor nor a number: None, or a token
        if self.joint.shown[value] is node:
            if value not in self.values:
                self._hold(value, self._new(value))
            return self.values[value]
        return self._view(node, *fx.node.map_arg(node.args, self._show), **fx.node.map_arg(node.kwargs, self._show))

    def _view(self, node: fx.Node, *args: Any, **kwargs: Any) -> Any:
        target: Any = node.target
        if target is aten.as_strided.default and otherwise_than_shown(node.all_input_nodes[0], args[0]):
            self.impossible_views.append(node)  # as_strided would select other elements from the real strides
        if target not in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
            return target(*args, **kwargs)
        viewed = aten.reshape.default(*args)
        if viewed.numel() and viewed.data_ptr() != args[0].data_ptr():
            self.impossible_views.append(node)
        return viewed

    def _new(self, value: int) -> Any:
        node = self.joint.shown[value]
        if value in self.given:
            return self.given[value].detach()
        if node.op == "get_attr":
            return attribute(node)
        if self.joint.values[value].origin is Origin.TANGENT:
            return torch.ones_like(tangent) if (tangent := value_like(node)).dim() == 0 else tangent
        return weights_like(node) if node.op == "placeholder" else value_like(node)


def _address(made: Any) -> int | None:
    """Return the address of the storage of a strided tensor; None for anything else."""
    strided = isinstance(made, torch.Tensor) and made.layout is torch.strided
    return made.untyped_storage().data_ptr() if strided else None


def _last_uses(joint: Captured, order: Sequence[int]) -> list[list[int]]:
    """Return, for each position in the order, the values used there that no later op reads, and that can be freed."""
    needed: set[int] = set()
    freed: list[list[int]] = []
    firsts = _firsts(order)
    for index, first in zip(reversed(order), reversed(list(firsts)), strict=True):
        op = joint.ops[index]
        reads, writes = (op.reads, op.writes) if first else (op.again_reads, op.again_writes)
        freed.append([value for value in {*reads, *writes} if value not in needed])
        needed.difference_update(writes)
        needed.update(reads)
    return freed[::-1]


def _firsts(order: Sequence[int]) -> Iterator[bool]:
    seen: set[int] = set()
    for index in order:
        yield index not in seen
        seen.add(index)
