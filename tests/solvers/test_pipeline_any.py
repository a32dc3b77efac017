"""Pipelines of any allocation: vectors, the integer program, the theory, plans under the independent checker."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxremat.errors import BudgetTooSmall, FxrematError, InvalidSchedule
from fxremat.solvers.pipeline.best_plan import plan_pipeline
from fxremat.solvers.pipeline.check import check
from fxremat.solvers.pipeline.contiguous import best_partition
from fxremat.solvers.pipeline.groups import scheduled
from fxremat.solvers.pipeline.madpipe import MadPipe, best_madpipe
from fxremat.solvers.pipeline.model import Machines, PipelinePlan, PlannedStage
from fxremat.solvers.pipeline.modulo import best_pattern
from fxremat.solvers.pipeline.moves import improved
from fxremat.solvers.pipeline.period_bound import lower_bound
from fxremat.solvers.pipeline.stage_costs import Job, step_seconds
from fxremat.solvers.pipeline.tasks import planned
from fxremat.solvers.references.pipeline.ilp import least_pattern
from fxremat.solvers.references.pipeline.pipedream import pipedream
from tests.dags import few
from tests.draws import everyday
from tests.solvers.pipelines import job_of, jobs, kind, stages_of
from tests.solvers.test_pipeline import by_costs, theory

SLACK = 1 + 1e-6


def one_by_one(job: Job, alloc: list[int] | None = None) -> tuple[PlannedStage, ...]:
    """Each layer as a stage."""
    return stages_of(job, [[k + 1, k + 1] for k in range(job.count)], alloc or [0] * job.count)


def planned_and_checked(job: Job, effort: float = 0.1, microbatches: int | None = None) -> PipelinePlan:
    plan = plan_pipeline(
        job.layers, job.machines, options=job.options, effort=effort, microbatches=microbatches
    )
    measured = check(plan)
    assert measured.memory == pytest.approx(plan.memory, abs=1e-6)
    assert max(plan.memory) <= job.machines.memory * SLACK
    assert plan.period >= plan.bound * (1 - 1e-9)
    return plan


@pytest.mark.parametrize("vector", kind("general_opt_full_memory"))
def test_the_integer_program_finds_the_optimum_of_the_vectors(vector: dict[str, Any]) -> None:
    job = job_of(vector, vector["P"])
    free = least_pattern(job, one_by_one(job), free=True, whole=True)
    fixed = least_pattern(job, one_by_one(job, vector["a_solution"]["alloc"]), free=False, whole=True)
    assert free is not None
    assert fixed is not None
    assert (free.tick, fixed.tick) == pytest.approx((vector["T_opt"], vector["T_opt"]))
    buffered = least_pattern(job, one_by_one(job), free=True)
    assert buffered is not None
    assert planned_and_checked(job).period <= buffered.tick * 1.02


def test_lemma_10_fits_where_stages_need_not_be_neighbours() -> None:
    vector = theory("Lemma 10")
    job = job_of(vector, vector["P"])
    plan = planned_and_checked(job)
    assert plan.period == vector["T_noncontiguous"]
    assert [stage.device for stage in plan.stages] == vector["alloc"]
    found = least_pattern(job, one_by_one(job), free=True)
    assert found is not None
    assert found.tick == pytest.approx(vector["T_noncontiguous"])


@pytest.mark.parametrize("name", ["1-2-1 chain", "Theorem 17 chain C_2"])
def test_periods_without_memory_are_those_of_the_theory(name: str) -> None:
    vector = theory(name)
    assert planned_and_checked(by_costs(vector), effort=2).period == pytest.approx(vector["T_noncontiguous"])


@pytest.mark.parametrize("k", [3, 4])
def test_theorem_18_s_pairs_are_found(k: int) -> None:
    vector = theory(f"Theorem 18 k={k}")
    plan = planned_and_checked(job_of(vector, vector["P"]), effort=1)
    assert plan.period == pytest.approx(vector["T_noncontiguous"])


@pytest.mark.parametrize("vector", kind("madpipe"))
def test_madpipe_hopes_for_the_period_of_the_vectors_and_plans_are_no_slower(vector: dict[str, Any]) -> None:
    job = job_of(vector, vector["P"])
    most = job.seconds + sum(map(job.copying, range(job.count - 1)))
    program = MadPipe(job, cells=400, grains=100)
    hoped = program.least_tick(job.seconds / vector["P"], most, tolerance=1e-5)
    assert hoped == pytest.approx(vector["phase1_T"], rel=2e-4)
    assert planned_and_checked(job).period <= min(
        vector["contiguous_opt"], vector["phase2_T_full_memory"] or inf
    )


@pytest.mark.parametrize("vector", kind("madpipe")[1:])
def test_the_second_phase_on_the_vectors_allocations_takes_as_long_as_they_say(
    vector: dict[str, Any],
) -> None:
    job = job_of(vector, vector["P"])
    normal = iter(range(1, vector["P"]))
    alloc = [0 if side == "S" else next(normal) for _, _, side in vector["phase1_stages"]]
    stages = stages_of(job, [stage[:2] for stage in vector["phase1_stages"]], alloc)
    found = least_pattern(job, stages, free=False, whole=True, seconds=30)
    assert found is not None
    assert found.tick == pytest.approx(vector["phase2_T_full_memory"])
    buffered = best_pattern(job, stages)
    assert buffered is not None
    assert buffered.tick <= found.tick * SLACK


def refused_or_checked(job: Job, effort: float = 0.1) -> None:
    """A plan that keeps its promises and is no slower than the contiguous optimum, or a refusal that says why."""
    try:
        plan = planned_and_checked(job, effort)
    except BudgetTooSmall as refusal:
        planned_and_checked(job.with_memory(refusal.minimum), effort)
        with pytest.raises(BudgetTooSmall):
            best_partition(job.with_memory(refusal.minimum - 1))
        return
    try:
        contiguous = best_partition(job).period
    except BudgetTooSmall:
        contiguous = inf
    assert plan.period <= contiguous * SLACK


@few(everyday(25))
@given(jobs(9, 4))
def test_plans_hold_and_are_never_slower_than_the_best_contiguous_one(job: Job) -> None:
    refused_or_checked(job, effort=0.02)


@pytest.mark.long
@few(everyday(2000))
@given(jobs(10, 5))
def test_two_thousand_plans_hold(job: Job) -> None:
    refused_or_checked(job)


def compared(job: Job) -> None:
    """No plan is more than 2 % slower than the integer program's, nor any bound above it."""
    exact = least_pattern(job, one_by_one(job), free=True, seconds=30)
    if exact is None:
        return
    assert planned_and_checked(job).period <= exact.period * 1.02
    assert lower_bound(job) <= exact.period * SLACK


