"""Hooks of modules: those that only let a value require gradients are left out of captured steps, and nowhere else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxremat
from benchmarks.meter import peak_bytes
from fxremat.settings import Search
from tests.toys import WIDTH, Stack
from tests.training import same

pytestmark = pytest.mark.usefixtures("torch_ready")
FAST: Any = {"search": Search(seconds=0.0)}


class Adapted(nn.Module):
    """A frozen embedding, and layers that train, checkpointed as reentrant checkpointing does where it is asked for."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Sequential(Stack(1), nn.Dropout(0.2)) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x: Any = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.square().mean()


def let_require_grad(module: nn.Module, inputs: Any, output: Tensor) -> None:
    output.requires_grad_(True)


def let_input_require_grad(module: nn.Module, inputs: Any) -> None:
    inputs[0].requires_grad_(True)


def step(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(7)
    loss = model(tokens)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_hooks_that_only_call_requires_grad_are_left_out_of_captured_steps(reentrant: bool | None) -> None:
    torch.manual_seed(0)
    plain = Adapted(reentrant)
    hooked = copy.deepcopy(plain)
    for model in (plain, hooked):
        model.layers[0].register_forward_pre_hook(let_input_require_grad)
        model.embedding.register_forward_hook(let_require_grad)
        model.embedding.register_forward_hook(lambda module, inputs, output: output * 1.5)
    compiled = fxremat.compile(hooked, mem="80%", **FAST)
    hooks = dict(hooked.embedding._forward_hooks)
    tokens = torch.arange(128).reshape(8, 16) % 16
    for _ in range(2):
        assert all(map(same, step(compiled, tokens), step(plain, tokens)))
    assert len(compiled.fxremat.plans) == 1
    assert list(hooked.embedding._forward_hooks.items()) == list(hooks.items())
    assert hooked.embedding(tokens).requires_grad, "plain calls run every hook"


def test_a_hook_that_does_more_is_not_left_out() -> None:
    model = Adapted(None)
    model.embedding.register_forward_hook(lambda module, inputs, output: output.clone().requires_grad_(True))
    with pytest.raises(fxremat.CaptureError, match="requires_grad_"):
        fxremat.compile(model, mem="90%", fullgraph=True, **FAST)(torch.arange(4))


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_backward_hook_of_a_submodule_is_no_part_of_a_graph_and_one_of_the_model_is_called(register: str) -> None:
    seen: list[str] = []

    def note(module: nn.Module, *gradients: Any) -> None:
        seen.append(type(module).__name__)

    module: Any = fxremat.compile(Stack(2), mem="100%", **FAST)
    getattr(module, register)(note)
    module(torch.ones(4, WIDTH).requires_grad_()).sum().backward()
    assert seen == ["Stack"]
    model = nn.Sequential(Stack(1), nn.Linear(WIDTH, 2))
    getattr(model[1], register)(note)
    says = r"note is a backward hook of the submodule '1' \(Linear\).*remove it"
    with pytest.raises(fxremat.CaptureError, match=says):
        fxremat.compile(model, mem="100%", fullgraph=True, **FAST)(torch.ones(4, WIDTH))


@pytest.mark.parametrize("broken", [False, True], ids=["one graph", "several"])
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
def test_hooks_of_all_modules_are_called_from_when_they_are_registered_to_when_they_are_removed(broken: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Blocks(cumulative=broken), nn.Flatten(0))
    ours = copy.deepcopy(plain)
    compiled = fxremat.compile(ours, mem="100%", **FAST)

    def double(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        return output * 2 if isinstance(module, nn.Dropout) else None

    x, losses = torch.randn(64, WIDTH), []
    for number in range(6):
        if number == 2:
            handle = nn.modules.module.register_module_forward_hook(double)
        if number == 4:
            handle.remove()
        expected = step(plain, x)
        assert all(map(same, step(compiled, x), expected))
        losses.append(expected[0].item())
    assert losses[1] != losses[2]


class Blocks(nn.Module):
    """Blocks one after another, one of which averages over all batches so far, if `cumulative`."""

    def __init__(self, cumulative: bool) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(Stack(1), nn.Dropout(0.1)) for _ in range(4)))
        if cumulative:
            self.blocks[1].append(nn.BatchNorm1d(WIDTH, momentum=None))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


@pytest.mark.parametrize(
    ("what", "mem"),
    [
        ("a hook", "min"),
        pytest.param("a hook", "100%", marks=pytest.mark.long),
        ("a hook from the third step on", "100%"),
        ("a cumulative average", "min"),
    ],
)
def test_around_what_no_graph_computes_a_model_is_several_graphs(
    what: str, mem: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    plain = Blocks(what == "a cumulative average")
    ours = copy.deepcopy(plain)
    seen: dict[nn.Module, list[Tensor]] = {plain: [], ours: []}
    compiled = fxremat.compile(ours, mem, **FAST)

    def hooked(model: nn.Module) -> None:
        def halve(module: nn.Module, inputs: tuple[Tensor], outputs: tuple[Tensor]) -> tuple[Tensor]:
            seen[model].append(outputs[0].clone())
            return (inputs[0] / 2,)

        model.get_submodule("blocks.1").register_full_backward_hook(halve)

    x = torch.randn(64, WIDTH)
    for number in range(6):
        if number == (2 if "third" in what else 0) and "hook" in what:
            hooked(plain)
            hooked(ours)
        assert all(map(same, step(compiled, x), step(plain, x)))
        assert all(map(same, ours.buffers(), plain.buffers()))
    assert all(map(same, seen[ours], seen[plain]))
    assert len(seen[ours]) == len(seen[plain])
    assert peak_bytes(lambda: compiled(x).backward()) <= compiled.plan.budget
    says = "'blocks.1' (Sequential), which has the backward hook "
    says = "'blocks.1.2' (BatchNorm1d), which has momentum=None" if "average" in what else says
    assert f"tracing stops at {says}" in caplog.text
    assert says in str(compiled.plan)


class Pooled(nn.Module):
    """Computes pooled values that nobody reads; `breaks` ends a graph behind them."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.first, self.pooler, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.breaks = breaks

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        self.pooler(x).tanh()
        if self.breaks:
            torch._dynamo.graph_break()
        x = self.last(x)
        return x.square().mean(), x


@pytest.mark.parametrize("breaks", [False, True])
def test_parameters_without_a_gradient_are_not_reached(breaks: bool) -> None:
    """Update the parameters in hooks, as soon as their gradients are there."""

    def update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    torch.manual_seed(0)
    plain = Pooled(breaks=breaks)
    hooked = copy.deepcopy(plain)
    for parameter in (*plain.parameters(), *hooked.parameters()):
        parameter.register_post_accumulate_grad_hook(update)
    compiled: Any = fxremat.compile(hooked, mem="100%", **FAST)
    for _ in range(4):
        x = torch.randn(64, WIDTH)
        for model in (compiled, plain):
            model(x)[0].backward()
    assert all(map(same, compiled.parameters(), plain.parameters()))
