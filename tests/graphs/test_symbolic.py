"""A symbolic joint graph at given sizes is the graph that a capture of inputs of these sizes gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import add, mul, sub
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fxremat.graphs.captured import Captured
from fxremat.graphs.op_key import op_key
from fxremat.graphs.symbolic import (
    NotSymbolic,
    Numbers,
    SymbolicGraph,
    has_symbolic_sizes,
    is_size,
    same_size,
)
from fxremat.torch_private import expression_of, storage_of, torch_release
from tests.dags import Dag, Layer, Recipe, batch, capture
from tests.symbolic import symbolic_graph
from tests.test_shapes import ConvNet, gpt, pictures, text

pytestmark = pytest.mark.usefixtures("torch_ready")

MANY = ("linear", "dropout", "batch_norm", "norm", "mul", "cat", "split", "tanh", "attend", "tokens", "twist", "shared")


def random_layers() -> nn.Module:
    return Dag(Recipe(tuple(Layer(kind, 0, 2) for kind in MANY), 1, True))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Sequence[Any]], Any, Sequence[tuple[int, int]]]] = {
    "layers": (random_layers, lambda size: batch(0, size[0]), (12, 0), ((20, 0),)),
    "gpt": (lambda: gpt(1), lambda size: [*text(size).values()], (4, 32), ((3, 50),)),
    "conv": (ConvNet, lambda size: [*pictures(size).values()], (4, 16), ((2, 9),)),
}


def layout_of(tensor: Tensor) -> object:
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.storage_offset()


def assert_same(ours: Captured, theirs: Captured) -> None:
    """Two joint graphs are equal in ops, numbers, layouts, and in which tensors share a storage."""
    assert [op.key for op in ours.ops] == [op.key for op in theirs.ops]
    for mine, its in zip(ours.ops, theirs.ops, strict=True):
        for fact in ("backward", "reads", "writes", "again_reads", "again_writes", "random", "anchored"):
            assert getattr(mine, fact) == getattr(its, fact), (mine.name, fact)
    facts = [[(value.bytes, value.origin, value.producer) for value in joint.values] for joint in (ours, theirs)]
    assert facts[0] == facts[1]
    layouts = [
        [(layout_of(node.meta["val"]), value) for node, value in joint.value_of.items() if shows_a_tensor(node)]
        for joint in (ours, theirs)
    ]
    assert layouts[0] == layouts[1]
    for fact in ("forward_count", "root_tangents", "kept_outputs", "mutated_primals", "updates", "returned"):
        assert getattr(ours, fact) == getattr(theirs, fact), fact


def shows_a_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


@cache
def captured_once(name: str) -> tuple[nn.Module, SymbolicGraph]:
    """A model and its graph at symbolic sizes; nothing here changes them."""
    make, inputs, first, _ = CASES[name]
    model = make().train()
    return model, symbolic_graph(model, *inputs(first))


@pytest.mark.parametrize("name", CASES)
def test_a_graph_at_sizes_is_what_is_captured_there(name: str) -> None:
    _, inputs, first, others = CASES[name]
    model, graph = captured_once(name)
    known = {graph.numbers(tuple(first)[: len(graph.inputs)]).of(symbol) for symbol in graph.symbols}
    assert known == {size for size in first if size}
    assert_same(graph.now(), capture(model, *inputs(first)))
    for size in others:
        assert_same(graph.at(size[: len(graph.inputs)]), capture(model, *inputs(size)))


@pytest.mark.parametrize("name", CASES)
def test_views_share_storages_with_what_they_view(name: str) -> None:
    others = CASES[name][3]
    _, graph = captured_once(name)
    joint = graph.at(others[0][: len(graph.inputs)])
    storages: dict[int, int] = {}
    for node, value in joint.value_of.items():
        if shows_a_tensor(node):
            storage = storage_of(node.meta["val"])
            assert storages.setdefault(value, storage) == storage, node
            assert node.meta["val"].untyped_storage().nbytes() == joint.values[value].bytes
    assert len(set(storages.values())) == len(storages)
    symbolic = {node.name: storage_of(node.meta["val"]) for node in graph.module.graph.nodes if shows_a_tensor(node)}
    found = {node.name: storage_of(node.meta["val"]) for node in joint.value_of if shows_a_tensor(node)}
    assert len(set(found.values())) == len({symbolic[name] for name in found}) < len(found)
    assert not has_symbolic_sizes(joint.module.graph)
    assert has_symbolic_sizes(graph.module.graph)


def test_a_graph_at_sizes_has_the_nodes_of_the_symbolic_one_again() -> None:
    _, graph = captured_once("gpt")
    joint = graph.at((3, 50))
    again = graph.as_captured(joint)
    nodes = set(graph.module.graph.nodes)
    assert again.module is graph.module
    assert {*again.nodes, *again.shown} <= nodes
    assert [op.name for op in again.ops] == [op.name for op in joint.ops]
    assert {node.name: value for node, value in again.value_of.items()} == {
        node.name: value for node, value in joint.value_of.items()
    }
    assert len(again.primals) == len(joint.primals) == len(graph.primals) - len(graph.inputs)
    assert len(again.backward_outputs) == len(joint.backward_outputs) + len(graph.inputs)
    assert [again.backward_outputs[place] for place in graph.places] == [None] * len(graph.places)
    assert len(again.forward_outputs) == len(joint.forward_outputs)


class Sizes(nn.Module):
    """Sizes of the input and numbers that are made of them, as they are used in models."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, factor: float) -> Tensor:
        rows = x.shape[0]
        y = self.linear(x)[: rows // 2] * (rows / 3) + rows**0.5
        return (y * factor).mean()


@cache
def symbols_of(count: int) -> tuple[Any, ...]:
    """Symbolic sizes of a traced input, which has that many now."""
    graph = symbolic_graph(nn.Sequential(nn.Linear(3, 3), nn.Flatten(0)), torch.randn(count, 5, 3))
    return tuple(node.meta["val"] for node in graph.inputs)


def test_numbers_at_sizes() -> None:
    rows, columns = symbols_of(7)
    numbers = Numbers([expression_of(rows), expression_of(columns)], (9, 4))
    assert numbers(rows) == 9
    assert numbers(rows * columns + 2) == 38
    assert numbers((rows + columns) // 2) == 6  # FloorDiv of 13
    assert numbers(rows % 4) == 1
    half = numbers(rows / 2)
    assert (half, type(half)) == (4.5, float)
    whole = numbers((rows - 1) // 4)
    assert (whole, type(whole)) == (2, int)
    assert numbers(torch.sym_float(rows)) == 9.0
    assert numbers(rows == 9) is True
    assert numbers(rows < columns) is False
    for other in (3, 2.5, None, "name", True):
        assert numbers(other) is other


ARITHMETIC: Sequence[Callable[[Any, Any], Any]] = [
    add,
    sub,
    mul,
    lambda one, other: one // (other * other + 1),
    lambda one, other: (one * one) % (other * other + 1),
]


@settings(deadline=None)
@given(data=st.data())
def test_a_number_is_what_sympy_says(data: st.DataObject) -> None:
    sizes: list[Any] = [*symbols_of(7)]
    for _ in range(data.draw(st.integers(1, 6))):
        one, other = (data.draw(st.sampled_from([*sizes, 2, 3])) for _ in range(2))
        sizes.append(data.draw(st.sampled_from(ARITHMETIC))(one, other))
    sizes.append(torch.sym_max(sizes[-1], sizes[0]))
    dims = data.draw(st.tuples(st.integers(1, 99), st.integers(1, 99)))
    given = dict(zip(map(expression_of, sizes[:2]), map(sympy.Integer, dims), strict=True))
    numbers = Numbers([*given], dims)
    symbolic = [size for size in sizes if isinstance(size, torch.SymInt)]
    assert [*map(numbers, symbolic)] == [int(expression_of(size).xreplace(given)) for size in symbolic]


@pytest.mark.parametrize("name", CASES)
def test_an_op_at_sizes_is_that_of_the_graph_there(name: str) -> None:
    sizes = CASES[name][3][0]
    _, graph = captured_once(name)
    dims = sizes[: len(graph.inputs)]
    joint, by_name = graph.at(dims), {node.name: node for node in graph.module.graph.nodes}
    for count in (1, len(joint.nodes)):
        found = graph.ops_at([by_name[node.name] for node in joint.nodes[-count:]], dims)
        assert [*map(op_key, found)] == [*map(op_key, joint.nodes[-count:])]


def test_an_input_whose_size_follows_from_others_is_left_out() -> None:
    rows, columns = symbols_of(7)
    expressions = [expression_of(size) for size in (rows, columns, rows * columns)]
    assert Numbers(expressions, (5, 2, 10))(rows * columns + columns) == 12


def test_sizes_are_equal_where_they_are_at_all_sizes() -> None:
    rows, columns = symbols_of(7)
    guards = len(rows.node.shape_env.guards)
    assert same_size(3, 3)
    assert not same_size(3, 4)
    assert same_size(rows, rows)
    assert not same_size(rows, 7)
    assert not same_size(7, rows)
    assert not same_size(rows, rows + 1)
    assert same_size(rows * (rows + columns), rows * columns + rows * rows)
    assert not same_size(rows // 2 * 2, rows)
    assert len(rows.node.shape_env.guards) == guards, "a comparison adds a guard"


def test_numbers_that_depend_on_data_are_no_sizes() -> None:
    (rows, *_) = symbols_of(7)
    assert is_size(rows)
    assert not is_size(3)
    assert not is_size(None)
    assert not is_size(rows.node.shape_env.create_unbacked_symint())


def test_a_float_that_changes_is_a_value() -> None:
    graph = symbolic_graph(Sizes(), torch.randn(8, 4), 0.5)
    assert len(graph.inputs) == 1
    joint = graph.at((11,))
    shapes = {tuple(node.meta["val"].shape) for node in joint.value_of if shows_a_tensor(node)}
    assert (5, 4) in shapes
    constants = {arg for op in joint.ops for arg in joint.nodes[op.index].args if isinstance(arg, float)}
    assert 11 / 3 in constants


class Spectrum(nn.Module):
    """A Fourier transform, whose shapes are found by views inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(self.linear(x), dim=1).abs().mean()


def test_a_view_inside_of_an_op_may_have_symbolic_sizes() -> None:
    model = Spectrum()
    graph = symbolic_graph(model, torch.randn(5, 8, 4))
    assert len(graph.inputs) == 2
    assert_same(graph.at((3, 10)), capture(model, torch.randn(3, 10, 4)))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 4, sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens).square().mean()


def test_a_sparse_value_is_known_for_one_size_alone() -> None:
    graph = symbolic_graph(Sparse(), torch.arange(5))
    with pytest.raises(NotSymbolic, match="a value of layout"):
        graph.at((7,))


class Factored(nn.Module):
    """A Cholesky factor, which is checked by an op with effects."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.linalg.cholesky(y.mT @ y + torch.eye(4)).sum()


@pytest.mark.skipif(torch_release() < (2, 13), reason="in torch 2.11 the check is an ordinary op")
def test_an_op_with_effects_is_refused() -> None:
    graph = capture(Factored(), torch.randn(6, 4))
    with pytest.raises(NotSymbolic, match="an op with effects"):
        SymbolicGraph(graph.module, len(graph.forward_outputs))


def test_two_inputs_may_be_one_symbol() -> None:
    """Take the same size twice, as the graph behind a break takes `x.shape[0]` and `y.shape[0]` of equal batches."""
    graph = symbolic_graph(nn.Linear(4, 4), torch.randn(6, 4))
    (size,) = [node.meta["val"] for node in graph.inputs]
    graph.symbols = (*graph.symbols, *graph.symbols)
    assert graph.formulas([size, 2 * size, 7])((5, 5)) == [5, 10, 7]
