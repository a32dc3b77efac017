"""Estimated costs of ops, from their flops and bytes and the rates of a device (the roofline model).

    seconds(op) = launch + max(flops / reached flops of the dtype, bytes read and written / reached bandwidth)

Flops are those of torch's own formulas (`torch.utils.flop_counter`); an op without a formula is assumed to be
limited by memory bandwidth. Batch normalization in training reads its input twice, first for the statistics.
Views cost nothing. A collective costs a latency, plus the bytes that each rank sends over the bandwidth between
ranks.

Workspaces are known for few ops: copies made by linear algebra and Fourier transforms; a CPU's convolutions,
which copy inputs and outputs into a layout of their own; statistics and normalization of a CPU's BatchNorm; and
CUDA's flash attention, whose backward accumulates in float32. Those of other ops count as 0. Sizes are rounded
as the device's allocator rounds them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from fxremat.cost.devices import DEVICES as DEVICES
from fxremat.cost.devices import Device as Device
from fxremat.graphs.accounting import costs_from, device_of
from fxremat.graphs.captured import Captured
from fxremat.graphs.collectives import groups_of
from fxremat.graphs.nodes import storage_bytes, subgraphs_of, tensors_of
from fxremat.slices.body import Sliced
from fxremat.step.costs import Costs, OpCost
from fxremat.step.step_graph import Op
from fxremat.torch_private import group_named

REACHED = 0.6  # fraction of its peak flops that a device reaches in large matrix products
STREAMED = 0.8  # fraction of its peak bandwidth that a device reaches on long arrays
TWICE = (  # ops that read their input twice
    torch.ops.aten.native_batch_norm,
    torch.ops.aten._native_batch_norm_legit,
    torch.ops.aten._native_batch_norm_legit_functional,
    torch.ops.fxremat.cudnn_batch_norm,
    torch.ops.aten.native_batch_norm_backward,
    torch.ops.fxremat.cudnn_batch_norm_backward,
)
COPYING = ("linalg_", "_linalg_", "lu_", "cholesky", "triangular_solve", "_fft_", "ormqr", "orgqr", "geqrf")
"""Prefixes of the names of ops whose workspace is at most one copy of all that they read and write."""
MATRIX_EXP = 12  # a matrix exponential allocates this many copies of its input
CHANNEL_BLOCK = 16  # CPU convolutions pad the number of channels to a multiple of this
WRAPPED = 16  # bytes that CPU kernels allocate for a scalar operand, which becomes a tensor
SMALL = 1024  # bytes that linear algebra allocates for pivots, flags and scalars, besides copies
CPU_ATTENTION = {  # CPU attention kernel -> the kernel for which torch has a formula for flops
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}
FLASH_BACKWARD = (  # backward ops that allocate the workspace of flash attention
    torch.ops.aten._scaled_dot_product_flash_attention_backward,
    # not documented; its workspace is assumed to be that of flash attention
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward,
)
ATTENTION = {  # names of CUDA's attention kernels
    torch.ops.aten._scaled_dot_product_cudnn_attention: "cuDNN's attention",
    torch.ops.aten._scaled_dot_product_flash_attention: "flash attention",
    torch.ops.aten._scaled_dot_product_efficient_attention: "memory-efficient attention",
}
CONVOLUTIONS = (torch.ops.aten.convolution, torch.ops.aten.convolution_backward)


def estimate(joint: Captured, device: Device, fresh: frozenset[int] = frozenset()) -> Costs:
    """Estimate the cost of every op by the roofline model. O(ops); nothing is run or allocated.

    Args:
        fresh: ops that must allocate their result instead of overwriting an operand.
    """
    return costs_from(joint, [cost_of(op, joint, device) for op in joint.ops], device.torch_device, fresh)


def assumptions(joint: Captured, device: Device) -> str:
    """Say in words what an estimate for a CUDA device assumes if the step was captured on a CPU; else return ""."""
    if not device.cuda or device_of(joint).type != "cpu":
        return ""
    found = dict.fromkeys(ATTENTION[packet] for node in joint.nodes if (packet := _packet(node)) in ATTENTION)
    kernels = ", ".join([*found, "512-byte blocks"])
    return f"CUDA's, assumed: {kernels}; unknown workspaces count as 0"


def cost_of(op: Op, joint: Captured, device: Device, *, safe: bool = False) -> OpCost:
    """Return the estimated cost of one op.

    Args:
        safe: assume a workspace as large as all that the op reads and writes, to be sure that the budget holds. Used
            for an op that could not be measured, in a step whose other ops were.
    """
    node = joint.nodes[op.index]
    if isinstance(node.target, Sliced):
        return _cost_of_slices(node.target, device)
    read = sum(_bytes(parent) for parent in node.all_input_nodes)
    written = _bytes(node)
    if op.communicates:
        return OpCost(_sent(node, read, written) / (device.network or device.link) + device.latency, 0)
    seconds = _seconds_of(node, device, read, written)
    workspace = _workspace(node, device, read, written)
    outputs = _outputs(node)
    return OpCost(seconds, max(workspace, read + written + SMALL) if safe else workspace, outputs)


def _seconds_of(node: fx.Node, device: Device, read: int, written: int) -> float:
    passes = 2 if _packet(node) in TWICE else 1
    rate = _rate(node, device) * REACHED
    return device.launch + max(flops_of(node) / rate, (passes * read + written) / (STREAMED * device.bandwidth))


def _cost_of_slices(target: Sliced, device: Device) -> OpCost:
    """Return the cost of a group of ops that runs in slices: the seconds of all slices, and the workspace of one."""
    seconds, largest = 0.0, 0
    for node in target.nodes():
        read, written = sum(_bytes(parent) for parent in node.all_input_nodes), _bytes(node)
        seconds += _seconds_of(node, device, read, written)
        largest = max(largest, _workspace(node, device, read, written))
    return OpCost(target.parts * seconds, target.workspace + largest)


def _sent(node: fx.Node, read: int, written: int) -> float:
    """Return the bytes that each rank sends in a collective with the best algorithm: all data but its own part.

    An all-reduce counts twice, since it is a reduce-scatter and an all-gather.
    """
    ranks = max((group.size() for name in groups_of(node) if (group := group_named(name))), default=2)
    rounds = 2 if "all_reduce" in str(node.target) else 1
    return rounds * max(read, written) * (ranks - 1) / ranks


def _rate(node: fx.Node, device: Device) -> float:
    """Return the device's peak operations per second for the dtype that the op computes in."""
    types = {tensor.dtype for tensor in tensors_of(node) if tensor is not None}
    if torch.bfloat16 in types and device.bf16_flops is not None:
        return device.bf16_flops
    if not types.isdisjoint((torch.float16, torch.bfloat16)):
        return device.half_flops
    return device.tf32_flops or device.flops if _packet(node) in CONVOLUTIONS else device.flops


