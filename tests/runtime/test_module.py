"""The returned module is the model: its class, attributes and hooks; and no training call escapes the budget unsaid."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fxremat
from fxremat.settings import Search
from tests.toys import WIDTH, Loss, Stack, assert_as_plain, record, rows, scalar
from tests.training import gradients_of, same, unequal

pytestmark = pytest.mark.usefixtures("torch_ready")
FAST: Any = {"search": Search(seconds=0.0)}


class Scaled(Stack):
    """A stack with an attribute that forward reads, and a method that calls the model."""

    def __init__(self) -> None:
        super().__init__(depth=3)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


def compiled(model: nn.Module, mem: int | str = "100%") -> Any:
    return fxremat.compile(model, mem, **FAST)


# --- class, attributes, methods ---------------------------------------------------------------------------


def test_it_is_an_instance_of_the_models_class_of_the_same_name() -> None:
    module = compiled(Scaled())
    assert isinstance(module, Scaled)
    assert type(module).__name__ == "Scaled"
    assert type(module).__qualname__ == "Scaled"
    assert type(module).__module__ == __name__
    assert module._get_name() == "Scaled"
    assert type(module) is type(compiled(Scaled()))
    assert repr(module) == repr(Scaled())


def test_attributes_set_on_either_are_set_on_both() -> None:
    model = Scaled()
    module = compiled(model)
    module.scale = 3.0
    assert model.scale == 3.0
    model.note = "here"  # type: ignore[assignment]
    assert module.note == "here"
    del module.note
    assert not hasattr(model, "note")
    module.extra = nn.Linear(2, 2)
    assert "extra.weight" in dict(model.named_parameters())
    module.training = False
    assert not model.training


def test_an_attribute_that_changes_between_calls_reaches_forward() -> None:
    def body(model: nn.Module, x: Tensor) -> list[Tensor]:
        outputs = []
        for scale in (1.0, 0.3):
            model.scale = scale  # type: ignore[assignment]
            outputs.append(model(x))
            scalar(outputs[-1]).backward()
        return outputs

    assert_as_plain(Scaled, rows(), body=body, mem="100%")


def test_a_sequential_can_be_indexed_iterated_and_measured() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    module = compiled(model)
    assert len(module) == 3
    assert module[0] is model[0]
    assert list(module) == list(model)
    assert isinstance(module[:2], nn.Sequential)


def test_looking_at_every_member_before_a_plan_raises_nothing() -> None:
    module = compiled(Scaled())
    assert hasattr(module, "plan")
    assert getattr(module, "plan", 1) is None
    members = dict(inspect.getmembers(module))
    assert members["plan"] is None


def test_a_method_that_calls_the_model_trains_inside_the_budget() -> None:
    module = compiled(Scaled())
    module.loss(rows()).backward()
    assert module.plan is not None


def test_copies_are_of_the_models_class_and_plan_for_themselves() -> None:
    module = compiled(Scaled())
    module.loss(rows()).backward()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(twin).__name__ == "Scaled"
        assert isinstance(twin, Scaled)
        assert twin.plan is None
        assert all(p is not q for p, q in zip(twin.parameters(), module.parameters(), strict=True))
        twin.loss(rows()).backward()
        assert twin.plan is not None


def test_a_subclass_hook_of_the_models_class_is_left_alone() -> None:
    made: list[type] = []

    class Registers(Stack):
        def __init_subclass__(cls, **_: Any) -> None:
            made.append(cls)

    compiled(Registers())
    assert made == []


# --- forward and hooks ------------------------------------------------------------------------------------


def test_hooks_of_the_model_run_once_whenever_they_are_registered() -> None:
    def body(model: Any, x: Tensor) -> list[Tensor]:
        outputs = [model(x)]
        model.register_forward_pre_hook(lambda _, given: (given[0] + 1,))
        model.register_forward_hook(lambda _, given, output: output * 1.5)
        outputs.append(model(x))
        model.blocks[1].register_forward_hook(lambda _, given, output: output - 0.5)
        model.register_full_backward_hook(lambda _, gradients, given: None)
        outputs.append(model(x))
        scalar(outputs).backward()
        return outputs

    assert_as_plain(Stack, rows().requires_grad_(), body=body, mem="100%")


def test_a_wrapper_around_forward_set_later_keeps_the_budget() -> None:
    """Accelerate sets such a wrapper for mixed precision."""
    module = compiled(Loss(Stack()))
    inner, calls = module.forward, []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    module.forward = wrapper
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(rows()).backward()
    assert calls == [1]
    assert module.plan is not None
    del module.forward
    module(rows()).backward()
    assert calls == [1]


def test_a_forward_that_was_set_before_is_the_one_that_is_planned() -> None:
    def make() -> nn.Module:
        model = Loss(Stack(dropout=0.0))
        model.forward = lambda x: model.inner(x).sum()  # type: ignore[method-assign]
        return model

    plain, model = make(), make()
    model.load_state_dict(plain.state_dict())
    module = compiled(model)
    assert same(module(rows()), plain(rows()))
    assert module.plan is not None


def test_a_forward_that_replaces_ours_is_told_of_once() -> None:
    module = compiled(Loss(Stack()))
    module.forward = lambda x: x.sum()
    x = rows().requires_grad_()
    with pytest.warns(UserWarning, match="never reached fxremat"):
        module(x).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(x).backward()


def test_a_model_that_was_compiled_in_place_has_a_budget() -> None:
    model = Loss(Stack())
    model.compile(backend="eager")
    module = compiled(model)
    module(rows()).backward()
    assert module.plan is not None
    with pytest.warns(UserWarning, match="changes nothing"):
        module.compile(backend="eager")


# --- graphs inside of graphs ------------------------------------------------------------------------------


def test_a_compiled_part_keeps_its_budget_inside_of_torch_compile() -> None:
    part = compiled(Stack(depth=2))
    whole = nn.Sequential(nn.Linear(WIDTH, WIDTH), part, nn.Linear(WIDTH, 4))
    scalar(torch.compile(whole, backend="aot_eager")(rows())).backward()
    assert part.plan is not None
    torch._dynamo.reset()
    with pytest.raises(Exception, match="plans its own graph within its own budget"):
        torch.compile(whole, backend="aot_eager", fullgraph=True)(rows())


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (lambda: nn.Sequential(compiled(Stack())), "'0' of this model is compiled already"),
        (lambda: compiled(Stack()), "compiled already"),
        (lambda: nn.DataParallel(Stack()), r"DataParallel\(fxremat.compile"),
        (lambda: torch.jit.script(nn.Linear(2, 2)), "TorchScript"),
        (lambda: "model", "str"),
    ],
)
def test_what_cannot_be_compiled_says_so(wrong: Callable[[], Any], hint: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.script is deprecated
        model = wrong()
    with pytest.raises(fxremat.FxrematError, match=hint) as error:
        compiled(model)
    assert "\n" not in str(error.value)


def test_a_copy_that_was_made_in_another_way_says_so() -> None:
    with pytest.raises(fxremat.FxrematError, match="DistributedDataParallel"):
        compiled(Stack())._replicate_for_data_parallel()


def test_the_class_of_a_compiled_model_makes_plain_models() -> None:
    module = compiled(nn.Linear(WIDTH, 3))
    made = type(module)(WIDTH, 5, bias=False)
    assert type(made) is nn.Linear
    assert made(rows()).shape == (len(rows()), 5)
    assert compiled(made)(rows()).shape == (len(rows()), 5)
    assert copy.copy(module)(rows()).shape == copy.deepcopy(module)(rows()).shape == (len(rows()), 3)


def test_a_torch_compiled_model_is_compiled_itself() -> None:
    module = compiled(torch.compile(Loss(Stack()), backend="eager"))  # type: ignore[arg-type]
    assert type(module).__name__ == "Loss"
    module(rows()).backward()
    assert module.plan is not None


def test_what_traces_the_module_sees_the_plain_model() -> None:
    module = compiled(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    assert same(torch.fx.symbolic_trace(module)(rows()), module(rows()))
    exported = torch.export.export(module, (rows(),)).module()
    assert same(exported(rows()), module(rows()))
    assert len(module.fxremat.plans) == 1


def test_transforms_of_torch_func_run_the_plain_model_and_say_so() -> None:
    module = compiled(Loss(Stack(dropout=0.0)))
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(given: Any) -> Tensor:
        return torch.func.functional_call(module, given, (rows(),))

    with pytest.warns(UserWarning, match=r"torch\.func"):
        gradients = torch.func.grad(loss)(parameters)
    module(rows()).backward()
    assert all(same(gradients[name], p.grad) for name, p in module.named_parameters())


def test_modes_that_see_each_op_see_those_of_the_plain_model() -> None:
    module = compiled(Loss(Stack(dropout=0.0)))
    module(rows()).backward()
    expected = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    counter = FlopCounterMode(display=False)
    with pytest.warns(UserWarning, match="TorchDispatchMode"), counter:
        module(rows()).backward()
    assert counter.get_total_flops() > 0
    assert all(map(same, expected, (p.grad for p in module.parameters())))


def test_a_recurrent_use_of_one_graph_is_no_second_part() -> None:
    stack = torch.compile(Stack(), backend="fxremat", options={"mem": "100%", **FAST})
    scalar(stack(stack(rows()))).backward()  # type: ignore[operator]


# --- autograd ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 2, pytest.param(1, marks=pytest.mark.long)])
def test_retain_graph_after_ordinary_steps(before: int) -> None:
    def body(model: nn.Module, x: Tensor) -> None:
        for _ in range(before):
            scalar(model(x)).backward()
        loss = scalar(model(x))
        loss.backward(retain_graph=True)
        torch.autograd.grad(loss, list(model.parameters())[:2], retain_graph=True)
        loss.backward()

    assert_as_plain(Stack, rows(), body=body, mem="80%")


class Heads(nn.Module):
    """Two losses; each has a layer of its own behind a shared one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Stack(depth=2)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        shared = self.trunk(x)
        return [head(shared).square().mean() for head in self.heads]


