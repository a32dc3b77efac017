"""Launches of users' Triton kernels become ops; functions of Python stand for kernels here, and run on a CPU."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._subclasses.fake_tensor import FakeTensorMode

from fxremat.errors import CaptureError
from fxremat.graphs.captured import read_joint
from fxremat.graphs.op_key import op_key
from fxremat.passes.pipelines import PIPELINES, normalize
from fxremat.passes.triton_kernels import launch_as_ops

aten = torch.ops.aten


class Kernel:
    """A function of tensors in the place of a Triton kernel."""

    def __init__(self, fn: Callable[..., None]) -> None:
        self.fn, self.arg_names = fn, ["x", "y", "factor"]

    def __getitem__(self, _: Any) -> Callable[..., None]:
        return self.fn


def add_squares(x: Tensor, y: Tensor, factor: float) -> None:
    """Add squares of `x` to `y`, times a factor."""
    y.add_(x * x, alpha=factor)


def write_squares(x: Tensor, y: Tensor, factor: float) -> None:
    """Write squares of `x` to `y`, times a factor."""
    torch.mul(x, x, out=y).mul_(factor)


ADDED, WRITTEN = Kernel(add_squares), Kernel(write_squares)


def graph_of(kernel: Kernel, made: Any, factor: float = 2.0, *, read_later: bool = False) -> fx.GraphModule:
    """Return a graph that launches a kernel on x and `made(x)`, and then takes a sine; it may return `made(x)` too."""
    graph = fx.Graph()
    with FakeTensorMode():
        value = torch.empty(3, 4)
    x = graph.placeholder("x")
    y = graph.call_function(made, (x,))
    options = {
        "kernel_idx": kernel_side_table.add_kernel(kernel),  # type: ignore[arg-type]
        "constant_args_idx": kernel_side_table.add_constant_args({"factor": factor}),
        "grid": [(1, 1, 1)],
        "tma_descriptor_metadata": {},
        "kwargs": {"x": x, "y": y},
        "tensors_to_clone": ["y"],
    }
    launch = graph.call_function(triton_kernel_wrapper_functional, (), options)
    item = graph.call_function(operator.getitem, (launch, "y"))
    sine = graph.call_function(aten.sin.default, (item,))
    for node in (x, y, item, sine):
        node.meta["val"] = value
    launch.meta["val"] = {"y": value}
    graph.output((sine, y) if read_later else (sine,))
    return fx.GraphModule({}, graph)


def launches_in(module: fx.GraphModule) -> list[fx.Node]:
    """Return the launches, once they are ops."""
    return [node for node in module.graph.nodes if str(node.target).startswith("triton ")]


def rewritten(kernel: Kernel, made: Any, factor: float = 2.0, *, read_later: bool = False) -> fx.GraphModule:
    """Return such a graph after the pass."""
    module = graph_of(kernel, made, factor, read_later=read_later)
    launch_as_ops(module.graph)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return module


def test_what_a_kernel_adds_to_is_copied() -> None:
    module, x = rewritten(ADDED, aten.cos.default, read_later=True), torch.randn(3, 4)
    sine, operand = module(x)
    assert torch.equal(sine, (x.cos() + 2 * x * x).sin())
    assert torch.equal(operand, x.cos())
    (launch,) = launches_in(module)
    assert len(launch.args) == 2


def test_a_buffer_is_allocated_by_the_op() -> None:
    module, x = rewritten(WRITTEN, aten.empty_like.default), torch.randn(3, 4)
    assert torch.equal(module(x)[0], (2 * x * x).sin())
    (launch,) = launches_in(module)
    assert len(launch.args) == 1
    assert not module.graph.find_nodes(op="call_function", target=aten.empty_like.default)
    read_later = rewritten(WRITTEN, aten.empty_like.default, read_later=True)
    assert len(launches_in(read_later)[0].args) == 2


def test_equal_launches_have_equal_keys() -> None:
    def key(*how: Any) -> str:
        (launch,) = launches_in(rewritten(*how))
        return op_key(launch)

    buffer = aten.empty_like.default
    assert key(WRITTEN, buffer) == key(WRITTEN, buffer)  # each launch has constants of its own
    others = {key(WRITTEN, buffer, 3.0), key(ADDED, buffer), key(WRITTEN, aten.cos.default)}
    assert len(others | {key(WRITTEN, buffer)}) == 4


def test_the_pipelines_of_what_fxremat_runs_have_the_pass() -> None:
    assert [name for name, passes in PIPELINES.items() if "launch_as_ops" not in passes] == ["for compilers"]


def test_a_dict_is_refused_by_name() -> None:
    module = normalize(graph_of(WRITTEN, aten.empty_like.default), PIPELINES["for compilers"])
    with pytest.raises(CaptureError, match=r"triton_kernel_wrapper_functional.* returns a dict"):
        read_joint(module, 1)
