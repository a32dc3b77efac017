"""Compare what torch's CUDA build chooses and captures with what `cost="estimate"` assumes of the same device.

    attention     which kernel scaled_dot_product_attention takes, for types, widths, masks, and shared keys
    graphs        the ops of a step that is captured on the device, and of one that is captured on the CPU for it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fxremat
from benchmarks import models
from fxremat.cost.devices import Device
from fxremat.runtime.target_kernels import kernels_of
from fxremat.settings import Search

KERNELS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}  # of torch.nn.attention.SDPBackend
WIDTHS = (32, 33, 64, 72, 80, 96, 100, 128, 192, 256, 320)  # of heads
TYPES = (torch.bfloat16, torch.float16, torch.float32)
BATCH, HEADS, GROUPS, ROWS, OTHER_ROWS = 2, 8, 2, 512, 300
IN_BFLOAT16 = ("gpt", "mixer", "deep_chain", "encoder_decoder", "unet")


@dataclass(frozen=True, kw_only=True)
class Attention:
    """A call of scaled_dot_product_attention."""

    dtype: torch.dtype
    width: int
    kind: str

    def tensors(self, device: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Query, key and value on a device, and options."""
        heads = GROUPS if self.kind == "groups" else HEADS
        rows = OTHER_ROWS if self.kind.startswith("cross") else ROWS
        values = max(8, self.width // 2) if self.kind == "narrow values" else self.width
        shapes = [(BATCH, HEADS, ROWS, self.width), (BATCH, heads, rows, self.width), (BATCH, heads, rows, values)]
        options: dict[str, Any] = {}
        match self.kind:
            case "causal" | "cross, causal":
                options["is_causal"] = True
            case "dropout":
                options["dropout_p"] = 0.1
            case "groups":
                options["enable_gqa"] = True
            case "mask":
                options["attn_mask"] = torch.empty(BATCH, 1, ROWS, ROWS, dtype=torch.bool, device=device)
        made = [torch.empty(s, dtype=self.dtype, device=device, requires_grad=True) for s in shapes]
        return made, options


ATTENTIONS = [
    Attention(dtype=dtype, width=width, kind=kind)
    for dtype in TYPES
    for width in WIDTHS
    for kind in ("plain", "causal", "dropout", "mask", "groups", "cross", "cross, causal", "narrow values")
]


def chosen(call: Attention) -> str:
    """The kernel that torch takes on the device that is there."""
    tensors, options = call.tensors("cuda")
    return KERNELS[torch._fused_sdp_choice(*tensors, **options)]


def assumed(call: Attention, device: Device) -> str:
    """The kernel that a plan for the device assumes."""
    with FakeTensorMode():
        tensors, options = call.tensors("cpu")
        with kernels_of(device), enable_python_dispatcher(), _Ops() as ops:
            F.scaled_dot_product_attention(*tensors, **options)
    names = " ".join(ops.names)
    found = [kernel for kernel in ("flash", "efficient", "cudnn") if f"_{kernel}_attention" in names]
    return found[0] if found else "math"


class _Ops(TorchDispatchMode):
    """Notes the names of all ops that run inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(op))
        return op(*args, **(kwargs or {}))


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The number of kernels that are chosen as assumed."""

    device: str
    cases: int
    equal: int
    others: dict[str, int] = field(default_factory=dict)  # "assumed -> chosen": how many


def attention(device: str) -> Choices:
    """Compare all calls."""
    target = Device.named(device)
    pairs = [(assumed(call, target), chosen(call)) for call in ATTENTIONS]
    others = Counter(f"{ours} -> {theirs}" for ours, theirs in pairs if ours != theirs)
    return Choices(device=device, cases=len(pairs), equal=len(pairs) - others.total(), others=dict(others))


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The ops of a step as captured on the device, against those that a plan for it assumes."""

    model: str
    ops: int
    captured: dict[str, int]  # only on the device: name and how many
    assumed: dict[str, int]  # only in the plan
    bytes: float  # peak with everything kept, of the plan over that on the device


def graphs(device: str) -> Iterator[Graph]:
    """Compare the small models of the benchmarks, in float32 and some in bfloat16."""
    for name in models.ALL:
        for dtype in (torch.float32, torch.bfloat16):
            if dtype is torch.float32 or name in IN_BFLOAT16:
                yield _graph(name, dtype, device)


def _graph(name: str, dtype: torch.dtype, device: str) -> Graph:
    case = models.get(name, "small")
    options = {"mem": "100%", "search": Search(seconds=0.0)}
    plans = []
    for where, how in (("cuda", {}), ("cpu", {"costs": device})):
        torch._dynamo.reset()
        batch = tuple(t.to(where, dtype if t.is_floating_point() else None) for t in case.batch())
        plans.append(fxremat.plan(case.model().to(where, dtype), batch, **options, **how))
    there, here = (Counter(_base(node.target) for node in plan.captured.nodes) for plan in plans)
    return Graph(
        model=f"{name}, {str(dtype).removeprefix('torch.')}",
        ops=there.total(),
        captured=dict(there - here),
        assumed=dict(here - there),
        bytes=plans[1].keep_all_peak / plans[0].keep_all_peak,
    )


def _base(target: Any) -> str:
    """The name of an op without its overload; one that overwrites its operand counts as the one that does not."""
    return str(target).split(".")[1].removesuffix("_") if str(target).startswith("aten.") else str(target)
