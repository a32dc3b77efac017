"""Regions by themselves: what they own, what they share, and what Inductor's cache must not mix up."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._inductor.fx_passes import joint_graph

from fxremat.errors import FxrematError
from fxremat.graphs import region as regions
from fxremat.graphs.region import (
    Kernels,
    Region,
    compile_all,
    forget_kernels,
    hand_over,
    regions_of,
    runnable,
)
from fxremat.ops.decompositions import DECOMPOSITIONS
from fxremat.ops.seeded import ALWAYS_COMPILED
from fxremat.torch_inductor import link_in_any_folder

pytestmark = pytest.mark.usefixtures("torch_ready")
aten = torch.ops.aten
SHAPE = (64, 32)


@pytest.fixture(autouse=True)
def _no_kernels() -> Iterator[None]:
    forget_kernels()
    yield
    forget_kernels()


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache of Inductor's."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def module_of(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    module = fx.symbolic_trace(function)
    for node, tensor in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta["val"] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return module


def region_of(function: Callable[..., Any], *inputs: Tensor, **owned: Any) -> Region:
    module = module_of(function, *inputs)
    for node in module.graph.find_nodes(op="placeholder"):
        node.meta["val"] = torch.empty_strided(node.meta["val"].shape, node.meta["val"].stride())
    how = Kernels(settings={}, decompositions=DECOMPOSITIONS, required=ALWAYS_COMPILED)
    return Region(module, module.graph, how, **owned)


def scaled(x: Any, y: Any) -> Any:
    return (aten.mul.Tensor(aten.sin.default(x), y),)


DONATED = frozenset([0])


def check(region: Region) -> None:
    """Run a region of `scaled`; only what it was given to overwrite changes."""
    inputs = [torch.rand(SHAPE), torch.rand(SHAPE)]
    wanted, before = inputs[0].sin() * inputs[1], [x.clone() for x in inputs]
    (result,) = region.run([*inputs])
    torch.testing.assert_close(result, wanted)
    overwritten = {place for place, x in enumerate(inputs) if not torch.equal(x, before[place])}
    assert overwritten == region.donated
    assert all(result.data_ptr() == inputs[place].data_ptr() for place in overwritten)


LATER = [pytest.param(order, marks=pytest.mark.long) for order in ((0, 1, None), (1, None, 0))]


@pytest.mark.long
@pytest.mark.parametrize("order", [(0, None), *LATER])
def test_code_that_may_overwrite_is_not_mixed_up_with_code_that_may_not(
    order: tuple[int | None, ...], cold: None
) -> None:
    del cold
    x, y = torch.rand(SHAPE), torch.rand(SHAPE)
    for hits in (0, len(order)):
        before = counters["inductor"]["fxgraph_cache_hit"]
        for donated in order:
            given_away = frozenset(() if donated is None else (donated,))
            check(region_of(scaled, x, y, dying=given_away, donated=given_away))
        assert counters["inductor"]["fxgraph_cache_hit"] - before == hits
        forget_kernels()  # and the next are read from Inductor's cache


def test_called_with_tensors_it_leaves_them_alone() -> None:
    x, y = torch.rand(SHAPE), torch.rand(SHAPE)
    before = x.clone()
    region = region_of(scaled, x, y, dying=DONATED, donated=DONATED)
    torch.testing.assert_close(region(x, y)[0], x.sin() * y)
    assert torch.equal(x, before)


def test_equal_code_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []

    def count(module: fx.GraphModule, *_: Any) -> Any:
        compiled.append(module)
        return lambda inputs: module(*inputs)

    monkeypatch.setattr(regions, "compile_region", count)
    x, y = torch.rand(SHAPE), torch.rand(SHAPE)
    same = [region_of(scaled, x, y) for _ in range(3)]
    other = [region_of(scaled, x.t(), y.t()), region_of(scaled, x, y, dying=DONATED, donated=DONATED)]
    assert len({*same, *other}) == 3
    assert len(list(compile_all([*same[:1], *other]))) == 3
    assert same[2].is_compiled
    assert same[1].compile() == 0.0
    assert len(compiled) == 3


def test_threads_that_compile_at_once_leave_settings_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread restores what it found, and one that begins while another waits finds that one's settings."""
    from torch.fx import _lazy_graph_module as lazy

    one_begins, other_begins, one_ends = (threading.Event() for _ in range(3))

    def overlapping(module: fx.GraphModule, _: Any, donated: object, *__: Any) -> Any:
        mine, waits = (other_begins, one_ends) if donated else (one_begins, other_begins)
        if donated:
            one_begins.wait(60)
        with lazy._use_lazy_graph_module(True):
            mine.set()
            waits.wait(60)
        one_ends.set()
        return lambda inputs: module(*inputs)

    monkeypatch.setattr(regions, "compile_region", overlapping)
    x, y = torch.rand(SHAPE), torch.rand(SHAPE)
    list(compile_all([region_of(scaled, x, y), region_of(scaled, x, y, dying=DONATED, donated=DONATED)]))
    assert not lazy._use_lazy_graph_module_flag


def test_what_does_not_compile_runs_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(regions, "compile_region", fail)
    x, y = torch.rand(SHAPE), torch.rand(SHAPE)
    region = region_of(scaled, x, y)
    region.compile()
    assert torch.equal(region(x, y)[0], x.sin() * y)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(regions, "compile_region", fail)