def _workspace(node: fx.Node, device: Device, read: int, written: int) -> int:
    name = getattr(_packet(node), "__name__", "")
    if "matrix_exp" in name:
        return MATRIX_EXP * read + SMALL
    if name.startswith(COPYING):
        return read + written + SMALL
    # workspace: copies of the bags that are not empty, assumed to be all
    if name.startswith("_embedding_bag") and "backward" in name:
        return 3 * _bytes(cast(fx.Node, node.args[0])) + read + SMALL
    if device.cuda:
        return _flash_workspace(node) if _packet(node) in FLASH_BACKWARD else 0
    # workspace: the output of the BatchNorm, running statistics, scale and shift
    if name == "batch_statistics" and node.args[5]:
        return _bytes(cast(fx.Node, node.args[0])) + 6 * _channel_bytes(node)
    if name == "batch_normalized":  # workspace: four vectors (the factor, a variance of one, scale and shift)
        return 4 * _channel_bytes(cast(fx.Node, node.args[3]))
    if name in ("native_dropout", "native_dropout_backward"):  # workspace: a copy of the mask as floats
        return _bytes(cast(fx.Node, node.args[0])) + WRAPPED
    if name not in ("convolution", "convolution_backward"):
        return WRAPPED
    return sum(_blocked(t) for n in (*node.all_input_nodes, node) for t in tensors_of(n) if t is not None)


def _channel_bytes(statistics: fx.Node) -> int:
    """Return the bytes of one statistic of all channels, from the first output of a `batch_statistics` node."""
    first = tensors_of(statistics)[0]
    return 0 if first is None else first.numel() * first.element_size()


def _flash_workspace(node: fx.Node) -> int:
    """Return the bytes that the backward of CUDA's flash attention allocates beside the gradients that it returns.

    It adds up the query's gradient in float32, with one more float32 number for each row of the query; rows are
    rounded up to tiles of 128, columns to 32. If several heads of the query share a head of keys and values, each
    of them has gradients of keys and values of its own, which are added up afterwards. See `mha_bwd`
    in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
    """
    query, key = (cast(torch.Tensor, cast(fx.Node, argument).meta["val"]) for argument in node.args[1:3])
    batch, heads, length, width = query.shape
    sums = batch * heads * _rounded(length, 128) * (_rounded(width, 32) + 1) * torch.float32.itemsize
    every = 2 * batch * heads * key.shape[2] * width * key.element_size()
    return sums + (every if key.shape[1] != heads else 0)


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step


def _outputs(node: fx.Node) -> tuple[int, ...]:
    """Return the bytes of the outputs' storages, if these are known to be larger than the outputs; else ().

    That is so for `aten.copy` into a view (functionalized from `y[0] = x`), which clones the storage behind the
    view.
    """
    target = node.args[0] if node.target is torch.ops.aten.copy.default else None
    return (storage_bytes(target.meta["val"]),) if isinstance(target, fx.Node) else ()


def _blocked(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor in the layout of CPU convolutions, which pads channels to blocks of 16."""
    size = tensor.numel() * tensor.element_size()
    channels = tensor.shape[1] if tensor.dim() > 1 else 0
    return size // channels * (-(-channels // CHANNEL_BLOCK) * CHANNEL_BLOCK) if channels else size


def _bytes(node: fx.Node) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_of(node) if t is not None)


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def flops_of(node: fx.Node) -> float:
    """Return the number of floating-point operations of an op; 0 if torch has no formula for it.

    A higher-order op, such as `cond`, has those of the largest graph that it calls.
    """
    packet = _packet(node)
    formula: Callable[..., Any] | None = flop_registry.get(CPU_ATTENTION.get(packet, packet))
    if formula is None:
        called = ([flops_of(each) for each in graph.graph.nodes] for graph in subgraphs_of(node))
        return max(map(sum, called), default=0.0)

    def value(parent: fx.Node) -> Any:
        return parent.meta.get("val")

    arguments, options = fx.node.map_arg(node.args, value), fx.node.map_arg(node.kwargs, value)
    try:
        return float(formula(*arguments, **options, out_val=node.meta.get("val")))
    except (TypeError, ValueError, AssertionError, AttributeError, IndexError):
        return 0.0
