"""POFO: against a search of all that it searches, and what must hold on random chains with tight budgets."""

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fxremat.chain import Block, Chain
from fxremat.errors import BudgetTooSmall
from fxremat.platform import Platform
from fxremat.schedule import Offload, Schedule
from fxremat.simulate import simulate
from fxremat.solvers import persistent
from fxremat.solvers.offload import frugal, pofo
from tests.dags import few
from tests.solvers.chains import chains
from tests.solvers.offloads import everything_away, fastest_pofo, fits, machine, speeds

more = st.integers(0, 10)  # bytes above the least


@few(80)
@given(chains(3, options=1), more)
def test_the_table_is_what_a_search_of_everything_finds(chain, more):
    assume(chain.least_time < 200)
    mem = _least(chain) + more
    assert pofo.build(chain, mem, machine(mem), mem).time == pytest.approx(fastest_pofo(chain, mem), abs=1e-9)


@few(150)
@given(chains(6), more, st.sampled_from([1.0, 2.0, 5.0]))
def test_the_schedule_takes_no_longer_than_the_table_says(chain, more, speed):
    mem = _least(chain) + more
    plan = pofo.build(chain, mem, machine(mem, speed), mem)
    fluid, whole = (
        simulate(chain, plan.schedule, machine(mem, speed), accounting=kind) for kind in ("fluid", "whole")
    )
    assert fluid.time <= plan.time + 1e-6
    assert fluid.time <= whole.time + 1e-6
    assert max(fluid.peak, whole.peak) <= mem
    assert fluid.time >= chain.least_time - 1e-6
    assert Schedule.parse(str(plan.schedule)) == plan.schedule


@few(150)
@given(chains(6), more, speeds, speeds)
def test_no_slower_than_checkpointing_and_the_same_without_a_link(chain, more, speed, back):
    mem = persistent.build(chain, 1, 1).least + more or 1
    table = persistent.build(chain, mem, mem)
    without = chain.least_time + table.curve[-1]
    assert pofo.build(chain, mem, machine(mem, speed, back), mem).time <= without + 1e-6
    for platform in (None, Platform(), Platform(to_host=1.0)):
        plan = pofo.build(chain, mem, platform, mem)
        assert plan.time == pytest.approx(without)
        assert simulate(chain, plan.schedule, Platform(memory=mem)).time == pytest.approx(without)
        assert not any(isinstance(op, Offload) for op in plan.schedule.ops)


@few(100)
@given(chains(6), more, st.booleans())
def test_with_a_very_slow_link_and_a_very_fast_one(chain, more, fast):
    mem = _least(chain) + more
    speed = 1e9 if fast else 1e-9
    plan = pofo.build(chain, mem, machine(mem, speed), mem)
    table = persistent.build(chain, mem, mem)
    if fast and fits(chain, everything_away(chain), mem):
        assert plan.time == pytest.approx(chain.least_time, abs=1e-3)
    elif not fast and table.least <= mem:
        assert plan.time == pytest.approx(chain.least_time + table.curve[-1])


@few(60)
@given(chains(5), more, st.sampled_from([1.0, 3.0]))
def test_more_memory_never_costs_time(chain, more, speed):
    least = _least(chain)
    times = [
        pofo.build(chain, mem, machine(mem, speed), mem).time
        for mem in range(least, least + min(more, 5) + 1)
    ]
    assert all(after <= before + 1e-6 for before, after in pairwise(times))


@few(100)
@given(chains(6))
def test_the_least_budget_is_exact(chain):
    least = frugal.plan(chain, machine(None)).peak
    (*_, schedule) = pofo.schedules(chain, max(least, 1), machine(None), slots=max(least, 1))
    assert fits(chain, schedule, least)
    with pytest.raises(BudgetTooSmall, match=str(least)):
        pofo.schedules(chain, least - 1, machine(None), slots=10)


@few(100)
@given(chains(7), st.floats(1.0, 2.5), st.integers(3, 40), speeds)
def test_every_candidate_fits(chain, room, slots, speed):
    mem = max(1, int(frugal.plan(chain, machine(None)).peak * room))
    for schedule in pofo.schedules(chain, mem, machine(None, speed), slots=slots):
        assert simulate(chain, schedule, machine(mem, speed)).peak <= mem


def test_a_fast_link_makes_recomputation_needless():
    block = Block(forward_time=1.0, backward_time=2.0, output_bytes=10, saved_bytes=20, grad_bytes=0)
    chain = Chain(blocks=(block,) * 8, input_bytes=0)
    plan = pofo.build(chain, 80, machine(80, 100.0), 80)
    assert plan.time == chain.least_time
    assert simulate(chain, plan.schedule, machine(80, 100.0)).time == chain.least_time


def _least(chain):
    return max(1, frugal.plan(chain, machine(None)).peak)
