"""The costs of one joint graph, by op number, and the text that identifies an op's cost."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import fx

from fxremat.budget import bytes_of
from fxremat.step.collectives import is_collective, without_group_names
from fxremat.step.handed_in import laid_out_by_others
from fxremat.step.joint import Joint, Origin, is_number
from fxremat.step.liveness import Sizes
from fxremat.step.names import FLOAT
from fxremat.step.overwriting import called, overwritten
from fxremat.step.program import Program
from fxremat.step.region import Region
from fxremat.torch_private import allocates_in_expandable_segments, holds_gradients
from fxremat.units import Budget

NUMBERS_OF_LOSS = 4  # for each output: such as the loss's terms, sums of them, and the gradients of those
SINGLE = torch.float32.itemsize
CUDA_BLOCK = 512  # the caching allocator counts every tensor in blocks of this many bytes
CUDA_UNSPLIT = 2**20  # bytes that it leaves in a block, rather than split them off, beyond a tensor of more than this


@dataclass(frozen=True)
class OpCost:
    """One execution of one op."""

    seconds: float
    workspace: int  # bytes beyond inputs and outputs, while it runs
    outputs: tuple[int, ...] = ()  # bytes of the storage of each output, by position; (): as the graph says


@dataclass(frozen=True)
class Costs:
    """Seconds of each op, the sizes that liveness needs, and which ops must not overwrite."""

    seconds: tuple[float, ...]
    sizes: Sizes
    fresh: frozenset[int] = frozenset()  # ops that make a new result, since real layouts do not allow to overwrite

    def time(self, program: Program) -> float:
        """Seconds of all executions of a program, as if copies took no time."""
        return self.time_of(step.op for step in program.executions)

    def time_of(self, ops: Iterable[int]) -> float:
        """Seconds of executions of these ops, by number, one after the other."""
        return sum([self.seconds[op] for op in ops])

    def scaled(self, factor: float) -> Costs:
        """The same with every time multiplied (calibration)."""
        return replace(self, seconds=tuple(seconds * factor for seconds in self.seconds))


def apart(joint: Joint, costs: Costs) -> tuple[Costs, float]:
    """The costs without the time of collectives, and the seconds of all of these, which may pass beside the ops."""
    sent = [is_collective(op.node) for op in joint.ops]
    seconds = tuple(0.0 if by_link else s for s, by_link in zip(costs.seconds, sent, strict=True))
    return replace(costs, seconds=seconds), sum(costs.seconds) - sum(seconds)


def rounded(size: int, device: torch.device) -> int:
    """The bytes that the device's allocator takes for so many."""
    block = CUDA_BLOCK if device.type == "cuda" else 1
    return -(-size // block) * block


def held(size: int, device: torch.device) -> int:
    """The most bytes that the device's allocator counts for so many: of those that it does not split off, too.

    CUDA's caching allocator gives a tensor the smallest free block that it has. It splits off the rest, unless the
    tensor has more than 1 MiB and the rest is at most that; in expandable segments it splits off all.
    """
    return rounded(size, device) + (unsplit(device) if size > CUDA_UNSPLIT else 0)


def unsplit(device: torch.device) -> int:
    """Bytes that a block on a device may have beyond a tensor of more than `CUDA_UNSPLIT`."""
    exact = device.type != "cuda" or not torch.cuda.is_available() or allocates_in_expandable_segments()
    return 0 if exact else CUDA_UNSPLIT


def costs_from(
    joint: Joint, by_op: Sequence[OpCost], device: torch.device, fresh: frozenset[int] = frozenset()
) -> Costs:
    """Put the costs of the ops together with the sizes of the values as the device's allocator rounds them.

    Floats of Python's that are inputs are there all along, as tensors that dynamo makes at each call.
    An op may leave more than its outputs' shapes need: `mse_loss` returns its sum in the storage of all its terms.
    One that overwrites what it reads leaves that storage, and needs no other: its workspace makes up for the two.
    A region's workspace is its whole peak, its outputs among them: it may free its inputs before it makes them.
    """
    sizes = [value.bytes for value in joint.values]
    taken = [0] * len(joint.ops)
    for op, cost in zip(joint.ops, by_op, strict=True):
        if (operand := overwritten(op.node)) is not None and op.index not in fresh:
            (result,) = op.writes
            sizes[result] = sizes[joint.value_of[operand]]
            taken[op.index] = held(sizes[result], device)
            continue
        for value in op.writes:
            position = output_position(joint.values[value].node, op.node)
            if position is not None and position < len(cost.outputs):
                sizes[value] = cost.outputs[position]
        if isinstance(op.node.target, Region):
            taken[op.index] = sum(held(sizes[value], device) for value in op.writes)
    floats = _floats(joint, device)
    copied = _copied_gradients(joint, device)
    own = [held(cost.workspace, device) + copied.get(op.index, 0) for op, cost in zip(joint.ops, by_op, strict=True)]
    return Costs(
        seconds=tuple(cost.seconds for cost in by_op),
        sizes=Sizes(
            values=tuple(held(size, device) for size in sizes),
            workspace=tuple(workspace - gone + floats for workspace, gone in zip(own, taken, strict=True)),
            seed=torch.default_generator.get_state().numel() if device.type == "cpu" else 0,
            outside=set_aside(joint, device),
            root=_numbers(joint, device) + _beside_copies(joint, device),
            unsplit=unsplit(device),
        ),
        fresh=fresh,
    )


def _copied_gradients(joint: Joint, device: torch.device) -> dict[int, int]:
    """Bytes of copies that ops may make of gradients that a loss outside hands in: those may lie otherwise than traced.

    A pointwise op takes them as they lie, unless it reads what autograd reshapes; a convolution does not. A backward in
    regions is given gradients as they were traced. Where the model returns its loss, no other is planned for.
    """
    unknown = laid_out_by_others(joint.module.graph) if _gradients(joint) else set()
    found = dict[int, int]()
    for op in joint.backward_ops if unknown else ():
        if isinstance(op.node.target, Region):
            continue
        pointwise = torch.Tag.pointwise in getattr(op.node.target, "tags", ())
        read = [node for node in op.node.all_input_nodes if node in unknown]
        sizes = [node.meta["val"].nbytes for node in read if not pointwise or _is_reshaped(joint, node)]
        found[op.index] = sum(held(size, device) for size in sizes)
    return found


def _is_reshaped(joint: Joint, node: fx.Node) -> bool:
    """Tell whether a node shows its value through a reshape, which copies what it cannot view."""
    value, shower = joint.value_of.get(node), node
    while shower.target is not torch.ops.aten.reshape.default:
        parents = [parent for parent in shower.all_input_nodes if joint.value_of.get(parent) == value]
        if value is None or not parents:
            return False
        shower = parents[0]
    return True


def set_aside(joint: Joint, device: torch.device) -> int:
    """Bytes for a loss outside the model as the device's allocator rounds them, and for the numbers beside it."""
    numbers = _numbers(joint, device)
    return outside_bytes(joint) + numbers + _floats(joint, device) if numbers else 0


def _beside_copies(joint: Joint, device: torch.device) -> int:
    """Bytes of gradients that a loss outside hands in and autograd holds, beside the copies that a backward may make.

    It copies those that lie otherwise than the outputs do, where it cannot view them as they lie.
    """
    return sum(rounded(t.numel() * t.element_size(), device) for t in _gradients(joint)) if holds_gradients() else 0


def _numbers(joint: Joint, device: torch.device) -> int:
    return NUMBERS_OF_LOSS * rounded(8, device) * len(_gradients(joint))


def _floats(joint: Joint, device: torch.device) -> int:
    """Bytes of the tensors that dynamo makes of Python's floats at each call."""
    made = [joint.values[joint.value_of[node]] for node in joint.primals if node.meta.get(FLOAT)]
    return sum(rounded(value.bytes, device) for value in made)


def outside_bytes(joint: Joint) -> int:
    """Bytes that a loss outside the model is taken to need between forward and backward, until it has been measured.

    A model that returns its loss needs nothing. The user can say better (`loss_bytes`).
    """
    trained = _gradients(joint)
    others = [node.meta.get("val") for node in joint.untrained_outputs] if trained else []
    assumed = sum(assumed_for(t.numel(), t.dtype) for t in trained)
    return assumed + sum(assumed_for(t.numel(), t.dtype, trained=False) for t in others if isinstance(t, torch.Tensor))


def assumed_for(count: int, dtype: torch.dtype, *, trained: bool = True) -> int:
    """Bytes that a loss of an output of `count` numbers is taken to need: four times the output's, in fp32 or wider.

    A cross entropy takes three times (log-probabilities, and two gradients at a time), `x.pow(2).mean()` four times;
    an output in half precision is copied to fp32 besides. Of an output that needs no gradient (`trained` False) the
    loss keeps one storage at most: `mse_loss` returns its sum in that of all its terms. Of integers it keeps nothing.
    """
    if not trained:
        return int(count) * max(dtype.itemsize, SINGLE) if dtype.is_floating_point else 0
    return int(count) * (4 * dtype.itemsize if dtype.itemsize >= SINGLE else 5 * SINGLE)


def _gradients(joint: Joint) -> list[torch.Tensor]:
    """What a loss outside hands in, as fake tensors; nothing where the model returns its loss."""
    shown = () if joint.root_tangents else (node.meta.get("val") for node in joint.tangents)
    return [tensor for tensor in shown if isinstance(tensor, torch.Tensor)]


def output_position(shown: fx.Node, op: fx.Node) -> int | None:
    """Which output of `op` the node shows; None for one that nothing reads."""
    if shown is op:
        value = op.meta.get("val")
        return 0 if isinstance(value, torch.Tensor) or is_number(value) else None
    position = shown.args[1]
    return position if isinstance(position, int) else None


def device_of(joint: Joint) -> torch.device:
    """The device of the largest parameter or input: where the step runs."""
    tensors = [t for node in joint.primals if isinstance(t := node.meta.get("val"), torch.Tensor)]
    accelerated = [t.device for t in tensors if t.device.type != "cpu"]
    return accelerated[0] if accelerated else torch.device("cpu")


def largest_tensor(joint: Joint) -> int:
    """Bytes of the largest tensor that the step makes."""
    return max((value.bytes for value in joint.values if value.origin is not Origin.PRIMAL), default=0)


def budget_in_bytes(budget: Budget, keep_all: int, joint: Joint) -> int:
    """The bytes that a budget means for a step, where keeping everything takes `keep_all` bytes."""
    return bytes_of(budget, keep_all, device_of(joint), largest_tensor(joint))


def op_key(node: fx.Node, *, fresh: bool = False) -> str:
    """Text that is equal for ops of equal cost: the op, its constants, and the layout of each tensor it reads.

    An op that may overwrite its operand does, unless its result is to be a new one (`fresh`).

    A layout names the device, and the bytes of the storage where a tensor shows a part of it: some ops copy it whole.
    A subgraph (the score function of flex attention) is named by a digest of its code.
    """
    target, args, kwargs = called(node, fresh=fresh)
    args = without_group_names(node) if is_collective(node) else args
    arguments = ", ".join(_describe(argument) for argument in (*args, *_sorted(kwargs)))
    return f"{_named(target)}({arguments})"


def op_keys(joint: Joint, fresh: Set[int] = frozenset()) -> list[str]:
    """The keys of all ops of a joint graph, in their order; `fresh` has those that make new results."""
    return [op_key(op.node, fresh=op.index in fresh) for op in joint.ops]


def _named(target: object) -> str:
    """What a node calls, by a name that is the same in every process."""
    return f"{target.__module__}.{target.__qualname__}" if isinstance(target, FunctionType) else str(target)


def _sorted(options: Mapping[str, Any]) -> Iterator[Any]:
    for name in sorted(options):
        yield (name, options[name])


def _describe(argument: object) -> str:
    if isinstance(argument, fx.Node):
        value = argument.meta.get("val")
        if isinstance(value, tuple | list):
            return f"({', '.join(_layout(item) for item in value)})"
        if value is None and argument.op == "get_attr":
            return _subgraph(attribute(argument))
        return _layout(value)
    if isinstance(argument, tuple | list):
        return f"({', '.join(_describe(item) for item in argument)})"
    return repr(argument)


def attribute(node: fx.Node) -> Any:
    """The attribute of the graph's module that a `get_attr` node names."""
    found: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        found = getattr(found, name)
    return found


def _subgraph(value: object) -> str:
    if not isinstance(value, fx.GraphModule):
        return type(value).__name__
    return f"graph {hashlib.sha256(str(value.graph).encode()).hexdigest()[:16]}"


def _layout(value: object) -> str:
    if is_number(value):
        return type(value).__name__
    if not isinstance(value, torch.Tensor):
        return repr(value)
    dtype = str(value.dtype).removeprefix("torch.")
    shape = "x".join(map(str, value.shape))
    if value.layout is not torch.strided:
        return f"{dtype}[{shape}|{value.layout}]"
    stride = "x".join(map(str, value.stride()))
    whole = value.untyped_storage().nbytes()
    part = f" of {whole} bytes" if whole != value.nbytes else ""
    flags = ("^" if value.is_conj() else "") + ("-" if value.is_neg() else "")
    device = "" if value.device.type == "cpu" else f" {value.device.type}"
    return f"{flags}{dtype}[{shape}|{stride}{part}]{device}"


@dataclass(frozen=True, kw_only=True)
class Link:
    """Speeds of the copies, and what one costs the thread that starts it."""

    to_host: float  # bytes per second
    from_host: float
    slowdown: float = 0.05  # seconds that ops lose for each second of copying: both use the device's memory
    in_powers: bool = False  # the host's memory is taken in powers of two bytes

    def on_host(self, size: int, tensors: int = 1) -> int:
        """Bytes of the host's memory that tensors of `size` bytes together take there.

        >>> Link(to_host=1e9, from_host=1e9, in_powers=True).on_host(65 * 2**20) // 2**20
        128
        """
        each = -(-size // tensors)
        return tensors * (1 << (each - 1).bit_length()) if self.in_powers and each else size


@dataclass(frozen=True, kw_only=True)
class ParameterUpdate:
    """A parameter that the step updates."""

    value: int  # of the joint graph
    bytes: int
    state_bytes: int  # of its optimizer state
    workspace: int  # bytes that the update takes besides
    seconds: float  # of the update
    stays: bool = False  # on the device: forward returns a view of it
