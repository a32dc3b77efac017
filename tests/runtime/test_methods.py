"""Training that goes through another method than `forward`: planned where it is named, and told of where it is not."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxremat
from fxremat.settings import Search
from tests.toys import Stack, rows
from tests.training import same

pytestmark = pytest.mark.usefixtures("torch_ready")
FAST: Any = {"search": Search(seconds=0.0, slots=100)}
NOTHING = r"parameters of the compiled Net get gradients, but none of its training calls went through `forward`"


class Net(nn.Module):
    """A network whose loss is a method, as in Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Stack(3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result

    def training_step(self, batch: tuple[Tensor, Tensor], index: int = 0) -> Tensor:
        """The loss of a batch."""
        x, y = batch
        return F.mse_loss(self.net(x), y)


def pair() -> tuple[Net, Net]:
    torch.manual_seed(0)
    plain = Net()
    return plain, copy.deepcopy(plain)


def test_a_method_is_planned_by_name() -> None:
    (plain, model), batch = pair(), (rows(), rows(seed=1))
    compiled = fxremat.compile(model, mem="80%", method="training_step", **FAST)
    for index in range(2):
        for module in (plain, compiled):
            module.zero_grad()
            torch.manual_seed(index)
            module.training_step(batch, index).backward()
        for ours, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
            assert same(ours.grad, theirs.grad)
    assert compiled.plan is not None
    assert type(compiled).training_step.__doc__ == "The loss of a batch."
    compiled.eval()
    plain.eval()
    assert torch.equal(compiled(rows()), plain(rows()))
    assert len(compiled.fxremat.plans) == 1, "forward runs as it is"


def test_a_plan_of_a_method_can_be_looked_at_and_survives_copies() -> None:
    batch = (rows(), rows(seed=1))
    plan = fxremat.plan(Net(), (batch,), mem="80%", method="training_step", **FAST)
    assert plan.predicted_peak <= plan.budget
    compiled = fxremat.compile(Net(), mem="80%", method="training_step", **FAST)
    for copied in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        copied.training_step(batch).backward()
        assert copied.plan is not None


def test_a_plan_is_its_own_copy_and_says_what_of_it_can_be_saved() -> None:
    plan = fxremat.plan(Net(), rows(), mem="80%", **FAST)
    assert copy.deepcopy({"plan": plan})["plan"] is plan
    with pytest.raises(fxremat.FxrematError, match=r"cannot be pickled: plan\.save\(path\) writes it"):
        pickle.dumps(plan)


def test_a_method_that_is_not_there_is_refused() -> None:
    with pytest.raises(fxremat.FxrematError, match="Net has no method 'train_step'"):
        fxremat.compile(Net(), mem="70%", method="train_step")
    with pytest.raises(Exception, match="method belongs to"):
        torch.compile(Net(), backend="fxremat", options={"mem": "70%", "method": "training_step"})(rows())


@pytest.mark.parametrize("call", [lambda c: c.training_step((rows(), rows())), lambda c: c.net(rows()).sum()])
def test_training_that_goes_around_every_plan_is_told_of_once(call: Any) -> None:
    compiled = fxremat.compile(Net(), mem="70%", **FAST)
    with pytest.warns(UserWarning, match=NOTHING):
        call(compiled).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(compiled).backward()


def test_training_that_is_planned_is_not_told_of() -> None:
    compiled = fxremat.compile(Net(), mem="90%", **FAST)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(rows()).sum().backward()
        compiled.training_step((rows(), rows())).backward()


def test_a_model_that_shares_its_parameters_with_one_that_is_trained_is_not_told_of() -> None:
    """The student is planned; the teacher, which reads the same layers, only runs without gradients."""
    student, teacher = Net(), Net()
    teacher.net = student.net
    trained, frozen = (fxremat.compile(model, mem="90%", **FAST) for model in (student, teacher))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            target = frozen(rows())
        F.mse_loss(trained(rows()), target).backward()
    other = fxremat.compile(Net(), mem="90%", **FAST)
    with pytest.warns(UserWarning, match=NOTHING):
        other.net(rows()).sum().backward()


# --- graphs that hold their backward --------------------------------------------------------------------------


def test_a_graph_with_its_backward_is_not_differentiated_again() -> None:
    for inputs, call in ((("primals_1", "tangents_1"), torch.ops.aten.mul.Tensor),
                         (("g", "x"), torch.ops.aten.silu_backward.default)):  # fmt: skip
        graph = fx.Graph()
        graph.output(graph.call_function(call, tuple(map(graph.placeholder, inputs))))
        with pytest.raises(fxremat.FxrematError, match=r"computes gradients already \((tangents_1|silu_backward)"):
            fxremat.plan(fx.GraphModule({}, graph), (rows(), rows()), mem="80%")


def test_a_backward_in_eval_mode_is_told_so() -> None:
    compiled = fxremat.compile(Net().eval(), mem="80%", **FAST)
    with pytest.warns(UserWarning, match=r"get gradients in eval mode, .* Call model\.train\(\)"):
        compiled(rows()).sum().backward()
    assert compiled.plan is None


class Manual(Net):
    """A network whose step runs its own backward after a message."""

    def training_step(self, batch: tuple[Tensor, Tensor], index: int = 0) -> Tensor:
        """The loss of a batch, after its backward."""
        loss = super().training_step(batch, index)
        print(end="")
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize("door", ["fxremat", "torch"])
def test_a_method_that_runs_its_own_backward_gives_gradients(door: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    plain = Manual()
    ours = copy.deepcopy(plain)
    if door == "fxremat":
        step: Any = fxremat.compile(ours, mem="90%", method="training_step", **FAST).training_step
    else:
        step = torch.compile(ours.training_step, backend="fxremat", options={"mem": "90%", **FAST})
    for seed in range(4):
        for model, method in ((plain, plain.training_step), (ours, step)):
            model.zero_grad()
            torch.manual_seed(seed)
            batch = rows(), rows()
            method(batch)
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            assert theirs.grad is not None
            assert same(mine.grad, theirs.grad)
