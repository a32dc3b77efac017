"""Seconds and workspace of each distinct op, measured with real tensors on the model's own device.

Ops with equal keys (op, constants, shapes, strides, dtypes) are measured once, and once a machine: see `cost.cache`.
Time is the median of a few runs after a warm-up. The workspace is the allocator's peak inside the op beyond the
storages that it leaves: on a CPU from the profiler's memory events, on CUDA from `max_memory_allocated`.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from tqdm import tqdm

from fxremat._torch import allocation_trace, real_tensors
from fxremat.cost.cache import CostCache
from fxremat.cost.table import CUDA_BLOCK, Costs, OpCost, costs_from, device_of, op_key
from fxremat.errors import FxrematError
from fxremat.linearize.in_place import overwritten
from fxremat.linearize.joint import Joint, Op, storage_bytes

aten = torch.ops.aten

SAMPLE_SECONDS = 0.04  # how long one op is sampled, at least LEAST_RUNS and at most MOST_RUNS times
LEAST_RUNS, MOST_RUNS = 3, 15
BATCH = 24  # ops whose workspaces are read from one profiler session


def measure(joint: Joint, *, progress: bool = True) -> Costs:
    """Measure every distinct op of a joint graph. A few seconds for a GPT of 12 layers, nothing from the cache.

    Args:
        progress: show a bar on stderr while measuring, where that is a terminal.
    """
    device = device_of(joint)
    cache = CostCache.of_device(device)
    keys = [op_key(op.node) for op in joint.ops]
    missing = {key: op for key, op in zip(keys, joint.ops, strict=True) if cache.op(key) is None}
    if missing:
        with quiet_world(device):
            _measure_missing(missing, device, cache, progress)
        cache.save()
    by_op = [cache.op(key) for key in keys]
    return costs_from(joint, [cost for cost in by_op if cost is not None], device)


@contextlib.contextmanager
def quiet_world(device: torch.device) -> Iterator[None]:
    """Real tensors, no gradients, no autocast, and the generators as they were afterwards."""
    devices = [device] if device.type == "cuda" else []
    with (
        real_tensors(),
        torch.no_grad(),
        torch.random.fork_rng(devices=devices),
        torch.autocast(device.type, enabled=False),
    ):
        yield


def _measure_missing(missing: dict[str, Op], device: torch.device, cache: CostCache, progress: bool) -> None:
    todo = list(missing.items())
    bar = tqdm(
        total=len(todo),
        desc="fxremat: measuring ops",
        unit="op",
        leave=False,
        disable=None if progress else True,
    )
    with bar:
        for start in range(0, len(todo), BATCH):
            batch = todo[start : start + BATCH]
            ops = [op for _, op in batch]
            seconds = []
            for op in ops:
                seconds.append(_seconds(op, device))
                bar.update()
            for (key, _), spent, (workspace, outputs) in zip(
                batch, seconds, _bytes(ops, device), strict=True
            ):
                cache.keep_op(key, OpCost(spent, workspace, outputs))


def call_of(node: fx.Node) -> Callable[[], Any]:
    """A call of a node's op on real tensors of the layouts that the node reads."""
    made: dict[fx.Node, Any] = {}

    def real(parent: fx.Node) -> Any:
        if parent not in made:
            made[parent] = real_value(parent, node)
        return made[parent]

    arguments = fx.node.map_arg(node.args, real)
    options = fx.node.map_arg(node.kwargs, real)
    target: Any = node.target
    return lambda: target(*arguments, **options)


def real_value(node: fx.Node, reader: fx.Node | None = None) -> Any:
    """Real data of the layout of a node; integers are valid indices for the op that reads them."""
    value = node.meta.get("val")
    if node.op == "get_attr":
        found: Any = node.graph.owning_module
        for name in str(node.target).split("."):
            found = getattr(found, name)
        return found
    if isinstance(value, torch.Tensor):
        return real_like(value, _index_limit(reader))
    if isinstance(value, tuple | list):
        return type(value)(real_like(v) if isinstance(v, torch.Tensor) else v for v in value)
    return value


def _index_limit(reader: fx.Node | None) -> int:
    """How large an integer input of an op may be; 1 (all zeros) where the op is not known to take more."""
    if reader is None:
        return 1
    if reader.target is aten.embedding.default:
        weight = reader.args[0]
        return int(weight.meta["val"].shape[0]) if isinstance(weight, fx.Node) else 1
    if reader.target is aten.embedding_dense_backward.default:
        return int(reader.args[2])  # type: ignore[arg-type]
    return 1


