"""DYNPROG: against a search of every choice of values, and what must hold on random chains with tight budgets."""

from itertools import combinations, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fxremat.chains.platform import Platform
from fxremat.chains.schedule import Schedule
from fxremat.chains.simulate import simulate
from fxremat.errors import BudgetTooSmall
from fxremat.solvers import keep_all
from fxremat.solvers.offload import pofo
from fxremat.solvers.offload.trips import needs, travel, trips
from fxremat.solvers.references.offload import greedy, offload_dp
from tests.dags import few
from tests.draws import everyday
from tests.solvers.chains import chains
from tests.solvers.offloads import everything_away, machine, speeds
from tests.ticks import tick

more = st.integers(0, 12)


@few(everyday(120))
@given(chains(5, options=1), more)
def test_the_table_is_what_a_search_of_everything_finds(chain, more):
    assume(chain.least_time < 200)
    mem = _least(chain) + more
    everything = keep_all.schedules(chain)[0]
    every = trips(chain, everything)
    times = []
    for count in range(len(every) + 1):
        for chosen in combinations(every, count):
            need = needs(chain, everything)
            for trip in chosen:
                need[trip.away] -= trip.size
            if need.max() <= mem:
                schedule = travel(everything, chosen, need, mem, in_part=True)
                times.append(tick(chain, schedule, mem, fluid=True, synchronized=True)[0])
    plan = offload_dp.build(chain, mem, machine(mem), mem, synchronized=True)
    assert plan.time == pytest.approx(min(times), abs=1e-9)


@few(everyday(150))
@given(chains(7), more, st.sampled_from([1.0, 2.0, 5.0]))
def test_the_schedule_takes_no_longer_than_the_table_says(chain, more, speed):
    mem = _least(chain) + more
    plan = offload_dp.build(chain, mem, machine(mem, speed), mem)
    fluid, whole = (
        simulate(chain, plan.schedule, machine(mem, speed), accounting=kind) for kind in ("fluid", "whole")
    )
    assert fluid.time <= plan.time + 1e-6
    assert fluid.time <= whole.time + 1e-6
    assert max(fluid.peak, whole.peak) <= mem
    assert Schedule.parse(str(plan.schedule)) == plan.schedule
    peak = simulate(chain, keep_all.schedules(chain)[0]).peak
    assert fluid.time >= max(chain.least_time, 2 * (peak - mem) / speed) - 1e-6


@few(everyday(150))
@given(chains(6), more, st.sampled_from([1.0, 2.0, 5.0]))
def test_the_turn_may_hide_copies_and_pofo_may_recompute(chain, more, speed):
    mem = _least(chain) + more
    free = offload_dp.build(chain, mem, machine(mem, speed), mem)
    bound = offload_dp.build(chain, mem, machine(mem, speed), mem, synchronized=True)
    assert free.time <= bound.time + 1e-6
    assert pofo.build(chain, mem, machine(mem, speed), mem).time <= bound.time + 1e-6


@few(everyday(100))
@given(chains(6), more, st.booleans())
def test_more_memory_never_costs_time(chain, more, synchronized):
    least = _least(chain)
    times = [
        offload_dp.build(chain, mem, machine(mem), mem, synchronized=synchronized).time
        for mem in range(least, least + min(more, 6) + 1)
    ]
    assert all(after <= before + 1e-6 for before, after in pairwise(times))


@few(everyday(100))
@given(chains(7), st.floats(1.0, 2.5), st.integers(3, 60), speeds)
def test_every_candidate_fits(chain, room, slots, speed):
    mem = max(1, int(_least(chain) * room))
    for schedule in offload_dp.schedules(chain, mem, machine(None, speed), slots=slots):
        assert simulate(chain, schedule, machine(mem, speed)).peak <= mem


@few(everyday(100))
@given(chains(6), more)
def test_links_that_are_very_fast_or_absent(chain, more):
    mem = _least(chain) + more
    plan = offload_dp.build(chain, mem, machine(mem, 1e9), mem)
    assert plan.time == pytest.approx(chain.least_time, abs=1e-3)
    peak = simulate(chain, keep_all.schedules(chain)[0]).peak
    if peak:
        assert offload_dp.schedules(chain, peak, Platform()) == keep_all.schedules(chain)
        with pytest.raises(BudgetTooSmall, match=str(peak)):
            offload_dp.schedules(chain, peak - 1, Platform())


def _least(chain):
    with pytest.raises(BudgetTooSmall) as error:
        greedy.schedules(chain, -1)
    assert error.value.minimum == max(needs(chain, everything_away(chain)))
    return max(1, error.value.minimum)
