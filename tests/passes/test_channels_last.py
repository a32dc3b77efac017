"""Convolutions in channels_last: numbers and the layouts of results stay, and fake layouts are the real ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from benchmarks import models
from benchmarks.capture import joint_graph
from fxremat.graphs.captured import read_joint
from fxremat.passes import channels_last
from fxremat.passes.channels_last import convolve_channels_last, strides_of
from fxremat.passes.detach import drop_detach
from fxremat.passes.pipelines import normalize
from fxremat.runtime.real_layouts import real_layouts
from fxremat.step.step_graph import Origin
from fxremat.torch_private import storage_of
from tests.passes.test_golden import text_of

pytestmark = pytest.mark.usefixtures("torch_ready")
aten = torch.ops.aten
CONVOLUTIONS = {aten.convolution.default: (0, 1), aten.convolution_backward.default: (0, 1, 2)}


class Net(nn.Module):
    """Layers by number, and what is done with them."""

    def __init__(self, forward: Callable[[Net, Tensor], Any], *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.body = nn.ModuleList(layers), forward

    def __getitem__(self, index: int) -> nn.Module:
        return self.layers[index]

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def conv(inputs: int, outputs: int, kernel: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, **{"padding": kernel // 2, **options})


def block(inputs: int, outputs: int, **options: Any) -> nn.Sequential:
    return nn.Sequential(conv(inputs, outputs, bias=False, **options), nn.BatchNorm2d(outputs), nn.ReLU())


def skips(m: Net, x: Tensor) -> Tensor:
    """A U with two ways up, a transposed convolution and an interpolation."""
    high = m[0](x)
    low = m[1](F.max_pool2d(high, 2))
    near = F.interpolate(low, scale_factor=2, mode="bilinear") + F.interpolate(low, scale_factor=2)
    up = torch.cat([high, m[2](low)[:, :, :-2, :-2], near[:, :4]], 1)
    return m[3](up).square().mean()


def squeezed(m: Net, x: Tensor) -> Tensor:
    """Channels weighed by their means, group norm and dropout."""
    y = m[0](x)
    y = y * m[1](y.mean((2, 3), keepdim=True)).sigmoid()
    return m[2](F.dropout(F.group_norm(y, 2), 0.25)).square().sum()


def attended(m: Net, x: Tensor) -> Tensor:
    """The pixels as tokens that attend to each other, and back."""
    y = m[0](x)
    q = y.flatten(2).transpose(1, 2)
    back = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(y.shape)
    return m[1](y + back).square().mean()


def images(*shape: int, **options: Any) -> Tensor:
    return torch.rand(shape or (2, 3, 8, 10), generator=torch.Generator().manual_seed(0), **options)


def classify(m: Net, x: Tensor) -> Tensor:
    y = m[0](x)
    y = F.max_pool2d((m[2](m[1](y)) + y).relu(), 3, 2, 1)
    return F.cross_entropy(m[3](F.adaptive_avg_pool2d(y, (2, 2)).flatten(1)), torch.zeros(2, dtype=torch.long))


def chained(m: Net, x: Tensor) -> Any:
    for layer in m.layers:
        x = layer(x)
    return x


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "trunk": lambda: (Net(lambda m, x: chained(m, x).mean(), block(3, 8), block(8, 4)), images()),
    "skips": lambda: (
        Net(skips, block(3, 4), block(4, 8), nn.ConvTranspose2d(8, 4, 4, 2), conv(12, 2)), images(2, 3, 8, 8)
    ),
    "residual": lambda: (
        Net(classify, block(3, 8, stride=2), block(8, 8), conv(8, 8), nn.Linear(32, 5)), images(2, 3, 16, 16)
    ),
    "one channel": lambda: (Net(lambda m, x: chained(m, x).sum(), conv(1, 4), conv(4, 1)), images(2, 1, 8, 8)),
    "squeeze": lambda: (Net(squeezed, conv(3, 8), conv(8, 8, 1), conv(8, 4)), images()),
    "attention": lambda: (Net(attended, conv(3, 8), conv(8, 4)), images(2, 3, 4, 4)),
    "depthwise": lambda: (
        Net(lambda m, x: chained(m, x).mean(), conv(3, 8), conv(8, 8, 5, groups=8), conv(8, 8, groups=4)), images()
    ),
    "a slow group beside others": lambda: (
        Net(lambda m, x: chained(m, x).mean(), conv(3, 16, 5), conv(16, 16, 1, groups=2), conv(16, 16)), images()
    ),
    "padding": lambda: (
        Net(lambda m, x: chained(m, x).mean(), conv(3, 4, padding_mode="reflect"), nn.GELU(),
            conv(4, 4, padding_mode="replicate"), nn.Hardtanh(), nn.AvgPool2d(2), nn.LocalResponseNorm(2)), images(),
    ),
    "outputs": lambda: (Net(lambda m, x: (y := m[0](x), y[:, 1:], y.relu() * 2, x + 1), conv(3, 4)), images()),
    "softmax": lambda: (
        Net(lambda m, x: F.cross_entropy(m[0](x), torch.zeros(2, 8, 10, dtype=torch.long)), conv(3, 4)), images()
    ),
    "an input that is added again": lambda: (
        Net(lambda m, x: F.avg_pool2d(x, len(y := m[0](x))).sum() + (y + x).exp().sum(), conv(3, 3)),
        images(requires_grad=True),
    ),
    "volumes": lambda: (
        Net(lambda m, x: chained(m, x).mean(), nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4), nn.ReLU(),
            nn.ConvTranspose3d(4, 2, 2, 2)), images(2, 2, 5, 6, 7),
    ),
}  # fmt: skip

ALONE: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "no convolution": lambda: (Net(lambda m, x: m[0](x).square().mean(), nn.Linear(10, 4)), images()),
    "one dimension": lambda: (Net(lambda m, x: m[0](x).mean(), nn.Conv1d(3, 4, 3)), images(2, 3, 9)),
    "doubles": lambda: (Net(lambda m, x: m[0](x).mean(), conv(3, 4).double()), images().double()),
    "groups of many channels": lambda: (
        Net(lambda m, x: chained(m, x).mean(), conv(3, 16, 1), conv(16, 16, groups=2)), images()
    ),
}


def joint_of(model: nn.Module, *inputs: Tensor) -> tuple[fx.GraphModule, int]:
    module, outputs = joint_graph(model.train(), *inputs)
    drop_detach(module.graph)
    module.graph.eliminate_dead_code()
    return module, outputs


def drawn(module: fx.GraphModule) -> list[Any]:
    """Numbers for all that a joint graph is given, laid out as it shows them."""
    generator = torch.Generator().manual_seed(1)
    given = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    return [_like(value, generator) if isinstance(value, Tensor) else value for value in given]


def _like(shown: Tensor, generator: torch.Generator) -> Tensor:
    made = torch.empty_strided(shown.shape, shown.stride(), dtype=shown.dtype)
    return made.copy_(torch.rand(shown.shape, generator=generator) + 0.1) if made.is_floating_point() else made.zero_()


class Measured(fx.Interpreter):
    """Runs a graph, and notes the nodes whose fake tensors have other strides than the real ones."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.otherwise: list[str] = []

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        if n.op == "call_function" and strides_of(n.meta["val"]) != strides_of(found):
            self.otherwise.append(f"{n.format_node()}: {strides_of(n.meta['val'])}, really {strides_of(found)}")
        return found


