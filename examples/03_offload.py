"""Near the least memory: recomputing alone, and with values that wait on the host.

A deep chain and a UNet train in little more than the least memory that recomputing can reach. With a CUDA device the
host is pinned memory; without one it is files, and the same plans run. Writes 03_offload.svg: ops, copies and memory
over time, as planned and as measured (on a CPU).

    python examples/03_offload.py [folder for the picture]
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, used below as a meter, is silent then

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fxremat
from fxremat.show.lanes import Lanes, lanes_picture, planned_lanes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ABOVE = 1.05  # of the least memory that recomputing can reach


class DeepChain(nn.Module):
    """32 blocks of norm, linear and GELU; returns its loss."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(32))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


class UNet(nn.Module):
    """Three levels down and up, with skips; returns its loss."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(_twice(a, b) for a, b in zip([3, *widths], widths))
        self.bottom = _twice(widths[-1], widths[-1])
        self.up = nn.ModuleList(_twice(2 * w, max(width, w // 2)) for w in reversed(widths))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        target, skips = x, []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, skip in zip(self.up, reversed(skips)):
            x = up(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1))
        return F.mse_loss(self.head(x), target)


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.ReLU(),
    )


def steps(models: list[nn.Module], batch: Tensor) -> list[float]:
    """Seconds of a training step of each: by turns, the least of five."""
    best = [float("inf")] * len(models)
    for _ in range(6):  # the first is to warm up, and loses
        for place, model in enumerate(models):
            model.zero_grad(set_to_none=True)
            start = time.perf_counter()
            model(batch).backward()
            _synchronize()
            best[place] = min(best[place], time.perf_counter() - start)
    return best


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def recorded(step: Callable[[], object], tier: fxremat.FileTier) -> Lanes:
    """Record one step on a CPU: the allocator's events, the ops, and the copies as the tier noted them."""
    tier.copies = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        origin = time.time_ns()
        step()
    events: Any = recording.profiler
    events = sorted(events.kineto_results.events(), key=lambda event: event.start_ns())
    memory = [event for event in events if event.name() == "[memory]" and event.start_ns() >= origin]
    levels = accumulate(event.nbytes() for event in memory)
    copies, tier.copies = tier.copies, None
    return Lanes(
        ops=_outermost(events, origin),
        out=[((c.start - origin) / 1e9, (c.end - origin) / 1e9) for c in copies if c.way == "out"],
        back=[((c.start - origin) / 1e9, (c.end - origin) / 1e9) for c in copies if c.way == "in"],
        memory=[((event.start_ns() - origin) / 1e9, level) for event, level in zip(memory, levels)],
    )


def _outermost(events: list[Any], origin: int) -> list[tuple[float, float]]:
    """The ops of the thread that runs most of them, without those inside others."""
    ops = [e for e in events if e.name().startswith("aten::") and e.start_ns() >= origin]
    spans, end = [], 0
    for op in ops:
        if op.start_ns() >= end:
            end = op.start_ns() + op.duration_ns()
            spans.append(((op.start_ns() - origin) / 1e9, (end - origin) / 1e9))
    return spans


def compare(name: str, make: Callable[[], nn.Module], batch: Tensor) -> tuple[nn.Module, fxremat.Plan]:
    """Plain, recomputing alone, and both, at the same budget; returns the last."""
    torch.manual_seed(0)
    plain = make().to(DEVICE)
    try:
        fxremat.compile(plain, mem=1, example_inputs=batch)
        raise AssertionError("nothing fits into one byte")
    except fxremat.BudgetTooSmall as error:
        mem = int(ABOVE * error.minimum)
    alone = fxremat.compile(plain, mem=mem, example_inputs=batch)
    both = fxremat.compile(plain, mem=mem, example_inputs=batch, offload=True)
    assert alone.plan is not None
    assert both.plan is not None
    seconds = steps([plain, alone, both], batch)
    print(f"{name} in {mem / 2**20:.1f} MiB, {mem / alone.plan.keep_all_peak:.0%} of keeping everything")
    print(f"  recomputing alone     {seconds[1] / seconds[0]:.2f}x of a plain step")
    print(f"  and offloading        {seconds[2] / seconds[0]:.2f}x of a plain step")
    print(f"{both.plan}\n")
    return both, both.plan


def main() -> None:
    torch.set_num_threads(1)  # the copies have the other core
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    compare("UNet", UNet, torch.randn(4, 3, 128, 128, device=DEVICE))
    batch = torch.randn(2048, 512, device=DEVICE)
    model, plan = compare("deep chain", DeepChain, batch)
    lanes = {"planned": planned_lanes(plan)}
    tier = plan.tier
    if isinstance(tier, fxremat.FileTier):
        model.zero_grad(set_to_none=True)
        lanes["measured"] = recorded(lambda: model(batch).backward(), tier)
    picture = folder / "03_offload.svg"
    picture.write_text(lanes_picture(lanes, budget=plan.budget))
    print(f"ops, copies and memory over time: {picture}")


if __name__ == "__main__":
    main()
