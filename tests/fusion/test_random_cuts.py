"""Random models cut into regions at random: numbers, peaks, and nothing reads what a region has overwritten.

The kernels of these tests run the ops of a region one by one, and then fill every input that they may overwrite with
numbers that are no numbers: what is read later, although it was given away, shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxremat.fusion.units import Unit, Units, by_block, compilable, pointwise
from fxremat.graphs import region
from fxremat.passes.pipelines import PIPELINES
from fxremat.planning import compiled
from fxremat.runtime import dynamo
from fxremat.settings import Inductor
from fxremat.step.liveness import Sizes
from fxremat.step.program import Program
from fxremat.torch_private import boxed
from tests import test_random_models
from tests.dags import Layer, Recipe, few, recipes, small_recipes
from tests.test_random_models import QUICK, check

pytestmark = pytest.mark.usefixtures("torch_ready")
SETTINGS = {"debug": False}  # which tells these kernels from real ones


def spoiling(module: Any, _: Any, donated: Any, *__: Any) -> Callable[[list[Any]], Any]:
    """A region's ops one by one; then its donated inputs hold no numbers any more."""
    run = boxed(module)

    def call(inputs: list[Any]) -> Any:
        given_away = [inputs[place] for place in donated]
        results = run(inputs)
        for tensor in given_away:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
        return results

    return call


def at_random(seed: int) -> Callable[[Program, Sizes, int], Units]:
    """Runs of steps of random lengths, some of which are compiled."""

    def cut(program: Program, _: Sizes, __: int) -> Units:
        chance, may = random.Random(seed), compilable(program.layout.graph)
        units: list[Unit] = []
        run: list[int] = []

        def close() -> None:
            if run:
                units.append(Unit(tuple(run), compiled=True))
                run.clear()

        for position, step in enumerate(program.steps):
            if position == program.split or chance.random() < 0.2:
                close()
            if step.op in may and chance.random() < 0.9:
                run.append(position)
            else:
                close()
                units.append(Unit((position,), compiled=False))
        close()
        return tuple(units)

    return cut


@pytest.fixture(autouse=True)
def _spoiling_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs in regions are always taken, and their kernels spoil what they may; convolutions keep their bits."""
    monkeypatch.setattr(dynamo, "PIPELINES", {**PIPELINES, "inductor": PIPELINES["eager"]})
    monkeypatch.setattr(region, "compile_region", spoiling)
    monkeypatch.setattr(compiled._Search, "_seconds", lambda _, found, single: list(range(len([*found, *single]))))
    monkeypatch.setattr(compiled, "SLOWER", 1e9)
    monkeypatch.setattr(compiled, "LITTLE", -1.0)
    monkeypatch.setattr(compiled, "COMPILING", -1e9)
    yield
    region.forget_kernels()


def check_cut(cut: Callable[..., Units], recipe: Recipe, share: int, **options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "CUTS", (cut,))
        check(recipe, share, backend=Inductor(random="eager", config=SETTINGS), **options)


@few(2)
@given(small_recipes, st.integers(0, 100), st.integers(0, 1000), st.sampled_from([False, False, True]))
def test_random_cuts_small(recipe: Recipe, share: int, seed: int, twice: bool) -> None:
    check_cut(at_random(seed), recipe, share, twice=twice, search=QUICK)


@few(2)
@given(small_recipes, st.integers(0, 100), st.booleans(), st.booleans())
def test_cuts_of_random_models_small(recipe: Recipe, share: int, blocks: bool, trained: bool) -> None:
    cut = (lambda program, *_: by_block(program)) if blocks else pointwise
    check_cut(cut, recipe, share, trained=trained, search=QUICK)


def close(mine: Any, its: Any) -> bool:
    """Tell whether numbers differ by no more than rounding, of which the largest number has most."""
    most = 1e-5 + 1e-4 * its.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item() if its.numel() else 0.0
    return mine.shape == its.shape and torch.allclose(mine.double(), its.double(), rtol=0, atol=most, equal_nan=True)


def check_whole(recipe: Recipe, share: int, **options: Any) -> None:
    """Check a model with its phases compiled whole; sums over tensors that lie otherwise add in another order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_random_models, "same", close)
        patch.setattr(compiled, "CUTS", ())
        patch.setattr(compiled._Search, "_seconds", lambda _, __, single: [1e9] * len(single))
        check(recipe, share, backend=Inductor(random="eager", whole_graphs=True, config=SETTINGS), **options)


@few(4)
@given(small_recipes, st.integers(0, 100), st.booleans(), st.booleans())
def test_whole_graphs_of_random_models_small(recipe: Recipe, share: int, trained: bool, twice: bool) -> None:
    check_whole(recipe, share, trained=trained, twice=twice, search=QUICK)


def test_gradients_of_outputs_without_one_count_beside_whole_graphs() -> None:
    shared = Recipe((Layer("batch_norm", 3, 9), Layer("batch_norm", 0, 9)), 1, False, True)
    check_whole(shared, 32, search=QUICK)


@pytest.mark.long
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(recipes, st.integers(0, 100), st.booleans(), st.booleans())
def test_whole_graphs_of_random_models(recipe: Recipe, share: int, trained: bool, twice: bool) -> None:
    check_whole(recipe, share, trained=trained, twice=twice)


@pytest.mark.long
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(recipes, st.integers(0, 100), st.integers(0, 1000), st.booleans(), st.booleans())
def test_random_cuts(recipe: Recipe, share: int, seed: int, trained: bool, twice: bool) -> None:
    check_cut(at_random(seed), recipe, share, trained=trained, twice=twice)
