"""The mixed integer program: optimal in its class, and valid, for budgets down to the least."""

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fxremat.chains.chain import Block, Chain
from fxremat.chains.simulate import simulate
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.solvers import exact, keep_all
from fxremat.solvers.references import checkmate
from tests.draws import everyday
from tests.solvers.chains import chains

PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
extra = st.integers(0, 12)


@settings(max_examples=everyday(60), deadline=None, phases=PHASES)
@given(chains(5), extra)
def test_valid_within_the_budget_and_no_faster_than_everything(chain, more):
    least = _least(chain)
    assert simulate(chain, checkmate.schedules(chain, least)[0]).peak == least
    timeline = simulate(chain, checkmate.schedules(chain, least + more)[0])
    assert timeline.peak <= least + more
    assert simulate(chain, exact.schedules(chain, least + more)[0]).time <= timeline.time + 1e-9


@settings(max_examples=everyday(60), deadline=None, phases=PHASES, derandomize=True)
@given(chains(5, options=0), extra)
def test_optimal_where_a_value_is_all_that_is_saved(chain, more):
    """The same examples every time: on a rare chain its least budget is a byte above that of exact."""
    blocks = [
        replace(block, output_bytes=block.saved_bytes, save_scratch=None, weight_grad_bytes=0, held_bytes=0)
        for block in chain.blocks
    ]
    chain = replace(chain, blocks=tuple(blocks))
    mem = exact.least(chain) + more
    assert _least(chain) == exact.least(chain)
    found = simulate(chain, checkmate.schedules(chain, mem)[0])
    assert found.time == pytest.approx(simulate(chain, exact.schedules(chain, mem)[0]).time)


@settings(max_examples=everyday(30), deadline=None, phases=PHASES)
@given(chains(6))
def test_more_memory_never_costs_time_and_all_of_it_keeps_everything(chain):
    everything, least = simulate(chain, keep_all.schedules(chain)[0]), _least(chain)
    budgets = sorted({least, (least + everything.peak) // 2, everything.peak})
    times = [simulate(chain, checkmate.schedules(chain, mem)[0]).time for mem in budgets]
    assert times == sorted(times, reverse=True)
    assert times[-1] == everything.time


def test_twelve_blocks():
    block = Block(forward_time=1.0, backward_time=2.0, output_bytes=100, saved_bytes=100)
    chain = Chain(blocks=(block,) * 12, input_bytes=100)
    # every value is like every other: a_0, the gradient and 5 more, of which two run along
    timeline = simulate(chain, checkmate.schedules(chain, 700)[0])
    assert timeline.peak <= 700
    assert timeline.time == simulate(chain, exact.schedules(chain, 700)[0]).time


def test_too_long_or_out_of_time():
    block = Block(forward_time=1.0, backward_time=2.0, output_bytes=7, saved_bytes=9)
    with pytest.raises(FxrematError, match="41 blocks is too long for checkmate"):
        checkmate.schedules(Chain(blocks=(block,) * 41, input_bytes=1), 100)
    with pytest.raises(FxrematError, match="no schedule in 0 s"):
        checkmate.schedules(Chain(blocks=(block,) * 40, input_bytes=1), 100, seconds=0)


def _least(chain):
    """The minimum that the error names; one byte less does not work either."""
    with pytest.raises(BudgetTooSmall) as error:
        checkmate.schedules(chain, 0 if chain.input_bytes else -1)
    least = error.value.minimum
    with pytest.raises(BudgetTooSmall):
        checkmate.schedules(chain, least - 1)
    return least
