"""Joins by the front door: `solve`, `solution` and `simulate` for several chains."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fxremat
from fxremat.chains.chain import Block, Chain, Join
from fxremat.chains.join_schedule import JoinSchedule
from fxremat.chains.platform import Platform
from fxremat.chains.schedule import Schedule
from fxremat.chains.simulate_join import simulate_join
from fxremat.errors import BudgetTooSmall, FxrematError, InvalidBudget, InvalidSchedule
from fxremat.solvers.choose import solution, solve
from fxremat.solvers.registry import JOINS
from tests.dags import few
from tests.draws import everyday
from tests.solvers.chains import chains
from tests.solvers.join_oracle import fastest


def joins_of(largest, most=3):
    return st.builds(
        Join,
        branches=st.lists(chains(largest, options=1), min_size=1, max_size=most).map(tuple),
        trunk=st.none() | chains(largest, options=1),
    )


def uniform(n, saved=5):
    block = Block(forward_time=1.0, backward_time=1.0, output_bytes=1, saved_bytes=saved)
    return Chain(blocks=(block,) * n, input_bytes=1)


def find(join, mem, solver):
    """The solution; where nothing fits, the error's minimum must be right and is asked."""
    try:
        return mem, solution(join, mem, solver=solver)
    except BudgetTooSmall as error:
        minimum = error.minimum
    assert minimum > mem
    return minimum, solution(join, minimum, solver=solver)


@pytest.mark.parametrize("solver", ["auto", *JOINS])
@few(everyday(40))
@given(joins_of(3), st.integers(0, 60))
def test_schedules_are_valid_and_fit(solver, join, mem):
    mem, found = find(join, mem, solver)
    assert found.solver in ([solver] if solver != "auto" else JOINS)
    timeline = simulate_join(join, found.schedule)
    assert timeline == found.timeline
    assert timeline.peak <= mem
    assert found.lower_bound - 1e-9 <= timeline.time
    assert JoinSchedule.parse(str(found.schedule)) == found.schedule
    assert solve(join, mem, solver=solver) == found.schedule


@few(everyday(40))
@given(joins_of(3), st.integers(0, 60))
def test_auto_is_never_worse_than_any(join, mem):
    mem, found = find(join, mem, "auto")
    for solver in JOINS:
        try:
            alone = solution(join, mem, solver=solver)
        except BudgetTooSmall:
            continue
        assert found.timeline.time <= alone.timeline.time


@few(everyday(25))
@given(joins_of(2, most=2), st.integers(0, 30))
def test_no_faster_than_everything(join, mem):
    mem, found = find(join, mem, "auto")
    optimum = fastest(join, mem)
    assert optimum is not None
    assert found.lower_bound - 1e-9 <= optimum <= found.timeline.time + 1e-9


@few(everyday(25))
@given(joins_of(3))
def test_the_least_budget_is_the_least_of_all_solvers(join):
    if max(chain.input_bytes for chain in join.branches) == 0:
        return  # something may fit in nothing
    refusals = {}
    for solver in ("auto", *JOINS):
        with pytest.raises(BudgetTooSmall) as error:
            solve(join, 0, solver=solver)
        refusals[solver] = error.value.minimum
    assert refusals.pop("auto") == min(refusals.values())


@pytest.mark.parametrize("solver", ["auto", *JOINS])
def test_memory_in_plenty_costs_no_time(solver):
    """Slots of a terabyte are larger than everything together."""
    for trunk in (None, uniform(4)):
        join = Join(branches=(uniform(30), uniform(20)), trunk=trunk)
        found = solution(join, 2**50, solver=solver, slots=20)
        assert found.timeline.time == found.lower_bound == 2 * (50 + (4 if trunk else 0))


def test_a_join_too_large_for_one_solver_is_left_to_the_other():
    join = Join(branches=(uniform(4),) * 10)
    with pytest.raises(FxrematError, match="too large a table"):
        solve(join, 100, solver="canonical", slots=50)
    assert solution(join, 100, slots=50).solver == "linear"
    with pytest.raises(BudgetTooSmall) as error:
        solve(join, 10, slots=50)
    assert simulate_join(join, solve(join, error.value.minimum, slots=50)).peak <= error.value.minimum


def test_what_joins_are_not_asked():
    join = Join(branches=(uniform(1), uniform(1)))
    with pytest.raises(
        FxrematError, match="a join is solved by auto, keep_all, canonical, linear; 'input_drop'"
    ):
        solve(join, 100, solver="input_drop")
    with pytest.raises(FxrematError, match="to_host"):
        solve(join, 100, platform=Platform(to_host=1.0, from_host=1.0))
    with pytest.raises(FxrematError, match="slots is 0"):
        solve(join, 100, slots=0)
    with pytest.raises(InvalidBudget, match="4GiB"):
        solve(join, "4GiB")
    with pytest.raises(FxrematError, match="unknown solver 'canonical'"):
        solve(uniform(1), 100, solver="canonical")


def test_simulate_takes_both():
    chain = uniform(1)
    join = Join(branches=(chain, chain))
    schedule = fxremat.solve(join, 12)
    assert fxremat.simulate(join, schedule) == simulate_join(join, schedule)
    assert fxremat.simulate(join, schedule).peak == 10
    assert fxremat.simulate(chain, Schedule.parse("Fall1 B1"), Platform(memory=8)).peak == 8
    with pytest.raises(InvalidSchedule, match="a Join cannot run a Schedule"):
        fxremat.simulate(join, Schedule.parse("Fall1 B1"))
    with pytest.raises(InvalidSchedule, match="a Chain cannot run a JoinSchedule"):
        fxremat.simulate(chain, schedule)