@pytest.mark.usefixtures("no_compiler")
def test_a_mask_has_to_be_compiled() -> None:
    seed = torch.zeros((), dtype=torch.int64)
    region = region_of(lambda s: (torch.ops.fxremat.seeded_mask.default(s, [4], 0.5, torch.float32),), seed)
    with pytest.raises(FxrematError, match=r'no compiler.*random="eager"'):
        region.compile()


@pytest.mark.usefixtures("no_compiler")
def test_what_has_kernels_of_its_own_need_not_be_compiled() -> None:
    x = torch.rand(8, 4, 5, 5)
    region = region_of(lambda x: torch.ops.fxremat.batch_statistics.default(x, None, None, 0.1, 1e-5, False)[:2], x)
    region.compile()
    mean, _ = region(x)
    assert region.given_up
    torch.testing.assert_close(mean, x.mean(dim=[0, 2, 3]))


def test_inputs_of_another_layout_are_laid_out_as_the_kernels_expect() -> None:
    x, y = torch.rand(SHAPE), torch.rand(SHAPE)
    region = region_of(scaled, x, y)
    transposed = x.t().contiguous().t()
    torch.testing.assert_close(region(transposed, y)[0], x.sin() * y)


def test_inputs_of_another_type_are_what_the_kernels_expect() -> None:
    """Fake kernels do not always know the types of real ones: those of statistics in mixed precision."""
    x, y = torch.rand(SHAPE), torch.rand(SHAPE)
    found = region_of(scaled, x, y)(x.double(), y)[0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, x.sin() * y)


def test_a_graph_hands_its_regions_what_dies_there() -> None:
    x, y = torch.rand(SHAPE), torch.rand(SHAPE)
    region = region_of(scaled, x, y, dying=DONATED, donated=DONATED)
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in ("x", "y")]
    made = graph.call_function(aten.cos.default, (given[0],))
    called = graph.call_function(region, (made, given[1]))
    graph.output((called,))
    module = fx.GraphModule({}, graph)
    assert regions_of(graph) == [region]
    run = runnable(module)
    ((result,),) = run([x, y])
    torch.testing.assert_close(result, x.cos().sin() * y)
    assert regions_of(module.graph) == [region]  # what is shown stays as it was
    assert not any(node.target is hand_over for node in module.graph.nodes)


def test_every_output_has_a_storage_of_its_own() -> None:
    def sharing(x: Any) -> Any:
        made = aten.sin.default(x)
        nothing = aten.zeros.default([*SHAPE])
        return made, aten.add.Tensor(made, nothing), aten.add.Tensor(x, nothing)

    x = torch.rand(SHAPE)
    region = region_of(sharing, x)
    results = region(x)
    assert not region.given_up
    assert len({tensor.untyped_storage().data_ptr() for tensor in (x, *results)}) == 4
    for found, wanted in zip(results, (x.sin(), x.sin(), x), strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_padded_product_is_returned_as_its_readers_expect_it(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = joint_graph.joint_graph_passes

    def padding(graph: fx.GraphModule) -> Any:
        """Pad a product to 8 columns, as Inductor does on CUDA where that is faster."""
        (product,) = graph.graph.find_nodes(op="call_function", target=aten.mm.default)
        left, right = product.args
        with graph.graph.inserting_before(product), product.meta["val"].fake_mode:
            wide = graph.graph.call_function(aten.constant_pad_nd.default, (right, [0, 1]))
            wide.meta["val"] = torch.empty(4, 8)
            made = graph.graph.call_function(aten.mm.default, (left, wide))
            made.meta["val"] = torch.empty(5, 8)
            cut = graph.graph.call_function(aten.slice.Tensor, (made, 1, 0, -1))
            cut.meta["val"] = made.meta["val"][:, :-1]
        product.replace_all_uses_with(cut)
        graph.graph.erase_node(product)
        return passes(graph)

    monkeypatch.setattr(joint_graph, "joint_graph_passes", padding)
    x, w = torch.rand(5, 4), torch.rand(4, 7)
    region = region_of(lambda x, w: (aten.mm.default(x, w),), x, w)
    (product,) = region(x, w)
    assert product.stride() == (7, 1)
    assert product.untyped_storage().nbytes() == product.nbytes
    torch.testing.assert_close(product, x @ w)
    assert not region.given_up


def test_single_elements_have_any_stride() -> None:
    x, y = torch.rand(1, 32), torch.rand(1, 32)
    region = region_of(scaled, x, y, dying=DONATED, donated=DONATED)
    odd = torch.rand(32).as_strided((1, 32), (1, 1))
    wanted, place = odd.sin() * y, odd.data_ptr()
    (result,) = region.run([odd, y])
    torch.testing.assert_close(result, wanted)
    assert result.data_ptr() == place  # it was not copied


def test_kernels_are_linked_where_pytorch_lies_in_a_folder_with_a_space(tmp_path: Path) -> None:
    from torch._inductor.cpp_builder import BuildOptionsBase, CppBuilder

    for _ in range(2):
        link_in_any_folder()
    folder = tmp_path / "a b"
    options = BuildOptionsBase(libraries_dirs=[str(folder)], compiler="c++")
    command = CppBuilder(name="kernels", sources="kernels.cpp", BuildOption=options).get_command_line()
    assert f"-L{folder}" in shlex.split(command)
