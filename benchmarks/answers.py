"""Compare the numbers of a training step with those of a plain one: three answers.

    yes                        every tensor is equal, bit for bit
    as plain repeats itself    some differ, but no further than plain PyTorch differs from itself from run to run
    NO                         some differ further

Kernels that add with atomics add in an order that changes from run to run: the backwards of some attention, embedding
and convolution kernels on CUDA do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn

REPEATS = 3  # runs of plain PyTorch that are compared with the first
NOISE = 10.0  # times the farthest that plain PyTorch has been from itself
LEAST_NOISE = 1e-6  # of a tensor's largest number, where plain PyTorch does not repeat itself

Outcome = Mapping[str, Tensor]


class Answer(StrEnum):
    """The answer to whether numbers are those of plain PyTorch."""

    YES = "yes"
    AS_PLAIN = "as plain repeats itself"
    NO = "NO"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The differences of one outcome from another."""

    tensors: int
    differing: int
    most: float  # largest |difference| of a tensor over its largest |number|
    where: str  # the tensor that differs most, empty where none does

    def __str__(self) -> str:
        if not self.differing:
            return f"none of {self.tensors} differ"
        return f"{self.differing} of {self.tensors} differ, most {self.where}: {self.most:.1e}"


def outcome(model: nn.Module, batch: Sequence[Tensor], seed: int = 7) -> dict[str, Tensor]:
    """Loss, gradients, buffers and random states after one step from gradients of None.

    Leaves gradients None and buffers as they were, so that the next step begins where this one did.
    """
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss: Tensor = model(*batch)
    loss.backward()
    found = {"loss": loss.detach().clone(), "random state": torch.get_rng_state()}
    if loss.is_cuda:
        found["random state of the GPU"] = torch.cuda.get_rng_state(loss.device)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {_plain_name(name)}"] = parameter.grad.clone()
    found |= {_plain_name(name): buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, value in before:
            buffer.copy_(value)
    return found


def difference(ours: Outcome, plain: Outcome) -> Difference:
    """Compare two outcomes. A tensor that only one of them has, or that has another shape, is infinitely far apart."""
    apart = {name: _relative(ours, plain, name) for name in {**plain, **ours} if not _equal(ours, plain, name)}
    where = max(apart, key=lambda name: apart[name], default="")
    return Difference(
        tensors=len({**plain, **ours}), differing=len(apart), most=apart.get(where, 0.0), where=where
    )


def answer(ours: Outcome, plain: Outcome, again: Callable[[], Outcome]) -> Answer:
    """Compare with plain PyTorch.

    Args:
        again: runs the plain step once more; called only where something differs.
    """
    differing = [name for name in {**plain, **ours} if not _equal(ours, plain, name)]
    if not differing:
        return Answer.YES
    if any(not plain[name].is_floating_point() for name in differing if name in plain):
        return Answer.NO  # random states, counts
    repeats = [again() for _ in range(REPEATS)]
    if all(_equal(repeat, plain, name) for repeat in repeats for name in plain):
        return Answer.NO
    within = all(_relative(ours, plain, name) <= _noise(repeats, plain, name) for name in differing)
    return Answer.AS_PLAIN if within else Answer.NO


def _noise(repeats: Sequence[Outcome], plain: Outcome, name: str) -> float:
    return NOISE * max(_relative(repeat, plain, name) for repeat in repeats) + LEAST_NOISE


def _plain_name(name: str) -> str:
    return name.removeprefix("_orig_mod.")


def _comparable(ours: Outcome, plain: Outcome, name: str) -> bool:
    return name in ours and name in plain and ours[name].shape == plain[name].shape


def _equal(ours: Outcome, plain: Outcome, name: str) -> bool:
    if not _comparable(ours, plain, name) or ours[name].dtype != plain[name].dtype:
        return False
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (ours[name], plain[name])))


def _relative(ours: Outcome, plain: Outcome, name: str) -> float:
    """The largest |difference| over the largest |number| of the plain tensor; infinite where they are no numbers."""
    if not _comparable(ours, plain, name):
        return float("inf")
    mine, theirs = (t[name].double() for t in (ours, plain))
    apart, largest = float((mine - theirs).abs().max()), float(theirs.abs().max())
    return apart / max(largest, 1e-30) if apart == apart else float("inf")
