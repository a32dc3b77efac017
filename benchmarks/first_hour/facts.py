"""Facts of what torch does on this device, where plans and estimates assume something.

    attention, BatchNorm    the kernels that are chosen by type and shape
    workspaces              what matrix products allocate at their first call in a thread or on a stream
    blocks                  what a tensor takes in the place of a larger one that was freed
    link                    pinned copies of each size, one way and both ways at once
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.models.on_gpus import GpuSize

from .part import Column, Measure, Results, Row
from .steps import MIB

COLUMNS = (Column(name="found", text=lambda r: r["found"]),)
BACKENDS = {-1: "error", 0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
HEADS = ((torch.bfloat16, 64), (torch.bfloat16, 100), (torch.bfloat16, 128), (torch.float32, 64))
BLOCKS = ((2.0, 1.2), (12.0, 11.2), (4.0, 3.5))  # MiB that are freed, and MiB of the tensor that comes next
SEGMENT = 20.0  # MiB, of tensors below 10 MiB, as the default allocator takes them from the driver
COPIES: dict[GpuSize, tuple[int, ...]] = {"gpu": (1, 16, 256), "small": (1, 16)}  # MiB
PINNED: dict[GpuSize, int] = {"gpu": 1024, "small": 16}  # MiB
ROUNDS = 10


def facts(size: GpuSize = "gpu", limit: float | None = None) -> list[Row]:
    """Look at each of them."""
    cases: dict[str, Measure] = {"driver": _driver, "workspaces MiB": _workspaces}
    for dtype, width in HEADS:
        cases[f"attention {str(dtype).removeprefix('torch.')} {width}"] = partial(_attention, dtype, width)
    cases |= {"BatchNorm": _batch_norm, "blocks MiB": _blocks}
    cases |= {f"link {mebibytes} MiB": partial(_link, mebibytes * MIB) for mebibytes in COPIES[size]}
    cases["pinning"] = partial(_pinning, PINNED[size] * MIB)
    return Results.of("facts", COLUMNS, size).run(cases, limit)


def _driver() -> Row:
    file = Path("/proc/driver/nvidia/version")
    known = re.search(r"\d+\.\d+(\.\d+)?", file.read_text()) if file.exists() else None
    major, minor = torch.cuda.get_device_capability()
    total = torch.cuda.mem_get_info()[1]
    found = f"{known[0] if known else '?'}; compute capability {major}.{minor}; {total / 1e9:.1f} GB"
    return {"found": f"{found}; cuDNN {torch.backends.cudnn.version()}"}


def _attention(dtype: torch.dtype, width: int) -> Row:
    query = torch.empty(2, 8, 256, width, device="cuda", dtype=dtype, requires_grad=True)
    mask = torch.ones(256, 256, device="cuda", dtype=torch.bool)
    few = query[:, :2]
    chosen = {
        "causal": torch._fused_sdp_choice(query, query, query, is_causal=True),
        "dropout": torch._fused_sdp_choice(query, query, query, dropout_p=0.1),
        "mask": torch._fused_sdp_choice(query, query, query, attn_mask=mask),
        "grouped": torch._fused_sdp_choice(query, few, few, is_causal=True, enable_gqa=True),
    }
    return _listed({name: BACKENDS.get(number, str(number)) for name, number in chosen.items()})


def _batch_norm() -> Row:
    norm = nn.BatchNorm2d(8).cuda()
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        y = norm(torch.randn(4, 8, 8, 8, device="cuda", dtype=dtype))
        found[str(dtype).removeprefix("torch.")] = type(y.grad_fn).__name__
    return _listed(found)


def _workspaces() -> Row:
    """Each line is what is allocated more than before it; results are freed, or counted as 0.2 to 0.5 MiB."""
    x = torch.randn(256, 256, device="cuda", requires_grad=True)
    other = torch.cuda.Stream()

    def on_another_stream() -> None:
        with torch.cuda.stream(other):
            x.detach() @ x.detach()

    def in_another_thread() -> None:
        thread = threading.Thread(target=lambda: x.detach() @ x.detach())
        thread.start()
        thread.join()

    calls: dict[str, Callable[[], object]] = {
        "product": lambda: x.detach() @ x.detach(),
        "its backward": lambda: (x @ x).sum().backward(),
        "addmm": lambda: torch.addmm(x.detach()[0], x.detach(), x.detach()),
        "another stream": on_another_stream,
        "another thread": in_another_thread,
    }
    found = {}
    for name, call in calls.items():
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        found[name] = f"{(torch.cuda.memory_allocated() - before) / MIB:.2f}"
    return _listed(found)


def _blocks() -> Row:
    """The freed block has no free neighbour: it ends where its segment does, or where another tensor begins."""
    found = {}
    for freed, size in BLOCKS:
        torch.cuda.empty_cache()
        old = _bytes(freed)
        beside = _bytes(max(1.0, SEGMENT - freed))
        del old
        before = torch.cuda.memory_allocated()
        tensor = _bytes(size)
        found[f"{size} in {freed}"] = f"{(torch.cuda.memory_allocated() - before) / MIB:.3f}"
        del tensor, beside
    return _listed(found)


def _bytes(mebibytes: float) -> Tensor:
    return torch.empty(int(mebibytes * MIB), dtype=torch.uint8, device="cuda")


def _link(size: int) -> Row:
    """GB/s of copies from the host, to the host, and of each when both run."""
    hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    pairs = {"in": (devices[0], hosts[0]), "out": (hosts[1], devices[1])}
    streams = {way: torch.cuda.Stream() for way in pairs}

    def speed(*ways: str) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(ROUNDS):
            for way in ways:
                target, source = pairs[way]
                with torch.cuda.stream(streams[way]):
                    target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return ROUNDS * size / (time.perf_counter() - start) / 1e9

    speed("in", "out")
    found = {"in": speed("in"), "out": speed("out"), "both": speed("in", "out")}
    return _listed({way: f"{value:.1f} GB/s" for way, value in found.items()})


def _pinning(size: int) -> Row:
    start = time.perf_counter()
    host: Tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    took = time.perf_counter() - start
    return {"found": f"{host.nbytes / MIB:.0f} MiB in {took:.3f} s", "seconds": took}


def _listed(found: dict[str, str]) -> Row:
    return {"found": ", ".join(f"{name} {value}" for name, value in found.items()), **found}
