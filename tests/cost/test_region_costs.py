"""Compiled regions are measured within a budget: on copies of what dies there, or only as in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from benchmarks.meter import storage_peak
from fxremat.cost import region_costs
from fxremat.cost.region_costs import WALKS, RegionCosts, RegionRaises, on_copies
from fxremat.graphs import region as regions
from fxremat.graphs.region import Kernels, Region, forget_kernels
from fxremat.torch_private import boxed, storage_watch

pytestmark = pytest.mark.usefixtures("torch_ready")
aten = torch.ops.aten
HERE = torch.device("cpu")
SHAPE = (256, 64)
SIZE = 4 * 256 * 64


def chain(x: Any, y: Any) -> Any:
    made = aten.sin.default(aten.mul.Tensor(x, y))
    return aten.mul.Tensor(made, y), aten.sum.default(x)


@pytest.fixture
def region(monkeypatch: pytest.MonkeyPatch) -> Region:
    """A region whose ops run one by one; its first input dies there."""
    monkeypatch.setattr(regions, "compile_region", lambda module, *_: boxed(module))
    forget_kernels()
    module = fx.symbolic_trace(chain)
    for node in module.graph.find_nodes(op="placeholder"):
        node.meta["val"] = torch.empty(SHAPE, device="meta")
    return Region(module, module.graph, Kernels(settings={}, decompositions={}), dying=frozenset([0]))


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The inputs that were copied."""
    found, copy = list[Tensor](), region_costs._copy_of
    monkeypatch.setattr(region_costs, "_copy_of", lambda x: found.append(x.detach().to("meta")) or copy(x))
    return found


def given() -> list[Tensor]:
    return [torch.rand(SHAPE), torch.rand(SHAPE)]


def test_a_region_without_a_limit_is_measured_at_once(region: Region, copied: list[Tensor]) -> None:
    inputs = given()
    wanted = chain(*inputs)
    cost, results = RegionCosts(HERE, None).measured("", region, inputs, 0)
    assert cost is not None
    assert len(copied) > WALKS
    assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


def test_one_that_has_no_room_for_copies_runs_as_in_a_step_until_its_cost_is_known(region: Region) -> None:
    region.compile()
    alone, _ = on_copies(region, given(), HERE)
    costs = RegionCosts(HERE, 4 * SIZE)
    for run in range(WALKS):
        inputs = given()
        wanted, dies = chain(*inputs), storage_watch(inputs[0])
        cost, results = costs.measured("", region, inputs, alive=2 * SIZE)
        assert not inputs
        assert not dies()
        assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))
        assert (cost is not None) == (run == WALKS - 1)
    assert cost is not None
    assert (cost.workspace, cost.outputs) == (alone.workspace, alone.outputs)
    assert cost.seconds > 0


def test_it_takes_what_the_region_takes_in_a_step(region: Region) -> None:
    region.compile()
    held = given()
    y = held[1]
    in_a_step = storage_peak(lambda: region.run([torch.rand(SHAPE), y]))
    costs = RegionCosts(HERE, 1)
    for _ in range(WALKS):
        assert storage_peak(lambda: costs.measured("", region, [torch.rand(SHAPE), y], 0)) == in_a_step
    with_copies = storage_peak(lambda: on_copies(region, [torch.rand(SHAPE), y], HERE))
    assert with_copies == in_a_step + SIZE


def test_one_that_has_room_is_measured_on_copies_from_the_second_run_on(region: Region, copied: list[Tensor]) -> None:
    costs = RegionCosts(HERE, 10 * SIZE)
    first, _ = costs.measured("", region, given(), alive=2 * SIZE)
    assert first is None
    assert len(copied) == 1
    second, _ = costs.measured("", region, given(), alive=2 * SIZE)
    assert second is not None
    assert len(copied) > WALKS


@pytest.mark.parametrize("run", [RegionCosts.run, lambda costs, *given: costs.measured("", *given, 0)])
def test_one_that_raises_runs_op_by_op_when_the_walk_begins_anew(
    region: Region, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(inputs: list[Any]) -> Any:
        inputs.clear()
        raise RuntimeError("wrong kernel")

    monkeypatch.setattr(regions, "compile_region", lambda *_: raises)
    costs = RegionCosts(HERE, 1)
    with pytest.raises(RegionRaises):
        run(costs, region, given())
    assert "wrong kernel" in region.given_up
    run(costs, region, given())
    monkeypatch.setattr(region, "_run", raises)  # op by op it raises, too: the walk ends
    with pytest.raises(RuntimeError, match="wrong kernel"):
        run(costs, region, given())