@pytest.mark.parametrize("used", [(0,), *(pytest.param(used, marks=pytest.mark.long) for used in ((1,), (0, 1)))])
def test_what_only_unused_outputs_depend_on_gets_no_gradient(used: tuple[int, ...]) -> None:
    def body(model: nn.Module, x: Tensor) -> Any:
        outputs = model(x)
        sum(outputs[k] for k in used).backward()
        return outputs

    module = assert_as_plain(Heads, rows(), body=body, mem="100%")
    assert [head.weight.grad is not None for head in module.heads] == [k in used for k in (0, 1)]  # type: ignore[union-attr, operator]


class Views(nn.Module):
    """An output, and two that are views of one value; its base may be one of them."""

    def __init__(self, base: bool) -> None:
        super().__init__()
        self.first, self.second, self.base = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), base

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = self.first(x)
        second = self.second(first)
        return first.sin(), second[:, ::2], second if self.base else second[:, 1:]


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("base", [False, True])
def test_what_only_unused_views_depend_on_gets_no_gradient(base: bool, breaks: bool) -> None:
    class Broken(Views):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            x = x.cos()
            torch._dynamo.graph_break()
            return super().forward(x)

    def body(model: nn.Module, x: Tensor) -> None:
        for used in ((0,), (0, 1), (2,), (0, 1, 2), (0,)):
            model.zero_grad(set_to_none=True)
            outputs = model(x)
            sum(outputs[place].square().sum() for place in used).backward()

    make = Broken if breaks else Views
    module = assert_as_plain(lambda: make(base), rows(), body=body, mem="100%")
    assert module.second.weight.grad is None


