"""mem="auto" in training loops on devices of several sizes, until memory runs out or all steps are done.

The optimizer's state comes with the first `step()`, after the first plan. Each batch needs more than the device has
where everything is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import fxremat
from fxremat.settings import Search
from fxremat.torch_private import allocates_in_expandable_segments
from tests.pretended_cuda.models import DEVICE, LanguageModel

STEPS = 20
ROWS, WORDS = 7, 4099


@dataclass(frozen=True, kw_only=True)
class Row:
    """A training loop; all sizes in bytes."""

    device: int
    optimizer: str
    expandable: bool  # segments of the allocator
    steps: int  # that were done
    ended: str  # the name of the error that ended it; "" where none did
    budgets: list[int]  # one after the other
    keep_all: int
    reserved: int  # at most
    retries: int  # of the allocator, after it gave back what it had kept


def trained(optimizer: str, layers: int, width: int, length: int) -> Row:
    """Train a GPT-2 of these sizes on the device that is there."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64, vocab_size=WORDS, n_positions=length)
    model = LanguageModel(GPT2LMHeadModel(config), autocast=False).to(DEVICE).train()
    batch = torch.randint(0, WORDS, (ROWS, length), device=DEVICE)
    stepper = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
    compiled = fxremat.compile(model, mem="auto", search=Search(seconds=0.0))
    budgets: dict[int, None] = {}
    done, ended = 0, ""
    try:
        while done < STEPS:
            stepper.zero_grad()
            compiled(batch).backward()
            budgets[compiled.plan.budget] = None
            stepper.step()
            done += 1
    except (torch.OutOfMemoryError, fxremat.BudgetTooSmall) as error:
        ended = type(error).__name__
    stats = torch.cuda.memory_stats()
    return Row(
        device=torch.cuda.mem_get_info()[1],
        optimizer=optimizer,
        expandable=allocates_in_expandable_segments(),
        steps=done,
        ended=ended,
        budgets=list(budgets),
        keep_all=compiled.plan.keep_all_peak if compiled.plan else 0,
        reserved=stats["reserved_bytes.all.peak"],
        retries=stats["num_alloc_retries"],
    )
