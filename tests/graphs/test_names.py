"""Tests of the sources of ops: modules and lines of everything that takes memory, and the names of parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import fxremat
from benchmarks.models import get
from fxremat.graphs.captured import Captured
from fxremat.graphs.names import frame_of, module_of, tied_names
from fxremat.plans import Plan
from fxremat.runtime import sharded
from fxremat.settings import Offload, Search
from fxremat.step.program import Role
from fxremat.step.source import Frame, Source, closed, common_module, ops_inside, span_of
from fxremat.step.step_graph import Origin
from fxremat.torch_private import function_resumed

pytestmark = pytest.mark.usefixtures("torch_ready")

HERE, OURS = Path(__file__), sharded.__file__
BENCHMARKS = Path(__import__("benchmarks").__file__ or "").parent
NEGLIGIBLE = 0.01  # of the peak with everything kept
ROWS, WIDTH = 64, 32


class Scale(torch.autograd.Function):
    """Multiplication with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum(0)


class Scaled(nn.Module):
    """A layer whose op is a custom `torch.autograd.Function`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return Scale.apply(x, self.scale)  # type: ignore[no-any-return, no-untyped-call]


class Custom(nn.Module):
    """Custom functions between layers, and a loss in the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled(), nn.GELU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(x, torch.zeros_like(x))


class Tied(nn.Module):
    """A head that is an embedding, and a layer with two names; those that are used first are registered last."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 100, bias=False)
        self.embedding = nn.Embedding(100, WIDTH)
        self.embedding.weight = self.head.weight
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.again = self.middle

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.middle(self.again(self.embedding(tokens)).tanh())
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Named(nn.Module):
    """Layers in containers of two kinds, under a name that may be no identifier."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.table = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH)})
        self.parts = nn.Module()
        self.parts.add_module(name, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        part = self.parts._modules[self.name]
        assert part is not None
        return part(self.table[self.name](x)).square().mean()  # type: ignore[no-any-return]


NAMES = [
    *("a b", "0", "class", "ünï", "x_modules", "@DATA@", "a\\b", "\u2028"),
    *("it's", 'a"b\'c', "a[0]", "[0", "a]['b", "L['self']", "</script>"),
]

TOKENS = torch.arange(32).view(2, 16)


def gpt2() -> tuple[nn.Module, Any]:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=100, n_positions=32, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config), {"input_ids": TOKENS, "labels": TOKENS}


def t5() -> tuple[nn.Module, Any]:
    config = transformers.T5Config(
        vocab_size=100,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=2,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config), {"input_ids": TOKENS, "labels": TOKENS}


def benchmark(name: str) -> tuple[nn.Module, Any]:
    case = get(name, "small")
    return case.model(), case.batch()


