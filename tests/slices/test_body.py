"""Random chains of ops that run in slices together make what they make as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxremat.slices.body import Region, Sliced
from fxremat.slices.labels import SUM, axes
from fxremat.slices.rules import shape_of, ways
from tests.dags import few
from tests.draws import everyday

pytestmark = pytest.mark.usefixtures("torch_ready")

aten = torch.ops.aten


def normed(x: torch.Tensor) -> torch.Tensor:
    """A layer norm and its backward at once."""
    size = [x.shape[-1]]
    y, mean, rstd = aten.native_layer_norm(x, size, None, None, 1e-5)
    return aten.native_layer_norm_backward(y * y, x, size, mean, rstd, None, None, [True, False, False])[0]


STEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "add": lambda x: (x * 2) + x,
    "backward": lambda x: aten.tanh_backward(x * x, x.tanh()),
    "softmax": lambda x: x.softmax(-1),
    "first softmax": lambda x: x.softmax(0),
    "normed": normed,
    "merge": lambda x: x.reshape(-1, x.shape[-1]),
    "split": lambda x: x.reshape(*x.shape[:-1], 2, -1) if x.shape[-1] % 2 == 0 and x.dim() < 4 else x,
    "turn": lambda x: x.transpose(0, -1),
    "dense": lambda x: x.transpose(0, -1).contiguous(),
    "matrix": lambda x: x.reshape(-1, x.shape[-1]) @ x.reshape(-1, x.shape[-1]).t().tanh(),
    "centre": lambda x: x - x.mean(-1, keepdim=True),
    "largest": lambda x: x / x.abs().amax(-1, keepdim=True).clamp(min=1),
    "mask": lambda x: torch.where(x > 0, x, x.exp() - 1),
    "columns": lambda x: x.sum(0, keepdim=True) * 0.1 + x,
    "half": lambda x: torch.cat([x[..., ::2], x[..., 1::2]], -1),
}


def region(graph: fx.Graph, outer: int, count: int, parts: int) -> Region:
    """A region of the first ops, up to one that cannot be cut along an axis of the first input as they are."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    labels: dict[fx.Node, Any] = {inputs[0]: outer}
    steps: list[fx.Node] = []
    for node in graph.nodes:
        inside = all(isinstance(labels.get(parent), int | tuple) for parent in node.all_input_nodes)
        if node.op != "call_function" or "val" not in node.meta or not inside:
            continue
        if node.target.__name__ == "getitem":
            labels[node] = labels[node.args[0]][node.args[1]]
            steps.append(node)
            continue
        found = [way for way in ways(node, count) if all(labels[p] == part for p, part in way.reads.items())]
        if found:
            labels[node] = (
                found[0].writes[0] if isinstance(node.meta["val"], torch.Tensor) else found[0].writes
            )
            steps.append(node)
    outputs = [
        node
        for node in steps
        if isinstance(node.meta["val"], torch.Tensor) and (labels[node] is SUM or read_outside(node, steps))
    ]
    return Region(
        inputs=tuple(inputs),
        steps=tuple(steps),
        outputs=tuple(outputs),
        labels=labels,
        count=count,
        parts=parts,
    )


def read_outside(node: fx.Node, steps: list[fx.Node]) -> bool:
    """Tell whether something outside of the region reads a value, or nothing does."""
    return not node.users or any(user not in steps for user in node.users)


@few(everyday(100))
@given(
    st.lists(st.integers(2, 4), min_size=2, max_size=3),
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5),
    st.integers(2, 5),
    st.booleans(),
    st.data(),
)
def test_chains(shape: list[int], names: list[str], parts: int, turned: bool, data: st.DataObject) -> None:
    x = torch.randn(*shape, dtype=torch.float64)
    if turned:
        x = torch.randn(*shape[::-1], dtype=torch.float64).permute(*range(len(shape))[::-1])

    def chain(x: torch.Tensor) -> torch.Tensor:
        for name in names:
            x = STEPS[name](x)
        return x

    module = make_fx(chain, tracing_mode="fake")(x)
    found = [(outer, count) for count in range(2, math.prod(shape) + 1) for outer, _ in axes(shape, count)]
    outer, count = data.draw(st.sampled_from(found))
    cut = region(module.graph, outer, count, min(parts, count))
    if not cut.outputs:
        return
    recorded = fx.Interpreter(module, garbage_collect_values=False)
    recorded.run(x)
    before = x.clone()
    for node, made in zip(cut.outputs, Sliced(cut)(x), strict=True):
        assert tuple(made.shape) == shape_of(node)
        torch.testing.assert_close(made, recorded.env[node], rtol=1e-9, atol=1e-12)
    assert torch.equal(x, before)
