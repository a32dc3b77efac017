"""A step of fixed sizes runs with other programs from one call to the next, without being captured again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fxremat
from benchmarks.meter import peak_bytes
from fxremat.graphs.names import NAME
from fxremat.runtime import fixed
from fxremat.runtime.fixed import _Programs
from fxremat.settings import Search
from tests.steps import differences, step_of

pytestmark = pytest.mark.usefixtures("torch_ready")
FAST: Any = {"search": Search(seconds=0.0, slots=100)}


class Net(nn.Module):
    """Layers with dropout and running statistics, before 400 logits."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))
            for _ in range(6)
        )
        self.head = nn.Linear(32, 400)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


X, TARGETS = torch.randn(256, 32, generator=torch.Generator().manual_seed(0)), torch.arange(256)


def loss_of(out: Tensor) -> Tensor:
    return F.cross_entropy(out, TARGETS)


def a_step(model: nn.Module) -> Any:
    return step_of(model, lambda: model(X), loss_of)


def twins(mem: str) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    plain = Net()
    return fxremat.compile(copy.deepcopy(plain), mem=mem, **FAST), plain


@pytest.mark.parametrize("mem", ["min", "60%"])
def test_a_measured_loss_changes_the_program_and_captures_nothing(mem: str) -> None:
    (ours, plain), captured = twins(mem), counters["stats"]["unique_graphs"]
    programs = []
    for _ in range(4):
        assert differences(a_step(ours), a_step(plain)) == []
        programs.append(ours.plan.program.steps)
    assert programs[0] != programs[1]
    assert counters["stats"]["unique_graphs"] == captured + 1
    ours.zero_grad()
    assert peak_bytes(lambda: loss_of(ours(X)).backward()) <= ours.plan.budget


def test_a_program_that_saves_more_than_there_are_slots_for_is_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed, "_usually_saved", lambda _: 0)
    asked, take = list[bool](), _Programs.take

    def noted(programs: _Programs, *given: Any) -> bool:
        asked.append(take(programs, *given))
        return asked[-1]

    monkeypatch.setattr(_Programs, "take", noted)
    (ours, plain), captured = twins("60%"), counters["stats"]["unique_graphs"]
    for _ in range(4):
        assert differences(a_step(ours), a_step(plain)) == []
    assert asked == [False]
    assert counters["stats"]["unique_graphs"] == captured + 2


def test_a_backward_runs_the_program_of_its_own_forward() -> None:
    """Replace the program between forwards and their backwards, of which some come in another order."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Tanh())))
    step = fxremat.capture(model, x := torch.randn(512, 16))
    plans = [step.plan(mem, search=FAST["search"]) for mem in ("100%", "min", "90%")]
    assert len({plan.program.recomputed for plan in plans}) == 3
    programs = _Programs.of(plans[0])
    assert programs is not None
    parameters = dict(model.named_parameters())
    named = [node.meta.get(NAME) for node in plans[0].captured.primals]
    calls = list[tuple[Tensor, list[Tensor]]]()
    for plan in (*plans, *plans):
        assert programs.take(plan.program, plan.costs.fresh)
        out, *saved = programs.forward([parameters[name].detach() if name in parameters else x for name in named])
        calls.append((out, saved))
    ones, whole = torch.ones(512, 16), model(x)
    expected = dict(zip(parameters, torch.autograd.grad(whole, [*parameters.values()], ones), strict=True))
    for out, saved in (*calls[::2], *calls[1::2]):
        assert torch.equal(out, whole)
        found = programs.backward_for(frozenset())([*saved, ones])
        assert all(torch.equal(found[named.index(name)], gradient) for name, gradient in expected.items())
