"""A model that is called several times before one backward: the calls share its budget, with plain PyTorch's bits."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from benchmarks import meter
from fxremat import Search, Slices
from fxremat.plans import Plan
from fxremat.runtime import calls
from fxremat.runtime.called_graph import saved_calls
from fxremat.runtime.module import budget_for_each_call
from fxremat.torch_private import holds_gradients
from tests.steps import differences, step_of

pytestmark = pytest.mark.usefixtures("torch_ready")

QUICK = Search(seconds=0.0)
WIDTH = 48


class Net(nn.Module):
    """Blocks with dropout, after each of which a graph may end; returns its output, or a loss."""

    def __init__(self, *, broken: bool, loss: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.head, self.broken, self.loss = nn.Linear(WIDTH, 4), broken, loss

    def block(self, number: int, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.blocks[number](x), 0.1)

    def forward(self, x: Tensor) -> Tensor:
        for number in range(len(self.blocks)):
            x = self.block(number, x)
            if self.broken:
                torch._dynamo.graph_break()
        x = self.head(x)
        return x.square().mean() if self.loss else x


def rows(seed: int = 0, count: int = 256) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


ONE, TWO, THREE = rows(1), rows(2), rows(3)  # what a step makes itself is not the model's


def contrasted(model: nn.Module) -> Tensor:
    return (model(ONE) - model(TWO)).square().mean()


def added(model: nn.Module) -> Tensor:
    return model(ONE) + model(TWO) + model(THREE)


def compared(ours: Any, plain: nn.Module, loss_of: Callable[[nn.Module], Tensor], steps: int = 6) -> None:
    for _ in range(steps):
        mine, its = (step_of(model, lambda model=model: loss_of(model), lambda loss: loss) for model in (ours, plain))
        assert differences(mine, its) == []
    assert not saved_calls


def peak_of(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> int:
    def step() -> None:
        loss_of(model).backward()

    model.zero_grad(set_to_none=True)
    return meter.peak_bytes(step)


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("mem", ["min", "60%"])
def test_calls_share_the_budget(broken: bool, mem: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = Net(broken=broken)
    ours = fxremat.compile(copy.deepcopy(plain), mem=mem, search=QUICK)
    with caplog.at_level(logging.WARNING, "fxremat"):
        compared(ours, plain, contrasted)
    told = [record for record in caplog.records if "several times before one backward" in record.getMessage()]
    assert len(told) == (0 if broken else 1)
    assert len(ours.plan.calls) == (6 if broken else 2)
    measured = peak_of(ours, contrasted)
    assert measured <= ours.plan.budget
    assert ours.plan.predicted_peak <= 1.2 * measured  # for what a loss outside needs is assumed
    again = fxremat.compile(copy.deepcopy(plain), mem=ours.plan.budget, search=QUICK)
    compared(again, plain, contrasted)
    assert peak_of(again, contrasted) <= ours.plan.budget


def test_a_percentage_of_one_call_that_is_mostly_gradients_is_refused_with_advice_that_works() -> None:
    plain, calls = Net(broken=False), [rows(seed, 16) for seed in range(8)]

    def policy(model: nn.Module) -> Tensor:
        return torch.stack([model(x).square().mean() for x in calls]).sum()

    ours = fxremat.compile(copy.deepcopy(plain), mem="50%", search=QUICK)
    with pytest.raises(fxremat.BudgetTooSmall, match="give bytes if the model is called several times"):
        policy(ours)
    mem = peak_of(plain, policy) // 2
    ours = fxremat.compile(copy.deepcopy(plain), mem=mem, search=QUICK)
    compared(ours, plain, policy)
    assert peak_of(ours, policy) <= mem
    ours = fxremat.compile(copy.deepcopy(plain), mem="5%", search=QUICK)
    with pytest.raises(fxremat.BudgetTooSmall) as large:
        ours(rows(count=2048))
    assert "give bytes" not in str(large.value)


@pytest.mark.parametrize("dynamic", [False, True])
def test_calls_of_what_torch_compile_returned_share_the_budget(dynamic: bool, caplog: pytest.LogCaptureFixture) -> None:
    plain = Net(broken=False)
    least = fxremat.compile(copy.deepcopy(plain), mem="min", search=QUICK)
    for _ in range(3):
        contrasted(least).backward()
    mem, own = least.plan.budget, copy.deepcopy(plain)
    options = {"mem": mem, "search": QUICK}
    ours: Any = torch.compile(own, backend="fxremat", options=options, dynamic=dynamic)

    def compare(loss_of: Callable[[nn.Module], Tensor], steps: int) -> None:
        for _ in range(steps):
            mine, its = (step_of(one, lambda call=call: loss_of(call), lambda x: x) for one, call in pairs)
            assert differences(mine, its) == []
        assert not saved_calls

    pairs = (own, ours), (plain, plain)
    compare(lambda call: call(ONE).square().mean(), 2)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fxremat"):
        compare(contrasted, 4)
    assert len([one for one in caplog.records if "several times before one backward" in one.getMessage()]) == 1
    assert peak_of(ours, contrasted) <= mem < 0.5 * peak_of(plain, contrasted)
    compare(lambda call: call(ONE).square().mean() + call(rows(count=31)).square().mean(), 4)
    compare(lambda call: call(ONE).square().mean(), 1)
    assert peak_of(ours, contrasted) <= mem


def test_functions_of_torch_compile_that_run_one_graph_share_only_their_own_calls() -> None:
    """Two models of one class are compiled once, as parameters are inputs; only the first is called twice a step."""
    plain = nn.ModuleList([Net(broken=False), Net(broken=False)])
    own = copy.deepcopy(plain)
    options = {"mem": "100%", "search": QUICK}
    ours = [torch.compile(model, backend="fxremat", options=options) for model in own]

    def loss_of(one: Any, other: Any) -> Tensor:
        return (one(ONE) - one(TWO)).square().mean() + other(THREE).square().mean()

    for _ in range(4):
        mine = step_of(own, lambda: loss_of(*ours), lambda loss: loss)
        assert differences(mine, step_of(plain, lambda: loss_of(*plain), lambda loss: loss)) == []
    assert not saved_calls


def test_torch_compile_says_once_that_options_need_one_graph() -> None:
    own = Net(broken=False)
    options = {"mem": "100%", "search": QUICK, "slices": Slices(drop_outputs=True)}
    ours: Any = torch.compile(own, backend="fxremat", options=options)
    with pytest.warns(UserWarning, match="Net is called again before the backward of its last call") as told:
        (contrasted(ours) + contrasted(ours)).backward()
    assert len(told) == 1
    assert told[0].filename == __file__


@pytest.mark.parametrize("broken", [False, True])
def test_the_prediction_is_exact_where_the_model_returns_its_loss(broken: bool) -> None:
    plain = Net(broken=broken, loss=True)
    ours = fxremat.compile(copy.deepcopy(plain), mem="50%", search=QUICK)
    compared(ours, plain, added)
    measured = peak_of(ours, added)
    slack = rows().nbytes if holds_gradients() else 0
    assert measured <= ours.plan.predicted_peak <= 1.005 * measured + slack
    assert measured <= ours.plan.budget < 0.55 * peak_of(plain, added)


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_calls_of_several_sizes(broken: bool, dynamic: bool | None) -> None:
    """Call a graph with sizes among its inputs, and so among its gradients."""
    few = rows(4, count=100)

    def loss_of(model: nn.Module) -> Tensor:
        return model(ONE).square().mean() + model(few).square().mean()

    plain = Net(broken=broken)
    ours = fxremat.compile(copy.deepcopy(plain), mem="60%", search=QUICK, dynamic=dynamic)
    compared(ours, plain, loss_of, 4)
    assert peak_of(ours, loss_of) <= ours.plan.budget


@pytest.mark.parametrize("by_name", [False, True])
def test_a_loss_that_is_kept_after_its_backward_changes_nothing(by_name: bool) -> None:
    ours = fxremat.compile(Net(broken=False), mem="60%", search=QUICK)
    kept = []
    for _ in range(3):
        kept.append(loss := ours(ONE).square().mean())
        if by_name:
            torch.autograd.grad(loss, [*ours.parameters()])
        else:
            loss.backward()
    ours(ONE)  # what was not kept cannot be differentiated
    kept.append(ours(TWO))
    assert isinstance(ours.plan, fxremat.Plan)


def test_two_backwards_after_two_forwards() -> None:
    plain = Net(broken=False)
    ours = fxremat.compile(copy.deepcopy(plain), mem="70%", search=QUICK)
    for step in range(8):
        for model in (ours, plain):
            model.zero_grad(set_to_none=True)
            torch.manual_seed(step)
            losses = [model(rows(seed)).square().mean() for seed in (1, 2)]
            for loss in losses if step % 2 else reversed(losses):
                loss.backward()
        pairs = zip(ours.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
    assert ours.plan.budget > 0
    assert not saved_calls


def test_a_discriminator_of_real_and_made_up_rows() -> None:
    """Call it twice in a step of its own, and once in a step of the generator's."""
    torch.manual_seed(0)
    made = nn.Linear(WIDTH, WIDTH)
    plain = Net(broken=False), made
    ours = fxremat.compile(copy.deepcopy(plain[0]), mem="60%", search=QUICK), copy.deepcopy(made)
    found = []
    for critic, maker in (ours, plain):
        optimizers = [torch.optim.SGD(model.parameters(), lr=1e-2) for model in (critic, maker)]
        torch.manual_seed(1)
        for step in range(6):
            loss = critic(rows(step)).mean() - critic(maker(rows(step + 100)).detach()).mean()
            loss.backward()
            optimizers[0].step()
            critic(maker(rows(step + 200))).mean().backward()
            optimizers[1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        found.append([*critic.parameters(), *maker.parameters()])
    assert all(map(torch.equal, *found))
    assert {path.calls for path in ours[0].plan.paths} == {1, 2}


def test_outputs_that_are_kept_and_never_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MOST_FORWARDS", 4)
    plain = Net(broken=False)
    ours = fxremat.compile(copy.deepcopy(plain), mem="100%", search=QUICK)
    kept = [ours(rows(seed)) for seed in range(10)]
    for _ in range(6):
        steps = [step_of(one, lambda one=one: contrasted(one), lambda loss: loss) for one in (ours, plain)]
        assert differences(*steps) == []
    assert len(saved_calls) == len(kept) - 1  # the first was a graph of its own
    kept.clear()
    assert not saved_calls


class Picky(Net):
    """Refuses seven rows."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 7:
            raise ValueError("seven rows")
        return super().forward(x)


@pytest.mark.parametrize("broken", [False, True])
def test_an_error_in_the_second_forward_leaves_the_first(broken: bool) -> None:
    plain = Picky(broken=broken)
    ours = fxremat.compile(copy.deepcopy(plain), mem="80%", search=QUICK)
    compared(ours, plain, contrasted)

    def stumbling(model: nn.Module) -> Tensor:
        first = model(rows(1))
        with pytest.raises(ValueError, match="seven rows"):
            model(rows(2, count=7))
        return first.square().mean()

    compared(ours, plain, stumbling, 2)
    compared(ours, plain, contrasted)


def test_an_option_that_needs_one_graph_is_named_once() -> None:
    ours = fxremat.compile(Net(broken=False), mem="80%", search=QUICK, slices=Slices(drop_outputs=True))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            contrasted(ours).backward()
    told = [str(each.message) for each in seen if "called again before the backward" in str(each.message)]
    assert len(told) == 1
    assert "slices=Slices(drop_outputs=True) needs one" in told[0]


def test_calls_of_which_something_else_plans_how_many_wait_are_planned_alone() -> None:
    """Call a model as a pipeline calls one of its stages."""
    plain = Net(broken=False)
    ours = fxremat.compile(copy.deepcopy(plain), mem="min", search=QUICK)
    budget_for_each_call(ours)
    compared(ours, plain, contrasted, steps=3)
    assert isinstance(ours.plan, Plan)


@pytest.mark.parametrize("broken", [False, True])
def test_each_call_has_sizes_of_its_own(*, broken: bool) -> None:
    """Call for short rows and then for long or middling ones, as a pair of texts comes, of which one kind changes."""
    compiled: Any = fxremat.compile(Net(broken=broken), mem="80%", dynamic=True, search=QUICK)
    plain = Net(broken=broken)

    short, others = rows(1, 64), {count: rows(2, count) for count in (200, 512)}

    def loss(model: nn.Module, count: int) -> Tensor:
        return (model(short).mean(0) * model(others[count]).mean(0)).sum()

    for count in (512, 512, 512, 512, 200, 512, 200, 512, 200):  # the shorter ones are measured at the second time
        torch.manual_seed(1)
        ours, theirs = (step_of(model, partial(loss, model, count), lambda x: x) for model in (compiled, plain))
        assert differences(ours, theirs) == []
    second = compiled.plan.calls[len(compiled.plan.calls) // 2 :]  # the first ones are chosen before it is known
    assert {call.shown_again for call in second} == {"nothing"}, "of the shorter ones"
    for count in (200, 512):
        compiled.zero_grad(set_to_none=True)
        measured = meter.peak_bytes(lambda size=count: loss(compiled, size).backward())
        assert measured <= min(compiled.plan.predicted_peak, compiled.plan.budget), count
    assert {call.shown_again for call in compiled.plan.calls} != {"nothing"}