def test_a_copy_that_takes_no_time_lets_the_other_one_pass() -> None:
    """The copy back crosses the moment of the copy forth, which 1F1B* does not let it do."""
    chain = {"uF": [2, 6], "uB": [9, 8], "W": [4, 3], "a": [3, 0, 0], "delta": [0, 5, 0]}
    job = job_of({"chain": chain | {"beta": 1, "C": 1}, "M": 17}, 2)
    assert best_partition(job).period == 16
    assert planned_and_checked(job).period == 15


@few(everyday(25))
@given(jobs(3, 3, ways=False))
def test_short_chains_are_within_two_percent_of_the_integer_program(job: Job) -> None:
    compared(job)


@pytest.mark.long
@few(everyday(300))
@given(jobs(5, 3, ways=False))
def test_more_short_chains_are_within_two_percent_of_the_integer_program(job: Job) -> None:
    compared(job)


@few(everyday(40))
@given(jobs(8, 4))
def test_heuristics_give_patterns_that_hold(job: Job) -> None:
    """MadPipe and the moves by themselves, on whatever jobs they find something for."""
    pattern = best_madpipe(job, low=lower_bound(job))
    if pattern is None:
        return
    better = improved(job, pattern, tries=100, floor=0.0)
    assert better.period <= pattern.period
    for found in (pattern, better):
        check(planned(job, found.stages, found.starts, found.tick, skip=None, bound=0.0, by="test"))