LIBRARY = Path(transformers.__file__).parent
class LookedUp(nn.Module):
    """Finds what it does not have in what it wraps, as adapters and pipelines do."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Custom()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base, name)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x * self.scale)
        return result


TORCH = Path(nn.__file__).parent
MODELS: Mapping[str, tuple[Callable[[], tuple[nn.Module, Any]], tuple[Path, ...]]] = {
    "gpt2": (gpt2, (LIBRARY, TORCH / "functional.py")),
    "t5": (t5, (LIBRARY,)),
    "resnet": (lambda: benchmark("resnet"), (BENCHMARKS,)),
    "unet": (lambda: benchmark("unet"), (BENCHMARKS,)),
    "custom": (lambda: (Custom(), torch.ones(ROWS, WIDTH)), (HERE,)),
    "tied": (lambda: (Tied(), TOKENS), (HERE,)),
    "looked up": (lambda: (LookedUp(), torch.ones(ROWS, WIDTH)), (HERE,)),
    "named": (lambda: (Named("a b"), torch.ones(ROWS, WIDTH)), (HERE,)),
}
LARGER = ("gpt2", "t5", "resnet")
ASKED = [pytest.param(name, marks=pytest.mark.long) if name in LARGER else name for name in MODELS]


@dataclass(frozen=True)
class Planned:
    """A model with its plan."""

    model: nn.Module
    plan: Plan
    files: tuple[Path, ...]  # of the model, or folders of its library


def planned(model: nn.Module, inputs: Any, **options: Any) -> Plan:
    torch.manual_seed(0)
    given = {"mem": "100%", "search": Search(seconds=0), "costs": "estimate", "dynamic": False} | options
    plan = fxremat.plan(model, inputs, **given)
    assert isinstance(plan, Plan)
    return plan


@cache
def captured(name: str) -> Planned:
    """A model that keeps everything, captured once."""
    build, files = MODELS[name]
    torch.manual_seed(0)
    model, inputs = build()
    return Planned(model, planned(model.train(), inputs, solver="keep_all"), files)


def large(plan: Plan) -> list[int]:
    sizes = plan.costs.sizes.values
    return [v.index for v in plan.graph.values if sizes[v.index] > NEGLIGIBLE * plan.keep_all_peak]


def check_parameters(joint: Captured, model: nn.Module) -> None:
    """Parameters have the names of `named_parameters()`, and so have the gradients that are returned."""
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    of_kind = {
        origin: Counter(name for value, name in joint.parameters.items() if joint.values[value].origin is origin)
        for origin in Origin
    }
    assert set(of_kind[Origin.PRIMAL]) == names
    assert set(of_kind[Origin.BACKWARD]) == names
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for value, name in joint.parameters.items():
        shown = joint.shown[value].meta["val"]
        assert shown.numel() == torch.Size(shapes[name]).numel()


def check_graphs(plan: Plan) -> None:
    """Every node of the emitted graphs that a step executes has its module."""
    roles = {role.value for role in (Role.FORWARD, Role.RECOMPUTE, Role.BACKWARD)}
    modules = {source.module for source in plan.graph.sources}
    seen = 0
    for graph in plan.graphs:
        for node in graph.graph.nodes:
            about = node.meta.get("fxremat")
            if node.op == "call_function" and about and about["role"] in roles:
                assert about["module"] in modules, node
                seen += 1
    assert seen >= len(plan.program.executions)


@pytest.mark.parametrize("name", ASKED)
def test_all_that_takes_memory_has_a_module_and_a_line(name: str) -> None:
    case = captured(name)
    modules = dict(case.model.named_modules(remove_duplicate=False))
    values = large(case.plan)
    assert {case.plan.graph.values[value].origin for value in values} >= {Origin.FORWARD, Origin.BACKWARD}
    for value in values:
        source = case.plan.graph.value_sources[value]
        assert source.module in modules
        assert source.frame is not None, case.plan.graph.values[value].name
        file = Path(source.frame.file)
        assert any(file == place or place in file.parents for place in case.files), file
        assert source.frame.code.strip() in file.read_text()
        assert source.frame.line <= len(file.read_text().splitlines())
    assert {source.module for source in case.plan.graph.sources} <= modules.keys()


@pytest.mark.parametrize("name", ASKED)
def test_ops_belong_to_what_was_called(name: str) -> None:
    """The parameters that an op of a layer reads are that layer's own; gradients of these are made in it too."""
    case = captured(name)
    joint = case.plan.graph
    modules = dict(case.model.named_modules(remove_duplicate=False))
    seen = 0
    for op in joint.ops:
        own = modules[joint.sources[op.index].module]
        weights = [joint.parameters[v] for v in op.reads if v in joint.parameters and v in joint.given]
        if isinstance(own, nn.Linear | nn.Conv2d) and weights and not op.backward:
            held = {id(parameter) for parameter in own.parameters(recurse=False)}
            assert {id(case.model.get_parameter(weight)) for weight in weights} <= held
            seen += 1
    assert seen


