"""Random models, cut wherever the rules allow it: the rewritten graph computes what the given one does, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from fxremat.cost.made_up import value_like, weights_like
from fxremat.graphs.captured import Captured
from fxremat.slices.rewrite import Slicing, largest_need
from tests.dags import Dag, Layer, Recipe, batch, capture, few, recipes, small_recipes

pytestmark = pytest.mark.usefixtures("torch_ready")

EXACT = 1e-9  # relative to the largest number of a tensor
MOST = (2, 3, 1 << 20)  # slices of a region


def results(joint: Captured, given: list[Any]) -> list[Any]:
    """Run forward and backward together from a seed, and return their results."""
    torch.manual_seed(5)
    with torch.no_grad():
        found = fx.Interpreter(joint.module).run(*(x.clone() if isinstance(x, torch.Tensor) else x for x in given))
    return tree_leaves(found)


def data_for(joint: Captured) -> list[Any]:
    """Made-up primals and tangents."""
    torch.manual_seed(1)
    primals: list[Any] = []
    for node in joint.primals:
        value = weights_like(node)
        varied = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1
        primals.append(value + torch.randn_like(value) if varied else value)
    return [*primals, *(1.5 * value_like(node) for node in joint.tangent_nodes)]


def check(recipe: Recipe, share: int, most: int, *, inside: bool, trained: bool) -> int:
    """The number of regions."""
    torch.manual_seed(0)
    model = Dag(recipe).train().double()
    inputs = [value.double().requires_grad_(trained) for value in batch(0)]
    return check_joint(capture(model, *inputs), share, most, inside=inside)


def check_joint(joint: Captured, share: int, most: int, *, inside: bool) -> int:
    """The number of regions of a joint graph, whose rewritten form computes the same."""
    target = max(1, largest_need(joint) * share // 100)
    found = Slicing(target=target, most=most, inside=inside).of(joint)
    given = data_for(joint)
    right, ours = results(joint, given), results(found.joint, given)
    assert len(right) == len(ours)
    for expected, computed in zip(right, ours, strict=True):
        if not isinstance(expected, torch.Tensor):
            assert computed is None or computed == expected
            continue
        assert (computed.shape, computed.dtype) == (expected.shape, expected.dtype)
        if expected.is_floating_point():
            scale = float(expected.abs().max()) if expected.numel() else 0.0
            torch.testing.assert_close(computed, expected, rtol=EXACT, atol=EXACT * max(scale, 1e-30))
        else:
            assert torch.equal(computed, expected)
    return len(found.regions)


class Centered(nn.Module):
    """Rows less their sum over all rows, which no row knows before all have run."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.tanh(self.up(x))
        return self.down(torch.tanh(wide - wide.sum(0, keepdim=True))).square().mean()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("share", [0, 30])
def test_a_sum_is_not_read_before_all_slices_have_run(share: int, inside: bool) -> None:
    torch.manual_seed(0)
    joint = capture(Centered().double(), torch.randn(12, 8, dtype=torch.float64))
    check_joint(joint, share, 3, inside=inside)


shares, at_most = st.sampled_from([0, 10, 30, 60]), st.sampled_from(MOST)


@few(6)
@given(small_recipes, shares, at_most, st.booleans(), st.booleans())
@example(Recipe((Layer("linear", 0, 0), Layer("relu", 0, 0)), 0, False), 0, 3, True, False)
def test_random_models_in_slices_small(recipe: Recipe, share: int, most: int, inside: bool, trained: bool) -> None:
    check(recipe, share, most, inside=inside, trained=trained)


@pytest.mark.long
@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(recipes, shares, at_most, st.booleans(), st.booleans())
def test_random_models_in_slices(recipe: Recipe, share: int, most: int, inside: bool, trained: bool) -> None:
    check(recipe, share, most, inside=inside, trained=trained)


def test_many_random_models_have_a_region() -> None:
    kinds = ("linear", "relu", "tanh", "add", "norm", "split", "dropout", "attend", "tokens", "images")
    recipe = [Recipe((Layer(kind, 0, 1), Layer("linear", 0, 0), Layer("relu", 0, 0)), 0, False) for kind in kinds]
    assert sum(check(each, 10, 4, inside=False, trained=False) > 0 for each in recipe) >= len(kinds) - 2
