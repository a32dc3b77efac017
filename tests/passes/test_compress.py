"""Compression of what the backward reads: the ops, what is found in a graph, and the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import fxremat
from fxremat.graphs.captured import Captured
from fxremat.ops.compressed import packed_by_words, row_length, unpacked_by_words
from fxremat.passes import compress
from fxremat.passes.compress import Compression, packable, roundable
from fxremat.torch_private import memory_order
from tests.dags import Dag, Recipe, batch, few, recipes

SHAPE = (4, 8, 16, 16)
SPECIAL = (0.0, -0.0, 1.0, 6.0, -1.0, 0.5, float("nan"), float("inf"), -float("inf"))

LOSSLESS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {  # each with the target of the op that stores
    "relu": (lambda x: F.dropout(F.relu(x), 0.2), "pack_bits"),
    "threshold": (lambda x: F.dropout(F.threshold(x, 0.5, -2.0), 0.2), "pack_bits"),
    "tail": (lambda x: F.dropout(F.relu(x.flatten()[1:] * 1), 0.2), "pack_bits"),  # where kernels take single elements
    "leaky_tail": (lambda x: F.leaky_relu(x.flatten()[3:] * 2, 0.1), "pack_bits"),
    "chunks": (lambda x: torch.where(torch.cat((x > 0.25).chunk(2, 1), 1), x * 3, x), "pack_bits"),
    "parts": (lambda x: _by_parts(x), "pack_bits"),
    "leaky_relu": (lambda x: F.leaky_relu(x * 2, 0.1), "pack_bits"),
    "dropout": (lambda x: F.dropout(x, 0.3), "pack_bits"),
    "transposed": (lambda x: F.dropout(x.transpose(1, 3), 0.3), "pack_bits"),
    "channels_last": (lambda x: F.dropout(x.to(memory_format=torch.channels_last), 0.3), "pack_bits"),
    "where": (lambda x: torch.where(x > 0.25, x * 3, x), "pack_bits"),
    "max_pool": (lambda x: F.max_pool2d(F.relu(x), 2), "_to_copy"),
    "overlapping": (lambda x: F.max_pool2d(x * 2, 3, 2, 1), "_to_copy"),
    "max_pool3d": (lambda x: F.max_pool3d(F.relu(x), 2), "_to_copy"),
    "topk": (lambda x: x.flatten(1).topk(700).values, "_to_copy"),
    "sort": (lambda x: x.flatten(1).sort(1, descending=True).values, "_to_copy"),
    "max": (lambda x: x.flatten(1).repeat(1, 2).view(-1, 8).max(1).values, "_to_copy"),
}


def _by_parts(x: Tensor) -> Tensor:
    """Read a mask through views that one op returns together."""
    parts = zip((x > 0.25).chunk(2, 1), x.chunk(2, 1), strict=True)
    return torch.cat([torch.where(mask, y * 3, y) for mask, y in parts])


FREED = {  # of whose input only the shape is read
    "avg_pool": lambda x: F.avg_pool2d(x * 2, 2),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x * 2, 5),
    "avg_pool3d": lambda x: F.avg_pool3d((x * 2).float(), 2).to(x.dtype),
}


class Of(nn.Module):
    """The function of an input with a parameter of its sizes, which gets the gradient."""

    def __init__(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
        values.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
        self.weight, self.function = nn.Parameter(values.to(dtype)), function

    def forward(self, x: Tensor) -> Tensor:
        y = self.function(self.weight * x)
        return (y * torch.arange(y.numel(), dtype=y.dtype).view(y.shape)).sum()


def captured(function: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> Captured:
    step = fxremat.capture(Of(function, dtype), (torch.ones(SHAPE, dtype=dtype),), mem="100%", costs="estimate")
    return step.graph


def outputs(graph: Captured, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Run a graph with the same inputs and random numbers each time."""
    torch.manual_seed(1)
    given = [Of(abs, dtype).weight.detach(), torch.ones(SHAPE, dtype=dtype), torch.ones((), dtype=dtype)]
    found = torch.fx.Interpreter(graph.module, graph=graph.module.graph).run(*given, enable_io_processing=False)
    return list(found)