@pytest.mark.parametrize("name", ASKED)
def test_parameters_and_their_gradients_have_the_names_of_the_model(name: str) -> None:
    case = captured(name)
    check_parameters(case.plan.graph, case.model)
    assert case.plan.graph.model == type(case.model).__name__


@pytest.mark.parametrize("name", ASKED)
def test_nodes_of_the_emitted_graphs_have_their_modules(name: str) -> None:
    check_graphs(captured(name).plan)


@pytest.mark.parametrize("name", ASKED)
def test_additions_of_gradients_lie_around_what_they_add_and_who_reads_it(name: str) -> None:
    joint = captured(name).plan.graph
    additions = [op for op in joint.backward_ops if joint.nodes[op.index].meta.get("is_gradient_acc")]
    producers = {value.index: value.producer for value in joint.values}
    for op in additions:
        makers = [made for value in op.reads if (made := producers[value]) is not None]
        users = [other.index for other in joint.ops if set(op.writes) & set(other.reads)]
        around = joint.sources[op.index].module
        assert makers
        others = {*users, max(makers)} - {addition.index for addition in additions}
        assert all(inside(joint.sources[other].module, around) for other in others)
    assert additions or name in ("resnet", "named")


def test_a_residual_stream_adds_its_gradients_in_the_layer() -> None:
    """In `x + layer(x)` the model adds the two gradients of x up: between layers, so in none of them."""
    joint = captured("custom").plan.graph
    backward = joint.backward_ops
    added = [joint.sources[op.index].module for op in backward if joint.nodes[op.index].meta.get("is_gradient_acc")]
    assert Counter(added) == {"layers": 2} | ({"": 1} if "" in added else {})


def test_a_custom_function_belongs_to_its_layer() -> None:
    joint = captured("custom").plan.graph
    gradients = {
        joint.parameters[value.index]: joint.sources[value.producer].module
        for value in joint.values
        if value.index in joint.parameters and value.producer is not None
    }
    assert {name: module for name, module in gradients.items() if name.endswith("scale")} == {
        f"layers.{number}.1.scale": f"layers.{number}.1" for number in range(3)
    }


def test_the_loss_of_the_root_is_the_models_own() -> None:
    joint = captured("custom").plan.graph
    last = joint.sources[joint.forward_count - 1]
    assert last == joint.sources[joint.forward_count]  # the backward begins with that of the loss
    assert last.module == ""
    assert last.frame is not None
    assert last.frame.code == "return F.mse_loss(x, torch.zeros_like(x))"
    assert last.frame.function == "forward"


@pytest.mark.parametrize("name", NAMES)
def test_odd_names(name: str) -> None:
    model = Named(name)
    joint = planned(model, torch.ones(8, WIDTH), solver="keep_all").captured
    check_parameters(joint, model)
    called = {"", f"table.{name}", f"parts.{name}.0", f"parts.{name}.1"}
    assert called <= dict(model.named_modules()).keys()
    assert {source.module for source in joint.sources} == called


def test_tied_parameters_have_the_first_of_their_names() -> None:
    model = Tied()
    tied = {"embedding.weight": "head.weight", "again.weight": "middle.weight", "again.bias": "middle.bias"}
    assert tied_names(model) == tied
    assert tied_names(nn.Linear(2, 2)) == {}


def test_names_at_another_size() -> None:
    model = Tied()
    plan = planned(model, TOKENS, dynamic=True)
    other = plan.at(tokens=(4, 24))
    for one in (plan, other):
        check_parameters(one.graph, model)
        check_graphs(one)
        modules = dict(model.named_modules(remove_duplicate=False))
        assert {one.graph.value_sources[v].module for v in large(one)} <= modules.keys()
    assert other.graph is not plan.graph
    assert other.graph.model == "Tied"


