"""The solvers that choose values to send away without a table: greedy, vdnn, autocapper."""

from contextlib import nullcontext, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.chains.chain import Block, Chain
from fxremat.chains.schedule import Schedule
from fxremat.chains.simulate import simulate
from fxremat.errors import BudgetTooSmall
from fxremat.solvers import input_drop, keep_all
from fxremat.solvers.offload import autocapper
from fxremat.solvers.references.offload import greedy, opportunist, vdnn
from tests.dags import few
from tests.draws import everyday
from tests.solvers.chains import chains
from tests.solvers.offloads import machine, speeds

more = st.integers(0, 12)
BLOCK = Block(forward_time=1.0, backward_time=2.0, output_bytes=4, saved_bytes=10, grad_bytes=0)
CHAIN = Chain(blocks=(BLOCK,) * 5, input_bytes=5)


def by_input_drop(chain, mem):
    table = input_drop.build(chain, 1 << 20, 64)
    top = max(table.enough, 1)
    table = input_drop.build(chain, top, min(top, 256))
    return autocapper.schedules(
        chain, mem, least=table.least, enough=top, solve=lambda budget: table.schedule(budget), count=8
    )


SOLVERS = {"greedy": greedy.schedules, "vdnn": vdnn.schedules, "autocapper": by_input_drop}


@few(everyday(150))
@given(chains(7), more, st.sampled_from(sorted(SOLVERS)), speeds, speeds)
def test_every_candidate_fits_and_the_least_budget_is_exact(chain, more, solver, speed, back):
    solve = SOLVERS[solver]
    with pytest.raises(BudgetTooSmall) as error:
        solve(chain, -1)
    least = error.value.minimum
    for mem in {max(least, 1), max(least, 1) + more}:
        for schedule in solve(chain, mem):
            whole, fluid = (
                simulate(chain, schedule, machine(mem, speed, back), accounting=kind)
                for kind in ("whole", "fluid")
            )
            assert max(whole.peak, fluid.peak) <= mem
            assert fluid.time <= whole.time + 1e-6
            assert Schedule.parse(str(schedule)) == schedule
            if solver != "autocapper":
                peak = simulate(chain, keep_all.schedules(chain)[0]).peak
                assert fluid.time >= max(chain.least_time, (peak - mem) * (1 / speed + 1 / back)) - 1e-6
    with pytest.raises(BudgetTooSmall):
        solve(chain, least - 1)


@few(everyday(100))
@given(chains(6), more, speeds)
def test_autocapper_is_no_slower_than_its_chain_solver(chain, more, speed):
    mem = max(1, input_drop.build(chain, 1, 1).least + more)
    table = input_drop.build(chain, mem, mem)
    found = autocapper.schedules(
        chain,
        mem,
        least=table.least,
        enough=table.enough,
        solve=lambda budget: table.schedule(min(budget, mem)),
        count=5,
    )
    best = min(simulate(chain, schedule, machine(mem, speed)).time for schedule in found)
    assert best <= simulate(chain, table.schedule(mem)).time


def test_greedy_by_hand():
    # 5 + 50 bytes at the peak; a0 and A1 are 15
    assert greedy.schedules(CHAIN, 55) == keep_all.schedules(CHAIN)
    assert greedy.schedules(CHAIN, 50) == [
        Schedule.parse("Off(a0) Fall1 Fall2 Fall3 Fall4 Fall5 B5 Pre(a0) B4 B3 B2 B1")
    ]
    assert greedy.schedules(CHAIN, 49) == [
        Schedule.parse("Off(a0) Fall1 Off(A1) Fall2 Fall3 Fall4 Fall5 B5 Pre(A1) Pre(a0) B4 B3 B2 B1")
    ]


def test_vdnn_takes_the_inputs_of_long_forwards():
    slow = Block(forward_time=9.0, backward_time=2.0, output_bytes=4, saved_bytes=10, grad_bytes=0)
    chain = Chain(blocks=(BLOCK, BLOCK, slow, BLOCK, BLOCK), input_bytes=5)
    assert any(
        str(schedule).split()[:4] == ["Fall1", "Fall2", "Off(A2)", "Fall3"]
        for schedule in vdnn.schedules(chain, 45)
    )


@few(everyday(150))
@given(chains(7), more, speeds, speeds)
def test_opportunist_fits(chain, more, speed, back):
    with pytest.raises(BudgetTooSmall) as error:
        opportunist.schedules(chain, -1, machine(None, speed, back), slots=64)
    mem = max(1, error.value.minimum + more)
    with suppress(BudgetTooSmall) if more else nullcontext():  # more memory makes other groups
        (schedule,) = opportunist.schedules(chain, mem, machine(None, speed, back), slots=64)
        timeline = simulate(chain, schedule, machine(mem, speed, back))
        assert timeline.peak <= mem
        assert Schedule.parse(str(schedule)) == schedule


def test_opportunist_by_hand():
    # 5 + 10 bytes go at 5 a second: two forwards run beneath 10 of them, then the rest fits
    (schedule,) = opportunist.schedules(CHAIN, 40, machine(None, 5.0))
    text = "Off(a0) Fall1 Off(A1) Fnone2 Fnone3 Fall4 Fall5 Pre(A1) Pre(a0) B5 B4 Fall2 Fall3 B3 B2 B1"
    assert schedule == Schedule.parse(text)
    assert simulate(CHAIN, schedule, machine(40, 5.0)).time == CHAIN.least_time + 2
