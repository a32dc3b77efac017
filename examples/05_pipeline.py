"""Train a GPT that does not fit on one device over two, each of them inside its budget.

    torchrun --nproc-per-node 2 examples/05_pipeline.py         or plainly: python examples/05_pipeline.py

Devices are processes on this machine. Losses and gradients are compared with plain PyTorch that goes through the same
micro-batches in the same order: they are the same to the last bit. (The model has no dropout: each process draws random
numbers of its own, so with dropout a pipeline trains as well, with other masks than one process has.) The peaks are
those of the allocator; they include parameters and gradients.
"""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from itertools import accumulate
from typing import Any

# Before torch is imported: its profiler reports every start and stop otherwise.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fxremat

DEVICES, MICROBATCHES, STEPS, ROWS = 2, 8, 4, 32
WORDS, LENGTH, WIDTH, HEADS, DEPTH = 256, 64, 128, 4, 6
SHARE = 0.5  # of what one device takes that trains the whole model


class Block(nn.Module):
    """Pre-norm attention and a wide layer, each added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(rows, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.wide(self.norm2(x))


class GPT(nn.Module):
    """Logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    """A text of its own for each step: counting, in strides."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(WORDS, (ROWS, 1), generator=generator)
    text = (start + 3 * torch.arange(LENGTH + 1)) % WORDS
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def plain_step(model: nn.Module, tokens: Tensor, target: Tensor) -> list[Tensor]:
    """The same micro-batches one after the other, by plain PyTorch."""
    losses = []
    for part, following in zip(tokens.chunk(MICROBATCHES), target.chunk(MICROBATCHES)):
        loss = loss_of(model(part), following)
        loss.backward()
        losses.append(loss.detach())
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(MICROBATCHES)
    return losses


def peak(step: Any) -> int:
    """Bytes allocated at the worst moment of `step()`, above the level at its start."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        step()
    found: Any = recording.profiler
    events = [event for event in found.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(sizes, initial=0))


def train() -> None:
    """Train in one of the processes, each of which compares its losses and gradients with plain PyTorch's."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, (tokens, target) = GPT(), batch(0)
    plain = copy.deepcopy(model)
    plain_step(plain, tokens, target)
    size = sum(parameter.nbytes for parameter in plain.parameters())
    plain.zero_grad()
    alone = size + peak(lambda: plain_step(plain, tokens, target))

    pipe = fxremat.pipeline(  # the one line
        model, tokens, mem=int(SHARE * alone), devices=DEVICES, microbatches=MICROBATCHES, loss_fn=loss_of,
        example_target=target, effort=1.0,
    )  # fmt: skip
    del model
    rank, last = dist.get_rank(), pipe.plan.stages[-1].device
    if rank == last:
        print(
            f"one device takes {alone / 2**20:.2f} MiB; each of {DEVICES} may take {SHARE:.0%} of that\n\n{pipe}\n"
        )

    first, second = torch.optim.SGD(plain.parameters(), lr=0.1), torch.optim.SGD(pipe.parameters(), lr=0.1)
    equal = True
    for step in range(STEPS):
        tokens, target = batch(step)
        first.zero_grad()
        second.zero_grad()
        theirs, mine = plain_step(plain, tokens, target), pipe.step(tokens, target)
        grads = dict(plain.named_parameters())
        equal &= all(torch.equal(p.grad, grads[name].grad) for name, p in pipe.named_parameters())  # type: ignore[arg-type]
        if rank == last:
            equal &= all(map(torch.equal, theirs, mine))
            print(f"{step:>4}  {torch.stack(theirs).mean():.7f}  {torch.stack(mine).mean():.7f}", flush=True)
        first.step()
        second.step()
    second.zero_grad()
    own = sum(parameter.nbytes for parameter in pipe.parameters())
    report(pipe, equal, own + peak(lambda: pipe.step(tokens, target)))


def report(pipe: fxremat.Pipeline, equal: bool, measured: int) -> None:
    """Gather what every process found; the last one prints it."""
    everyone: list[Any] = [None] * DEVICES
    dist.all_gather_object(everyone, (equal, measured))
    if dist.get_rank() == pipe.plan.stages[-1].device:
        same = all(equal for equal, _ in everyone)
        print("losses and gradients are", "identical" if same else "DIFFERENT")
        for device, (_, bytes_) in enumerate(everyone):
            planned = pipe.memory[device]
            print(
                f"device {device}: peak {bytes_ / 2**20:.2f} MiB, planned {planned / 2**20:.2f} MiB",
                flush=True,
            )
    dist.destroy_process_group()


def main() -> None:
    if "RANK" in os.environ:
        train()
    else:  # start the processes
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(DEVICES), __file__]
        sys.exit(subprocess.run([sys.executable, *start], check=False).returncode)


if __name__ == "__main__":
    main()