def test_unused_outputs_are_told_apart_between_steps() -> None:
    def body(model: nn.Module, x: Tensor) -> None:
        first, second = model(x), model(x)
        second[1].backward()
        first[0].backward(retain_graph=True)
        (first[0] + first[1]).backward()

    assert_as_plain(Heads, rows(), body=body, mem="100%")


def test_old_plans_are_let_go() -> None:
    module = compiled(Loss(Stack(depth=1)))
    for n in range(1, 12):
        module(rows(n)).backward()
    assert len(module.fxremat.plans) == 8
    module(rows(1)).backward()


def test_a_call_that_finds_its_graph_sets_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    module = compiled(Loss(Stack()))
    module(rows()).backward()
    monkeypatch.setattr("fxremat.torch_private.capture_settings", None)
    monkeypatch.setattr("fxremat.torch_private.logging_functions", None)
    module(rows()).backward()


def test_models_of_one_class_do_not_share_a_limit_of_graphs() -> None:
    one, other = compiled(Stack(depth=1)), compiled(Stack(depth=1))
    assert one._fxremat.step.__wrapped__.__code__ is not other._fxremat.step.__wrapped__.__code__
    assert record(one, (rows(),), {}).output.shape == record(other, (rows(),), {}).output.shape


class Planner(nn.Module):
    """A model whose attributes have the names of ours."""

    plans = 3

    def __init__(self) -> None:
        super().__init__()
        self.plan = nn.Linear(4, 4)
        self.fxremat = "mine"

    def make_plan(self) -> str:
        return "its own"

    def to_device(self) -> str:
        return "its own"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plan(x).sum()