def sliced() -> tuple[nn.Module, Plan]:
    model = nn.Sequential(nn.Linear(WIDTH, 2000), nn.GELU(), nn.Linear(2000, WIDTH), nn.Flatten(0))
    plan = planned(model, torch.ones(512, WIDTH), mem="40%", slices=True)
    assert plan.slices
    return model, plan


def offloading() -> tuple[nn.Module, Plan]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)), nn.Flatten(0))
    least = planned(model, torch.ones(ROWS, WIDTH), mem=2**40, offload=True).minimum
    plan = planned(model, torch.ones(ROWS, WIDTH), mem=least, offload=True)
    assert plan.chosen.transfers
    return model, plan


def hosted_weights() -> tuple[nn.Module, Plan]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)), nn.Flatten(0))
    options: dict[str, Any] = {"offload": Offload(weights=True)}
    options["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    least = planned(model, torch.ones(ROWS, WIDTH), mem=2**40, **options).minimum
    plan = planned(model, torch.ones(ROWS, WIDTH), mem=least, **options)
    assert plan.weights
    assert plan.program.fetched
    return model, plan


@pytest.mark.parametrize("make", [sliced, offloading, hosted_weights])
def test_names_of_steps_that_are_rewritten(make: Callable[[], tuple[nn.Module, Plan]]) -> None:
    model, plan = make()
    check_parameters(plan.graph, model)
    check_graphs(plan)
    modules = dict(model.named_modules())
    for value in large(plan):
        source = plan.graph.value_sources[value]
        assert source.module in modules
        assert source.module != "", plan.graph.values[value].name


class Calls(nn.Module):
    """Ops in functions inside of its forward."""

    def forward(self, x: Tensor) -> Tensor:
        wide = lambda y: y.sin()  # noqa: E731
        return wide(x).square().mean()


def test_the_line_is_the_innermost_one() -> None:
    joint = planned(nn.Sequential(nn.Linear(8, 8), Calls()), torch.ones(4, 8)).captured
    frames = [frame_of(joint.nodes[op.index]) for op in joint.forward_ops if op.name == "sin"]
    line = "wide = lambda y: y.sin()  # noqa: E731"
    assert [(frame.function, frame.code) for frame in frames if frame] == [("<lambda>", line)]
    assert "test_names.py:" in str(frames[0])


def test_no_line_is_one_of_fxremat() -> None:
    """Lines of torch.nn are left out by dynamo, and what stands around the model is not the model's."""
    joint = planned(nn.Linear(8, 8), torch.ones(4, 8)).captured
    assert {*joint.sources, *joint.value_sources} == {Source(module="", frame=None)}


@pytest.mark.parametrize(
    ("trace", "found"),
    [
        ("", None),
        ("no frame at all", None),
        ('  File "a, line 3 in b.py", line 7, in f\n    x = 1', ("a, line 3 in b.py", 7, "f", "x = 1")),
        ('  File "a.py", line 1, in f\n    g()\n  File "b.py", line 2, in g\n    h()', ("b.py", 2, "g", "h()")),
        (f'  File "a.py", line 1, in f\n    g()\n  File "{OURS}", line 2, in run\n    h()', ("a.py", 1, "f", "g()")),
        (f'  File "{OURS}", line 2, in run\n    h()', (OURS, 2, "run", "h()")),
        ('  File "a.py", line 1, in <listcomp>\n    [\n    ^^^^', ("a.py", 1, "<listcomp>", "[")),
    ],
)
def test_frames(trace: str, found: tuple[str, int, str, str] | None) -> None:
    node = fx.Graph().placeholder("x")
    node.meta["stack_trace"] = trace
    frame = frame_of(node)
    assert (frame and (frame.file, frame.line, frame.function, frame.code)) == found


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("y = F.scaled_dot_product_attention(", "y = F.scaled_dot_product_attention(...)"),
        ("y = f(x, [a,", "y = f(x, [a, ...])"),
        ("y = f(x)", "y = f(x)"),
        ("x, y)", "x, y)"),
        ("y = f(')', \"[\",", "y = f(')', \"[\", ...)"),
        ("", ""),
    ],
)
def test_the_line_of_a_call_of_several_lines_is_closed(code: str, shown: str) -> None:
    assert closed(code) == shown
    assert str(Frame("a.py", 1, "f", code)) == f"a.py:1 in f: {repr(shown)[1:-1]}"


