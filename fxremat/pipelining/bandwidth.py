"""Measures the speed of copies between the processes of a pipeline."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

ROUNDS = 5  # number of round trips of a tensor, of which the fastest counts


def measured_bandwidth(size: int, device: torch.device) -> float | None:
    """Measure the bytes per second of copying `size` bytes from one rank to another, latency included.

    Every rank has to call this. Ranks 0 and 1, which stand for all pairs of ranks, send a tensor there and back
    a few times; the fastest round trip counts. Returns None on all ranks but rank 0.
    """
    rank = dist.get_rank()
    value = torch.zeros(max(1, size), dtype=torch.uint8, device=device)
    found = None
    if rank < 2:
        trips = [_trip(value, rank) for _ in range(ROUNDS)]
        found = value.nbytes / max(min(trips), 1e-9) if rank == 0 else None
    return found


def _trip(value: torch.Tensor, rank: int) -> float:
    """Return half of the seconds that a tensor takes to the other rank and back."""
    start = time.perf_counter()
    if rank == 0:
        dist.send(value, 1)
        dist.recv(value, 1)
        _wait(value)
    else:
        dist.recv(value, 0)
        dist.send(value, 0)
    return (time.perf_counter() - start) / 2


def _wait(value: torch.Tensor) -> None:
    """Wait until a GPU has received the tensor, since `dist.recv` returns earlier."""
    value[:1].cpu()
