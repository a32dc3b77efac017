"""Costs without running anything: flops and bytes of each op over what a device can do of each.

    seconds(op) = launch + max(flops / reached flops of the dtype, bytes read and written / reached bandwidth)

The roofline model. Flops are those of torch's own formulas (`torch.utils.flop_counter`); an op without a formula
is bound by memory. Batch normalization in training reads what it normalizes twice, first for the statistics.
Views cost nothing. Workspaces are known for few ops: what linear algebra and Fourier transforms copy, and a CPU's
convolutions, which bring what they read and write into a layout of their own. For others they count as nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from fxremat.errors import FxrematError
from fxremat.step.costs import Costs, OpCost, costs_from, device_of
from fxremat.step.joint import Joint, Op, storage_bytes, tensors_of

REACHED = 0.6  # share of its peak flops that a device reaches on large matrix products
STREAMED = 0.8  # share of its peak bandwidth that a device reaches on long arrays
TWICE = (
    torch.ops.aten.native_batch_norm,
    torch.ops.aten._native_batch_norm_legit,
    torch.ops.aten._native_batch_norm_legit_functional,
    torch.ops.aten.cudnn_batch_norm,
    torch.ops.aten.native_batch_norm_backward,
    torch.ops.aten.cudnn_batch_norm_backward,
)
COPYING = ("linalg_", "_linalg_", "lu_", "cholesky", "triangular_solve", "_fft_", "ormqr", "orgqr", "geqrf")
"""How the names of ops begin that copy what they read and write once, at most."""
MATRIX_EXP = 12  # copies of its input that a matrix exponential works with
CHANNEL_BLOCK = 16
WRAPPED = 16  # bytes that a CPU's kernels take for a number which they read as a tensor (a factor, a count)
SMALL = 1024  # bytes of pivots, flags and scalars beside such copies
CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a device can do: data-sheet numbers."""

    name: str
    flops: float  # a second, fp32 matrix products (TF32 where the device has it)
    half_flops: float  # a second, fp16 and bf16 matrix products, dense
    bandwidth: float  # bytes a second, device memory
    launch: float = 5e-6  # seconds that any op takes
    link: float = 12e9  # bytes a second to the host, and as many back: PCIe 3.0 x16 unless told

    def __str__(self) -> str:
        return self.name

    @classmethod
    def named(cls, name: str | Device) -> Device:
        """A known device, or the description given. Raises `FxrematError` with the known names."""
        if isinstance(name, Device):
            return name
        if name not in DEVICES:
            raise FxrematError(
                f"unknown device {name!r}; known are {', '.join(DEVICES)}, or give a Device(...)"
            )
        return DEVICES[name]


DEVICES = {
    device.name: device
    for device in (
        Device(name="cpu", flops=5e10, half_flops=5e10, bandwidth=1e10, launch=3e-6, link=4e9),
        Device(name="cuda", flops=156e12, half_flops=312e12, bandwidth=1.555e12),
        Device(name="V100", flops=15.7e12, half_flops=125e12, bandwidth=0.9e12),
        Device(name="T4", flops=8.1e12, half_flops=65e12, bandwidth=0.32e12),
        Device(name="A100-40GB", flops=156e12, half_flops=312e12, bandwidth=1.555e12, link=24e9),
        Device(name="A100-80GB", flops=156e12, half_flops=312e12, bandwidth=2.039e12, link=24e9),
        Device(name="L4", flops=60e12, half_flops=121e12, bandwidth=0.3e12, link=24e9),
        Device(name="H100", flops=495e12, half_flops=989e12, bandwidth=3.35e12, link=50e9),
        Device(name="H200", flops=495e12, half_flops=989e12, bandwidth=4.8e12, link=50e9),
        Device(name="RTX-3090", flops=71e12, half_flops=71e12, bandwidth=0.936e12, link=24e9),
        Device(name="RTX-4090", flops=82.6e12, half_flops=165e12, bandwidth=1.008e12, link=24e9),
    )
}


def estimate(joint: Joint, device: Device) -> Costs:
    """The roofline cost of every op. O(ops); nothing is run, no memory is taken."""
    return costs_from(joint, [cost_of(op, joint, device) for op in joint.ops], device_of(joint))


def cost_of(op: Op, joint: Joint, device: Device, *, safe: bool = False) -> OpCost:
    """The estimated cost of one op.

    Args:
        safe: for an op that could not be measured among others that were: let its workspace be as large as all that it
            reads and writes, so that the budget holds.
    """
    read = sum(_bytes(parent) for parent in op.node.all_input_nodes)
    written = _bytes(op.node)
    passes = 2 if _packet(op.node) in TWICE else 1
    half = any(t is not None and t.dtype in (torch.float16, torch.bfloat16) for t in tensors_of(op.node))
    rate = (device.half_flops if half else device.flops) * REACHED
    moved = passes * read + written
    seconds = device.launch + max(flops_of(op.node) / rate, moved / (STREAMED * device.bandwidth))
    workspace = _workspace(op.node, device, read, written)
    outputs = _outputs(op.node)
    return OpCost(seconds, max(workspace, read + written + SMALL) if safe else workspace, outputs)


def _workspace(node: fx.Node, device: Device, read: int, written: int) -> int:
    name = getattr(_packet(node), "__name__", "")
    if "matrix_exp" in name:
        return MATRIX_EXP * read + SMALL
    if name.startswith(COPYING):
        return read + written + SMALL
    if name.startswith("_embedding_bag") and "backward" in name:  # gathers the bags that are not empty
        return 3 * _bytes(cast(fx.Node, node.args[0])) + read + SMALL
    if device.name != "cpu":
        return 0
    if name in ("native_dropout", "native_dropout_backward"):  # the mask as numbers
        return _bytes(cast(fx.Node, node.args[0])) + WRAPPED
    if name not in ("convolution", "convolution_backward"):
        return WRAPPED
    return sum(_blocked(t) for n in (*node.all_input_nodes, node) for t in tensors_of(n) if t is not None)


def _outputs(node: fx.Node) -> tuple[int, ...]:
    """Bytes of the outputs' storages where they are more than their shapes need; else empty.

    `copy` into a view (functionalized from `y[0] = x`) clones the whole storage behind the view.
    """
    target = node.args[0] if node.target is torch.ops.aten.copy.default else None
    return (storage_bytes(target.meta["val"]),) if isinstance(target, fx.Node) else ()


def _blocked(tensor: torch.Tensor) -> int:
    """Bytes of a tensor in the layout of a CPU's convolutions, whose channels come in blocks."""
    size = tensor.numel() * tensor.element_size()
    channels = tensor.shape[1] if tensor.dim() > 1 else 0
    return size // channels * (-(-channels // CHANNEL_BLOCK) * CHANNEL_BLOCK) if channels else size


def _bytes(node: fx.Node) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_of(node) if t is not None)


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def flops_of(node: fx.Node) -> float:
    """Floating-point operations of one op; 0 where torch has no formula for it."""
    packet = _packet(node)
    formula: Callable[..., Any] | None = flop_registry.get(CPU_ATTENTION.get(packet, packet))
    if formula is None:
        return 0.0

    def value(parent: fx.Node) -> Any:
        return parent.meta.get("val")

    arguments, options = fx.node.map_arg(node.args, value), fx.node.map_arg(node.kwargs, value)
    try:
        return float(formula(*arguments, **options, out_val=node.meta.get("val")))
    except (TypeError, ValueError, AssertionError, IndexError):
        return 0.0
