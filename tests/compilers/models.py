"""Small models, and their training steps as other compilers capture them."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import (
    aot_compile_joint_with_descriptors,
    aot_export_joint_with_descriptors,
)
from torch.fx.experimental.proxy_tensor import make_fx

from fxremat.passes import as_emitted
from fxremat.torch_private import copied

WORDS, WIDTH = 64, 32


class Gpt(nn.Module):
    """Blocks of causal attention with dropout, and the loss of the next word."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        length = words.shape[1]
        mask = torch.triu(torch.full((length, length), float("-inf")), 1)
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


class ResNet(nn.Module):
    """Residual blocks of convolutions and BatchNorms."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)),
                *(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3))).square().mean()


class EncoderDecoder(nn.Module):
    """A T5-like transformer: the encoder's output is read by every layer of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 2 * WIDTH, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        return F.cross_entropy(self.head(self.transformer(x, x)).flatten(0, 1), words.flatten())


class Experts(nn.Module):
    """A router sends each token to two of four experts, which are grouped matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.router = nn.Linear(16, 4)
        self.weight = nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.up:
            x = layer(x).tanh()
        share, chosen = self.router(x).softmax(-1).topk(2, -1)
        expert = chosen.flatten()
        order = expert.argsort(stable=True)
        rows = x.repeat_interleave(2, 0)[order]
        ends = torch.histc(expert.float(), 4, 0, 3).cumsum(0).to(torch.int32)
        made = torch._grouped_mm(rows.bfloat16(), self.weight.bfloat16(), offs=ends).float()
        back = torch.zeros_like(rows).index_copy(0, order, made).view(-1, 2, 16)
        return (back * share[..., None]).sum(1).square().mean()


@dataclass(frozen=True)
class Case:
    """A model with an input."""

    model: nn.Module
    x: Tensor
    name: str = ""  # that the case can be made again by


def case(name: str) -> Case:
    torch.manual_seed(0)
    makers: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
        "gpt": lambda: (Gpt(), torch.randint(0, WORDS, (4, 16))),
        "resnet": lambda: (ResNet(), torch.randn(4, 3, 16, 16)),
        "encoder and decoder": lambda: (EncoderDecoder(), torch.randint(0, WORDS, (4, 12))),
        "experts": lambda: (Experts(), torch.randn(64, 16)),
    }
    return Case(*makers[name](), name)


NAMES = ("gpt", "resnet", "encoder and decoder", "experts")
EVERY_DAY = [pytest.param(name, marks=() if name in ("gpt", "resnet") else pytest.mark.long) for name in NAMES]


def joint_step(case: Case, partition_fn: Any) -> Callable[[], list[Tensor]]:
    """A step by AOTAutograd's own door, on a copy of the model; it returns the loss, gradients and buffers."""
    model = copy.deepcopy(case.model)
    with contextlib.ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, model, (case.x,))
        run = aot_compile_joint_with_descriptors(
            joint, partition_fn=partition_fn, fw_compiler=as_emitted, bw_compiler=as_emitted
        )

    def step() -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        loss = run(*model.parameters(), *model.buffers(), case.x)
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return [loss.detach(), *gradients, *model.buffers()]

    return step


def joint_graph(case: Case) -> fx.GraphModule:
    """The joint graph that AOTAutograd passes to a partition function; its first output is the loss.

    A copy, so that graphs of named cases are captured once.
    """
    joint = _joint_graph_of(case.name) if case.name else _captured(case)
    return fx.GraphModule(joint, copied(joint.graph))


@functools.cache
def _joint_graph_of(name: str) -> fx.GraphModule:
    return _captured(case(name))


def _captured(case: Case) -> fx.GraphModule:
    found: list[fx.GraphModule] = []

    def keep(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        from torch._functorch.partitioners import default_partition

        found.append(fx.GraphModule(joint, copied(joint.graph)))
        return default_partition(joint, inputs, **options)

    joint_step(case, keep)
    return found[0]


def full_step(case: Case, mark: str = "partitioner_tag") -> fx.GraphModule:
    """The step as one graph (parameters, buffers, input) -> [loss, gradients]; `mark` is on the nodes of the backward.

    Buffers are not written.
    """
    model = case.model
    names, buffers = [name for name, _ in model.named_parameters()], dict(model.named_buffers())

    def step(parameters: list[Tensor], others: list[Tensor], x: Tensor) -> list[Tensor]:
        leaves = [parameter.detach().requires_grad_() for parameter in parameters]
        given = dict(zip([*names, *buffers], [*leaves, *others], strict=True))
        loss = torch.func.functional_call(model, given, (x,))
        return [loss, *torch.autograd.grad(loss, leaves)]

    given = list(model.parameters()), list(buffers.values()), case.x
    graph: fx.GraphModule = make_fx(step, tracing_mode="fake")(*given)
    loss: Any = graph.graph.output_node().args[0][0]  # type: ignore[index]
    late = False
    for node in graph.graph.nodes:
        if late and node.op == "call_function" and mark:
            node.meta[mark] = "is_backward" if mark == "partitioner_tag" else True
        late |= node is loss
    return graph


def inputs_of(case: Case) -> list[Tensor]:
    """The inputs of `full_step`, in order."""
    return [*case.model.parameters(), *case.model.buffers(), case.x]
