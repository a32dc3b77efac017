"""Train a GPT on two processes, neither of which could hold its parameters, gradients and optimizer state.

    torchrun --nproc-per-node 2 examples/06_sharded.py          or plainly: python examples/06_sharded.py

Each process may take a share of bytes for everything: its shards of parameters, gradients and AdamW's state, and the
step. The model is sharded with PyTorch's own `fully_shard`; one line plans its step into what is left of the share. The
losses are compared with those of `fully_shard` alone, which takes more: they are the same to the last bit.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fxremat

PROCESSES, STEPS, ROWS = 2, 4, 4
WORDS, LENGTH, WIDTH, HEADS, DEPTH = 1024, 64, 128, 4, 8
SHARE = 19 * 2**20  # bytes that one process may take for everything


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
    """The loss of predicting the next token; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), target.flatten())


def sharded() -> nn.Module:
    """The model, of which each process keeps a part."""
    torch.manual_seed(0)
    model = GPT()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    """A text of its own for each process and step: counting, in strides."""
    generator = torch.Generator().manual_seed(step * PROCESSES + dist.get_rank())
    start = torch.randint(WORDS, (ROWS, 1), generator=generator)
    text = (start + 3 * torch.arange(LENGTH + 1)) % WORDS
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def losses_of(model: nn.Module) -> list[Tensor]:
    """Train for a few steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        loss = model(*batch(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def train() -> None:
    """Train in one of the processes, without fxremat and with it, and compare the losses."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    say = print if dist.get_rank() == 0 else lambda *_: None
    whole = sum(parameter.nbytes for parameter in sharded().parameters())  # of a DTensor: of all its parts
    mine = whole // PROCESSES
    state = 4 * whole / 2**20
    say(f"a process may take {SHARE / 2**20:.0f} MiB; parameters, gradients and AdamW's state take {state:.1f} MiB")

    theirs = losses_of(sharded())
    model = sharded()
    model = fxremat.compile(model, mem=SHARE - 3 * mine)  # the one line; gradients are within mem
    ours = losses_of(model)
    assert model.plan is not None
    say(f"\n{model.plan}\n")
    for step, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        say(f"{step:>4}  {one:.7f}  {other:.7f}")
    say("the losses are", "identical" if all(map(torch.equal, theirs, ours)) else "DIFFERENT")
    dist.destroy_process_group()


def main() -> None:
    if "RANK" in os.environ:
        train()
    else:  # start the processes
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES), __file__]
        sys.exit(subprocess.run([sys.executable, *start], check=False).returncode)


if __name__ == "__main__":
    main()
