"""Errors of capture blame the right party: data, shapes, the model itself, or a line that cannot be traced."""

from __future__ import annotations

import copy
import itertools
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad

import fxremat
from fxremat.runtime.plain_errors import NOTE
from fxremat.settings import Search
from fxremat.torch_private import has_data
from tests.toys import WIDTH, rows

pytestmark = pytest.mark.usefixtures("torch_ready")


class Calls(nn.Module):
    """A function of a linear layer and the input."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.cumulative = nn.BatchNorm1d(WIDTH, momentum=None)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {
    "a selection": (lambda m, x: m.linear(x)[x > 0].sum(), (rows(),), r"depends on data, .*test_advice.py:\d+"),
    "repeats": (
        lambda m, x, r: m.linear(x).repeat_interleave(r, 0),
        (rows(4), torch.tensor([1, 2, 3, 4])),
        r"depends on data, .*test_advice.py:\d+.*output_size=",
    ),
    "a logger that is looked up": (
        lambda m, x: (logging.getLogger("a model").info("running"), m.linear(x))[1],
        (rows(),),
        r"not one graph: tracing stops at .*test_advice.py:\d+.*Leave messages out of forward",
    ),
    "a cumulative average": (
        lambda m, x: m.cumulative(m.linear(x)),
        (rows(),),
        r"'cumulative' \(BatchNorm1d\) has momentum=None.*Give it a momentum",
    ),
    "an address": (
        lambda m, x: m.linear(x) * x.data_ptr(),
        (rows(),),
        r"not one graph: tracing stops at .*test_advice.py:\d+",
    ),
    "a branch on data": (
        lambda m, x: m.linear(x) if x.sum() > 0 else x,
        (rows(),),
        r"not one graph: tracing stops at .*test_advice.py:\d+.*values of tensors",
    ),
    "a physics-informed loss": (
        lambda m, x: grad(m.linear(leaf := x.detach().requires_grad_()).sum(), leaf, create_graph=True)[0].square(),
        (rows(),),
        r"at requires_grad_\(\) on a tensor that forward makes, .*requires_grad_\(\) on the input before the call",
    ),
    "an input that wants a gradient": (
        lambda m, x: m.linear(x.requires_grad_()),
        (rows(),),
        r"requires_grad_\(\) on the input before the call",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_went_wrong_and_where(name: str, caplog: pytest.LogCaptureFixture) -> None:
    function, given, says = CASES[name]
    with caplog.at_level(logging.ERROR), pytest.raises(fxremat.CaptureError, match=says) as error:
        fxremat.compile(Calls(function), "100%", search=Search(seconds=0.0), fullgraph=True)(*given)
    assert "\n" not in str(error.value)
    assert str(Path(fxremat.__file__).parent) not in str(error.value), "lines are the model's"
    assert caplog.records == []


def counted(model: Any, x: Tensor) -> Tensor:
    """Leaves traces in the model and in the generator, and fails."""
    model.calls = 1
    model.seen.append(x.shape)
    result: Tensor = model.norm(model.linear(x)) + torch.rand(()) @ x
    return result


WRONG: dict[str, tuple[Callable[..., Any], tuple[Any, ...], type[Exception], str]] = {
    "too many arguments": (lambda m, x: m.linear(x), (rows(), rows()), TypeError, "takes 2 positional arguments"),
    "a submodule's arguments": (lambda m, x: m.linear(x, x), (rows(),), TypeError, r"Linear.forward\(\) takes 2"),
    "a wrong type": (lambda m, x: m.linear(x), (None,), TypeError, "must be Tensor, not NoneType"),
    "a wrong shape": (lambda m, x: m.linear(x), (rows()[:, :3],), RuntimeError, "reduction dim"),
    "another device": (lambda m, x: m.linear(x), (rows().to("meta"),), RuntimeError, "two devices, meta and cpu"),
    "a batch of one": (lambda m, x: m.norm(m.linear(x)), (rows(1),), ValueError, "more than 1 value per channel"),
    "traces left behind": (counted, (rows(),), RuntimeError, "0D and 2D"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_call_that_is_wrong_raises_what_the_plain_model_raises_and_changes_nothing(
    name: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    function, given, kind, says = WRONG[name]
    model = Calls(function)
    model.seen = []  # type: ignore[assignment]
    before, draws = copy.deepcopy(model.state_dict()), (torch.get_rng_state(), random.getstate())
    with caplog.at_level(logging.ERROR), pytest.raises(kind, match=says) as error:
        fxremat.compile(model, "100%", search=Search(seconds=0.0))(*given)
    assert type(error.value) is kind
    assert error.value.__notes__ == [NOTE]
    assert error.value.__cause__ is None
    assert caplog.records == []
    assert capsys.readouterr().out == ""
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(type(parameter) is nn.Parameter and has_data(parameter) for parameter in model.parameters())
    assert (model.seen, hasattr(model, "calls")) == ([], False)
    assert torch.equal(torch.get_rng_state(), draws[0])
    assert random.getstate() == draws[1]


SEEN: list[Tensor] = []
NUMBERS = itertools.count()


class Leaving(nn.Module):
    """Leaves traces outside of itself, and is more than one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.numbers: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.numbers.append(next(NUMBERS))
        y = self.linear(x)
        SEEN.append(y)
        torch._dynamo.graph_break()
        return y.square().mean() + SEEN[-1].mean()


def test_traces_that_a_forward_leaves_elsewhere_are_those_of_the_calls_alone() -> None:
    model = Leaving()
    compiled = fxremat.compile(model, "100%", search=Search(seconds=0.0, progress=False))
    for _ in range(3):
        loss = compiled(rows())
        loss.backward()
    assert type(loss) is Tensor
    assert (model.numbers, len(SEEN)) == ([0, 1, 2], 3)
    assert {type(each) for each in SEEN} == {Tensor}


@pytest.mark.filterwarnings("ignore")
def test_a_part_in_torchscript_keeps_its_parameters() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.jit.script(nn.Linear(WIDTH, WIDTH)))
    found = []
    for each in (fxremat.compile(model, "100%", search=Search(seconds=0.0, progress=False)), model):
        each(rows()).square().mean().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    assert all(map(has_data, model.parameters()))
    assert len(found[0]) == 4
    assert all(map(torch.equal, *found))


class More(nn.Linear):
    """Adds to what its forward returns, outside of it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().__call__(*args, **kwargs) + 1


@pytest.mark.parametrize("trained", [True, False])
def test_a_class_with_a_call_of_its_own_is_called_by_it(trained: bool) -> None:
    model = More(WIDTH, WIDTH)
    compiled = fxremat.compile(model, "100%", search=Search(seconds=0.0, progress=False)).train(trained)
    assert torch.equal(compiled(rows()), model(rows()))


def test_wrong_names_are_a_type_error_that_a_plan_raises_too() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'labels'"):
        given = {"input": torch.ones(2, 4), "labels": torch.ones(2)}
        fxremat.plan(nn.Linear(4, 4), given, mem="100%", search=Search(seconds=0.0))
