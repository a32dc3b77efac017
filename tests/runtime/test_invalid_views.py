"""Views that one op made, and whose base is overwritten later, have no autograd history that could be looked at."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat import Search

pytestmark = pytest.mark.usefixtures("torch_ready")
QUICK = Search(seconds=0.0, slots=100)


class Rotary(nn.Module):
    """Overwrites a part of a value by what it computes from the two halves of that part."""

    def __init__(self, halves: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.halves, self.query, self.out = halves, nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        a, b = self.halves(query[:, 4:])
        query[:, 4:] = torch.cat([-b, a], -1)
        return self.out(query).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "halves", [lambda x: x.chunk(2, -1), lambda x: x.split(8, -1), lambda x: x.unflatten(-1, (8, 2)).unbind(-1)]
)
def test_a_model_that_overwrites_their_base(halves: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    torch.manual_seed(0)
    plain, x = Rotary(halves), torch.randn(2, 12, 16)
    ours = fxremat.compile(copy.deepcopy(plain), mem="100%", search=QUICK)
    for model in (plain, ours):
        model(x).backward()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_a_loss_that_keeps_them_under_a_profiler() -> None:
    """Values that Python holds of a loss are looked for where the program's own profiler runs."""
    compiled = fxremat.compile(nn.Linear(16, 64), mem="100%", search=QUICK)
    with torch.autograd.profiler.profile():
        y = compiled(torch.randn(8, 12, 16)) * 1
        halves = y.chunk(2, -1)
        y[:, 2:] = 0
        y.sum().backward()
    with pytest.raises(RuntimeError, match="modified inplace"):
        _ = halves[0].grad_fn
    assert compiled.weight.grad is not None
