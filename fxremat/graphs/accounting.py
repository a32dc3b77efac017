"""Bytes of ops and values of a captured step, and of a loss outside of it, as the device's allocator counts them."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from operator import sub

import torch
from torch import fx

from fxremat.device import kind_of
from fxremat.graphs.captured import Captured, captured_of
from fxremat.graphs.handed_in import laid_out_by_others
from fxremat.graphs.names import FLOAT
from fxremat.graphs.nodes import is_number
from fxremat.graphs.op_key import op_key
from fxremat.step.costs import Costs, OpCost
from fxremat.step.liveness import Sizes
from fxremat.step.step_graph import Kind, Origin, StepGraph
from fxremat.torch_private import allocates_in_expandable_segments, holds_gradients

NUMBERS_OF_LOSS = 4  # number of scalars that a loss is assumed to allocate for each output of the model
SINGLE = torch.float32.itemsize  # bytes of one number in single precision


def rounded(size: int, device: torch.device) -> int:
    """Round a size in bytes up to the block size of the device's allocator."""
    block = kind_of(device).block
    return -(-size // block) * block


def held(size: int, device: torch.device) -> int:
    """Return the most bytes that the allocator may count as allocated for a tensor of `size` bytes.

    CUDA's caching allocator gives a tensor the smallest free block that is large enough, and splits off the
    rest, except that for a tensor of more than 1 MiB it keeps a rest of up to 1 MiB in the block. With
    expandable segments it always splits.
    """
    return rounded(size, device) + (unsplit(device) if size > kind_of(device).unsplit else 0)


def unsplit(device: torch.device) -> int:
    """Return the bytes by which the allocated block of a large tensor may exceed the tensor, as it is not split."""
    kind = kind_of(device)
    if not (kind.unsplit and kind.is_available()):
        return 0
    return 0 if kind.of_cuda and allocates_in_expandable_segments() else kind.unsplit


def costs_from(
    joint: Captured, by_op: Sequence[OpCost], device: torch.device, fresh: frozenset[int] = frozenset()
) -> Costs:
    """Combine the costs of ops with the sizes of values, rounded as the device's allocator does.

    Inputs that are Python floats count during the entire step, as the tensors that dynamo makes of them at each
    call. The storage of an output may be larger than its shape needs: `mse_loss` returns its sum in the storage
    of all its terms. An op that overwrites an operand gets a negative workspace, since operand and result,
    which share a storage, both count as values. The measured workspace of a compiled region is its entire peak,
    since it may free inputs before it allocates outputs; so its outputs are subtracted.

    Args:
        by_op: the cost of each op, with bytes that are not rounded.
        fresh: ops that allocate a new result although they might overwrite an operand.
    """
    sizes = [value.bytes for value in joint.values]
    taken = [0] * len(joint.ops)
    for op, cost in zip(joint.ops, by_op, strict=True):
        if op.overwrites is not None and op.index not in fresh:
            (result,) = op.writes
            sizes[result] = sizes[op.overwrites]
            taken[op.index] = held(sizes[result], device)
            continue
        for value in op.writes:
            position = output_position(joint.shown[value], joint.nodes[op.index])
            if position is not None and position < len(cost.outputs):
                sizes[value] = cost.outputs[position]
        if op.kind is Kind.REGION:
            taken[op.index] = sum(held(sizes[value], device) for value in op.writes)
    floats = bytes_of_floats(joint, device)
    copied = copied_gradients(joint, device)
    own = [held(cost.workspace, device) + copied.get(op.index, 0) for op, cost in zip(joint.ops, by_op, strict=True)]
    return Costs(
        seconds=tuple(cost.seconds for cost in by_op),
        sizes=Sizes(
            values=tuple(held(size, device) for size in sizes),
            workspace=tuple(workspace - gone + floats for workspace, gone in zip(own, taken, strict=True)),
            seed=torch.default_generator.get_state().numel() if device.type == "cpu" else 0,
            outside=set_aside(joint, device),
            root=_numbers(joint, device) + held_beside_copies(joint, device),
            unsplit=unsplit(device),
        ),
        fresh=fresh,
    )


def copied_gradients(joint: Captured, device: torch.device) -> dict[int, int]:
    """Return for each backward op the bytes of copies that it may make of gradients whose layout was not traced."""
    found = gradients_copied_by(joint)
    return {op: sum(held(node.meta["val"].nbytes, device) for node in read) for op, read in found.items()}


def gradients_copied_by(joint: Captured) -> dict[int, list[fx.Node]]:
    """Return for each backward op the gradients that it may copy, since their layout was not traced.

    These are gradients that a loss outside the model passes in. A pointwise op reads any layout without a copy,
    unless it reads a reshape; a convolution does not. Compiled regions get gradients in the traced layout. If
    the model returns its loss, the result is {}.
    """
    unknown = laid_out_by_others(joint.module.graph) if outer_gradients(joint) else set()
    found = dict[int, list[fx.Node]]()
    for op in joint.backward_ops if unknown else ():
        if op.kind is Kind.REGION:
            continue
        node = joint.nodes[op.index]
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        read = [parent for parent in node.all_input_nodes if parent in unknown]
        found[op.index] = [one for one in read if not pointwise or _is_reshaped(joint, one)]
    return found


def apart_from_copies(joint: Captured, costs: Costs) -> tuple[Costs, Sequence[int]]:
    """Return the costs without copies of gradients into the traced strides, and the bytes of these copies for each op.
    """
    copied = copied_gradients(joint, device_of(joint))
    copies = [copied.get(op.index, 0) for op in joint.ops]
    workspace = tuple(map(sub, costs.sizes.workspace, copies))
    return replace(costs, sizes=replace(costs.sizes, workspace=workspace)), copies


def as_traced(joint: Captured, costs: Costs) -> Costs:
    """Return the costs of a step whose loss outside hands in gradients that lie as traced, so that none is copied.

    Where autograd keeps them alive until the backward has returned, as `held_beside_copies` counts, they count there
    alone.
    """
    costs, _ = apart_from_copies(joint, costs)
    if not held_beside_copies(joint, device_of(joint)):
        return costs
    values = list(costs.sizes.values)
    for node in outer_gradients(joint):
        values[joint.value_of[node]] = 0
    return replace(costs, sizes=replace(costs.sizes, values=tuple(values)))


def _is_reshaped(joint: Captured, node: fx.Node) -> bool:
    """Tell whether a node is a reshape, or a view of a reshape's result; a reshape may copy its operand."""
    value, shower = joint.value_of.get(node), node
    while shower.target is not torch.ops.aten.reshape.default:
        parents = [parent for parent in shower.all_input_nodes if joint.value_of.get(parent) == value]
        if value is None or not parents:
            return False
        shower = parents[0]
    return True


def set_aside(joint: Captured, device: torch.device) -> int:
    """Return the bytes that plans reserve for a loss outside the model and its scalars; 0 if there is no such loss."""
    if not outer_gradients(joint):
        return 0
    return outside_bytes(joint) + _numbers(joint, device) + bytes_of_floats(joint, device)


def held_beside_copies(joint: Captured, device: torch.device) -> int:
    """Return the bytes of gradients of outputs that autograd keeps alive while the backward works on copies of them.

    The backward copies gradients whose layout differs from that of the outputs, unless it can view them. If the model
    returns a loss, these gradients are values of the step that last until its end (`StepGraph.held_tangents`).
    """
    if joint.root_tangents or not holds_gradients():
        return 0
    return sum(rounded(node.meta["val"].nbytes, device) for node in outer_gradients(joint))


def _numbers(joint: Captured, device: torch.device) -> int:
    """Return the bytes of single numbers that a program makes of outputs: a loss of its own, or the model's, scaled."""
    return numbers_of_loss(device) * len(joint.tangent_nodes)


def numbers_of_loss(device: torch.device) -> int:
    """Return the bytes of single numbers that a program is assumed to make of each output of the model."""
    return NUMBERS_OF_LOSS * rounded(8, device)


def bytes_of_floats(joint: Captured, device: torch.device) -> int:
    """Return the bytes of the tensors that dynamo makes at each call for inputs that are Python floats."""
    made = [joint.values[joint.value_of[node]] for node in joint.primals if node.meta.get(FLOAT)]
    return sum(rounded(value.bytes, device) for value in made)


def outside_bytes(joint: Captured) -> int:
    """Return the bytes that a loss outside the model is assumed to allocate between forward and backward.

    They are 0 if the model returns its loss. The assumption is used until the loss was measured, or if the user
    states no number (option `loss`).
    """
    trained = [node.meta["val"] for node in outer_gradients(joint)]
    others = [node.meta.get("val") for node in joint.untrained_outputs] if trained else []
    assumed = sum(assumed_for(t.numel(), t.dtype) for t in trained)
    return assumed + sum(assumed_for(t.numel(), t.dtype, trained=False) for t in others if isinstance(t, torch.Tensor))


def scale_of_loss(joint: Captured) -> int:
    """Return the bytes with which the memory is taken to grow that the program needs between forward and backward.

    They are those assumed for a loss outside the model, or, where the model returns its loss, for its other outputs.
    """
    if assumed := outside_bytes(joint):
        return assumed
    others = [node.meta.get("val") for node in joint.untrained_outputs]
    return max(1, sum(assumed_for(t.numel(), t.dtype, trained=False) for t in others if isinstance(t, torch.Tensor)))


def assumed_for(count: int, dtype: torch.dtype, *, trained: bool = True) -> int:
    """Return the bytes that a loss is assumed to allocate for an output of `count` numbers.

    They are four times the output's bytes: a cross entropy allocates three times as much (log-probabilities,
    and two gradients at a time), `x.pow(2).mean()` four times. An output in half precision counts five times
    its size in fp32, to which it is copied.

    Args:
        trained: False: no gradient is needed for the output. Then its size is assumed once, as `mse_loss` returns its
            sum in the storage of all its terms; for integers nothing.
    """
    if not trained:
        return int(count) * max(dtype.itemsize, SINGLE) if dtype.is_floating_point else 0
    return int(count) * (4 * dtype.itemsize if dtype.itemsize >= SINGLE else 5 * SINGLE)


def outer_gradients(joint: Captured) -> list[fx.Node]:
    """Return the placeholders of the gradients that a loss outside the model passes to the backward; [] without one.

    That of a loss which the model returns is not among them. A model may return a part of its loss, such as the
    divergence of a variational autoencoder, beside outputs from which the rest is computed.
    """
    given = [node for node in joint.tangent_nodes if joint.value_of.get(node) not in joint.root_tangents]
    return [node for node in given if isinstance(node.meta.get("val"), torch.Tensor)]


def output_position(shown: fx.Node, op: fx.Node) -> int | None:
    """Return the index of the node `shown` among the outputs of `op`; None for outputs that no getitem selects."""
    if shown is op:
        value = op.meta.get("val")
        return 0 if isinstance(value, torch.Tensor) or is_number(value) else None
    position = shown.args[1]
    return position if isinstance(position, int) else None


def device_of(graph: StepGraph) -> torch.device:
    """Return the device on which a step runs."""
    return torch.device(graph.device)


def largest_tensor(graph: StepGraph) -> int:
    """Return the bytes of the largest tensor that the step allocates."""
    return max((value.bytes for value in graph.values if value.origin is not Origin.PRIMAL), default=0)


def op_keys(graph: StepGraph, fresh: Set[int] = frozenset()) -> list[str]:
    """Return the keys of all ops of a graph, in order; ops with equal keys have equal costs.

    Args:
        fresh: ops that allocate a new result although they might overwrite an operand.
    """
    return [op_key(captured_of(graph).nodes[op.index], fresh=True) if op.index in fresh else op.key for op in graph.ops]
