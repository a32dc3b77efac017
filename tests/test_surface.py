"""A compiled model is a drop-in: what an ordinary training loop does with a module works, bit for bit.

Unless a test says otherwise the model is compiled at its least budget, where nearly everything is recomputed.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat
from fxremat.settings import Offload
from tests.toys import QUICK, WIDTH, Loss, Stack, assert_as_plain, mse, record, rows, scalar, under_autocast
from tests.training import same

pytestmark = pytest.mark.usefixtures("torch_ready")
LOGGER = logging.getLogger(__name__)


# --- the module -------------------------------------------------------------------------------------------


def test_parameters_are_the_same_tensors() -> None:
    model = Stack()
    compiled = fxremat.compile(model, mem="100%", **QUICK)
    scalar(compiled(rows())).backward()
    assert list(dict(compiled.named_parameters())) == list(dict(model.named_parameters()))
    assert all(a is b for a, b in zip(compiled.parameters(), model.parameters(), strict=True))
    assert all(p.grad is not None for p in model.parameters())


def test_state_dicts_load_both_ways() -> None:
    one, other = Stack(), Stack()
    compiled = fxremat.compile(one, mem="100%", **QUICK)
    assert list(compiled.state_dict()) == list(one.state_dict())
    other.load_state_dict(compiled.state_dict())
    assert all(same(p, q) for p, q in zip(other.parameters(), one.parameters(), strict=True))
    fresh = Stack()
    compiled.load_state_dict(fresh.state_dict())
    assert all(same(p, q) for p, q in zip(one.parameters(), fresh.parameters(), strict=True))


def test_loading_a_state_dict_after_planning_takes_effect() -> None:
    compiled, fresh = fxremat.compile(Stack(), mem="100%", **QUICK), Stack()
    compiled(rows())
    compiled.load_state_dict(fresh.state_dict())
    assert _same_steps(compiled, fresh)


def test_train_and_eval_reach_the_model() -> None:
    model = Stack()
    compiled = fxremat.compile(model, mem="100%", **QUICK)
    assert compiled.training
    compiled.eval()
    assert not model.training
    assert not model.blocks[0].training
    compiled.train()
    assert model.training


def test_eval_and_no_grad_run_the_plain_model() -> None:
    """With a budget of one byte, so that planning would fail."""
    model = Stack()
    compiled = fxremat.compile(model, mem=1)
    x = rows()
    with torch.no_grad():
        torch.manual_seed(0)
        expected = model(x)
        torch.manual_seed(0)
        assert same(compiled(x), expected)
    compiled.eval()
    assert same(compiled(x), model(x))
    assert compiled(x).requires_grad


def test_training_goes_on_after_eval() -> None:
    def body(model: nn.Module, x: Tensor) -> list[Tensor]:
        outputs = []
        for _ in range(2):
            outputs.append(model.train()(x))
            scalar(outputs[-1]).backward()
            outputs.append(model.eval()(x))
        return outputs

    assert_as_plain(Stack, rows(), body=body)


def test_the_uncompiled_model_is_unaffected() -> None:
    model = Stack()
    compiled = fxremat.compile(model, mem="100%", **QUICK)
    scalar(compiled(rows())).backward()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is Stack
        assert all(
            same(p, q) and p is not q for p, q in zip(twin.parameters(), model.parameters(), strict=True)
        )
        assert _same_steps(twin, model)


def test_planning_at_once_or_at_the_first_call_is_the_same() -> None:
    torch.manual_seed(1)
    early = fxremat.compile(Stack(), mem="80%", example_inputs=(rows(),), **QUICK)
    late = fxremat.compile(Stack(), mem="80%", **QUICK)
    late(rows())
    assert early.plan.budget == late.plan.budget
    assert str(early.plan.schedule) == str(late.plan.schedule)


def test_before_planning_there_is_no_plan() -> None:
    compiled = fxremat.compile(Stack(), mem="80%", **QUICK)
    compiled.eval()(rows())
    assert compiled.plan is None
    assert compiled.fxremat.plans == ()
    compiled.train()(rows())
    assert compiled.plan is compiled.fxremat.plans[-1]


def test_nested_in_a_larger_module() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), Stack(), nn.Linear(WIDTH, 4))
    nested = copy.deepcopy(plain)
    nested[1] = fxremat.compile(nested[1], mem="100%", **QUICK)
    assert list(nested.state_dict()) == list(plain.state_dict())
    assert _same_steps(nested, plain)


def test_forward_has_the_signature_of_the_models() -> None:
    """Trainers look there, at the object and at its class, for the names of inputs and labels."""
    compiled = fxremat.compile(Structured(), mem="100%", **QUICK)
    for forward in (compiled.forward, type(compiled).forward):
        assert [name for name in inspect.signature(forward).parameters if name != "self"] == [
            "x",
            "scale",
            "extra",
        ]
    assert type(copy.deepcopy(compiled)).__name__ == "Structured"


# --- inputs and outputs -----------------------------------------------------------------------------------


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()

    def forward(self, x: Tensor, *, scale: float = 1.0, extra: Tensor | None = None) -> dict[str, Any]:
        y = self.stack(x if extra is None else x + extra)
        return {"y": y, "parts": (y.sum() * scale, None), "count": 3, "plain": x.detach() + 1}


def test_keywords_and_nested_outputs_with_none() -> None:
    assert_as_plain(Structured, rows(), scale=0.5, extra=rows(seed=1))


def test_keywords_left_out() -> None:
    assert_as_plain(Structured, rows())


def test_an_output_that_is_none() -> None:
    class Optional(Stack):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), None

    assert_as_plain(Optional, rows())


def test_only_one_of_two_outputs_is_used() -> None:
    class Two(Stack):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y, self.blocks[0](y)

    def body(model: nn.Module, x: Tensor) -> Any:
        outputs = model(x)
        scalar(outputs[0]).backward()
        return outputs

    assert_as_plain(Two, rows(), body=body)


def test_outputs_that_are_views_of_one_another_or_of_an_input() -> None:
    class Views(Stack):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y, y.t(), x[:3]

    def body(model: nn.Module, x: Tensor) -> Any:
        outputs = model(x)
        scalar(outputs[0]).backward()
        return outputs

    assert_as_plain(Views, rows(), body=body)


def test_integer_inputs_and_an_embedding() -> None:
    class Words(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, WIDTH)

        def forward(self, words: Tensor) -> Tensor:
            return super().forward(self.embedding(words))

    assert_as_plain(Words, torch.arange(128) % 50)


def test_input_gradients() -> None:
    compiled = assert_as_plain(Stack, rows().requires_grad_())
    assert compiled.plan.predicted_peak > 0


def test_an_input_gradient_that_others_are_made_of() -> None:
    class Shifted(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.tanh(x + self.shift)) + x

    class Places(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Embedding(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.places(torch.arange(WIDTH)).mean(0)
            return x + super().forward(x)

    assert_as_plain(Shifted, rows().requires_grad_())
    assert_as_plain(Places, rows().requires_grad_())


def test_an_input_modified_in_place() -> None:
    class InPlace(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            return super().forward(x)

    def body(model: nn.Module, x: Tensor) -> Any:
        y = model(x)
        scalar(y).backward()
        return y, x

    assert_as_plain(InPlace, rows(), body=body)


def test_values_modified_in_place_inside() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = F.relu_(layer(x).add_(1))
            return x

    assert_as_plain(InPlace, rows())


def test_new_shapes_are_planned_anew() -> None:
    def body(model: nn.Module, x: Tensor) -> list[Tensor]:
        outputs = []
        for n in (128, 96, 128, 64):
            outputs.append(model(x[:n]))
            scalar(outputs[-1]).backward()
        return outputs

    assert_as_plain(Stack, rows(), body=body, mem="100%")


# --- parameters and buffers -------------------------------------------------------------------------------


def test_tied_weights() -> None:
    class Tied(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[4][0].weight = self.blocks[1][0].weight  # type: ignore[index]

    assert_as_plain(Tied, rows())


@pytest.mark.parametrize("frozen", [(0, 1), (2, 3), (5,)])
def test_frozen_parameters_get_no_gradient(frozen: tuple[int, ...]) -> None:
    def make() -> Stack:
        stack = Stack()
        for i in frozen:
            stack.blocks[i].requires_grad_(False)
        return stack

    compiled = assert_as_plain(make, rows())
    assert [p.grad is None for p in compiled.parameters()] == [
        not p.requires_grad for p in compiled.parameters()
    ]


def test_a_parameter_that_forward_does_not_use() -> None:
    class Spare(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Parameter(torch.ones(3))

    assert_as_plain(Spare, rows())


def test_buffers_are_updated_once() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(5)
            )
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            for layer in self.layers:
                x = layer(x)
            return x

    compiled = assert_as_plain(Counting, rows())
    assert compiled.get_buffer("calls") == 1


# --- autograd ---------------------------------------------------------------------------------------------


def test_loss_outside_the_model() -> None:
    def body(model: nn.Module, x: Tensor) -> Tensor:
        loss = mse(model(x)) + model(x).abs().mean()
        loss.backward()
        return loss

    assert_as_plain(Stack, rows(), body=body)


def test_gradient_accumulation() -> None:
    def body(model: nn.Module, x: Tensor) -> None:
        for part in x.chunk(2):
            scalar(model(part)).backward()

    assert_as_plain(Stack, rows(), body=body)


def test_retain_graph() -> None:
    def body(model: nn.Module, x: Tensor) -> None:
        loss = scalar(model(x))
        loss.backward(retain_graph=True)
        loss.backward()

    assert_as_plain(Stack, rows(), body=body)


def test_autograd_grad_of_some_parameters() -> None:
    def body(model: nn.Module, x: Tensor) -> Any:
        return torch.autograd.grad(scalar(model(x)), list(model.parameters())[2:5])

    assert_as_plain(Stack, rows(), body=body)


def test_a_forward_whose_backward_never_comes() -> None:
    def body(model: nn.Module, x: Tensor) -> Tensor:
        model(x)
        y = model(x)
        scalar(y).backward()
        return y

    assert_as_plain(Stack, rows(), body=body)


class Doubled(torch.autograd.Function):
    """x * 2 with a gradient of 3, so that it shows when it is bypassed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 + 0 * x


