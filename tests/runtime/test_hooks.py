"""Hooks of modules: those that only let a value require gradients are left out of captured steps, and nowhere else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxremat
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
def test_a_backward_hook_of_a_submodule_is_refused_by_name_and_one_of_the_model_is_called(register: str) -> None:
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
        fxremat.compile(model, mem="100%", **FAST)(torch.ones(4, WIDTH))
