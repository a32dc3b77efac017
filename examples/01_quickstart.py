"""Train a GPT of 10 million parameters twice: as it is, and inside 40 % of the memory.

The text is this repository's own. The two loss curves are the same to the last bit; the peaks are measured.
"""

from __future__ import annotations

import copy
import gc
import os
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

LAYERS, WIDTH, HEADS, LENGTH, BATCH, STEPS = 6, 384, 6, 128, 8, 12


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each behind a norm and around a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Reads bytes, returns the mean loss of predicting each next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text[:, :-1]) + self.position.weight
        return F.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), text[:, 1:].flatten())


def own_text() -> Tensor:
    """The bytes of this repository's documents and sources."""
    root = Path(__file__).parents[1]
    files = sorted([*root.glob("*.md"), *root.glob("fxremat/**/*.py")])
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)))


def train(model: nn.Module, text: Tensor) -> list[float]:
    """An ordinary training loop; the loss of each step."""
    torch.manual_seed(1)  # the same batches and the same dropout each time
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,))
        batch = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def peak(step: Callable[[], object]) -> int:
    """Bytes allocated at the worst moment of `step()` above its start, from the allocator's own record."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        step()
    recorded: Any = recording.profiler
    memory = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    memory.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in memory))


def main() -> None:
    torch.set_num_threads(1)  # times then depend less on what else the machine is doing
    torch.manual_seed(0)
    text, plain = own_text(), GPT()
    parameters = sum(p.numel() for p in plain.parameters())
    print(f"{parameters / 1e6:.1f} million parameters, {len(text)} bytes of text")

    small = fxremat.compile(copy.deepcopy(plain), mem="40%")  # the one line

    curves = train(plain, text), train(small, text)
    print("\nstep      plain       mem=40%")
    for step, (ours, theirs) in enumerate(zip(*curves), 1):
        print(f"{step:>4}  {ours:.7f}  {theirs:.7f}")
    print("the two curves are", "identical" if curves[0] == curves[1] else "DIFFERENT")

    batch = text[: BATCH * (LENGTH + 1)].view(BATCH, -1)
    plain.zero_grad()
    small.zero_grad()
    peaks = peak(lambda: plain(batch).backward()), peak(lambda: small(batch).backward())
    print(f"\nmeasured peaks: {peaks[0] / 2**20:.1f} MiB plain, {peaks[1] / 2**20:.1f} MiB with the plan")
    print(f"\n{small.plan}")


if __name__ == "__main__":
    main()
