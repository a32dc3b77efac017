"""Checkpoints only: no forward is saved but right before its backward, and what holds on random chains."""

from itertools import pairwise

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fxremat.chains.chain import Block, Chain
from fxremat.chains.schedule import Backward, Forward, Keep, Schedule
from fxremat.chains.simulate import simulate
from fxremat.errors import BudgetTooSmall
from fxremat.solvers import binomial, exact, persistent
from fxremat.solvers.references import revolve
from tests.draws import everyday
from tests.solvers.chains import chains

PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
extra = st.integers(0, 12)


def test_by_hand():
    block = Block(forward_time=1.0, backward_time=2.0, output_bytes=1, saved_bytes=2)
    chain = Chain(blocks=(block,) * 3, input_bytes=1)
    table = revolve.build(chain, 7, 7)
    assert table.schedule(7) == Schedule.parse("Fck1 Fck2 Fall3 B3 Fall2 B2 Fall1 B1")
    assert table.schedule(6) == Schedule.parse("Fck1 Fnone2 Fall3 B3 Fck1 Fall2 B2 Fall1 B1")
    assert (table.least, table.enough) == (6, 7)


@settings(max_examples=everyday(300), deadline=None, phases=PHASES)
@given(chains(6), extra)
def test_schedule_costs_what_the_table_says(chain, more):
    table = _exact(chain, more)
    schedule = table.schedule(table.mem)
    timeline = simulate(chain, schedule)
    assert timeline.peak <= table.mem
    assert timeline.time == pytest.approx(chain.least_time + table.curve[-1])
    for op, after in pairwise(schedule.ops):
        match op:
            case Forward(block, Keep.ALL):
                assert after == Backward(block)
    assert persistent.build(chain, table.mem, table.mem).curve[-1] <= table.curve[-1] + 1e-9


@settings(max_examples=everyday(100), deadline=None, phases=PHASES)
@given(chains(5))
def test_the_least_budget_is_exact(chain):
    table = revolve.build(chain, 64, 64)
    assert simulate(chain, table.schedule(table.least)).peak == table.least
    assert simulate(chain, table.schedule(table.least)).time >= _optimum(chain, table.least) - 1e-9
    with pytest.raises(BudgetTooSmall, match=str(table.least)):
        table.schedule(table.least - 1)


@settings(max_examples=everyday(100), deadline=None, phases=PHASES)
@given(chains(6))
def test_more_memory_never_costs_time_up_to_enough(chain):
    enough = revolve.build(chain, 1, 1).enough
    table = revolve.build(chain, max(1, enough + 3), max(1, enough + 3))
    times = [simulate(chain, table.schedule(mem)).time for mem in range(table.least, table.mem + 1)]
    assert all(after <= before + 1e-9 for before, after in pairwise(times))
    again = sum(block.forward_time for block in chain.blocks[:-1])
    assert times[enough - table.least] == times[-1] == pytest.approx(chain.least_time + again)


@settings(max_examples=everyday(200), deadline=None, phases=PHASES)
@given(chains(7), st.floats(1.0, 2.5), st.integers(4, 60))
def test_a_rounded_table_keeps_its_promise(chain, room, slots):
    mem = int(revolve.build(chain, 64, 8).least * room) + 1
    table = revolve.build(chain, mem, slots)
    timeline = simulate(chain, table.schedule(mem))
    assert timeline.peak <= mem
    assert timeline.time <= chain.least_time + table.curve[-1] + 1e-9


@settings(max_examples=everyday(60), deadline=None, phases=PHASES)
@given(chains(7))
def test_no_slower_than_the_binomial_schedules(chain):
    for timeline in (simulate(chain, schedule) for schedule in binomial.schedules(chain)):
        mem = max(1, timeline.peak)
        assert chain.least_time + revolve.build(chain, mem, mem).curve[-1] <= timeline.time + 1e-9


def _optimum(chain, mem):
    return simulate(chain, exact.schedules(chain, mem)[0]).time


def _exact(chain, more):
    """The table for `more` bytes above the least budget, one slot a byte."""
    mem = max(1, revolve.build(chain, 1, 1).least + more)
    return revolve.build(chain, mem, mem)