def equal(a: object, b: object) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b
    return bool(torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0), b.nan_to_num(0)))


def stored(graph: Captured) -> list[str]:
    return [op.target for op in graph.ops if not op.backward]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*LOSSLESS, *FREED])
def test_what_is_packed_has_the_same_gradients_with_nan_and_zeros_of_both_signs(name: str, dtype: torch.dtype) -> None:
    function, how = LOSSLESS.get(name) or (FREED[name], "")
    graph = captured(function, dtype)
    saved = packable(graph)
    packed = Compression(packed=tuple(saved)).of(graph)
    assert saved, graph.ops
    if how:
        assert any(how in target for target in stored(packed))
    before, after = outputs(graph, dtype), outputs(packed, dtype)
    assert all(map(equal, before, after))
    assert any(isinstance(each, Tensor) and each.shape == SHAPE for each in before)


@pytest.mark.parametrize("name", [*LOSSLESS, *FREED])
def test_what_the_backward_reads_has_fewer_bytes_by_what_was_said(name: str) -> None:
    graph = captured(LOSSLESS.get(name, (FREED.get(name), ""))[0])  # type: ignore[arg-type]
    saved = packable(graph)
    packed = Compression(packed=tuple(saved)).of(graph)
    assert across(graph) - across(packed) == sum(saved.values())


