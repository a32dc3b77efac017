"""Several graphs in slices, or compiled by Inductor: plain PyTorch's numbers up to rounding, within the budget."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat
from fxremat import Search
from tests.runtime.test_several_graphs import nothing_is_saved, peak_of
from tests.steps import step_of

pytestmark = pytest.mark.usefixtures("torch_ready")

WIDTH, WORDS = 32, 4096
SEARCH = Search(seconds=0.3, progress=False)


class Head(nn.Module):
    """Logits over many words, and their loss: what needs most."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.words(x), tokens)


class Model(nn.Module):
    """Reads a number from the hidden state between its blocks and the head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.head, self.dropout = nn.Embedding(WORDS, WIDTH), Head(), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.dropout(self.down(F.gelu(self.up(x))))
        if x.detach().abs().max().item() > 1e6:
            x = x.clamp(-1, 1)
        return self.head(x, tokens)


def tokens(count: int = 256, seed: int = 0) -> Tensor:
    return torch.randint(0, WORDS, (count,), generator=torch.Generator().manual_seed(seed))


def twins(dropout: float = 0.0, **options: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    model = Model(dropout)
    return fxremat.compile(model, **{"search": SEARCH, **options}), copy.deepcopy(model)


def assert_close_steps(ours: Any, plain: nn.Module, *inputs: Tensor) -> None:
    """Equal up to rounding, with the same random numbers: where they differed, a dropout would show."""
    mine, theirs = (step_of(model, partial(model, *inputs), lambda loss: loss) for model in (ours, plain))
    torch.testing.assert_close(mine.values, theirs.values, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(mine.gradients, theirs.gradients, rtol=1e-4, atol=1e-6)
    assert torch.equal(mine.rng, theirs.rng)


def trained(*, steps: int = 4, **options: Any) -> Any:
    ours, plain = twins(**options)
    for seed in range(steps):
        assert_close_steps(ours, plain, tokens(seed=seed))
    return ours


def rewritten(ours: Any) -> list[bool]:
    """Tell for each call of the plan whether it runs another graph than the captured one."""
    return [call.program.another is not None for call in ours.plan.calls]


def test_slices_need_less_and_the_prediction_is_exact() -> None:
    least = trained(mem="min").plan.minimum
    ours = trained(mem="min", slices=True)
    assert ours.plan.minimum < 0.6 * least
    assert rewritten(ours)[-1]
    measured = peak_of(ours, tokens())
    assert measured <= ours.plan.budget
    assert measured <= ours.plan.predicted_peak <= 1.005 * measured
    assert nothing_is_saved()


def test_nothing_is_sliced_where_all_fits() -> None:
    ours = trained(mem="100%", slices=True)
    plain = trained(mem="100%")
    assert ours.plan.keep_all_peak == plain.plan.keep_all_peak
    assert ours.plan.predicted_time <= ours.plan.keep_all_time


def test_slices_and_the_host_go_together() -> None:
    ours = trained(mem="45%", slices=True, offload=True)
    assert peak_of(ours, tokens()) <= ours.plan.budget
    assert nothing_is_saved()


@pytest.mark.parametrize("mem", ["min", pytest.param("80%", marks=pytest.mark.long)])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_compiled_graphs_hold_the_budget(mem: str, dropout: float) -> None:
    ours = trained(mem=mem, dropout=dropout, backend="inductor")
    measured = peak_of(ours, tokens())
    assert measured <= ours.plan.budget
    assert measured <= ours.plan.predicted_peak <= 1.02 * measured
    assert nothing_is_saved()


def only_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no program of single ops compete."""
    monkeypatch.setattr("fxremat.planning.graph_programs.ALWAYS_COMPILED", {torch.ops.aten.addmm.default})


@pytest.mark.parametrize("mem", ["min", "80%"])
def test_every_call_may_be_compiled(mem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only_compiled(monkeypatch)
    ours = trained(mem=mem, dropout=0.2, backend="inductor")
    assert rewritten(ours) == [True, True]
    measured = peak_of(ours, tokens())
    assert measured <= ours.plan.predicted_peak <= min(ours.plan.budget, 1.02 * measured)


def test_what_a_compiled_call_saved_may_be_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    only_compiled(monkeypatch)
    ours, plain = twins(dropout=0.2, mem="100%", backend="inductor")
    for seed in range(3):
        assert_close_steps(ours, plain, tokens(seed=seed))
    coordinator = ours._fxremat.backend.coordinator
    backward, gone = coordinator.backward, []

    def letting_go(call: Any, tangents: list[Tensor]) -> Any:
        if call.can_let_go:
            gone.append(call)
            call.let_go()
        return backward(call, tangents)

    monkeypatch.setattr(coordinator, "backward", letting_go)
    assert_close_steps(ours, plain, tokens())
    assert gone


def test_graphs_of_changing_sizes_run_single_ops() -> None:
    ours, plain = twins(dropout=0.2, mem="90%", backend="inductor")
    for count in (256, 192, 224, 160, 208):
        assert_close_steps(ours, plain, tokens(count))
    graphs = {node.graph for node in ours._fxremat.backend.coordinator.plans.root.walk() if node.graph}
    resizable = [graph for graph in graphs if graph._sizes]
    assert resizable
    assert all(program.another is None for graph in resizable for at in graph._at.values() for program in at.programs)
    assert peak_of(ours, tokens(224)) <= ours.plan.budget
