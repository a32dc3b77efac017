"""Contiguous pipelines: vectors, brute force, and the independent checker."""

from __future__ import annotations

from itertools import combinations, product
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings

from fxremat.errors import BudgetTooSmall
from fxremat.solvers.pipeline.check import check
from fxremat.solvers.pipeline.contiguous import best_partition
from fxremat.solvers.pipeline.fixed import memory_at, shortest_tick, ticks
from fxremat.solvers.pipeline.groups import Element, alive, elements_of, pattern_of, scheduled
from fxremat.solvers.pipeline.model import Machines, PlannedStage
from fxremat.solvers.pipeline.stage_costs import Job
from tests.draws import everyday
from tests.solvers.pipelines import job_of, jobs, kind, stages_of, three_ways


@pytest.mark.parametrize("vector", kind("1f1b_groups"))
def test_groups_and_starts_are_those_of_the_vectors(vector: dict[str, Any]) -> None:
    elements = [Element(f, b) for f, b in zip(vector["uF"], vector["uB"], strict=True)]
    pattern = pattern_of(elements, vector["T"])
    assert list(pattern.groups) == vector["groups"]
    assert list(pattern.forward_starts) == vector["tF"]
    assert list(pattern.backward_starts) == vector["tB_same_minibatch"]


@pytest.mark.parametrize("vector", kind("1f1b_fixed_partition"))
def test_fixed_partitions_have_the_memory_and_the_period_of_the_vectors(vector: dict[str, Any]) -> None:
    job = job_of(vector, len(vector["stages"]))
    stages = stages_of(job, vector["stages"])
    elements = [e for e in elements_of(job, stages) if e.seconds or job.machines.bandwidth]
    said = [e for e in vector["elements"] if e[0] == "S" or job.machines.bandwidth]
    assert [(e.forward, e.backward) for e in elements] == [(e[2], e[3]) for e in said]
    curve: list[tuple[float, list[float]]] = []
    for tick in ticks(elements):
        memory = memory_at(job, stages, tick)
        if not curve or curve[-1][1] != memory:
            curve.append((tick, memory))
    assert curve == [(tick, memory) for tick, memory in vector["memory_curve"]]
    assert shortest_tick(job, stages) == vector["T_opt"]


@pytest.mark.parametrize("vector", kind("contiguous_opt"))
def test_contiguous_allocations_have_the_period_of_the_vectors(vector: dict[str, Any]) -> None:
    job = job_of(vector, vector["P"])
    found = best_partition(job)
    assert shortest_tick(job, stages_of(job, vector["a_solution"])) == vector["T_opt"]
    assert found.period <= vector["T_opt"]
    one_periodic = _brute_force(job, skips=(0,))
    assert one_periodic == pytest.approx(vector["T_opt"])


@pytest.mark.parametrize("vector", kind("joint_contiguous_recompute"))
def test_stages_that_recompute_have_the_period_of_the_vectors(vector: dict[str, Any]) -> None:
    keeping = job_of(vector, vector["P"])
    job = Job(keeping.layers, keeping.machines, three_ways(keeping.layers))
    chosen = [
        next(
            w
            for w in job.ways(a - 1, b - 1)
            if [w.seconds, w.kept_bytes, max(w.kept_bytes, w.peak_bytes)] == option
        )
        for (a, b), option in zip(vector["stages"], vector["options"], strict=True)
    ]
    stages = [
        PlannedStage(first=s.first, last=s.last, device=s.device, way=way)
        for s, way in zip(stages_of(job, vector["stages"]), chosen, strict=True)
    ]
    assert shortest_tick(job, stages) == vector["T_opt"]
    assert _brute_force(job, skips=(0,)) == pytest.approx(vector["T_opt"])
    assert _brute_force(keeping, skips=(0,)) == pytest.approx(vector["T_without_recompute"])


@pytest.mark.parametrize("vector", kind("k_periodic_drop"))
def test_empty_slots_leave_as_many_in_flight_as_the_vectors_say(vector: dict[str, Any]) -> None:
    assert [[group, skip, alive(group, skip)] for group, skip, _ in vector["table"]] == vector["table"]


