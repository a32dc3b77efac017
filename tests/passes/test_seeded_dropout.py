"""Dropouts drawn from seeds: what the pass writes, what the ops give, and the bits of `torch.compile(model)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fxremat.chains.schedule import Schedule
from fxremat.graphs.captured import read_joint
from fxremat.graphs.nodes import is_random
from fxremat.linearize.lay_out import lay_out
from fxremat.ops.seeded import DECOMPOSITIONS, SEEDS
from fxremat.passes.lower import lower
from fxremat.passes.seeded_dropout import draw_from_seeds
from fxremat.step.order import rematerialize
from fxremat.torch_private import aot_backend, differentiate_as_eager, real_tensors, taking_a_list
from tests.passes.test_rewrites import Drawing, dropout, drops_all, with_a_size

pytestmark = pytest.mark.usefixtures("torch_ready")
aten, ours = torch.ops.aten, torch.ops.fxremat


def calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=target))


# --- the pass


def test_what_a_dropout_becomes() -> None:
    drawing = dropout(0.15)
    (captured,) = calls(drawing.graph, aten.native_dropout.default)
    captured.meta["stack_trace"] = "its line"
    draw_from_seeds(drawing.graph)
    assert drawing.text() == [
        "seeds.default(1){'device': device(type='cpu')}",
        "select.int(seeds_default, 0, 0)",
        "seeded_mask.default(select_int, [64, 8], 0.15, torch.float32)",
        "masked.default(x, seeded_mask_default, 0.15)",
        f"native_dropout_backward.default(tangents_1, seeded_mask_default, {1 / 0.85})",
    ]
    made = [node for node in drawing.graph.nodes if node.op == "call_function"]
    assert [node.meta.get("stack_trace") for node in made] == ["its line"] * 4 + [None]
    assert [node.meta["val"].dtype for node in made[1:4]] == [torch.int64, torch.bool, torch.float32]
    assert list(map(is_random, made)) == [True, False, False, False, False]


def test_what_draws_nothing_is_left_alone() -> None:
    for drawing in (dropout(0.0), dropout(0.1, training=False), dropout(1.0, rows=0)):
        before = drawing.text()
        draw_from_seeds(drawing.graph)
        assert drawing.text() == before


def test_a_dropout_of_everything_is_the_same_product_with_zero() -> None:
    drawing = dropout(1.0)
    draw_from_seeds(drawing.graph)
    assert drawing.text() == drops_all().text()


def number_of(mask: fx.Node) -> object:
    """Which of the seeds a mask is drawn from."""
    seed = mask.args[0]
    assert isinstance(seed, fx.Node)
    return seed.args[2]


def test_dropouts_are_numbered_on_each_device() -> None:
    drawing = Drawing()
    inputs = [drawing.input(name, 4, device=name[:-1]) for name in ("cpu1", "cuda1", "cpu2", "cuda2")]
    drawing.graph.output([drawing.item(drawing.call(aten.native_dropout.default, x, 0.5, True), 0) for x in inputs])
    draw_from_seeds(drawing.graph)
    drawing.graph.lint()
    masks = calls(drawing.graph, ours.seeded_mask.default)
    assert [number_of(node) for node in masks] == [0, 0, 1, 1]
    assert [node.meta["val"].device.type for node in masks] == ["cpu", "cuda", "cpu", "cuda"]
    seeds = calls(drawing.graph, ours.seeds.default)
    assert [(node.args[0], node.kwargs["device"].type) for node in seeds] == [(2, "cpu"), (2, "cuda")]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3),
    "permuted": lambda x: x.permute(1, 3, 0, 2),
    "with gaps": lambda x: x.transpose(0, 3)[:, 1:],
    "expanded": lambda x: x[:, :1].expand(3, 2, 4, 5),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mask_has_the_layout_of_what_is_dropped(layout: str) -> None:
    """The order in memory is that in which `torch.compile` draws; the fake results have the captured strides."""
    drawing = Drawing()
    x = drawing.graph.placeholder("x")
    with drawing.mode:
        x.meta["val"] = LAYOUTS[layout](torch.empty(3, 2, 4, 5))
    both = drawing.call(aten.native_dropout.default, x, 0.5, True)
    captured = both.meta["val"]
    drawing.graph.output([drawing.item(both, 0), drawing.item(both, 1)])
    draw_from_seeds(drawing.graph)
    for node, before in zip(drawing.graph.output_node().args[0], captured, strict=True):  # type: ignore[arg-type]
        assert isinstance(node, fx.Node)
        assert node.meta["val"].stride() == before.stride()
        assert node.meta["val"].shape == before.shape
    output, mask = drawing.run(given := LAYOUTS[layout](torch.ones(3, 2, 4, 5)))
    assert output.stride() == captured[0].stride()
    assert torch.equal(output, given * mask * 2)


def test_symbolic_sizes_are_compared_with_nothing() -> None:
    drawing, x = with_a_size()
    both = drawing.call(aten.native_dropout.default, drawing.call(aten.t.default, x), 0.5, True)
    environment = drawing.mode.shape_env
    assert environment is not None
    before = list(environment.guards)
    drawing.graph.output([drawing.item(both, 0), drawing.item(both, 1)])
    draw_from_seeds(drawing.graph)
    assert drawing.text()[1:] == [
        "seeds.default(1){'device': device(type='cpu')}",
        "sym_size.int(t_default, 1)",
        "select.int(seeds_default, 0, 0)",
        "seeded_mask.default(select_int, [sym_size_int, 3], 0.5, torch.float32)",
        "permute.default(seeded_mask_default, [1, 0])",
        "masked.default(t_default, permute_default, 0.5)",
    ]
    assert environment.guards == before
    output, mask = drawing.run(torch.ones(7, 3))
    assert output.shape == mask.shape == (3, 7)


# --- the ops


def mask_of(seed: int, p: float = 0.3) -> Tensor:
    mask: Tensor = ours.seeded_mask(torch.tensor(seed), [200, 300], p, torch.float32)
    return mask


def test_a_mask_is_a_function_of_its_seed() -> None:
    state = torch.get_rng_state()
    first = mask_of(SEEDS.min)
    torch.rand(3)
    assert torch.equal(first, mask_of(SEEDS.min))
    torch.set_rng_state(state)
    seeds = (SEEDS.min + 1, SEEDS.max, 2, 3)  # a CPU's generator takes the lower 32 bits
    others = [mask_of(seed) for seed in (*seeds, 8, -9)]
    assert torch.equal(state, torch.get_rng_state())
    for place, mask in enumerate([first, *others]):
        assert mask.float().mean() == pytest.approx(0.7, abs=0.01)
        for other in others[place:]:
            assert (mask == other).float().mean() == pytest.approx(0.7**2 + 0.3**2, abs=0.01)
    assert mask_of(5, p=0.01).float().mean() == pytest.approx(0.99, abs=0.002)


def test_seeds_are_drawn_from_the_device_s_generator() -> None:
    torch.manual_seed(1)
    found = ours.seeds(1000, device=torch.device("cpu"))
    torch.manual_seed(1)
    assert torch.equal(found, torch.randint(-(2**63), 2**63 - 1, [1000]))
    assert (found < 0).float().mean() == pytest.approx(0.5, abs=0.1)
    assert len(found.unique()) == 1000


def test_the_ops_are_what_their_schemas_say() -> None:
    x, mask = torch.ones(4, 3).t(), mask_of(1)[:4, :3].t()
    kinds = ("test_schema", "test_faketensor")
    seed = torch.ones((), dtype=torch.int64)
    torch.library.opcheck(ours.seeded_mask, (seed, [4, 3], 0.5, x.dtype), test_utils=kinds)
    torch.library.opcheck(ours.masked, (x, mask, 0.5), test_utils=kinds)
    torch.library.opcheck(ours.seeds, (3,), {"device": torch.device("cpu")}, test_utils="test_faketensor")


# --- compiled by Inductor


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
            outputs: Any = region.graph.output_node()
            outputs.meta["user_visible_output_idxs"] = [*range(len(outputs.args[0]))]
            run: Any = compile_fx_inner(region, fakes, static_input_idxs=())
    return taking_a_list(run)


class Model(nn.Module):
    """Dropouts of three rates: of what a convolution gives, of what is transposed, of what is contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.conv(x).tanh(), 0.1).flatten(2).transpose(1, 2)
        y = F.dropout(self.linear(F.dropout(y.exp(), 0.2)), 0.5)
        return y.relu().float().square().mean()