def real_like(tensor: torch.Tensor, index_limit: int = 1) -> torch.Tensor:
    """A real tensor with the size, stride, dtype and device of a fake one, with harmless numbers."""
    count = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        pattern = (
            torch.rand(min(count, 1 << 14), device=tensor.device) * 0.5 + 0.1
        )  # neither zero nor denormal
    elif tensor.dtype is torch.bool:
        pattern = torch.ones(1, device=tensor.device)
    else:
        pattern = torch.randint(max(1, index_limit), (min(count, 1 << 14),), device=tensor.device)
    data = pattern.to(tensor.dtype).repeat(-(-count // pattern.numel()))[:count]
    return data.as_strided(tensor.shape, tensor.stride())


def _seconds(op: Op, device: torch.device) -> float:
    call = call_of(op.node)
    try:
        return seconds_of(call, device)
    except Exception as error:
        raise FxrematError(
            f"{op.node.target} cannot be measured on {device} with inputs of the model's shapes "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}); "
            'cost="estimate" plans without running anything'
        ) from error


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """What one call takes of the device's time."""
    return _cuda_seconds(call) if device.type == "cuda" else _cpu_seconds(call)


def _cpu_seconds(call: Callable[[], Any]) -> float:
    """The median of a few runs after one to warm up."""
    call()
    runs: list[float] = []
    end = time.perf_counter() + SAMPLE_SECONDS
    while len(runs) < LEAST_RUNS or (len(runs) < MOST_RUNS and time.perf_counter() < end):
        start = time.perf_counter()
        result = call()
        runs.append(time.perf_counter() - start)
        del result
    return statistics.median(runs)


def _cuda_seconds(call: Callable[[], Any]) -> float:
    """The median over a few batches of what one call adds to a busy stream: launches overlap as in a real step."""
    call()
    runs: list[float] = []
    for _ in range(LEAST_RUNS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(MOST_RUNS):
            call()
        end.record()
        end.synchronize()
        runs.append(start.elapsed_time(end) / 1e3 / MOST_RUNS)
    return statistics.median(runs)


def _bytes(ops: Sequence[Op], device: torch.device) -> list[tuple[int, tuple[int, ...]]]:
    """For each op, the bytes it needs beyond its outputs while it runs, and the bytes of each output's storage."""
    measured = [_cuda_peak(op, device) for op in ops] if device.type == "cuda" else _cpu_peaks(ops)
    made = [
        0 if overwritten(op.node) else sum(outputs) for op, (_, outputs) in zip(ops, measured, strict=True)
    ]
    return [(max(0, peak - new), outputs) for new, (peak, outputs) in zip(made, measured, strict=True)]


def _cpu_peaks(ops: Sequence[Op]) -> list[tuple[int, tuple[int, ...]]]:
    """The highest sum of the allocator's events inside each op, and the bytes of its outputs."""
    prefix = "fxremat_op_"
    peaks, outputs = [0] * len(ops), []
    with allocation_trace() as trace:
        for number, op in enumerate(ops):
            call = call_of(op.node)
            with torch.profiler.record_function(f"{prefix}{number}"):
                result = call()
            outputs.append(_output_bytes(result))
            del result, call
    allocations = trace.allocations()
    for name, start, end in trace.marks(prefix):
        level = peak = 0
        for moment, size in allocations:
            if start <= moment <= end:
                level += size
                peak = max(peak, level)
        peaks[int(name.removeprefix(prefix))] = peak
    return list(zip(peaks, outputs, strict=True))


def _cuda_peak(op: Op, device: torch.device) -> tuple[int, tuple[int, ...]]:
    peak, result = cuda_bytes(call_of(op.node), device)
    return peak, tuple(-(-size // CUDA_BLOCK) * CUDA_BLOCK for size in _output_bytes(result))


def cuda_bytes(call: Callable[[], Any], device: torch.device) -> tuple[int, Any]:
    """Bytes at the worst moment of a call, above those at its start, and what it returns."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before, result


def _output_bytes(result: Any) -> tuple[int, ...]:
    """Bytes of the storage of each output of an op; 0 for what is no tensor."""
    items = result if isinstance(result, tuple | list) else [result]
    return tuple(storage_bytes(item) if isinstance(item, torch.Tensor) else 0 for item in items)