def run(module: fx.GraphModule, inputs: list[Any], *, compare: bool = True) -> list[Tensor]:
    torch.manual_seed(0)
    run = Measured(module)
    outputs = [leaf for leaf in tree_leaves(run.run(*inputs)) if isinstance(leaf, Tensor)]
    assert run.otherwise == [] or not compare
    return outputs


def doubled(inputs: list[Any]) -> list[Any]:
    return [value.double() if isinstance(value, Tensor) and value.is_floating_point() else value for value in inputs]


def convert(module: fx.GraphModule) -> list[fx.Node]:
    """Convert a joint graph, and return the nodes that this adds."""
    before = set(module.graph.nodes)
    with real_layouts({}, cpu=True, compiled=True):
        convolve_channels_last(module.graph)
    module.graph.lint()
    return [node for node in module.graph.nodes if node not in before]


def check(model: nn.Module, *inputs: Tensor) -> tuple[fx.GraphModule, list[fx.Node]]:
    """One step before and after, in single precision for the layouts, in double for the numbers."""
    module, outputs = joint_of(model, *inputs)
    given = drawn(module)
    wanted, exact = run(module, given, compare=False), run(module, doubled(given), compare=False)
    unknown = aliases(module)
    added = convert(module)
    found = run(module, given)
    assert strides_of(found) == strides_of(wanted)
    for one, other in zip(run(module, doubled(given), compare=False), exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    assert distance(found, wanted) < 1e-5
    assert aliases(module) == unknown
    read_joint(module, outputs)
    return module, added


def distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The norm of the difference between the results of a step and others, over the norm of those others."""
    ours, theirs = (torch.cat([result.double().flatten() for result in results]) for results in (found, wanted))
    return float((ours - theirs).norm() / theirs.norm())


def aliases(module: fx.GraphModule) -> int:
    """Count real tensors that share memory unknown to fake ones; none shares memory where the real ones do not."""
    shown = fx.Interpreter(module, garbage_collect_values=False)
    shown.run(*drawn(module))
    pairs = {
        (storage_of(fake), storage_of(real))
        for node, value in shown.env.items()
        for fake, real in zip(tree_leaves(node.meta.get("val")), tree_leaves(value))
        if isinstance(real, Tensor) and isinstance(fake, Tensor) and real.numel()
    }
    assert len({fake for fake, _ in pairs}) == len(pairs)
    return len(pairs) - len({real for _, real in pairs})


def channels_last_everywhere(module: fx.GraphModule) -> bool:
    """Tell whether all that convolutions read is in channels_last."""
    read = [node.args[place].meta["val"] for node in module.graph.nodes for place in CONVOLUTIONS.get(node.target, ())]
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return all(value.is_contiguous(memory_format=formats[value.dim()]) for value in read)


@pytest.mark.parametrize("case", CASES)
def test_a_step_computes_and_returns_the_same_and_convolutions_read_channels_last(case: str) -> None:
    model, x = CASES[case]()
    module, added = check(model, x)
    assert added
    assert channels_last_everywhere(module) or case == "a slow group beside others"


@pytest.mark.parametrize("case", ALONE)
def test_what_gains_nothing_is_left_alone(case: str) -> None:
    module, _ = joint_of(*ALONE[case]())
    shown = {node: node.meta.get("val") for node in module.graph.nodes}
    assert convert(module) == []
    assert all(node.meta.get("val") is value for node, value in shown.items())


def test_a_language_model_is_left_alone() -> None:
    case = models.get("gpt", "small")
    module, _ = joint_of(case.model(), *case.batch())
    before = text_of(module.graph)
    assert convert(module) == []
    assert text_of(module.graph) == before


def copied(nodes: list[fx.Node]) -> list[str]:
    assert all(node.target is aten.clone.default for node in nodes)
    formats = {torch.channels_last: "", torch.contiguous_format: " back"}
    return [f"{node.args[0]}{formats[node.kwargs['memory_format']]}" for node in nodes]


def test_few_copies_are_made() -> None:
    """The images, each weight and its gradient, and the first gradient of an image that is no copy."""
    module, _ = joint_of(*CASES["trunk"]())
    weights = ["primals_2", "primals_8"]
    images_and_gradient = ["primals_1", "div"]
    found = copied(convert(module))
    assert sorted(c for c in found if not c.endswith("back")) == sorted(weights + images_and_gradient)
    assert len(found) == len(weights + images_and_gradient) + 2

    case = models.get("resnet", "small")
    module, _ = joint_of(case.model(), *case.batch())
    found = copied(convert(module))
    assert len(module.graph.find_nodes(op="call_function", target=aten.convolution.default)) == 16
    assert len(found) == 1 + 5 + 1 + 5  # images, 5 weights of more than a pixel, a gradient, theirs


def test_all_that_read_an_activation_read_its_copy() -> None:
    module, _ = joint_of(*CASES["an input that is added again"]())
    added = convert(module)
    image = next(node for node in module.graph.find_nodes(op="placeholder") if node.meta["val"].shape == (2, 3, 8, 10))
    (copy,) = image.users
    assert copy in added
    assert len(copy.users) == 5  # the convolution, the pooling, the backward of both, and the sum


def test_an_image_of_one_channel_is_given_the_strides_that_make_a_result_channels_last() -> None:
    module, _ = joint_of(*CASES["one channel"]())
    (image, *_) = convert(module)
    assert image.meta["val"].shape == (2, 1, 8, 8)
    first, *_ = module.graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert first.args[0] is image
    assert first.meta["val"].stride() == (256, 1, 32, 4)


def test_a_model_in_channels_last_needs_a_copy_of_a_gradient_alone() -> None:
    model = Net(lambda m, x: chained(m, x).mean(), block(3, 8), conv(8, 4)).to(memory_format=torch.channels_last)
    module, _ = joint_of(model, images().to(memory_format=torch.channels_last))
    assert copied(convert(module)) == ["div"]


def test_copies_belong_to_the_half_of_the_step_that_reads_them() -> None:
    module, outputs = joint_of(*CASES["residual"]())
    added = convert(module)
    joint = read_joint(module, outputs)
    for copy in added:
        origin = joint.values[joint.value_of[copy]].origin
        reads_gradients = "getitem" in str(copy.args[0]) or copy.kwargs["memory_format"] is torch.channels_last
        weights_or_images = str(copy.args[0]).startswith("primals")
        assert origin is (Origin.FORWARD if weights_or_images or not reads_gradients else Origin.BACKWARD), copy


def test_two_outputs_that_share_memory_go_on_sharing_it() -> None:
    module, _ = joint_of(*CASES["outputs"]())
    convert(module)
    shared = [leaf.untyped_storage().data_ptr() for leaf in run(module, drawn(module))[:2]]
    assert shared[0] == shared[1]


def test_what_autocast_computes_is_converted_too() -> None:
    def body(m: Net, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return chained(m, x).float().mean()

    module, _ = joint_of(Net(body, block(3, 8), conv(8, 4)), images())
    given = drawn(module)
    wanted = run(module, given, compare=False)
    assert convert(module)
    assert channels_last_everywhere(module)
    assert distance(run(module, given), wanted) < 2e-2


def test_an_op_of_somebody_else_reads_the_layout_as_captured() -> None:
    @torch.library.custom_op("channels_last_tests::rows", mutates_args=())
    def rows(x: Tensor) -> Tensor:
        assert x.is_contiguous()
        return x * 2

    rows.register_fake(torch.empty_like)
    body: Any = lambda m, x: m[1]((y := m[0](x)) + rows(y.detach())).mean()  # noqa: E731
    module, added = check(Net(body, block(3, 4), conv(4, 2)), images())
    (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.channels_last_tests.rows.default)
    (read,) = node.all_input_nodes
    assert read in added


def told_strides(module: fx.GraphModule) -> fx.Node:
    """Let an op that is told strides read the convolution in the place of a ReLU."""
    (relu,) = module.graph.find_nodes(op="call_function", target=aten.relu.default)
    shown = relu.meta["val"]
    relu.target, relu.args = aten.as_strided.default, (relu.args[0], list(shown.shape), list(shown.stride()))
    relu.meta["val"] = channels_last.evaluate(relu)
    return relu


def test_an_op_that_is_told_strides_reads_the_layout_as_captured() -> None:
    module, _ = joint_of(Net(lambda m, x: m[0](x).relu(), conv(3, 4)), images())
    node = told_strides(module)
    given = drawn(module)
    wanted = run(module, given)
    convert(module)
    (read,) = node.all_input_nodes
    assert read.kwargs == {"memory_format": torch.contiguous_format}
    assert storage_of(node.meta["val"]) == storage_of(read.meta["val"])
    assert distance(run(module, given), wanted) < 1e-5


def test_a_graph_is_left_as_it_was_where_anything_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, _ = joint_of(*CASES["residual"]())
    before, shown = text_of(module.graph), [node.meta.get("val") for node in module.graph.nodes]

    def breaks(*_: object) -> None:
        raise ValueError("the last step")

    monkeypatch.setattr(channels_last._Conversion, "_return", breaks)
    with caplog.at_level(logging.DEBUG, logger=channels_last.__name__):
        assert convert(module) == []
    assert "ValueError: the last step" in caplog.text
    assert text_of(module.graph) == before
    assert all(node.meta.get("val") is value for node, value in zip(module.graph.nodes, shown, strict=True))


def test_a_graph_that_overwrites_gradients_is_left_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    module, _ = joint_of(*CASES["residual"]())
    normalize(module)
    with caplog.at_level(logging.DEBUG, logger=channels_last.__name__):
        assert convert(module) == []
    assert "overwrites what it reads" in caplog.text


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "conv": lambda inputs, outputs: conv(inputs, outputs),
    "pointwise": lambda inputs, outputs: conv(inputs, outputs, 1, bias=False),
    "strided": lambda inputs, outputs: conv(inputs, outputs, stride=2),
    "transposed": lambda inputs, outputs: nn.ConvTranspose2d(inputs, outputs, 2, 2),
    "norm": lambda inputs, _: nn.BatchNorm2d(inputs),
    "group norm": lambda inputs, _: nn.GroupNorm(1, inputs),
    "gelu": lambda *_: nn.GELU(),
    "silu": lambda *_: nn.SiLU(),
    "leaky": lambda *_: nn.LeakyReLU(),
    "hard swish": lambda *_: nn.Hardswish(),
    "elu": lambda *_: nn.ELU(),
    "pool": lambda *_: nn.AvgPool2d(3, 1, 1),
    "max pool": lambda *_: nn.MaxPool2d(3, 1, 1),
    "adaptive pool": lambda *_: nn.AdaptiveAvgPool2d((4, 3)),
    "up": lambda *_: nn.Upsample(scale_factor=2, mode="bilinear"),
    "softmax": lambda *_: nn.Softmax(1),
    "dropout": lambda *_: nn.Dropout(0.5),
    "linear": lambda *_: nn.Sequential(nn.Flatten(2), nn.Tanh(), nn.Unflatten(2, (-1, 1))),
    "shuffle": lambda *_: nn.Sequential(nn.PixelShuffle(1), nn.ReflectionPad2d(1)),
}


@st.composite
def nets(draw: Any) -> list[tuple[str, int]]:
    """Layers by name with the number of channels after each, two convolutions among them at least."""
    names = draw(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=5))
    names = ["conv", *names, draw(st.sampled_from(["conv", "pointwise", "strided", "transposed"]))]
    return [(name, draw(st.sampled_from([1, 2, 6]))) for name in names]


@settings(max_examples=5, deadline=None)
@given(nets(), st.booleans())
def test_a_step_of_random_layers_computes_and_returns_the_same(layers: list[tuple[str, int]], residual: bool) -> None:
    channels, made = 3, []
    for name, outputs in layers:
        made.append(LAYERS[name](channels, outputs))
        channels = outputs if isinstance(made[-1], nn.Conv2d | nn.ConvTranspose2d) else channels

    def body(m: Net, x: Tensor) -> Any:
        for layer in m.layers:
            y = layer(x)
            x = x + y if residual and x.shape == y.shape else y
        return x, x.square().mean()

    torch.manual_seed(0)
    check(Net(body, *made), images(2, 3, 8, 8))
