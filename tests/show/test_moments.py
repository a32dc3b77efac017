"""Moments are exact: their bytes are those of liveness, their times those of the plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fxremat
from fxremat.plans import Plan
from fxremat.search.candidate import Candidate
from fxremat.search.survey import survey
from fxremat.settings import Offload, Search
from fxremat.show.moments import LOSS, Moments
from fxremat.step.costs import Costs
from fxremat.step.kinds import MemoryKind
from fxremat.step.liveness import live_bytes
from fxremat.step.program import Role, Transfer
from tests.dags import capture, estimated, few
from tests.saved_steps import VARIED, saved

pytestmark = pytest.mark.usefixtures("torch_ready")
ROWS, WIDTH = 64, 32
TRIPS = {role.value for role in (Role.OFFLOAD, Role.RELEASE, Role.PREFETCH, Role.WAIT, Role.UPDATE)}


def check(candidate: Candidate, costs: Costs) -> Moments:
    """All that moments promise, of one candidate."""
    moments, program = Moments.of(candidate, costs), candidate.program()
    memory = live_bytes(program, costs.sizes)
    count = len(moments.moments)
    inserted = [place for place, moment in enumerate(moments.moments) if moment.role == LOSS]
    assert inserted == ([program.split] if costs.sizes.outside else [])
    steps = [place for place in range(count) if place not in inserted]
    assert tuple(moments.bytes[place] for place in steps) == memory.during
    assert all(moments.bytes[place] == memory.at_split for place in inserted)
    assert max(moments.bytes) == memory.peak == candidate.peak
    assert moments.split == program.split + len(inserted)

    for place in range(count):
        assert sum(life.bytes for life in moments.lives_at(place)) == moments.bytes[place]
    for life in moments.lives:
        assert life.bytes > 0
        assert 0 <= life.first <= life.last <= count
        assert life.first < count
        if life.value is not None and life.kind is not MemoryKind.WEIGHTS:
            assert life.bytes == costs.sizes.values[life.value]

    for place, step in zip(steps, program.steps, strict=True):
        moment = moments.moments[place]
        assert (moment.role, moment.op, moment.block) == (step.role.value, step.op, step.block)
        assert (moment.value is not None) == (isinstance(step, Transfer) and step.role.value in TRIPS)
    check_times(candidate, costs, moments)
    return moments


def check_times(candidate: Candidate, costs: Costs, moments: Moments) -> None:
    starts = [moment.start for moment in moments.moments]
    assert starts == sorted(starts)
    assert starts[0] >= 0
    assert all(moment.end >= moment.start for moment in moments.moments)
    assert moments.timed == any(costs.seconds)
    if not moments.timed:
        assert moments.end == len(candidate.program().steps)
    elif candidate.transfers or candidate.communication:
        assert moments.end <= candidate.time * (1 + 1e-9)
    else:
        assert moments.end == pytest.approx(candidate.time, rel=1e-9)
    for moment in moments.moments:
        if moments.timed and moment.op is not None:
            assert moment.end - moment.start == pytest.approx(costs.seconds[moment.op], rel=1e-6, abs=1e-12)


@few(4)
@given(
    st.sampled_from(VARIED),
    st.integers(0, 100),
    st.sampled_from([0, 0, 1, 5000]),
    st.sampled_from([0, 16]),
    st.integers(0, 64),
)
def test_moments_are_those_of_exact_liveness(name: str, share: int, outside: int, root: int, seed: int) -> None:
    joint, costs = saved(name)
    costs = replace(costs, sizes=replace(costs.sizes, outside=outside, root=root, seed=seed))
    frontier = survey(joint, costs, slots=60, effort=0)
    for candidate in {frontier.keep_all, *frontier.candidates[:: 1 + share // 10]}:
        moments = check(candidate, costs)
        if not candidate.program().recomputed:
            assert not any(life.kind is MemoryKind.RECOMPUTED for life in moments.lives)


def test_without_times_moments_are_counted() -> None:
    joint, costs = saved("four_layers")
    costs = replace(costs, seconds=(0.0,) * len(costs.seconds))
    candidate = survey(joint, costs, effort=0).keep_all
    moments = check(candidate, costs)
    assert [moment.start for moment in moments.moments] == list(range(len(moments.moments)))


class Tower(nn.Module):
    """Layers, and optionally a loss."""

    def __init__(self, loss: bool, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)))
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x.square().mean() if self.loss else x


def planned(model: nn.Module, mem: int | str, rows: int = ROWS, **options: Any) -> Plan:
    given = {"search": Search(seconds=0), "costs": "estimate", "dynamic": False} | options
    plan = fxremat.plan(model, torch.ones(rows, WIDTH), mem=mem, **given)
    assert isinstance(plan, Plan)
    return plan


@cache
def swapping() -> Plan:
    """The least memory that offloading gets along with."""
    plan = planned(Tower(loss=False), 2**40, offload=True, loss=64)
    return planned(Tower(loss=False), plan.minimum, offload=True, loss=64)


@cache
def updating() -> Plan:
    """Weights on the host, and the optimizer's step inside."""
    model = Tower(loss=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options: dict[str, Any] = {"offload": Offload(weights=True), "optimizer": optimizer}
    return planned(model, planned(model, 2**40, **options).minimum, **options)


def test_moments_of_offloading() -> None:
    plan = swapping()
    assert plan.chosen.transfers
    moments = check(plan.chosen, plan.costs)
    assert moments.end <= plan.predicted_time * (1 + 1e-9)
    offloaded = {life.value for life in moments.lives if life.kind is MemoryKind.OFFLOADED}
    left = {moment.value for moment in moments.moments if moment.role == Role.OFFLOAD.value}
    assert left == offloaded != set()
    for candidate in plan.alternatives.candidates:
        check(candidate, plan.costs)


def test_moments_of_weights_on_the_host() -> None:
    plan = updating()
    moments = check(plan.chosen, plan.costs)
    assert any(moment.role == Role.UPDATE.value for moment in moments.moments)
    states = [life for life in moments.lives if life.kind is MemoryKind.WEIGHTS and life.value is not None]
    assert states
    assert max(moments.bytes) == plan.predicted_peak


@pytest.mark.parametrize("loss_bytes", [1, 100, 10**6])
def test_moments_with_a_loss_outside(loss_bytes: int) -> None:
    plan = planned(Tower(loss=False), "100%", loss=loss_bytes)
    moments = check(plan.chosen, plan.costs)
    (loss,) = [moment for moment in moments.moments if moment.role == LOSS]
    place = moments.moments.index(loss)
    assert (loss.op, loss.value, loss.start) == (None, None, loss.end)
    assert moments.bytes[place] == plan.memory.at_split
    tangents = set(plan.graph.tangent_values)
    assert {life.first for life in moments.lives if life.value in tangents} == {place}
    outside = sum(life.bytes for life in moments.lives_at(place) if life.kind is MemoryKind.OUTSIDE)
    given = sum(plan.costs.sizes.values[value] for value in tangents)
    assert outside == max(plan.costs.sizes.root, plan.costs.sizes.outside - given)


def test_a_loss_inside_needs_no_moment_of_its_own() -> None:
    plan = planned(Tower(loss=True), "100%")
    assert all(moment.role != LOSS for moment in check(plan.chosen, plan.costs).moments)


def test_moments_of_slices() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 2000), nn.GELU(), nn.Linear(2000, WIDTH), nn.Flatten(0))
    plan = planned(model, "40%", rows=512, slices=True)
    assert plan.slices
    for candidate in (plan.chosen, *plan.alternatives.candidates):
        check(candidate, plan.costs)


class Waves(nn.Module):
    """A layer, and functions whose gradients may be written over what they are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for _ in range(3):
            x = torch.tanh(x)
        return x.mean()


def test_an_op_that_overwrites_its_operand_counts_once() -> None:
    """Gradients of tanh in a row take the bytes of one: each lives where the one before it did."""
    joint = capture(Waves(), torch.ones(ROWS, WIDTH))
    costs = estimated(joint)
    moments = check(survey(joint, costs, effort=0).keep_all, costs)
    over = [op for op, extra in enumerate(costs.sizes.workspace) if extra < 0]
    assert len(over) >= 2
    for place, moment in enumerate(moments.moments):
        if moment.op in over:
            op = joint.ops[moment.op]
            gradients = [life for life in moments.lives_at(place) if life.kind is MemoryKind.GRADIENTS]
            alive = [(life.value, life.bytes) for life in gradients if life.value not in joint.tangent_values]
            assert alive == [(op.writes[0], ROWS * WIDTH * 4)]
