"""Models whose regions run in slices, from end to end: within the budget, as predicted, and equal up to rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from benchmarks.meter import peak_bytes
from fxremat.settings import Loss, Offload, Search, Slices
from tests.slices.models import (
    EVERYDAY,
    LONG,
    Example,
    GatedStack,
    features,
)
from tests.training import gradients_of, same, unequal

pytestmark = pytest.mark.usefixtures("torch_ready")

CLOSE = 1e-6  # relative error of a gradient in float32
HALF_CLOSE = 0.03  # the same in bfloat16
PREDICTED = 0.01  # relative error of the predicted peak
LEAST_GRADIENT = 1e-30
EXAMPLES = {**EVERYDAY, **LONG}
# Like others that are tried every day, or in tests of their own.
LATER = ("tied", "class weights", "no reduction", "equal layers", "z loss", "logits beside", "dropout")
SLICED: Any = {"slices": True, "search": Search(seconds=0.0)}


def named(*long: str) -> list[Any]:
    """The names of all examples, those of the long ones marked."""
    return [pytest.param(name, marks=[pytest.mark.long] if name in long else []) for name in EXAMPLES]


def step_of(model: Any, inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    """Forward and backward from a seed; returns the loss."""

    def step() -> Tensor:
        torch.manual_seed(7)
        output = model(*inputs)
        loss: Tensor = output[0] if isinstance(output, tuple) else output
        loss.backward()
        return loss.detach()

    return step


def gradients_after(model: nn.Module, step: Callable[[], object]) -> dict[str, Tensor]:
    """The gradients that a step leaves, which are then None again."""
    model.zero_grad(set_to_none=True)
    step()
    found = {name: gradient for name, gradient in gradients_of(model).items() if gradient is not None}
    model.zero_grad(set_to_none=True)
    return found


def error(ours: Tensor, right: Tensor) -> float:
    """The norm of the difference over that of the right one."""
    return float((ours.double() - right.double()).norm() / (right.double().norm() + LEAST_GRADIENT))


def ulps(ours: Tensor, plain: Tensor) -> float:
    """The difference of two numbers in units of the last place."""
    away = float(torch.nextafter(plain, torch.full_like(plain, torch.inf)).double() - plain.double())
    return abs(float(ours.double() - plain.double())) / away


def check_gradients(example: Example, ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    """Gradients are close to plain ones, or as exact as those where convolutions are in between."""
    assert ours.keys() == plain.keys()
    if not example.convolutions:
        limit = HALF_CLOSE if example.dtype is torch.bfloat16 else CLOSE
        assert {name for name in plain if error(ours[name], plain[name]) > limit} == set()
        return
    model, inputs = example.made()
    exact_inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    model = model.double()
    exact = gradients_after(model, step_of(model, exact_inputs))
    for name, right in exact.items():
        assert error(ours[name], right) <= error(plain[name], right) + CLOSE, name


@pytest.mark.parametrize("name", named(*LONG, *LATER))
def test_a_model_in_slices_keeps_its_budget_and_computes_what_the_plain_one_does(name: str) -> None:
    example = EXAMPLES[name]
    model, inputs = example.made()
    plain = gradients_after(model, step_of(model, inputs))
    loss = step_of(model, inputs)()
    state = torch.get_rng_state()
    compiled = fxremat.compile(model, mem=example.mem, example_inputs=inputs, **SLICED, **example.options)
    step, plan = step_of(compiled, inputs), compiled.plan
    assert plan.slices

    ours = gradients_after(model, step)
    assert ulps(step(), loss) <= 1
    assert torch.equal(torch.get_rng_state(), state)
    check_gradients(example, ours, plain)

    model.zero_grad(set_to_none=True)
    peak = peak_bytes(step)
    assert peak <= plan.budget
    assert plan.predicted_peak == pytest.approx(peak, rel=PREDICTED)
    model.zero_grad(set_to_none=True)
    assert unequal(gradients_after(model, step), ours) == []  # the same step leaves the same bits


def compiled_words(**options: Any) -> tuple[nn.Module, Any, tuple[Tensor, ...]]:
    """A plain model of language, a twin in slices, and inputs."""
    model, inputs = EVERYDAY["ignored"].made()
    twin = copy.deepcopy(model)
    given = {"mem": "40%", **SLICED, **options}
    return model, fxremat.compile(twin, example_inputs=inputs, **given), inputs


def assert_close_gradients(ours: nn.Module, plain: nn.Module, limit: float = CLOSE) -> None:
    theirs = gradients_of(plain)
    for name, gradient in gradients_of(ours).items():
        right = theirs[name]
        assert gradient is not None
        assert right is not None
        assert error(gradient, right) <= limit, name


def test_gradients_come_through_the_loss_and_through_the_logits_beside_it() -> None:
    model, inputs = EVERYDAY["logits beside"].made()
    twin = copy.deepcopy(model)
    loss = Loss(gradients="all", bytes="1MB")  # less than it takes: nothing is sliced where it needs most
    compiled = fxremat.compile(twin, mem="70%", example_inputs=inputs, loss=loss, **SLICED)
    assert compiled.plan.slices
    assert not any(region.inside for region in compiled.plan.slices)
    for each in (model, compiled):
        loss, logits = each(*inputs)
        (loss + logits.square().mean()).backward()
    assert_close_gradients(compiled, model)


def test_a_number_is_the_most_slices_of_a_region() -> None:
    model, inputs = EVERYDAY["ignored"].made()
    options: Any = SLICED | {"slices": Slices(max_parts=2)}
    least = fxremat.compile(model, mem="70%", example_inputs=inputs, **options)
    assert {region.parts for region in least.plan.slices} == {2}


def twice(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """The backward runs twice over one forward."""
    loss = model(x, y)
    loss.backward(retain_graph=True)
    loss.backward()


def interleaved(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """A second forward runs before the first backward."""
    first, second = model(x, y), model(x.flip(0), y.flip(0).roll(1, 1))
    first.backward()
    (3 * second).backward()


def accumulated(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Gradients accumulate over steps."""
    for shift in range(2):
        (model(x.roll(shift, 0), y.roll(shift, 1)) / 2).backward()


