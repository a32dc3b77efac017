"""Activations of a model that is several graphs wait on the host: the bits of plain PyTorch, budgets, and limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fxremat
from fxremat import FileTier, Offload, Search
from fxremat.planning import choosing
from fxremat.planning.graph_programs import SizedPrograms
from fxremat.runtime.calls import Call
from fxremat.search.paths import Node
from fxremat.step.costs import Link
from fxremat.torch_private import holds_gradients
from tests.dags import few
from tests.runtime.test_several_graphs import (
    DEPTHS,
    QUICK,
    Talking,
    as_it_is,
    assert_equal_steps,
    early,
    nothing_is_saved,
    peak_of,
    rows,
    selected,
    take_paths,
    twins,
)
from tests.search.test_paths import program

pytestmark = pytest.mark.usefixtures("torch_ready")


@pytest.fixture(autouse=True)
def fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that take next to no time, so that what is offloaded does not depend on how busy the machine is."""
    link = Link(to_host=1e12, from_host=1e12)
    monkeypatch.setattr(choosing, "measure_link", lambda *_: link)


@pytest.mark.parametrize("mem", ["min", "50%", pytest.param("30%", marks=pytest.mark.long)])
def test_the_budget_holds_and_the_prediction_is_exact(mem: str) -> None:
    x = rows(512)
    ours, plain = twins(mem=mem, search=Search(seconds=0.3), offload=True)
    for _ in range(4):
        assert_equal_steps(ours, plain, x)
    assert ours.plan.hosted > 0
    assert f"offloads          {fxremat.units.format_bytes(ours.plan.hosted)} of what" in str(ours.plan)
    measured = peak_of(ours, x)
    assert measured <= ours.plan.budget
    slack = x.nbytes if holds_gradients() else 0  # for the liveness of each gradient is not followed
    assert measured <= ours.plan.predicted_peak <= 1.005 * measured + slack
    assert nothing_is_saved()


def test_offloading_needs_no_more_and_is_predicted_to_take_less_time() -> None:
    plans = []
    for offload in (False, True):
        ours, _ = twins(mem="45%", search=Search(seconds=0.3), offload=offload)
        for _ in range(4):
            ours(rows(512)).backward()
        plans.append(ours.plan)
    recomputing, offloading = plans
    assert offloading.minimum <= recomputing.minimum
    assert offloading.keep_all_peak == recomputing.keep_all_peak
    slower = [plan.predicted_time / plan.keep_all_time for plan in plans]
    assert slower[1] < slower[0]


def test_no_more_waits_on_the_host_than_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the plan, nor in steps that take another way, nor while calls run that no plan knows."""
    limit, seen = 900_000, []
    keep = Call.keep

    def noting(call: Call, *args: Any) -> Tensor:
        token = keep(call, *args)
        seen.append(call.step.hosted)
        return token

    monkeypatch.setattr(Call, "keep", noting)
    depth = [4]
    between = lambda number, x: None if number + 1 == depth[0] else x  # noqa: E731
    ours, plain = twins(between, mem="50%", search=Search(seconds=0.3), offload=Offload(limit=limit))
    for now in (2, 2, 2, 4, 4, 4, 1, 3):
        depth[0] = now
        assert_equal_steps(ours, plain, rows(512))
    assert 0 < max(seen) <= limit
    assert ours.plan.hosted <= limit
    plans = ours._fxremat.backend.coordinator.plans
    copying, recomputing = program(1, 0, 1, 1, hosted=100), program(2, 1, 1, 1)
    at = SizedPrograms(
        programs=[copying, recomputing], keep_all=recomputing, outputs={}, gradients=0, inputs={}, largest=0, layouts=[]
    )
    unknown = Node(None, programs=at.programs)
    assert plans.number(unknown, at, saved=0, hosted=limit - 100) == 0
    assert plans.number(unknown, at, saved=0, hosted=limit - 99) == 1


def test_what_waits_on_the_host_may_be_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, plain = twins(mem="40%", search=Search(seconds=0.3), offload=True)
    for _ in range(4):
        assert_equal_steps(ours, plain, rows(512))
    coordinator = ours._fxremat.backend.coordinator
    backward, hosted = coordinator.backward, []

    def letting_go(call: Any, tangents: list[Tensor]) -> Any:
        if call.can_let_go:
            hosted.append(call.hosted)
            call.let_go()
        copied = len(stored)
        gradients = backward(call, tangents)
        assert len(stored) == copied, "a forward that runs again just before its backward copies nothing to the host"
        return gradients

    stored: list[Tensor] = []
    store = FileTier.store
    monkeypatch.setattr(FileTier, "store", lambda tier, x, host: (stored.append(host), store(tier, x, host)))
    monkeypatch.setattr(coordinator, "backward", letting_go)
    assert_equal_steps(ours, plain, rows(512))
    assert max(hosted) > 0
    assert stored
    monkeypatch.undo()
    assert_equal_steps(ours, plain, rows(512))


def test_a_backward_that_runs_again_copies_back_again() -> None:
    ours, plain = twins(mem="50%", search=Search(seconds=0.3), offload=True)
    for _ in range(4):
        assert_equal_steps(ours, plain, rows(512))
    for model in (ours, plain):
        torch.manual_seed(2)
        model.zero_grad(set_to_none=True)
        loss = model(rows(512))
        loss.backward(retain_graph=True)
        loss.backward()
    mine, theirs = ([p.grad for p in model.parameters()] for model in (ours, plain))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    del loss
    assert nothing_is_saved()


def test_one_capture_serves_several_sizes() -> None:
    ours, plain = twins(mem="50%", search=Search(seconds=0.3), offload=True)
    for count in (256, 384, 512, 320, 448):
        assert_equal_steps(ours, plain, rows(count))
    graphs = {node.graph for node in ours._fxremat.backend.coordinator.plans.root.walk() if node.graph}
    assert all(peak_of(ours, rows(count)) <= ours.plan.budget for count in (320, 512))
    assert len(graphs) <= 10  # with fixed sizes there would be twenty-five
    for graph in graphs:
        on_host = [max(program.hosted for program in at.programs) for at in graph._at.values()]
        assert len(set(on_host)) == len(on_host)
    assert ours.plan.hosted > 0


@pytest.mark.parametrize("between", [early, pytest.param(selected, marks=pytest.mark.long)])
def test_ways_and_sizes_that_depend_on_data(between: Any) -> None:
    ours, plain = twins(between, mem="60%" if between is early else "85%", offload=True)
    for seed in range(6):
        assert_equal_steps(ours, plain, rows(seed=seed))
    assert nothing_is_saved()


@few(3)
@given(DEPTHS, st.sampled_from(["min", "90%"]))
def test_paths_that_no_step_took_before_small(depths: list[int], mem: str) -> None:
    take_paths(depths, mem, offload=True)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(DEPTHS, st.sampled_from(["min", "90%"]))
def test_paths_that_no_step_took_before(depths: list[int], mem: str) -> None:
    take_paths(depths, mem, offload=True)


def test_exact_may_offload_between_graphs() -> None:
    ours, plain = twins(as_it_is, mem="45%", search=Search(seconds=0.3), exact=True)
    for _ in range(4):
        assert_equal_steps(ours, plain, rows(512))
    assert ours.plan.hosted > 0


def test_a_solver_of_chains_that_offloads_needs_one_graph() -> None:
    ours = fxremat.compile(Talking(), mem="100%", offload=True, search=QUICK, solver="pofo")
    with pytest.raises(fxremat.CaptureError, match="several graphs, but offload with solver='pofo' needs one"):
        ours(rows())