@few(everyday(40))
@given(jobs(6, 4))
def test_finite_steps_are_no_slower_than_those_of_the_shortest_period(job: Job) -> None:
    try:
        steady = plan_pipeline(job.layers, job.machines, options=job.options, effort=0.0)
    except BudgetTooSmall:
        return
    for microbatches in (1, 3, 16):
        plan = planned_and_checked(job, 0.0, microbatches)
        assert step_seconds(plan, microbatches) <= step_seconds(steady, microbatches) * SLACK
    alone = planned_and_checked(job, 0.0, 1)
    assert step_seconds(alone, 1) >= min(way.seconds for way in job.ways(0, job.count - 1)) * (
        1 - 1e-9
    ) - sum(job.copying(border) for border in range(job.count - 1))


def test_a_short_step_trades_the_period_for_a_shorter_pipeline() -> None:
    vector = kind("1f1b_fixed_partition")[0].values[0]
    job = job_of(vector, 3).with_memory(60)
    steps = {n: step_seconds(planned_and_checked(job, 0.0, n), n) for n in (1, 2, 4, 64)}
    steady = planned_and_checked(job, 0.0)
    assert all(steps[n] <= step_seconds(steady, n) for n in steps)
    assert steps[1] < step_seconds(steady, 1)  # all on one device: nothing is copied
    assert planned_and_checked(job, 0.0, 64).period < planned_and_checked(job, 0.0, 1).period


def test_a_short_step_merges_what_only_a_short_period_needs_apart() -> None:
    """A small layer on each side evens out the devices, but a micro-batch then crosses between them five times."""
    chain = {
        "uF": [0.1, 10, 20, 10, 0.1],
        "uB": [0.1, 20, 40, 20, 0.3],
        "W": [0] * 5,
        "a": [1] * 6,
        "delta": [1] * 6,
    }
    job = job_of({"chain": chain | {"beta": 0, "C": 1}, "M": 1000}, 2)
    steady, short = planned_and_checked(job), planned_and_checked(job, 1.0, 8)
    assert steady.period <= short.period
    assert step_seconds(short, 8) <= 0.9 * step_seconds(steady, 8)
    assert [stage.device for stage in short.stages] in ([0, 1, 0], [1, 0, 1])


@few(everyday(15))
@given(jobs(8, 4), st.integers(1, 12))
def test_steps_of_some_microbatches_hold_and_are_no_slower_than_without_effort(job: Job, count: int) -> None:
    try:
        plain = planned_and_checked(job, 0.0, count)
    except BudgetTooSmall:
        return
    assert step_seconds(planned_and_checked(job, 0.1, count), count) <= step_seconds(plain, count) * SLACK


@few(everyday(60))
@given(jobs(8, 4, ways=False))
def test_pipedream_s_partition_is_never_faster_and_holds(job: Job) -> None:
    try:
        partition, _ = pipedream(job)
    except BudgetTooSmall:
        return
    check(scheduled(job, partition.stages, partition.tick, skip=None, bound=0.0, by="pipedream"))
    assert partition.period >= best_partition(job).period * (1 - 1e-6)


# What the checker must refuse: a plan with one thing wrong.


def correct() -> PipelinePlan:
    vector = kind("contiguous_opt")[1].values[0]
    job = job_of(vector, vector["P"])
    found = best_partition(job)
    plan = scheduled(job, found.stages, found.tick, skip=found.skip or None, bound=0.0, by="test")
    check(plan)
    return plan


def moved(plan: PipelinePlan, field: str, place: int, by: float) -> PipelinePlan:
    starts = list(getattr(plan, field))
    starts[place] += by
    return replace(plan, **{field: tuple(starts)})  # type: ignore[arg-type]


