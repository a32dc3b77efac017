"""Local search: never worse, always valid, and able to trade recomputation for copies and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.chains.chain import Block, Chain
from fxremat.chains.schedule import Schedule
from fxremat.chains.simulate import simulate
from fxremat.solvers import input_drop, keep_all
from fxremat.solvers.offload import local_search, pofo
from fxremat.solvers.references.offload import greedy
from tests.dags import few
from tests.draws import everyday
from tests.solvers.chains import chains
from tests.solvers.offloads import machine, speeds

BLOCK = Block(forward_time=4.0, backward_time=8.0, output_bytes=4, saved_bytes=10, grad_bytes=0)
CHAIN = Chain(blocks=(BLOCK,) * 6, input_bytes=4)


@few(everyday(60))
@given(chains(6), st.integers(0, 12), speeds, st.booleans(), st.sampled_from(["input_drop", "pofo"]))
def test_never_worse_and_always_fits(chain, more, speed, copies, start):
    table = input_drop.build(chain, 1, 1)
    mem = max(1, table.least + more)
    link = machine(mem, speed)
    found = (
        input_drop.build(chain, mem, mem).schedule(mem)
        if start == "input_drop" or not copies
        else pofo.build(chain, mem, link, mem).schedule
    )
    before = simulate(chain, found, link)
    better = local_search.improve(
        chain, found, mem, lambda schedule: simulate(chain, schedule, link), tries=40, copies=copies
    )
    after = simulate(chain, better, link)
    assert (after.time, after.peak) <= (before.time, before.peak)
    assert after.peak <= mem
    assert copies or after.sent == 0
    assert Schedule.parse(str(better)) == better


@few(everyday(100))
@given(chains(6), st.integers(0, 12), speeds)
def test_taken_apart_and_put_together_a_schedule_is_no_slower(chain, more, speed):
    with pytest.raises(Exception, match="no schedule") as error:
        greedy.schedules(chain, -1)
    mem = max(1, error.value.minimum + more)
    link = machine(mem, speed)
    (schedule,) = greedy.schedules(chain, mem)
    state = local_search._read(chain, schedule)
    again = local_search._written(chain, state, mem)
    assert state.plain == keep_all.schedules(chain)[0]
    assert simulate(chain, again, link).time == simulate(chain, schedule, link).time


def test_it_sends_what_a_chain_solver_recomputes_and_the_reverse():
    mem = 44
    plain = input_drop.build(CHAIN, mem, mem).schedule(mem)
    fast = machine(mem, 20.0)
    sent = local_search.improve(CHAIN, plain, mem, lambda s: simulate(CHAIN, s, fast), tries=600)
    assert simulate(CHAIN, sent, fast).time == CHAIN.least_time < simulate(CHAIN, plain, fast).time
    (all_sent,) = greedy.schedules(CHAIN, mem)
    slow = machine(mem, 0.02)
    kept = local_search.improve(CHAIN, all_sent, mem, lambda s: simulate(CHAIN, s, slow), tries=600)
    assert simulate(CHAIN, kept, slow).time <= simulate(CHAIN, plain, slow).time * 1.2