def _allocations(job: Job) -> list[list[PlannedStage]]:
    """Every contiguous allocation with every choice of ways."""
    found = []
    for devices in range(1, min(job.count, job.machines.devices) + 1):
        for cuts in combinations(range(1, job.count), devices - 1):
            ends = list(zip([0, *cuts], [*cuts, job.count], strict=True))
            for ways in product(*(job.ways(a, b - 1) for a, b in ends)):
                found.append(
                    [
                        PlannedStage(first=a, last=b - 1, device=device, way=way)
                        for device, ((a, b), way) in enumerate(zip(ends, ways, strict=True))
                    ]
                )
    return found


def _brute_force(job: Job, skips: tuple[int, ...]) -> float:
    """The shortest period over all of them, every period at which groups change tried in turn."""
    best = inf
    for stages in _allocations(job):
        for skip in skips:
            stretch = 1 + 1 / skip if skip else 1
            for tick in ticks(elements_of(job, stages)):
                if tick * stretch < best and max(memory_at(job, stages, tick, skip)) <= job.machines.memory:
                    best = tick * stretch
    return best


def _skips(job: Job) -> tuple[int, ...]:
    return tuple(range(2 * job.machines.devices))


@settings(max_examples=everyday(120), deadline=None)
@given(jobs(6, 4))
def test_no_contiguous_allocation_is_faster_than_the_one_found(job: Job) -> None:
    optimum = _brute_force(job, _skips(job))
    if optimum == inf:
        with pytest.raises(BudgetTooSmall) as refusal:
            best_partition(job)
        enough = job.with_memory(refusal.value.minimum)
        assert _brute_force(enough, (0,)) < inf
        assert _brute_force(job.with_memory(refusal.value.minimum - 1), (0,)) == inf
        return
    found = best_partition(job)
    assert found.period == pytest.approx(optimum, rel=1e-6)
    plan = scheduled(job, found.stages, found.tick, skip=found.skip or None, bound=0.0, by="contiguous")
    measured = check(plan)
    assert measured.in_flight == plan.in_flight
    assert measured.memory == pytest.approx(plan.memory)
    assert plan.period == pytest.approx(found.period)


def theory(name: str) -> dict[str, Any]:
    return next(p.values[0] for p in kind("theory") if p.values[0]["name"] == name)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_theorem_16_needs_empty_slots(k: int) -> None:
    vector = theory(f"Theorem 16 k={k}")
    job = job_of(vector, k + 1, buffers=False)
    stages = stages_of(job, vector["stages"])
    assert shortest_tick(job, stages) == vector["T_1periodic"]
    assert shortest_tick(job, stages, skip=k) * (1 + 1 / k) == pytest.approx(vector["normalised_T_kperiodic"])
    assert best_partition(job).period == pytest.approx(vector["normalised_T_kperiodic"])


def by_costs(vector: dict[str, Any]) -> Job:
    costs = vector["costs"]
    zeros = [0] * (len(costs) + 1)
    chain = {
        "uF": [c / 2 for c in costs],
        "uB": [c / 2 for c in costs],
        "W": zeros[1:],
        "a": zeros,
        "delta": zeros,
    }
    return job_of({"chain": chain | {"beta": None, "C": 1}, "M": 0}, vector["P"])


@pytest.mark.parametrize("name", ["1-2-1 chain", "Theorem 17 chain C_2"])
def test_contiguous_periods_without_memory_are_those_of_the_theory(name: str) -> None:
    vector = theory(name)
    assert best_partition(by_costs(vector)).period == pytest.approx(vector["T_contiguous"])


@pytest.mark.parametrize("k", [3, 4])
def test_theorem_18_needs_stages_that_are_no_neighbours(k: int) -> None:
    vector = theory(f"Theorem 18 k={k}")
    assert best_partition(job_of(vector, vector["P"])).period == pytest.approx(vector["T_contiguous"])


def test_lemma_10_has_no_contiguous_allocation() -> None:
    vector = theory("Lemma 10")
    with pytest.raises(BudgetTooSmall, match="no schedule fits in 2 bytes; the least that does is 3 bytes"):
        best_partition(job_of(vector, vector["P"]))


def test_a_device_more_or_a_byte_more_never_takes_longer() -> None:
    vector = kind("contiguous_opt")[0].values[0]
    job = job_of(vector, 2).with_memory(80)
    periods = []
    for devices in range(2, 6):
        machines = Machines(devices=devices, memory=80, bandwidth=None, copies=3)
        periods.append(best_partition(Job(job.layers, machines)).period)
    assert periods == sorted(periods, reverse=True)
    assert periods[-1] < periods[0]
