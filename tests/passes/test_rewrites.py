"""Passes on graphs of a few ops that are put together here: what is rewritten, what is left alone, and the bits."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn import functional as F

from fxremat.errors import CaptureError
from fxremat.graphs.batch_norm import NORMALIZED, STATISTICS
from fxremat.graphs.overwriting import called
from fxremat.passes.batch_norm import drop_running_statistics, halve, halve_exactly
from fxremat.passes.detach import drop_detach
from fxremat.passes.dropout import drop_as_eager, rounded
from fxremat.passes.in_place import note_overwriting
from fxremat.passes.numbers import copy_views_by_number, refuse_symbols
from fxremat.passes.pipelines import Pass, normalize
from fxremat.torch_private import storage_of

aten = torch.ops.aten
CASES = [0.0, 0.04, 0.1, 0.15, 0.25, 0.45, 0.5, 0.9, 1.0]


class Drawing:
    """A graph under construction, whose nodes show fake tensors."""

    def __init__(self) -> None:
        self.graph, self.mode = fx.Graph(), FakeTensorMode()

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype, device=device)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        values = fx.node.map_arg((args, kwargs), lambda argument: argument.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def item(self, node: fx.Node, place: int) -> fx.Node:
        found = self.graph.call_function(operator.getitem, (node, place))
        found.meta["val"] = node.meta["val"][place]
        return found

    def text(self, *, fresh: bool = False) -> list[str]:
        """The calls with their arguments, one op an entry; ops overwrite what they may, unless `fresh`."""
        calls = [called(node, fresh=fresh) for node in self.graph.nodes if node.op == "call_function"]
        return [f"{target.__name__}{args}{dict(options) or ''}".replace(",)", ")") for target, args, options in calls]

    def run(self, *inputs: Tensor) -> Any:
        self.graph.lint()
        return fx.Interpreter(fx.GraphModule({}, self.graph)).run(*inputs)


def test_a_detach_is_gone() -> None:
    drawing = Drawing()
    x = drawing.input("x", 3)
    drawing.graph.output(drawing.call(aten.relu.default, drawing.call(aten.detach.default, x)))
    drop_detach(drawing.graph)
    assert drawing.text() == ["relu.default(x)"]


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_s_backward_reads_running_statistics_in_evaluation_alone(training: bool) -> None:
    drawing = Drawing()
    tangent, x = drawing.input("tangents_1", 4, 3), drawing.input("x", 4, 3)
    weight, mean, variance, saved, inverse = (drawing.input(name, 3) for name in ("w", "m", "v", "s", "i"))
    flags = (training, 1e-5, [True, True, True])
    drawing.graph.output(
        drawing.call(
            aten.native_batch_norm_backward.default, tangent, x, weight, mean, variance, saved, inverse, *flags
        )
    )
    drop_running_statistics(drawing.graph)
    (node,) = drawing.graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default)
    statistics = (None, None) if training else (mean, variance)
    assert node.args == (tangent, x, weight, *statistics, saved, inverse, *flags)


def batch_norm(dtype: torch.dtype, parameters: torch.dtype, device: str = "cpu") -> Drawing:
    """The output of a BatchNorm, as torch captures it."""
    drawing = Drawing()
    x = drawing.input("x", 4, 3, dtype=dtype, device=device)
    given = (drawing.input(name, 3, dtype=parameters, device=device) for name in ("w", "b", "m", "v"))
    both = drawing.call(aten._native_batch_norm_legit_functional.default, x, *given, True, 0.1, 1e-5)
    drawing.graph.output(tuple(drawing.item(both, place) for place in (0, 1, 2, 3, 4)))
    return drawing


@pytest.mark.parametrize("rewrite", [halve, halve_exactly])
def test_a_batch_norm_of_half_precision_stays_whole(rewrite: Callable[[fx.Graph], None]) -> None:
    for kinds in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float64)):
        drawing = batch_norm(*kinds)
        before = drawing.text()
        rewrite(drawing.graph)
        assert drawing.text() == before
    drawing = batch_norm(torch.bfloat16, torch.float32)
    rewrite(drawing.graph)
    (statistics,) = drawing.graph.find_nodes(op="call_function", target=STATISTICS)
    assert {shown.dtype for shown in statistics.meta["val"]} == {torch.float32}


def test_a_batch_norm_of_cuda_is_halved_where_other_bits_will_do() -> None:
    for rewrite, halves in ((halve_exactly, 0), (halve, 1)):
        drawing = batch_norm(torch.float32, torch.float32, "cuda")
        rewrite(drawing.graph)
        assert len(drawing.graph.find_nodes(op="call_function", target=NORMALIZED)) == halves


def dropout(p: float, training: bool = True, rows: int = 64, **kind: Any) -> Drawing:
    """The dropout of x and, from a gradient, its backward, as torch captures them."""
    drawing = Drawing()
    x, gradient = (drawing.input(name, rows, 8, **kind) for name in ("x", "tangents_1"))
    both = drawing.call(aten.native_dropout.default, x, p, training)
    output, mask = drawing.item(both, 0), drawing.item(both, 1)
    outputs = [output]
    if training:
        scale = 0.0 if p == 1 else 1 / (1 - p)
        outputs.append(drawing.call(aten.native_dropout_backward.default, gradient, mask, scale))
    drawing.graph.output(outputs)
    return drawing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("p", CASES[1:])
def test_dropout_has_the_bits_of_eager_pytorch(p: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x, gradient = (torch.randn(64, 8, generator=generator).to(dtype) for _ in range(2))
    drawing = dropout(p, dtype=dtype)
    drop_as_eager(drawing.graph)
    torch.manual_seed(2)
    found = drawing.run(x, gradient)
    after = torch.rand(1)
    torch.manual_seed(2)
    leaf = x.clone().requires_grad_()
    wanted = F.dropout(leaf, p, training=True)
    assert torch.equal(torch.rand(1), after)
    wanted.backward(gradient)
    assert torch.equal(found[0], wanted)
    assert torch.equal(found[1], leaf.grad)


def unchanged(drawing: Drawing) -> bool:
    before = drawing.text()
    drop_as_eager(drawing.graph)
    return drawing.text() == before


def test_dropouts_that_round_as_eager_pytorch_s_are_left_alone() -> None:
    for p in CASES[:-1]:
        assert unchanged(dropout(p, device="cuda")), p
        assert unchanged(dropout(p, training=False)), p
    for p in (0.0, 0.5):
        assert unchanged(dropout(p))
    assert unchanged(dropout(1.0, training=False))
    assert unchanged(dropout(1.0, rows=0))
    assert not unchanged(dropout(1.0, device="cuda"))


def test_what_a_dropout_becomes() -> None:
    """The mask is drawn by itself where the forward rounds otherwise in single precision."""
    split, kept, half = dropout(0.15), dropout(0.1), dropout(0.15, dtype=torch.bfloat16)
    for drawing in (split, kept, half):
        (captured,) = drawing.graph.find_nodes(op="call_function", target=aten.native_dropout.default)
        captured.meta["stack_trace"] = "its line"
        drop_as_eager(drawing.graph)
    exact, coarse = rounded(0.85, torch.float32), rounded(0.85, torch.bfloat16)
    assert split.text() == [
        "empty_like.default(x){'dtype': torch.bool}",
        "bernoulli.p(empty_like_default, 0.85)",
        f"native_dropout_backward.default(x, bernoulli_p, {exact})",
        f"native_dropout_backward.default(tangents_1, bernoulli_p, {exact})",
    ]
    product = split.graph.find_nodes(op="call_function", target=aten.native_dropout_backward.default)[0]
    assert product.meta["val"].shape == (64, 8)
    assert product.meta["stack_trace"] == "its line"
    assert kept.text()[:3] == [
        "native_dropout.default(x, 0.1, True)",
        "getitem(native_dropout_default, 0)",
        "getitem(native_dropout_default, 1)",
    ]
    assert half.text()[3] == f"native_dropout_backward.default(tangents_1, getitem_1, {coarse})"
    assert half.text()[0] == "native_dropout.default(x, 0.15, True)"


def drops_all() -> Drawing:
    drawing = dropout(1.0)
    drop_as_eager(drawing.graph)
    return drawing


def test_a_dropout_of_everything_is_a_product_with_zero() -> None:
    assert drops_all().text() == [
        "zeros.default([]){'dtype': torch.float32, 'device': device(type='cpu')}",
        "mul.Tensor(x, zeros_default)",
        "mul.Tensor(tangents_1, zeros_default)",
    ]


OVERWRITING: dict[str, tuple[Callable[[Drawing, fx.Node, fx.Node], Any], list[str]]] = {
    "a gradient that the op alone reads": (
        lambda d, t, p: d.call(aten.add.Tensor, d.call(aten.exp.default, t), p),
        ["exp.default(tangents_1)", "add_.Tensor(exp_default, primals_1)"],
    ),
    "the second operand, where the order does not matter": (
        lambda d, t, p: d.call(aten.mul.Tensor, p, d.call(aten.mm.default, t, d.input("weight", 4, 4))),
        ["mm.default(tangents_1, weight)", "mul_.Tensor(mm_default, primals_1)"],
    ),
    "not the second operand, where it lies as a gradient that is handed in": (
        lambda d, t, p: d.call(aten.mul.Tensor, p, d.call(aten.exp.default, t)),
        ["exp.default(tangents_1)", "mul.Tensor(primals_1, exp_default)"],
    ),
    "a gradient that lies as one that is handed in, not where a new result lies as the other operand": (
        lambda d, t, p: [
            d.call(aten.threshold_backward.default, d.call(aten.exp.default, t), p, 0),
            d.call(aten.threshold_backward.default, d.call(aten.mm.default, t, d.input("weight", 4, 4)), p, 0),
        ],
        [
            "exp.default(tangents_1)",
            "threshold_backward.default(exp_default, primals_1, 0)",
            "mm.default(tangents_1, weight)",
            "threshold_backward.grad_input(mm_default, primals_1, 0){'grad_input': mm_default}",
        ],
    ),
    "the first of two": (
        lambda d, t, p: d.call(aten.add.Tensor, d.call(aten.exp.default, t), d.call(aten.sin.default, t)),
        ["exp.default(tangents_1)", "sin.default(tangents_1)", "add_.Tensor(exp_default, sin_default)"],
    ),
    "not the second of a quotient": (
        lambda d, t, p: d.call(aten.div.Tensor, p, d.call(aten.exp.default, t)),
        ["exp.default(tangents_1)", "div.Tensor(primals_1, exp_default)"],
    ),
    "not the second of a weighted sum": (
        lambda d, t, p: d.call(aten.add.Tensor, p, d.call(aten.exp.default, t), alpha=2),
        ["exp.default(tangents_1)", "add.Tensor(primals_1, exp_default){'alpha': 2}"],
    ),
    "the first of a weighted sum": (
        lambda d, t, p: d.call(aten.add.Tensor, d.call(aten.exp.default, t), p, alpha=2),
        ["exp.default(tangents_1)", "add_.Tensor(exp_default, primals_1){'alpha': 2}"],
    ),
    "not what autograd hands in": (
        lambda d, t, p: d.call(aten.neg.default, t),
        ["neg.default(tangents_1)"],
    ),
    "nor a view of it": (
        lambda d, t, p: d.call(aten.neg.default, d.call(aten.view.default, t, [12])),
        ["view.default(tangents_1, [12])", "neg.default(view_default)"],
    ),
    "not what the forward made": (
        lambda d, t, p: d.call(aten.add.Tensor, d.call(aten.exp.default, p), t),
        ["exp.default(primals_1)", "add.Tensor(exp_default, tangents_1)"],
    ),
    "not the same operand twice": (
        lambda d, t, p: d.call(aten.add.Tensor, e := d.call(aten.exp.default, t), e),
        ["exp.default(tangents_1)", "add.Tensor(exp_default, exp_default)"],
    ),
    "not what another op reads": (
        lambda d, t, p: [d.call(aten.neg.default, e := d.call(aten.exp.default, t)), d.call(aten.sin.default, e)],
        ["exp.default(tangents_1)", "neg.default(exp_default)", "sin.default(exp_default)"],
    ),
    "through a view of all of it": (
        lambda d, t, p: d.call(aten.neg.default, d.call(aten.view.default, d.call(aten.exp.default, t), [12])),
        ["exp.default(tangents_1)", "view.default(exp_default, [12])", "neg_.default(view_default)"],
    ),
    "through two of them": (
        lambda d, t, p: d.call(
            aten.neg.default,
            d.call(aten.view.default, d.call(aten.view.default, d.call(aten.exp.default, t), [12]), [6, 2]),
        ),
        [
            "exp.default(tangents_1)",
            "view.default(exp_default, [12])",
            "view.default(view_default, [6, 2])",
            "neg_.default(view_default_1)",
        ],
    ),
    "not through a view beside another": (
        lambda d, t, p: [
            d.call(aten.neg.default, d.call(aten.view.default, e := d.call(aten.exp.default, t), [12])),
            d.call(aten.sin.default, d.call(aten.view.default, e, [2, 6])),
        ],
        [
            "exp.default(tangents_1)",
            "view.default(exp_default, [12])",
            "neg.default(view_default)",
            "view.default(exp_default, [2, 6])",
            "sin.default(view_default_1)",
        ],
    ),
    "not a part of a storage": (
        lambda d, t, p: d.call(aten.neg.default, d.call(aten.select.int, d.call(aten.exp.default, t), 0, 1)),
        ["exp.default(tangents_1)", "select.int(exp_default, 0, 1)", "neg.default(select_int)"],
    ),
    "not where the result is larger": (
        lambda d, t, p: d.call(aten.add.Tensor, d.call(aten.sum.dim_IntList, t, [0], True), p),
        ["sum.dim_IntList(tangents_1, [0], True)", "add.Tensor(sum_dim_int_list, primals_1)"],
    ),
    "not where it has another type": (
        lambda d, t, p: d.call(
            aten.add.Tensor, d.call(aten.exp.default, t), d.input("double", 3, 4, dtype=torch.float64)
        ),
        ["exp.default(tangents_1)", "add.Tensor(exp_default, double)"],
    ),
    "the gradient of a backward op": (
        lambda d, t, p: d.call(aten.tanh_backward.default, d.call(aten.exp.default, t), p),
        [
            "exp.default(tangents_1)",
            "tanh_backward.grad_input(exp_default, primals_1){'grad_input': exp_default}",
        ],
    ),
    "not what an op without such a form reads": (
        lambda d, t, p: d.call(aten.sub.Tensor, d.call(aten.exp.default, t), p),
        ["exp.default(tangents_1)", "sub.Tensor(exp_default, primals_1)"],
    ),
}


@pytest.mark.parametrize("case", OVERWRITING)
def test_what_is_overwritten(case: str) -> None:
    draw, wanted = OVERWRITING[case]
    drawing = Drawing()
    drawing.graph.output(draw(drawing, drawing.input("tangents_1", 3, 4), drawing.input("primals_1", 3, 4)))
    before = drawing.text()
    note_overwriting(drawing.graph)
    assert drawing.text() == wanted
    assert drawing.text(fresh=True) == before


def with_symbols() -> tuple[Drawing, fx.Node, Any]:
    """A drawing with an input, and a number that is only known from data."""
    drawing = Drawing()
    drawing.mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    x, number = drawing.input("x", 4, 3), drawing.graph.placeholder("number")
    assert drawing.mode.shape_env is not None
    number.meta["val"] = drawing.mode.shape_env.create_unbacked_symint()
    torch._check(number.meta["val"] >= 0)
    torch._check(number.meta["val"] < 4)
    return drawing, x, number


def test_a_view_by_a_number_of_the_data_is_a_copy_of_its_own() -> None:
    drawing, x, number = with_symbols()
    row = drawing.call(aten.select.int, x, 0, number)
    plain = drawing.call(aten.select.int, x, 0, 1)
    scaled = drawing.call(aten.mul.Tensor, row, number)
    drawing.graph.output((row, plain, scaled))
    assert storage_of(row.meta["val"]) == storage_of(x.meta["val"])
    copy_views_by_number(drawing.graph)
    assert drawing.text() == [
        "select_copy.int(x, 0, number)", "select.int(x, 0, 1)", "mul.Tensor(select_int, number)",
    ]  # fmt: skip
    assert storage_of(row.meta["val"]) != storage_of(x.meta["val"])
    assert row.meta["val"].shape == (3,)
    found = drawing.run(torch.arange(12.0).view(4, 3), 2)
    assert torch.equal(found[0], torch.tensor([6.0, 7.0, 8.0]))


def test_sizes_that_depend_on_data_are_refused_with_their_line() -> None:
    drawing, x, number = with_symbols()
    rows = drawing.call(aten.slice.Tensor, x, 0, 0, number)
    rows.meta["stack_trace"] = '  File "model.py", line 12, in forward\n    x[:n]\n'
    drawing.graph.output(rows)
    with pytest.raises(CaptureError, match=r"slice_tensor depends on data, model.py:12 in forward: x\[:n\], and"):
        refuse_symbols(drawing.graph)
    with pytest.raises(CaptureError, match="depends on data"):
        normalize(fx.GraphModule({}, drawing.graph))
    refuse_symbols(drawing.graph, "example_value")  # none has one


def with_a_size() -> tuple[Drawing, fx.Node]:
    """A drawing with an input whose first size is symbolic."""
    drawing = Drawing()
    drawing.mode = FakeTensorMode(shape_env=ShapeEnv())
    x = drawing.graph.placeholder("x")
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x.meta["val"] = drawing.mode.from_tensor(torch.empty(5, 3), symbolic_context=dynamic)
    return drawing, x


def test_sizes_of_inputs_may_be_symbolic_and_passes_tie_them_to_no_number() -> None:
    drawing, x = with_a_size()
    rows = drawing.call(aten.sym_size.int, x, 0)
    t = drawing.graph.placeholder("tangents_1")
    t.meta = dict(x.meta)
    made = drawing.call(aten.exp.default, t)
    drawing.graph.output((drawing.call(aten.slice.Tensor, x, 0, 0, rows), drawing.call(aten.add.Tensor, made, made)))
    drawing.call(aten.add.Tensor, made, t)
    refuse_symbols(drawing.graph)
    copy_views_by_number(drawing.graph)
    note_overwriting(drawing.graph)
    assert "slice.Tensor(x, 0, 0, sym_size_int)" in drawing.text()
    environment = drawing.mode.shape_env
    assert environment is not None
    assert not environment.guards
    assert not environment.replacements


def test_dead_code_goes_and_a_broken_graph_is_noticed() -> None:
    drawing = Drawing()
    x = drawing.input("x", 3)
    last = drawing.call(aten.exp.default, x)
    drawing.call(aten.sin.default, x)
    drawing.graph.output(last)
    assert len(drawing.text()) == 2
    normalize(fx.GraphModule({}, drawing.graph))
    assert drawing.text() == ["exp.default(x)"]

    def breaks(graph: fx.Graph) -> None:
        graph.output_node().prepend(x)  # its reader comes before

    with pytest.raises(RuntimeError, match="before"):
        normalize(fx.GraphModule({}, drawing.graph), (Pass("breaks", breaks),))