def scaled(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """A scaled loss scales the gradients."""
    (-1000 * model(x, y)).backward()


def test_a_model_in_slices_is_used_as_the_plain_one() -> None:
    """In every way in turn; then with targets that are all ignored, whose loss is nan; then in eval mode."""
    model, compiled, (x, y) = compiled_words()
    for use in (twice, interleaved, accumulated, scaled):
        for each in (model, compiled):
            each.zero_grad(set_to_none=True)
            use(each, x, y)
        assert_close_gradients(compiled, model)
    for each in (model, compiled):
        each.zero_grad(set_to_none=True)
        loss = each(x, torch.full_like(y, -100))
        assert loss.isnan()
        loss.backward()
    theirs = gradients_of(model)
    for name, gradient in gradients_of(compiled).items():
        torch.testing.assert_close(gradient, theirs[name], equal_nan=True)
    model.eval()
    compiled.eval()
    with torch.no_grad():
        assert same(compiled(x, y), model(x, y))


@pytest.mark.long
def test_recomputation_goes_with_slices() -> None:
    model, inputs = Example(make=lambda: GatedStack(4), inputs=features(4, 128, 32)).made()
    plain = gradients_after(model, step_of(model, inputs))
    compiled = fxremat.compile(model, mem="min", example_inputs=inputs, **SLICED)
    assert compiled.plan.budget == compiled.plan.minimum
    assert compiled.plan.slices
    assert compiled.plan.program.recomputed
    ours = gradients_after(model, step_of(compiled, inputs))
    assert {name for name in plain if error(ours[name], plain[name]) > CLOSE} == set()
    assert peak_bytes(step_of(compiled, inputs)) <= compiled.plan.minimum


def test_offloading_goes_with_slices() -> None:
    example = EVERYDAY["equal layers"]
    model, inputs = example.made()
    plain = gradients_after(model, step_of(model, inputs))
    compiled = fxremat.compile(model, mem=example.mem, example_inputs=inputs, offload=True, **SLICED)
    assert compiled.plan.slices
    check_gradients(example, gradients_after(model, step_of(compiled, inputs)), plain)


def test_weights_on_the_host_go_with_slices() -> None:
    (model, inputs), (twin, _) = (EVERYDAY["ignored"].made() for _ in range(2))
    plain, ours = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, twin))
    hosted = Offload(weights=True, activations=False)
    compiled = fxremat.compile(twin, mem="60%", offload=hosted, optimizer=ours, example_inputs=inputs, **SLICED)
    for _ in range(3):
        for each, optimizer in ((model, plain), (compiled, ours)):
            optimizer.zero_grad()
            each(*inputs).backward()
            optimizer.step()
    assert compiled.plan.slices
    assert compiled.plan.weights
    theirs = model.state_dict()
    for name, value in compiled.state_dict().items():
        assert error(value, theirs[name]) <= CLOSE, name