def test_the_checker_refuses_plans_with_something_wrong() -> None:
    plan = correct()
    tick, least = plan.tick, min(max(plan.memory), plan.machines.memory)
    wrong = {
        "in flight; the plan says": moved(plan, "backward_starts", 0, tick),
        "before": moved(plan, "backward_starts", 0, -tick),
        "starts at": moved(plan, "forth_starts", 0, -1.0),
        "is used twice": replace(plan, tick=tick * 0.9),
        f"bytes of {least - 1:.0f}": replace(plan, machines=replace(plan.machines, memory=least - 1)),
        "the plan says": replace(plan, memory=(plan.memory[0] - 1, *plan.memory[1:])),
        "comes next": replace(plan, stages=plan.stages[1:]),
        "is on device 9": replace(plan, stages=(replace(plan.stages[0], device=9), *plan.stages[1:])),
        "the stages end before": replace(plan, stages=(*plan.stages[:-1], replace(plan.stages[-1], last=99))),
    }
    wrong.pop("the stages end before")
    for message, broken in wrong.items():
        with pytest.raises(InvalidSchedule, match=message):
            check(broken)


def test_the_checker_refuses_a_link_that_carries_two_copies_at_once() -> None:
    """Stages 0 and 2 are on one device, so that both borders use one link; the devices themselves have time enough."""
    chain = {"uF": [4, 4, 0], "uB": [4, 4, 0], "W": [0] * 3, "a": [0, 4, 4, 0], "delta": [0, 4, 4, 0]}
    job = job_of({"chain": chain | {"beta": 1, "C": 1}, "M": 100}, 2)
    pattern = best_pattern(job, one_by_one(job, [0, 1, 0]))
    assert pattern is not None
    plan = planned(job, pattern.stages, pattern.starts, pattern.tick, skip=None, bound=0.0, by="test")
    assert check(plan).in_flight == plan.in_flight
    assert plan.tick == 16
    apart = tuple(replace(stage, device=number) for number, stage in enumerate(plan.stages))
    three = replace(plan, stages=apart, machines=Machines(devices=3, memory=100, bandwidth=1, copies=1))
    quick = best_pattern(Job(job.layers, three.machines), apart)
    assert quick is not None
    assert quick.tick == 8
    stages = one_by_one(job, [0, 1, 0])
    with pytest.raises(InvalidSchedule, match="the link of devices 0 and 1 is used twice"):
        check(planned(job, stages, quick.starts, quick.tick, skip=None, bound=0.0, by="test"))


def test_wrong_groups_are_refused() -> None:
    """A backward one period early for its group starts before the one after it has ended."""
    plan = correct()
    for place in range(len(plan.stages) - 1):
        with pytest.raises(InvalidSchedule):
            check(moved(plan, "backward_starts", place, -plan.tick))
        with pytest.raises(InvalidSchedule):
            check(moved(plan, "backward_starts", place, plan.tick))


def test_questions_that_make_no_sense_are_refused() -> None:
    job = job_of(kind("contiguous_opt")[0].values[0], 3)
    with pytest.raises(FxrematError, match="microbatches is 0"):
        plan_pipeline(job.layers, job.machines, microbatches=0)
    with pytest.raises(FxrematError, match="effort is -1"):
        plan_pipeline(job.layers, job.machines, effort=-1)
    with pytest.raises(FxrematError, match="devices is 0"):
        Machines(devices=0, memory=1, bandwidth=None, copies=1)
    with pytest.raises(FxrematError, match="bandwidth is 0"):
        Machines(devices=1, memory=1, bandwidth=0, copies=1)


@settings(max_examples=1, deadline=None)
@given(jobs(8, 4))
def test_the_same_job_has_the_same_plan(job: Job) -> None:
    first, second = (
        plan_pipeline(job.layers, job.machines, options=job.options, effort=0.1) for _ in range(2)
    )
    assert first == second
