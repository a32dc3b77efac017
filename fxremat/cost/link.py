"""The speed of copies to and from the host, measured with tensors of typical size and cached with the costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from fxremat.cost.cache import CostCache
from fxremat.cost.measure import quiet_world
from fxremat.device import kind_of
from fxremat.graphs.captured import Captured
from fxremat.host.tier import HostTier
from fxremat.step.costs import Link
from fxremat.step.step_graph import Origin

RUNS = 3  # copies are timed this many times in each direction, and the fastest counts
MOST_BYTES = 1 << 26  # largest tensor that is copied to measure a speed


def typical_size(joint: Captured) -> int:
    """Return a typical size of a value to copy: half of the bytes that the backward reads are in smaller values.

    Only values that the forward computes count; the result is at most `MOST_BYTES`.
    """
    read = {value for op in joint.backward_ops for value in op.reads}
    sizes = sorted(v.bytes for v in joint.values if v.index in read and v.origin is Origin.FORWARD)
    total, half = 0, sum(sizes) / 2
    for size in sizes:
        total += size
        if total >= half:
            return max(1, min(size, MOST_BYTES))
    return MOST_BYTES


def measure_link(tier: HostTier, device: torch.device, size: int) -> Link:
    """Return the speeds of copies to the host and back, cached or measured with a tensor of about `size` bytes."""
    size = 1 << (size - 1).bit_length()
    cache = CostCache.of_device(device)
    key = f"link {tier.description} {size}"
    known = cache.numbers(key, 2)
    if known is None:
        with quiet_world(device):
            known = _speeds(tier, device, size)
        cache.keep(key, known)
        cache.save()
    return Link(to_host=known[0], from_host=known[1], in_powers=tier.in_powers)


def _speeds(tier: HostTier, device: torch.device, size: int) -> list[float]:
    tensor = torch.zeros(size, dtype=torch.uint8, device=device)
    hosts: list[torch.Tensor] = []

    def out() -> None:
        host = tier.offload(tensor)
        tier.release(host)
        hosts[:] = [host]

    def back() -> None:
        tier.prefetch(hosts[0], device)
        tier.wait(hosts[0])

    return [size / _least_seconds(move, device) for move in (out, back)]


def _least_seconds(move: Callable[[], None], device: torch.device) -> float:
    move()
    seconds: Sequence[float] = [_timed(move, device) for _ in range(RUNS)]
    return max(min(seconds), 1e-9)


def _timed(move: Callable[[], None], device: torch.device) -> float:
    kind_of(device).synchronize(device)
    start = time.perf_counter()
    move()
    kind_of(device).synchronize(device)
    return time.perf_counter() - start
