"""Dropouts drawn from seeds: what the pass writes, what the ops give, and the bits of `torch.compile(model)`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, StatelessSymbolicContext, DimDynamic

from benchmarks.capture import joint_graph
from fxremat.ops.seeded import DECOMPOSITIONS, masked, seeded_mask, seeds
from fxremat.passes.seeded_dropout import draw_from_seeds
from fxremat.step.joint import is_random, read_joint
from fxremat.step.names import parameter_of
from fxremat.step.program import rematerialize
from fxremat.chains.schedule import Schedule
from fxremat.passes.lower import lower
from fxremat.linearize.lay_out import lay_out
from fxremat.torch_private import aot_backend, differentiate_as_eager, real_tensors, taking_a_list

pytestmark = pytest.mark.usefixtures("torch_ready")
aten, ours = torch.ops.aten, torch.ops.fxremat


class Model(nn.Module):
    """Dropouts of three rates, the first in the order of channels last, another of what is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3), nn.Linear(8, 8)
        self.rates = [nn.Dropout(p) for p in (0.1, 0.2, 0.5)]
        self.all, self.none = nn.Dropout(1.0), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.rates
        y = first(self.conv(x).tanh()).flatten(2)
        y = self.linear(second(y.transpose(1, 2).exp()))
        return (third(self.none(y)).relu() + self.all(y)).float().square().mean()


def model_and_input(dtype: torch.dtype, memory_format: torch.memory_format) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(5, 3, 9, 9)
    return Model().to(dtype, memory_format=memory_format), x.to(dtype, memory_format=memory_format)


def compiled(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[[list[Tensor]], Any]:
    """A graph as one region of Inductor's, whose results have the layouts that the graph shows."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    table = select_decomp_table() | DECOMPOSITIONS
    with real_tensors(), torch.no_grad():
        with (mode := FakeTensorMode()):
            fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in inputs]
            region = make_fx(fx.Interpreter(module).run, decomposition_table=table)(*fakes)
        region.graph.eliminate_dead_code()
        with V.set_fake_mode(mode), torch._guards.tracing(torch._guards.TracingContext(mode)):
            joint_graph_passes(region)
            region.recompile()
            outputs = region.graph.output_node()
            outputs.meta["user_visible_output_idxs"] = [*range(len(outputs.args[0]))]
            return taking_a_list(compile_fx_inner(region, fakes, static_input_idxs=()))


def recomputed(module: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
    draw_from_seeds(module.graph)
    module.graph.eliminate_dead_code()
    joint = read_joint(module, num_fwd_outputs)
    (second,) = module.graph.find_nodes(op="call_function", target=aten.exp.default)
    layout = lay_out(joint, [op.index for op in joint.forward_ops if op.node is second])
    program = rematerialize(layout, Schedule.parse("Fck1 Fall2 B2 Fall1 B1"))
    forward, backward = lower(program)
    print(forward.graph)
    print(backward.graph)
    return forward, backward


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_x(dtype, memory_format) -> None:
    model, x = model_and_input(dtype, memory_format)
    results = []
    for backend in (aot_backend(fw_compiler=compiled, bw_compiler=compiled, partition_fn=recomputed), "inductor"):
        torch._dynamo.reset()
        model.zero_grad()
        with differentiate_as_eager():
            torch.manual_seed(3)
            loss = torch.compile(model, backend=backend)(x)
        loss.backward()
        results.append([loss, *[p.grad for p in model.parameters()], torch.rand(2)])
    for a, b in zip(*results):
        print((a - b).abs().max(), b.abs().max())
