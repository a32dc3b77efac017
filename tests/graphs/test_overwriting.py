"""An op that runs at every size overwrites its operand where that is as good as a new result, and only there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fxremat.graphs.collectives import Collective
from fxremat.graphs.overwriting import BACKWARDS, METHODS
from fxremat.ops.overwriting import overwrite_where_alike

pytestmark = pytest.mark.usefixtures("torch_ready")
aten = torch.ops.aten

ARGUMENTS: dict[Any, Callable[[Tensor], tuple[Any, ...]]] = {  # of a backward, after the gradient; given the input
    aten.threshold_backward.default: lambda known: (known, 0),
    aten.hardtanh_backward.default: lambda known: (known, -1.0, 1.0),
    aten.leaky_relu_backward.default: lambda known: (known, 0.01, False),
    aten.elu_backward.default: lambda known: (1.0, 1, 1, False, known),
}


def arguments_of(op: Any, known: Tensor) -> tuple[Any, ...]:
    return ARGUMENTS.get(op, lambda known: (known,))(known)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(op: Any, first: Tensor, *rest: Any, swapped: bool = False, **options: Any) -> tuple[Tensor, Tensor]:
    """Run an op that was captured with these arguments; return its results, overwriting and as captured.

    Args:
        swapped: overwrite the second of them.
    """
    expected = op(first, *rest, **options)
    return overwrite_where_alike(op, int(swapped), first, *rest, **options), expected


def assert_alike(ours: Tensor, theirs: Tensor) -> None:
    assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    assert ours.numpy().tobytes() == theirs.numpy().tobytes()


@pytest.mark.parametrize("op", [op for op in METHODS if not isinstance(op, Collective)], ids=str)
def test_a_method_overwrites_where_layouts_agree(op: Any) -> None:
    first, second = numbers(4, 6), numbers(4, 6, seed=1)
    place = first.data_ptr()
    ours, theirs = run(op, first, *([] if op is aten.neg.default else [second]))
    assert ours.data_ptr() == place
    assert_alike(ours, theirs)


@pytest.mark.parametrize("op", BACKWARDS, ids=str)
def test_a_backward_overwrites_the_gradient_where_layouts_agree(op: Any) -> None:
    gradient, known = numbers(4, 6), numbers(4, 6, seed=1)
    place = gradient.data_ptr()
    ours, theirs = run(op, gradient, *arguments_of(op, known))
    assert ours.data_ptr() == place
    assert_alike(ours, theirs)


@pytest.mark.parametrize("op", BACKWARDS, ids=str)
def test_a_backward_of_other_layouts_gives_what_was_captured(op: Any) -> None:
    """The gradient is laid out as the input is not, so that a new result differs from it or its strides do."""
    for gradient, known in (
        (numbers(1, 6).expand(4, 6), numbers(4, 6, seed=1)),
        (numbers(6, 8)[:, :4], numbers(6, 4, seed=1)),
        (numbers(6, 4).t(), numbers(4, 6, seed=1)),
    ):
        before = gradient.clone()
        ours, theirs = run(op, gradient, *arguments_of(op, known))
        assert_alike(ours, theirs)
        if not gradient.t().is_contiguous():
            assert torch.equal(gradient, before), "it is overwritten"


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_options_are_handed_on(approximate: str) -> None:
    for gradient in (numbers(4, 6), numbers(1, 6).expand(4, 6)):
        ours, theirs = run(aten.gelu_backward.default, gradient, numbers(4, 6, seed=1), approximate=approximate)
        assert_alike(ours, theirs)
    gelu = aten.gelu_backward.default
    other = "tanh" if approximate == "none" else "none"
    assert not torch.equal(ours, gelu(numbers(1, 6).expand(4, 6), numbers(4, 6, seed=1), approximate=other))


def size_one() -> tuple[Tensor, Tensor]:
    """Both are as large as their storages; where the size is 1, the strides differ."""
    return numbers(1, 6).as_strided((1, 6), (1, 1)), numbers(1, 6, seed=1)


LAYOUTS: dict[str, tuple[Callable[[], tuple[Tensor, Tensor]], bool, bool]] = {
    # first and second operand; whether the first, and whether the second, may be overwritten
    "equal": (lambda: (numbers(4, 6), numbers(4, 6, seed=1)), True, True),
    "both transposed": (lambda: (numbers(6, 4).t(), numbers(6, 4, seed=1).t()), True, True),
    "one transposed": (lambda: (numbers(6, 4).t(), numbers(4, 6, seed=1)), True, False),
    "the other transposed": (lambda: (numbers(4, 6), numbers(6, 4, seed=1).t()), True, False),
    "expanded": (lambda: (numbers(6, 4).t(), numbers(1, 6, seed=1).expand(4, 6)), True, False),
    "larger": (lambda: (numbers(1, 6), numbers(4, 6, seed=1)), False, True),
    "an expanded operand": (lambda: (numbers(4, 1).expand(4, 6), numbers(4, 6, seed=1)), False, True),
    "size 1": (size_one, False, True),
    "a part of a storage": (lambda: (numbers(8, 6)[:4], numbers(4, 6, seed=1)), False, True),
    "a part of the other's": (lambda: (numbers(4, 6), numbers(8, 6, seed=1)[2:6]), True, False),
    "other dtypes": (lambda: (numbers(4, 6).bfloat16(), numbers(4, 6, seed=1)), False, True),
    "a number": (lambda: (numbers(4, 6), torch.tensor(0.7)), True, False),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("op", [aten.add.Tensor, aten.mul.Tensor], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_decide_whether_an_operand_is_overwritten(name: str, op: Any, swapped: bool) -> None:
    make, *may = LAYOUTS[name]
    operands = make()
    target, other = (operands[1], operands[0]) if swapped else operands
    before = target.clone(), other.clone()
    ours, theirs = run(op, *operands, swapped=swapped)
    assert_alike(ours, theirs)
    assert torch.equal(other, before[1])
    overwritten = ours.data_ptr() == target.data_ptr()
    assert overwritten is may[swapped]
    if not overwritten:
        assert torch.equal(target, before[0]), "it is overwritten"


def test_operands_are_handed_over_in_the_order_of_the_capture() -> None:
    """Which of two operands comes first decides the layout of a new result."""
    first, second = numbers(4, 6), numbers(6, 4, seed=1).t()
    assert aten.add.Tensor(first, second).stride() != aten.add.Tensor(second, first).stride()
    for operands in ((first, second), (second, first)):
        ours, theirs = run(aten.add.Tensor, *(operand.clone() for operand in operands), swapped=True)
        assert_alike(ours, theirs)


def test_what_was_known_for_one_layout_is_not_taken_for_another() -> None:
    for count in (4, 6):
        ours, theirs = run(aten.add.Tensor, numbers(count, 6), numbers(6, count, seed=1).t())
        assert_alike(ours, theirs)
    ours, theirs = run(aten.add.Tensor, numbers(4, 6).double(), numbers(4, 6, seed=1).double())
    assert_alike(ours, theirs)
    ours, theirs = run(aten.add.Tensor, numbers(4, 6), numbers(4, 6, seed=1).double())
    assert_alike(ours, theirs)


SHAPES = [(4, 6), (1, 6), (6, 1), (1, 1), (2, 1, 3), (2, 3, 1, 1), (0, 3), (3, 0), (5,), ()]


def layouts(tensor: Tensor) -> Iterator[Tensor]:
    """Copies of a tensor: contiguous, with dimensions in reverse order, and with other strides where a size is 1."""
    yield tensor.clone()
    yield tensor.new_empty(tensor.shape[::-1]).permute([*range(tensor.dim())[::-1]]).copy_(tensor)
    odd = [stride if size > 1 else 7 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    yield tensor.clone().as_strided(tensor.shape, odd)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", [op for op in (*METHODS, *BACKWARDS) if not isinstance(op, Collective)], ids=str)
def test_a_result_has_the_layout_that_was_captured(op: Any, shape: tuple[int, ...]) -> None:
    for first, second in product(layouts(numbers(*shape)), layouts(numbers(*shape, seed=1))):
        rest = [] if op is aten.neg.default else [second] if op in METHODS else arguments_of(op, second)
        assert_alike(*run(op, first, *rest))


def test_an_op_of_contiguous_operands_is_not_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxremat.ops.overwriting._alike", lambda *_: pytest.fail("it is tried on meta tensors"))
    for op in BACKWARDS:
        assert_alike(*run(op, numbers(3, 4, 5), *arguments_of(op, numbers(3, 4, 5))))
