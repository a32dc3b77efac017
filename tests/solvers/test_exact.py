"""The exact solver: stated optima, plain Dijkstra on random chains, the least budget, and chains too long."""

import json
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fxremat.chains.chain import Block, Chain
from fxremat.chains.simulate import simulate
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.solvers import exact, input_drop
from tests.draws import everyday
from tests.solvers.chains import chains
from tests.solvers.oracle import fastest

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "remat.json").read_text())
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
extra = st.integers(-2, 12)  # bytes above the least


@pytest.mark.parametrize("case", VECTORS, ids=range(len(VECTORS)))
def test_stated_optima(case):
    chain = Chain.from_json(case["chain"])
    if case["optimum"] is None:
        with pytest.raises(BudgetTooSmall):
            exact.schedules(chain, case["mem"])
    else:
        assert _time(chain, case["mem"]) == case["optimum"]


@settings(max_examples=everyday(400), deadline=None, phases=PHASES)
@given(chains(4), extra)
def test_as_fast_as_plain_dijkstra(chain, more):
    mem = exact.least(chain) + more
    optimum = fastest(chain, mem)
    assert (optimum is None) == (more < 0)
    assert optimum is None or _time(chain, mem) == pytest.approx(optimum)


@settings(max_examples=everyday(100), deadline=None, phases=PHASES)
@given(chains(6))
def test_the_least_budget(chain):
    least = exact.least(chain)
    with pytest.raises(BudgetTooSmall) as error:
        exact.schedules(chain, least - 1)
    assert error.value.minimum == least
    assert simulate(chain, exact.schedules(chain, least)[0]).peak == least


@settings(max_examples=everyday(100), deadline=None, phases=PHASES)
@given(chains(7), st.integers(0, 12))
def test_no_table_is_faster_and_more_memory_costs_no_time(chain, more):
    mem = max(1, input_drop.build(chain, 1, 1).least + more)
    table = chain.least_time + input_drop.build(chain, mem, mem).curve[-1]
    assert _time(chain, mem + 1) - 1e-9 <= _time(chain, mem) <= table + 1e-9


def test_twelve_blocks():
    chain = Chain(blocks=(_block(3), _block(1), _block(2)) * 4, input_bytes=1)
    least = exact.least(chain)
    assert _time(chain, least) > _time(chain, least + 4) > chain.least_time


def test_too_long():
    with pytest.raises(FxrematError, match="chain of 40 blocks is too long"):
        exact.schedules(Chain(blocks=(_block(1),) * 40, input_bytes=1), 20)
    with pytest.raises(FxrematError, match="gave up after 1000 states"):
        exact.schedules(Chain(blocks=(_block(1),) * 20, input_bytes=1), 20, states=1000)


def _block(size):
    return Block(forward_time=size, backward_time=2.0, output_bytes=size, saved_bytes=size + 2)


def _time(chain, mem):
    """The time of the solver's schedule, which fits."""
    timeline = simulate(chain, exact.schedules(chain, mem)[0])
    assert timeline.peak <= mem
    return timeline.time