def test_without_slices_no_region_is_cut_and_the_bits_are_those_of_plain() -> None:
    model, compiled, inputs = compiled_words(slices=False, mem="97%")
    assert compiled.plan.slices == compiled.plan.not_sliced == ()
    assert "in slices" not in str(compiled.plan)
    for each in (model, compiled):
        each(*inputs).backward()
    assert unequal(gradients_of(compiled), gradients_of(model)) == []


def test_a_budget_that_whole_ops_fit_needs_no_region() -> None:
    model, compiled, inputs = compiled_words(mem="100%")
    assert compiled.plan.slices == ()
    for each in (model, compiled):
        each(*inputs).backward()
    assert unequal(gradients_of(compiled), gradients_of(model)) == []


def test_every_size_is_captured_and_cut_by_itself() -> None:
    example = EXAMPLES["ignored"]
    model, (x, y) = example.made()
    with pytest.warns(UserWarning, match="slices are planned for one size"):
        compiled = fxremat.compile(model, mem=example.mem, dynamic=True, **SLICED)
    for batch in (len(x), 1 + len(x)):
        tokens, targets = x[:1].expand(batch, -1).contiguous(), y[:1].expand(batch, -1).contiguous()
        plain = gradients_after(model, step_of(model, (tokens, targets)))
        ours = gradients_after(model, step_of(compiled, (tokens, targets)))
        assert compiled.plan.slices
        assert {name for name in plain if error(ours[name], plain[name]) > CLOSE} == set()
    assert len(compiled.fxremat.plans) == 2


def test_slices_go_through_the_door_of_torch_compile() -> None:
    example = EXAMPLES["ignored"]
    model, inputs = example.made()
    plain = gradients_after(model, step_of(model, inputs))
    torch._dynamo.reset()
    options = {"mem": example.mem, "slices": True, "search": Search(seconds=0.0)}
    compiled = torch.compile(model, backend="fxremat", dynamic=False, options=options)
    ours = gradients_after(model, step_of(compiled, inputs))
    assert {name for name in plain if error(ours[name], plain[name]) > CLOSE} == set()
    assert unequal(ours, plain)  # a sum over slices is another sum


@pytest.mark.long
def test_outputs_beside_the_loss_are_left_out_where_asked() -> None:
    example = EXAMPLES["logits beside"]
    model, inputs = example.made()
    plain = gradients_after(model, step_of(model, inputs))
    options: Any = SLICED | {"slices": Slices(drop_outputs=True)}
    compiled = fxremat.compile(model, mem="60%", example_inputs=inputs, **options)
    ours = gradients_after(model, step_of(compiled, inputs))
    assert {name for name in plain if error(ours[name], plain[name]) > CLOSE} == set()
    _, logits = compiled(*inputs)
    _, right = model(*inputs)
    assert (logits.shape, logits.dtype) == (right.shape, right.dtype)
    assert bool(logits.isnan().all())
    with pytest.raises(fxremat.BudgetTooSmall, match=r"slices=Slices\(drop_outputs=True\) leaves them out") as small:
        fxremat.plan(model, inputs, mem=compiled.plan.minimum, **SLICED)
    assert compiled.plan.minimum < small.value.minimum