def test_a_backward_op_has_the_module_of_its_forward() -> None:
    node = fx.Graph().placeholder("x")
    node.meta["fwd_nn_module_stack"] = {"1": ("L['self']", nn.Module), "2": ("L['self'].up", nn.Linear)}
    assert module_of(node) == "up"
    node.meta["nn_module_stack"] = {"1": ("L['forward'].__self__.layers[2].down", nn.Linear)}
    assert module_of(node) == "layers.2.down"


levels = st.sampled_from(["a", "b", "h", "0", "1", "11"])
paths = st.lists(levels, max_size=4).map(".".join)
many = st.lists(paths, min_size=1, max_size=12)


def parts(path: str) -> list[str]:
    return path.split(".") if path else []


def inside(module: str, outer: str) -> bool:
    """Tell whether a module is another one, or a part of it."""
    return parts(module)[: len(parts(outer))] == parts(outer)


@given(many)
def test_the_common_module_is_the_innermost_around_all(modules: list[str]) -> None:
    outer = common_module(modules)
    assert all(inside(module, outer) for module in modules)
    length = len(parts(outer))
    deeper = {tuple(parts(module)[: length + 1]) for module in modules}
    assert len(deeper) > 1 or len(next(iter(deeper))) == length  # none one level further in has them all
    assert common_module([outer]) == outer


@given(many)
def test_ops_inside_counts_each_op_at_every_level(modules: list[str]) -> None:
    counts = ops_inside(modules)
    for module in {*modules, "", "a", "h.1"}:
        assert counts[module] == sum(inside(other, module) for other in modules)


@given(many, st.data())
def test_a_span_names_modules_that_are_there(model: list[str], data: st.DataObject) -> None:
    """A span is a module that has exactly these ops, or the first and last part of what is around them."""
    first = data.draw(st.integers(0, len(model) - 1))
    last = data.draw(st.integers(first, len(model) - 1))
    modules, counts = model[first : last + 1], ops_inside(model)
    span = span_of(modules, counts)
    outer = common_module(modules)
    assert not span or inside(span.replace("..", "."), outer) or inside(span.partition("..")[0], outer)
    begins, dots, ends = span.partition("..")
    assert not begins or counts[begins], span
    if dots:
        around = begins.rpartition(".")[0]
        assert counts[f"{around}.{ends}" if around else ends], span
        assert begins.rpartition(".")[2] != ends
        assert all(inside(module, around) for module in modules)
    if counts[outer] == len(modules):
        assert span == outer


def test_spans_by_hand() -> None:
    model = ["embed", "h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp", "", "head"]
    counts = ops_inside(model)
    assert span_of(model, counts) == ""
    assert span_of(["h.0.attn", "h.0.mlp"], counts) == "h.0"
    assert span_of(["h.0.mlp", "h.1.attn"], counts) == "h.0..1"
    assert span_of(["h.0.mlp"], counts) == "h.0.mlp"
    assert span_of(["", "head"], counts) == "head"
    assert span_of(["embed", "h.0.attn"], counts) == "embed..h"
    assert span_of([""], counts) == ""


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("forward", "forward"),
        ("torch_dynamo_resume_in_forward_at_14", "forward"),
        ("torch_dynamo_resume_in_look_at_it_at_14", "look_at_it"),
        ("torch_dynamo_resume_in_torch_dynamo_resume_in_forward_at_14_at_20", "forward"),
    ],
)
def test_a_function_that_dynamo_resumes_has_its_own_name(name: str, function: str) -> None:
    assert function_resumed(name) == function
