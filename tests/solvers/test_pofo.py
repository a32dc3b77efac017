"""POFO: against a search of all that it searches, and what must hold on random chains with tight budgets."""

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fxremat.chains.chain import Block, Chain
from fxremat.chains.platform import Platform
from fxremat.chains.schedule import Offload, Schedule
from fxremat.chains.simulate import simulate
from fxremat.errors import BudgetTooSmall
from fxremat.solvers import persistent
from fxremat.solvers.offload import min_memory, pofo
from fxremat.solvers.sizes import in_bytes
from tests.dags import few
from tests.draws import everyday
from tests.solvers.chains import chains
from tests.solvers.offloads import (
    everything_away,
    fastest_pofo,
    fastest_rerun,
    fits,
    lean_chains,
    machine,
    speeds,
)

more = st.integers(0, 10)  # bytes above the least


@few(everyday(80))
@given(chains(3, options=1), more)
def test_the_table_is_what_a_search_of_everything_finds(chain, more):
    assume(chain.least_time < 200)
    mem = _least(chain) + more
    assert pofo.build(chain, mem, machine(mem), mem).time == pytest.approx(fastest_pofo(chain, mem), abs=1e-9)


@few(everyday(150))
@given(lean_chains(2, 4), st.integers(0, 6))
def test_the_table_is_what_a_search_finds_where_memory_is_short(chain, more):
    mem = _least(chain) + more
    assert pofo.build(chain, mem, machine(mem), mem).time == pytest.approx(fastest_pofo(chain, mem), abs=1e-9)


@few(everyday(60))
@given(lean_chains(2, 5, unit=4), st.integers(0, 40), st.randoms(use_true_random=False))
def test_what_is_rerun_while_copies_come(chain, more, dice):
    mem = persistent.build(chain, 1, 1).least + more
    low, _ = persistent.bounds(in_bytes(chain), len(chain))
    task = pofo.task_of(chain, mem, machine(mem), mem)
    back = pofo.fill_back(task)
    for t in range(1, len(chain) + 1):
        for s in range(1, t + 1):
            kept = max(0, mem - int(low[s, t]) - dice.randint(0, 12))
            due = dice.randint(0, int(back.reach[s, kept]))
            found = pofo._line(back, s, t, kept)[due]
            blocks = chain.blocks[s - 1 : t]
            once = sum(block.forward_time + block.backward_time for block in blocks)
            assert once + found == fastest_rerun(chain, s, t, kept, due, mem)


BLOCKS = {
    "what B_s waits for is not waited for again": (
        18, 9, [(4, 5, 2, 4, 1, 0, 3), (4, 2, 3, 7, 2, 3, 0), (1, 1, 3, 9, 1, 3, 3)]
    ),
    "a pass waits less if what it reads leaves meanwhile": (
        19, 11, [(3, 4, 0, 3, 2, 0, 0), (2, 1, 5, 10, 0, 8, 0), (1, 3, 2, 4, 2, 8, 8), (3, 4, 4, 6, 0, 3, 8)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BLOCKS)
def test_what_a_search_finds_in_cases_that_matter(case):
    mem, size, rows = BLOCKS[case]
    blocks = [
        Block(
            forward_time=forward, backward_time=backward, output_bytes=out, saved_bytes=saved, grad_bytes=grad,
            forward_scratch=scratch, backward_scratch=back,
        )
        for forward, backward, out, saved, grad, scratch, back in rows
    ]  # fmt: skip
    chain = Chain(blocks=tuple(blocks), input_bytes=size, input_grad_bytes=0)
    assert pofo.build(chain, mem, machine(mem), mem).time == fastest_pofo(chain, mem)


@few(everyday(150))
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


@few(everyday(150))
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


@few(everyday(100))
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


@few(everyday(60))
@given(chains(5), more, st.sampled_from([1.0, 3.0]))
def test_more_memory_never_costs_time(chain, more, speed):
    least = _least(chain)
    times = [
        pofo.build(chain, mem, machine(mem, speed), mem).time
        for mem in range(least, least + min(more, 5) + 1)
    ]
    assert all(after <= before + 1e-6 for before, after in pairwise(times))


@few(everyday(100))
@given(chains(6))
def test_the_least_budget_is_exact(chain):
    least = min_memory.plan(chain, machine(None)).peak
    (*_, schedule) = pofo.schedules(chain, max(least, 1), machine(None), slots=max(least, 1))
    assert fits(chain, schedule, least)
    with pytest.raises(BudgetTooSmall, match=str(least)):
        pofo.schedules(chain, least - 1, machine(None), slots=10)


@few(everyday(100))
@given(chains(7), st.floats(1.0, 2.5), st.integers(3, 40), speeds)
def test_every_candidate_fits(chain, room, slots, speed):
    mem = max(1, int(min_memory.plan(chain, machine(None)).peak * room))
    for schedule in pofo.schedules(chain, mem, machine(None, speed), slots=slots):
        assert simulate(chain, schedule, machine(mem, speed)).peak <= mem


def test_a_fast_link_makes_recomputation_needless():
    block = Block(forward_time=1.0, backward_time=2.0, output_bytes=10, saved_bytes=20, grad_bytes=0)
    chain = Chain(blocks=(block,) * 8, input_bytes=0)
    plan = pofo.build(chain, 80, machine(80, 100.0), 80)
    assert plan.time == chain.least_time
    assert simulate(chain, plan.schedule, machine(80, 100.0)).time == chain.least_time


def _least(chain):
    return max(1, min_memory.plan(chain, machine(None)).peak)