def test_a_custom_autograd_function() -> None:
    class Custom(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](Doubled.apply(super().forward(x)))

    assert_as_plain(Custom, rows())


def test_forward_hooks() -> None:
    def make() -> Stack:
        stack = Stack()
        stack.blocks[2].register_forward_hook(lambda module, args, output: output * 1.5)
        stack.blocks[3].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        return stack

    assert_as_plain(make, rows())


@pytest.mark.parametrize("scale", [1, 2])
def test_inputs_that_forward_pre_hooks_make_are_told_of(scale: int, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Stack:
        stack = Stack()
        stack.register_forward_pre_hook(lambda module, args: (args[0] * scale if scale > 1 else args[0],))
        return stack

    assert_as_plain(make, rows())
    told = [text for text in caplog.messages if text.startswith("forward pre-hooks of Stack make")]
    assert len(told) == (scale > 1)


def test_inputs_of_a_subclass_without_kernels() -> None:
    class Image(Tensor):
        """A tensor of a class of its own, such as torchvision's `tv_tensors.Image`."""

    assert_as_plain(Stack, rows().as_subclass(Image))


def test_autocast() -> None:
    assert_as_plain(Stack, rows(), body=under_autocast)


def test_autocast_on_and_off_are_planned_apart() -> None:
    def body(model: nn.Module, x: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = [model(x)]
        outputs.append(model(x))
        scalar(outputs).backward()
        return outputs

    assert_as_plain(Stack, rows(), body=body, mem="100%")


# --- torch.compile's front door ---------------------------------------------------------------------------


def test_as_a_backend_of_torch_compile() -> None:
    model = Loss(Stack())
    compiled = torch.compile(model, backend="fxremat", options={"mem": "100%"})
    expected = record(copy.deepcopy(model), (rows(),), {})
    got = record(compiled, (rows(),), {})  # type: ignore[arg-type]
    assert same(got.output, expected.output)
    for ours, theirs in zip(got.gradients.values(), expected.gradients.values(), strict=True):
        assert same(ours, theirs)


# --- what cannot work -------------------------------------------------------------------------------------


def test_a_graph_break_names_its_line() -> None:
    class Prints(Stack):
        def forward(self, x: Tensor) -> Tensor:
            print("shape", x.shape)
            return super().forward(x)

    _assert_capture_fails(Prints(), "print(")


def test_data_dependent_control_flow_names_its_line() -> None:
    class Branches(Stack):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum().item() > 0:
                x = x + 1
            return super().forward(x)

    _assert_capture_fails(Branches(), ".item()")


def test_messages_of_any_kind_do_not_break_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries add methods to loggers; what they write is left out."""

    @functools.lru_cache(None)
    def warning_once(self: logging.Logger, message: str) -> None:
        self.warning(message)

    monkeypatch.setattr(logging.Logger, "warning_once", warning_once, raising=False)

    class Talks(Stack):
        def forward(self, x: Tensor) -> Tensor:
            LOGGER.info("shape %s", x.shape)
            LOGGER.warning_once("once")  # type: ignore[attr-defined]
            return super().forward(x)

    assert_as_plain(Talks, rows(), mem="100%")


def test_the_line_that_is_named_is_the_models() -> None:
    """Not the one inside of torch that it leads to."""

    class Registers(Stack):
        def forward(self, x: Tensor) -> Tensor:
            self.register_buffer("last", x, bool(x.sum() > 0))
            return super().forward(x)

    _assert_capture_fails(Registers(), "self.register_buffer(" + '"last"')


def test_inputs_that_the_model_does_not_take_while_its_weights_may_be_on_the_host() -> None:
    model = Stack()
    hosted = Offload(weights=True, activations=False)
    options: Any = {**QUICK, "offload": hosted, "optimizer": torch.optim.SGD(model.parameters())}
    with pytest.raises(fxremat.CaptureError, match=r"reduction dim.*plain model") as error:
        fxremat.compile(model, mem="100%", **options)(torch.zeros(3, WIDTH + 1))
    _assert_one_line(error.value, "toys.py")


def test_a_failure_after_tracing_says_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise NotImplementedError("no such op")

    monkeypatch.setattr("fxremat.runtime.dynamo.read_joint", broken)
    with pytest.raises(fxremat.CaptureError) as error:
        fxremat.compile(Stack(), mem="100%", fullgraph=True, **QUICK)(rows())
    _assert_one_line(error.value, "no such op")
    assert isinstance(error.value.__cause__, NotImplementedError)


def test_a_model_without_trainable_parameters_runs_and_has_nothing_to_plan() -> None:
    model = Stack(dropout=0.0).requires_grad_(False)
    compiled = fxremat.compile(model, mem="100%", **QUICK)
    assert same(compiled(rows()), model(rows()))
    with pytest.raises(fxremat.FxrematError) as error:
        fxremat.plan(model, (rows(),), mem="100%", **QUICK)
    _assert_one_line(error.value, "nothing to plan")


@pytest.mark.parametrize("mem", [1.5, 0.6, None, True, 0, -1, "lots", "", "-3MB", "0%", "60 x", b"4GiB", [4]])
def test_a_wrong_mem_shows_the_right_forms(mem: Any) -> None:
    with pytest.raises(fxremat.FxrematError) as error:
        fxremat.compile(Stack(), mem=mem, **QUICK)
    _assert_one_line(error.value, "4GiB")


def test_auto_needs_a_gpu_and_says_so() -> None:
    with pytest.raises(fxremat.FxrematError) as error:
        fxremat.compile(Stack(), mem="auto")(rows())
    _assert_one_line(error.value, "CUDA")


@pytest.mark.parametrize("mem", ["4 GB", "4GB", "4 GiB", "1500MB", "100 %", 10**9])
def test_the_right_forms_of_mem(mem: int | str) -> None:
    scalar(fxremat.compile(Stack(depth=2), mem=mem, **QUICK)(rows())).backward()


def _assert_capture_fails(model: nn.Module, code: str) -> None:
    """CaptureError naming the line of this file that holds `code` first."""
    with open(__file__) as source:
        line = next(number for number, text in enumerate(source, 1) if code in text)
    with pytest.raises(fxremat.CaptureError, match=rf"test_surface\.py:{line}\b"):
        fxremat.compile(model, mem="100%", fullgraph=True, **QUICK)(rows())


def _assert_one_line(error: Exception, hint: str) -> None:
    assert "\n" not in str(error)
    assert hint in str(error)


def _same_steps(one: nn.Module, other: nn.Module) -> bool:
    one.zero_grad()
    other.zero_grad()
    first = record(one, (rows(),), {})
    one.zero_grad()
    other.zero_grad()
    second = record(other, (rows(),), {})
    pairs = zip(first.gradients.values(), second.gradients.values(), strict=True)
    return same(first.output, second.output) and all(same(a, b) for a, b in pairs)