def across(graph: Captured) -> int:
    """The bytes made by the forward that the backward reads."""
    read = {value for op in graph.ops if op.backward for value in op.reads}
    made = {value for op in graph.ops if not op.backward for value in op.writes}
    return sum(graph.values[value].bytes for value in read & made)


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x: F.relu6(x * 3), torch.float32),  # what its backward does with NaN depends on the place
        (lambda x: F.hardtanh(x * 2, -1, 0.5), torch.float32),
        (lambda x: F.threshold(x * 2, 0.1, 0.0), torch.bfloat16),  # 0.1 is another number in bfloat16
    ],
)
def test_what_one_bit_does_not_tell_stays(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    assert not packable(captured(function, dtype))


def test_masks_that_lie_otherwise_than_their_fakes_come_back_as_they_lay() -> None:
    mask = (torch.rand(2, 3, 4, 5) > 0.5).to(memory_format=torch.channels_last)
    packed = torch.ops.fxremat.pack_bits(mask, [0, 1, 2, 3])
    back = torch.ops.fxremat.unpack_bits(packed, [2, 3, 4, 5], [0, 1, 2, 3], torch.bool)
    assert torch.equal(back, mask)
    assert back.stride() == mask.stride()


def test_values_that_are_returned_or_read_in_full_stay_as_they_are() -> None:
    product = captured(lambda x: F.relu(x) ** 2)  # the backward reads the number itself
    assert not packable(product)
    step = fxremat.capture(Returning(), (torch.ones(64, 64),), mem="100%", costs="estimate")
    assert not packable(step.graph)


class Returning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = self.weight * x > 0.5
        return torch.where(mask, self.weight * 2, 0.0).sum(), mask


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.permutations(range(4)), st.integers(0, 99))
def test_bits_come_back_with_strides_and_by_either_way(shape: list[int], order: list[int], seed: int) -> None:
    order = [dimension for dimension in order if dimension < len(shape)]
    torch.manual_seed(seed)
    mask = (torch.rand([shape[d] for d in order]) > 0.5).permute([order.index(d) for d in range(len(order))])
    packed = torch.ops.fxremat.pack_bits(mask, order)
    back = torch.ops.fxremat.unpack_bits(packed, shape, order, torch.bool)
    assert packed.numel() == -(-mask.numel() // 8)
    assert torch.equal(back, mask)
    assert back.stride() == mask.stride()
    flat = mask.permute(order).reshape(-1)
    assert torch.equal(packed_by_words(flat), packed)
    assert torch.equal(unpacked_by_words(packed)[: flat.numel()], flat.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("to", [torch.int8, torch.float8_e4m3fn])
@given(st.integers(0, 99), st.sampled_from([(3, 128), (2, 4, 9, 9), (7,), (2, 3, 64)]), st.floats(1e-5, 1e3))
def test_rounded_numbers_are_as_near_as_is_said(
    dtype: torch.dtype, to: torch.dtype, seed: int, shape: tuple[int, ...], scale: float
) -> None:
    torch.manual_seed(seed)
    x = (torch.randn(shape) * scale).to(dtype)
    x.view(-1)[0] = 0
    order = memory_order(x)
    rounded, scales = torch.ops.fxremat.round_rows(x, order, to)
    back = torch.ops.fxremat.scale_rows(rounded, scales, shape, order, dtype)
    assert (back.dtype, back.shape, back.stride()) == (x.dtype, x.shape, x.stride())
    rows = x.reshape(-1, row_length(shape, order)).double()
    error = (back.reshape(rows.shape).double() - rows).abs()
    largest = rows.abs().amax(1, keepdim=True)
    bound = largest / 254 if to is torch.int8 else rows.abs() / 16 + largest / 448 / 1024
    own = torch.finfo(dtype).eps / 2 * largest + torch.finfo(dtype).tiny * torch.finfo(dtype).eps  # of the result
    assert bool((error <= 1.001 * bound + own).all())


def test_zeros_stay_zeros_when_rounded() -> None:
    zeros = torch.zeros(2, 64)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        rounded, scales = torch.ops.fxremat.round_rows(zeros, [0, 1], dtype)
        assert torch.equal(torch.ops.fxremat.scale_rows(rounded, scales, [2, 64], [0, 1], torch.float32), zeros)


def test_losses_attention_and_copies_of_parameters_are_not_rounded() -> None:
    def attended(x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(x * 2, x, x)
        return F.log_softmax(y @ y.transpose(2, 3), -1)

    graph = captured(attended)
    readers = {op.target for value in roundable(graph, "int8") for op in graph.ops if op.backward and value in op.reads}
    assert readers <= {"aten.bmm.default", "aten.mul.Tensor"}
    assert any("flash_attention" in op.target for op in graph.ops)


def test_an_equal_graph_gets_an_equal_rewrite() -> None:
    one, other = (captured(LOSSLESS["max_pool"][0]) for _ in range(2))
    assert packable(one) == packable(other)
    compression = Compression(packed=tuple(packable(one)), rounded=tuple(roundable(one, "fp8")), dtype="fp8")
    assert compression.of(one).digest == compression.of(other).digest


def given_to(graph: Captured) -> list[Any]:
    """Numbers for the inputs of a graph, gradients of its outputs included."""
    torch.manual_seed(2)
    shown = [node.meta["val"] for node in graph.module.graph.nodes if node.op == "placeholder"]
    return [
        torch.randn(each.shape, dtype=each.dtype) if each.is_floating_point() else torch.randint(2, each.shape)
        for each in shown
    ]


def check_random(recipe: Recipe) -> None:
    torch._dynamo.reset()
    model = Dag(recipe).train()
    graph = fxremat.capture(model, batch(), mem="100%", costs="estimate", search=fxremat.Search(seconds=0)).graph
    saved = packable(graph)
    packed = Compression(packed=tuple(saved)).of(graph)
    rounded = Compression(packed=tuple(saved), rounded=tuple(roundable(graph, "int8"))).of(graph)
    found = []
    for each in (graph, packed, rounded):
        inputs = given_to(each)
        torch.manual_seed(3)
        run = torch.fx.Interpreter(each.module, graph=each.module.graph)
        found.append([*run.run(*inputs, enable_io_processing=False), torch.get_rng_state()])
    assert all(map(equal, *found[:2]))
    strides = [[one.stride() for one in each if isinstance(one, Tensor)] for each in found]
    assert strides[0] == strides[1] == strides[2]
    kept = len(graph.forward_outputs)
    assert all(map(equal, found[0][:kept], found[2][:kept]))  # only the backward reads what is rounded


@pytest.fixture
def all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compress, "LEAST_BYTES", 1)


@pytest.mark.usefixtures("all_sizes")
@few(6)
@given(recipes)
def test_random_models_have_the_same_gradients(recipe: Recipe) -> None:
    check_random(recipe)


@pytest.mark.long
@pytest.mark.usefixtures("all_sizes")
@few(300)
@given(recipes)
def test_many_random_models_have_the_same_gradients(recipe: Recipe) -> None:
    check_random(recipe)