def test_attributes_of_the_model_come_before_ours() -> None:
    model = Planner()
    compiled = fxremat.compile(model, mem="100%", search=Search(seconds=0), costs="estimate")
    compiled(torch.ones(2, 4)).backward()
    assert compiled.plan is model.plan
    assert (compiled.plans, compiled.fxremat, compiled.make_plan(), compiled.to_device()) == (
        *(3, "mine"),
        *("its own", "its own"),
    )
    compiled.fxremat = "another"
    assert model.fxremat == "another"
    del model.fxremat
    assert compiled.fxremat.plan.predicted_peak <= compiled.fxremat.plans[-1].budget
    assert "peak" in repr(compiled.fxremat)


def test_ours_can_be_set_over_and_come_back() -> None:
    compiled = fxremat.compile(nn.Linear(4, 4), mem="100%", search=Search(seconds=0), costs="estimate")
    assert compiled.plan is None
    compiled.plan = 5
    assert compiled.plan == 5
    del compiled.plan
    assert compiled.plan is None


class NamesOfClasses(nn.Module):
    """Asks for the names of its weight's class, as peft's DoRA does for quantized weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        kind = type(self.layer.weight)
        if kind.__module__.startswith("torchao.") or not kind.__qualname__.endswith("Parameter"):
            x = x + 1
        return self.layer(x).tanh()  # type: ignore[no-any-return]


def test_names_of_classes_end_no_graph() -> None:
    torch.manual_seed(0)
    plain = NamesOfClasses()
    compiled = fxremat.compile(copy.deepcopy(plain), mem="100%", fullgraph=True, search=Search(seconds=0.0))
    x = torch.randn(4, 8)
    for model in (plain, compiled):
        model(x).sum().backward()
    assert unequal(gradients_of(compiled), gradients_of(plain)) == []


@torch.library.custom_op("fxremat_tests::without_backward", mutates_args=())
def without_backward(x: Tensor) -> Tensor:
    """Return x, doubled."""
    return 2 * x


@without_backward.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _fail(ctx: Any, gradient: Tensor) -> None:
    raise RuntimeError("no backward for these sizes")


without_backward.register_autograd(_fail)


class Failing(nn.Module):
    """Calls an op whose backward cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return without_backward(self.first(x)).square().mean()


def test_of_a_backward_that_cannot_be_traced_only_our_warning_tells(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        compiled(Failing())(rows())
    assert [str(each.message).partition(":")[0] for each in told] == ["no part of Failing could be captured as a graph"]
    assert "cannot be planned, and runs as plain PyTorch: RuntimeError: no backward for these sizes" in caplog.text
