"""Ops that are not PyTorch's own kernels: custom ops, control flow, regions that are compiled once, FlexAttention.

Each is planned from a model, and through the doors for other compilers from a joint graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch._higher_order_ops import scan
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fxremat
from fxremat.compilers.planned_text import planned_text
from fxremat.passes import InductorPartitioner, as_emitted, from_text, partitioner, tag, to_text
from fxremat.plans import Plan
from tests.compilers.models import Case, joint_graph, joint_step
from tests.steps import differences, step_of

pytestmark = pytest.mark.usefixtures("torch_ready")

QUICK = fxremat.Search(seconds=0.0, progress=False)


@torch.library.custom_op("fxremat_tests::scaled", mutates_args=())
def scaled(x: Tensor, factor: float) -> Tensor:
    """Return a multiple, as an op that PyTorch knows nothing of."""
    return x * factor


@scaled.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


def _note(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.factor = inputs[1]


scaled.register_autograd(lambda ctx, gradient: (scaled(gradient, ctx.factor), None), setup_context=_note)


@torch.library.custom_op("fxremat_tests::add_sines", mutates_args=("to",))
def add_sines(x: Tensor, to: Tensor) -> None:
    """Overwrite an argument."""
    to.add_(x.sin())


@torch.library.custom_op("fxremat_tests::noisy", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noisy(x: Tensor) -> Tensor:
    """Return the argument with noise."""
    return x + torch.rand_like(x)


@noisy.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


noisy.register_autograd(lambda ctx, gradient: gradient)


@torch.compiler.nested_compile_region
def gelu_of(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(layer(x))


def in_custom_op(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.tanh(scaled(layer(x), 2.0))


def in_overwriting_op(layer: nn.Module, x: Tensor) -> Tensor:
    y = layer(x)
    to = torch.zeros_like(y)
    add_sines(y.detach(), to)
    return y * to


def in_noisy_op(layer: nn.Module, x: Tensor) -> Tensor:
    return noisy(layer(x)).sin()


def in_cond(layer: nn.Module, x: Tensor) -> Tensor:
    x = layer(x)
    found: Tensor = torch.cond(x.sum() > 0, lambda y: y.sin() * 2, lambda y: y.cos() * 3, (x,))
    return found


def in_cond_with_noise(layer: nn.Module, x: Tensor) -> Tensor:
    x = layer(x)
    found: Tensor = torch.cond(x.sum() > 0, lambda y: noisy(y) * 2, lambda y: noisy(y) + 1, (x,))
    return found.sin()


KINDS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "custom op": in_custom_op,
    "overwriting op": in_overwriting_op,
    "noisy op": in_noisy_op,
    "region": gelu_of,
    "cond": in_cond,
    "cond with noise": in_cond_with_noise,
}
EVERY_DAY = [pytest.param(kind, marks=() if kind in ("custom op", "cond") else pytest.mark.long) for kind in KINDS]
AGAIN = {  # ops that plans for little memory recompute
    "custom op": "fxremat_tests.scaled.default",
    "overwriting op": "auto_functionalized_v2",
    "noisy op": "fxremat_tests.noisy.default",
    "region": "aten.gelu.default",
    "cond": "cond",
    "cond with noise": "cond",
}


class Stack(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = KINDS[self.kind](layer, x)
        return x.square().mean()


def case(kind: str) -> Case:
    torch.manual_seed(0)
    return Case(Stack(kind), torch.randn(256, 16))  # values are larger than the state of a generator


def recomputed(plan: Plan) -> set[str]:
    return {str(plan.captured.nodes[op].target) for op in plan.program.repeated}


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_kept_and_recomputed_like_others(kind: str) -> None:
    one = case(kind)
    ours, plain = fxremat.compile(copy.deepcopy(one.model), mem="min", search=QUICK), one.model
    if kind == "cond with noise":  # the backward of PyTorch's own cond draws anew
        plain = fxremat.compile(plain, mem="100%", search=QUICK)

    def seeded(model: nn.Module) -> Any:
        torch.manual_seed(1)
        return model(one.x)

    steps = [step_of(model, lambda model=model: seeded(model), lambda loss: loss) for model in (ours, plain)]  # type: ignore[misc]
    assert differences(*steps) == []
    plan = ours.plan
    assert plan.check(runs=2).peak == plan.predicted_peak
    assert AGAIN[kind] in recomputed(plan)


@pytest.mark.parametrize("kind", EVERY_DAY)
def test_they_are_planned_in_a_joint_graph_for_this_device_and_another(kind: str) -> None:
    one = case(kind)
    expected = joint_step(one, default_partition)()
    within = partitioner("min", costs="H100", search=QUICK)
    assert all(map(torch.equal, joint_step(one, within)(), expected))
    assert within.plan is not None
    assert "as predicted" in str(within.plan.check())
    assert within.plan.program.repeated
    assert "as predicted" in str(fxremat.plan(one.model, (one.x,), mem="min", costs="H100", search=QUICK).check())


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_written_as_text_and_read_back(kind: str) -> None:
    joint = joint_graph(case(kind))
    text = to_text(joint, 1)
    assert to_text(from_text(text).module, 1) == text
    mine = fxremat.capture(joint, num_fwd_outputs=1, search=QUICK).plan("min")
    assert any("recompute" in node.meta for node in tag(joint, mine).graph.nodes)
    plan, written = planned_text(text, "min", search=QUICK)
    assert plan.predicted_peak == mine.predicted_peak
    assert ("torch.ops.higher_order.cond(" in written) == ("cond" in kind)
    if "cond" in kind:
        assert written.startswith("def true_graph_0")


def test_a_graph_in_a_graph_in_a_graph_is_written_and_read() -> None:
    def late(y: Tensor) -> Any:
        return torch.cond(y.mean() > 1, lambda z: z.sin(), lambda z: z.sin() * 2, (y,))

    def step(x: Tensor) -> list[Tensor]:
        found: Tensor = torch.cond(x.sum() > 0, late, lambda y: y.cos() * 3, (x,))
        return [found.sum(), found.square()]

    graph = make_fx(step, tracing_mode="fake")(torch.randn(8, 4))
    text = to_text(graph)
    assert "def true_graph_0__false_graph_0(" in text
    read = from_text(text).module
    assert to_text(read) == text
    for x in (torch.ones(8, 4), -torch.ones(8, 4), 0.1 * torch.ones(8, 4)):
        assert all(map(torch.equal, read(x), graph(x)))
    with pytest.raises(fxremat.CaptureError, match=r"line \d+ .*there is no function true_graph_9 before it"):
        from_text(text.replace("self.true_graph_0\n", "self.true_graph_9\n"))


def test_random_numbers_in_a_branch_are_replayed() -> None:
    for kind, random in (("cond with noise", True), ("cond", False)):
        step = fxremat.capture(joint_graph(case(kind)), num_fwd_outputs=1, search=QUICK)
        assert {op.random for op in step.graph.forward_ops if op.target == "cond"} == {random}


def test_a_higher_order_op_has_the_flops_of_the_graphs_that_it_calls() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = torch.cond(x.sum() > 0, lambda y: y @ self.weight, lambda y: y * 2, (x,))
            return found.square().mean()

    from fxremat.cost.estimate import flops_of

    captured = fxremat.capture(Wide(), (torch.randn(32, 64),), costs="estimate", search=QUICK).graph
    nodes = [node for node in captured.nodes if str(node.target) == "cond"]
    # the backward of the branch is one product, since x needs no gradient
    assert [flops_of(node) for node in nodes] == [2 * 32 * 64 * 64] * 2


def test_ops_of_a_region_belong_to_the_modules_of_their_call() -> None:
    one = case("region")
    plan = fxremat.plan(one.model, (one.x,), mem="min", search=QUICK, never_again="layers.1")
    modules = {source.module for source in plan.graph.sources}
    assert {f"layers.{place}" for place in range(3)} <= modules
    again = {plan.graph.sources[op].module for op in plan.program.repeated}
    assert "layers.0" in again
    assert "layers.1" not in again


def by_torch_compile(one: Case, backend: Any, within: Any = None) -> list[Tensor]:
    """Return loss and gradients of a step by torch.compile."""
    torch._dynamo.reset()
    model = copy.deepcopy(one.model)
    with inductor_config.patch(custom_partitioner_fn=within):
        loss = torch.compile(model, backend=backend)(one.x)
        loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def test_a_region_that_aotautograd_partitions_by_itself_is_a_part_of_the_step() -> None:
    one = case("region")
    backend = aot_autograd(fw_compiler=as_emitted, partition_fn=default_partition)
    expected = by_torch_compile(one, backend)
    for mem in ("60%", "min"):
        within = partitioner(mem, search=QUICK)
        found = by_torch_compile(one, aot_autograd(fw_compiler=as_emitted, partition_fn=within))
        assert all(map(torch.equal, found, expected))
        (plan,) = within.plans  # one plan, for the whole step
        assert plan.predicted_peak <= plan.budget
        assert "as predicted" in str(plan.check())
        assert "aten.gelu.default" in recomputed(plan)
        assert "aten.t.default" not in {op.target for op in plan.graph.ops}  # views of parameters take no memory


def test_small_results_of_a_loop_take_what_the_device_allocates() -> None:
    """A carry of 64 bytes takes 512 on CUDA, beside a large result of the same op."""

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                y = layer(x)
                x = y + scan(lambda carry, row: (carry + row.sin(), carry * 1), y[0] * 0, y, dim=0)[1]
            return x.square().mean()

    step = fxremat.capture(Loop(), (torch.randn(64, 16),), costs="H100", search=QUICK)
    for mem in ("100%", "min"):
        assert "as predicted" in str(step.plan(mem).check())


@pytest.mark.long
def test_inductor_compiles_a_step_with_regions() -> None:
    one = case("region")
    expected = by_torch_compile(one, "inductor")
    for mem in ("100%", "80%", "min"):
        within = InductorPartitioner(mem, search=QUICK)
        for mine, its in zip(by_torch_compile(one, "inductor", within), expected, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-6)
        assert len(within.plans) == 1


class Flex(nn.Module):
    """Attention with a mask and a score function of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(3))
        self.mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = layer(x).view(2, 128, 3, 2, 8).permute(2, 0, 3, 1, 4)
            found: Any = flex_attention(q, k, v, lambda score, b, h, q, k: score + (q - k), block_mask=self.mask)
            x = x + found.transpose(1, 2).reshape(x.shape)
        return x.square().mean()


def test_flex_attention_is_planned_for_a_device_that_has_its_backward() -> None:
    plan = fxremat.plan(Flex(), (torch.randn(2, 128, 16),), mem="min", costs="H100", search=QUICK)
    assert "as predicted" in str(plan.check())
    assert "flex_attention" in recomputed(plan)
    assert {op.target for op in plan.graph.ops} >= {"flex_attention", "flex_attention_backward"}
    with pytest.raises(NotImplementedError, match="FlexAttention does not support backward on CPU"):
        fxremat.plan(Flex(), (torch.randn(2, 128, 16),), mem="100%", costs="estimate", search=QUICK)
