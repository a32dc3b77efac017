"""A forward that is put on an instance: what it calls of the model is planned, and it runs as it is."""

from __future__ import annotations

import copy
import inspect
import logging
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.runtime.replaced_forward import WRAPPERS
from fxremat.settings import Search
from tests.toys import WIDTH, Stack, rows
from tests.training import same

pytestmark = pytest.mark.usefixtures("torch_ready")
FAST: Any = {"search": Search(seconds=0.0)}
Make = Callable[[nn.Module], nn.Module]


class Model(nn.Module):
    """A body that is most of the model, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack(4)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, pieces: bool = False) -> Tensor:
        return self.head(self.body(x)).square().mean()


class Wrapper(nn.Module):
    """Calls another module's forward, and not the module, as adapters do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.forward(*args, **kwargs)


def compute_in_pieces(model: Any) -> None:
    """Replace the forward by one that is captured by no graph, and calls the old one where it is not asked to."""
    before = model.forward

    def forward(self: Any, x: Tensor, pieces: bool = False) -> Tensor:
        if not pieces:
            return before(x)
        hidden, losses = self.body(x), []
        for piece in hidden.split(8):
            losses.append(torch.nn.functional.linear(piece, self.head.weight).square().sum())
            if losses[-1].item() < 0:
                break
        return torch.stack(losses).sum()

    model.forward = types.MethodType(forward, model)


def compiled(model: nn.Module, *, fullgraph: bool = False) -> Any:
    return fxremat.compile(model, mem="90%", fullgraph=fullgraph, **FAST)


def replaced_once_more(module: Any) -> Any:
    before = module.forward
    module.forward = lambda *args, **kwargs: before(*args, **kwargs)
    return module


def replaced_after(model: nn.Module) -> Any:
    module = compiled(model)
    compute_in_pieces(module)
    return module


def replaced_twice(model: nn.Module) -> Any:
    """As a library does that computes under autocast what another one put there."""
    return replaced_once_more(replaced_after(model))


def replaced_before(model: nn.Module) -> Any:
    compute_in_pieces(model)
    return compiled(model)


def replaced_inside_of_what_is_compiled(model: nn.Module) -> Any:
    module = compiled(Wrapper(model))
    compute_in_pieces(model)
    return module


def replaced_before_and_after(model: nn.Module) -> Any:
    return replaced_once_more(replaced_before(model))


def replaced_inside_and_outside(model: nn.Module) -> Any:
    return replaced_once_more(replaced_inside_of_what_is_compiled(model))


def replaced_inside_of_a_plain_wrapper(model: nn.Module) -> Any:
    return Wrapper(replaced_after(model))


def step(model: nn.Module, seed: int, **kwargs: Any) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(rows(), **kwargs)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    "make",
    [
        *(replaced_after, replaced_twice, replaced_before, replaced_before_and_after),
        *(replaced_inside_of_what_is_compiled, replaced_inside_and_outside, replaced_inside_of_a_plain_wrapper),
    ],
)
def test_the_part_that_is_most_of_the_model_is_planned(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    plain = Model()
    model = copy.deepcopy(plain)
    compute_in_pieces(plain)
    module: Any = make(model)
    names = list(module.state_dict())
    with caplog.at_level(logging.WARNING, logger="fxremat"), warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(3):
            assert all(map(same, step(module, seed, pieces=True), step(plain, seed, pieces=True)))
    planned = module.inner if make is replaced_inside_of_a_plain_wrapper else module
    assert planned.plan is not None
    assert planned.plan.predicted_peak <= planned.plan.budget
    assert type(model.body) is Stack, "the drop-in module stands in during the call alone"
    assert list(module.state_dict()) == names
    said = [record.getMessage() for record in caplog.records if "was replaced" in record.getMessage()]
    assert len(said) == 1
    assert "forward of Model was replaced by" in said[0]
    last = "<lambda>" if make in (replaced_twice, replaced_before_and_after) else "compute_in_pieces.<locals>.forward"
    assert last in said[0]
    assert "its part `body`" in said[0]
    module.eval()
    plain.eval()
    assert same(module(rows(), pieces=True), plain(rows(), pieces=True))


def test_where_the_forward_that_was_there_before_is_called_the_whole_is_planned() -> None:
    plain = Model()
    module = replaced_after(copy.deepcopy(plain))
    for seed in range(2):
        assert all(map(same, step(module, seed), step(plain, seed)))
    whole = module.plan.keep_all_peak
    step(module, 2, pieces=True)
    assert len(module.fxremat.plans) == 2
    assert module.plan.keep_all_peak != whole
    assert module.forward == module.forward, "libraries compare it with what they have kept"
    assert module.forward.__func__.__name__ == "forward"
    assert list(inspect.signature(module.forward).parameters) == ["x", "pieces"]


def test_a_library_s_wrapper_that_cannot_be_captured_is_planned_inside() -> None:
    class Refuses(Wrapper):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                raise RuntimeError("call fabric.backward(loss)")
            return self.inner(*args, **kwargs)

    with pytest.raises(fxremat.CaptureError, match="call fabric"):
        compiled(Refuses(Model()), fullgraph=True)(rows())
    Refuses.__module__ = WRAPPERS[0]
    plain = Refuses(Model())
    module = compiled(copy.deepcopy(plain))
    assert all(map(same, step(module, 0), step(plain, 0)))
    assert module.plan is not None


class Skipping(Wrapper):
    """Goes around the forward of what it wraps, as adapters of PEFT without a task do."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.inner.inner(*args, **kwargs)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_outermost_part_that_the_forward_calls_is_planned(depth: int) -> None:
    """Whichever it skips."""
    plain = Skipping(Wrapper(Wrapper(Model())))
    module = compiled(copy.deepcopy(plain))

    def call(x: Tensor) -> Tensor:
        part: Any = module
        for _ in range(depth + 1):
            part = part.inner
        return part(x) * 2

    module.forward = call
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(3):
            ours, theirs = step(module, seed), step(plain, seed)
            assert all(same(a, 2 * b) for a, b in zip(ours, theirs, strict=True))
    assert module.plan.predicted_peak <= module.plan.budget
    inside, part = module._fxremat, module.inner
    for _ in range(depth):
        part = part.inner
    assert inside.reached.plain is part
    assert type(module.inner.inner.inner) is Model, "the drop-in modules stand in during the call alone"


def test_a_plan_of_a_part_can_be_looked_at_without_running_it() -> None:
    model = Model()
    compute_in_pieces(model)
    plan = fxremat.plan(model, {"x": rows(), "pieces": True}, mem="90%", **FAST)
    assert plan.predicted_peak <= plan.budget
    assert type(model.body) is Stack


def test_a_forward_that_calls_none_that_is_most_of_the_model_is_told_of() -> None:
    module = compiled(Model())
    module.forward = lambda x: module.head(x).sum()
    with pytest.warns(UserWarning, match=r"never reached fxremat.*compile what it calls"):
        module(rows()).backward()