def drawn_twice(module: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
    """A step that computes everything up to the exponential again, in its backward."""
    draw_from_seeds(module.graph)
    module.graph.eliminate_dead_code()
    joint = read_joint(module, num_fwd_outputs)
    assert [op.name for op in joint.ops if op.random] == ["seeds_default"]
    end = next(op.index for op in joint.forward_ops if joint.nodes[op.index].target is aten.exp.default)
    forward, backward = lower(rematerialize(lay_out(joint, [end]), Schedule.parse("Fck1 Fall2 B2 Fall1 B1")))
    masks = [number_of(node) for node in calls(forward.graph, ours.seeded_mask.default)]
    assert masks == [0, 1, 2]
    (again,) = calls(backward.graph, ours.seeded_mask.default)
    assert str(again.args[0]).removesuffix("__r1") == "select_int"
    return forward, backward


def trained(backend: Any, dtype: torch.dtype, memory_format: torch.memory_format) -> list[Tensor | None]:
    """Loss and gradients of one step, and what the generator gives after it."""
    torch.manual_seed(0)
    model = Model().to(dtype, memory_format=memory_format)  # type: ignore[call-overload]
    x = torch.randn(5, 3, 9, 9).to(dtype, memory_format=memory_format)
    torch._dynamo.reset()
    torch.manual_seed(3)
    with differentiate_as_eager():
        loss = torch.compile(model, backend=backend)(x)
    loss.backward()
    return [loss, *(parameter.grad for parameter in model.parameters()), torch.rand(2)]


@pytest.mark.parametrize(
    ("dtype", "memory_format"),
    [
        (torch.float32, torch.channels_last),
        pytest.param(torch.bfloat16, torch.contiguous_format, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_steps_that_draw_masks_again_have_the_bits_of_torch_compile(
    dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    backend = aot_backend(fw_compiler=compiled, bw_compiler=compiled, partition_fn=drawn_twice)
    wanted = trained("inductor", dtype, memory_format)
    for found, plain in zip(trained(backend, dtype, memory_format), wanted, strict=True):
        assert found is not None
        assert plain is not None
        assert torch.equal(found, plain)


def test_compiled_masks_in_half_precision() -> None:
    """Numbers are rounded before they are compared with p, and the same alone and among other ops."""
    x, p = torch.ones(451, 443, dtype=torch.bfloat16), 0.1
    torch.manual_seed(5)
    wanted = torch.compile(lambda x: F.dropout(x, p))(x) != 0
    torch.manual_seed(5)
    seeds = ours.seeds(1, device=x.device)
    drawing = Drawing()
    given, leaf = drawing.input("seed", dtype=torch.int64), drawing.input("x", *x.shape, dtype=x.dtype)
    mask = drawing.call(ours.seeded_mask.default, given, [*x.shape], p, x.dtype)
    with_others = [mask, drawing.call(ours.masked.default, leaf, mask, p)]
    for outputs in ([mask], with_others):
        drawing.graph.output(outputs)
        for found in compiled(fx.GraphModule({}, drawing.graph), [seeds[0], x])([seeds[0], x]):
            assert torch.equal(found != 0, wanted)
        drawing.graph.erase_node(drawing.graph.output_node())
