"""The floating dynamic program: stated values, the paper's own counter-example, and what holds on random chains."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fxremat.chains.chain import Block, Chain
from fxremat.chains.simulate import simulate
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.solvers import exact, persistent
from fxremat.solvers.references import floating
from tests.draws import everyday
from tests.solvers.chains import chains

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "remat.json").read_text())
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
extra = st.integers(0, 12)  # bytes above the least: loose budgets find no mistake


@pytest.mark.parametrize("case", VECTORS, ids=range(len(VECTORS)))
def test_stated_values(case):
    chain, mem = Chain.from_json(case["chain"]), case["mem"]
    table = floating.build(chain, mem, mem)
    if case["floating"] is None:
        with pytest.raises(BudgetTooSmall):
            table.schedule(mem)
    else:
        assert simulate(chain, table.schedule(mem)).time == case["floating"]


@pytest.mark.parametrize(
    ("n", "persists", "floats", "announced"), [(4, 10, 10, 8), (6, 16, 14, 12), (8, 22, 18, 16)]
)
def test_the_counter_example_needs_more_than_the_theorem(n, persists, floats, announced):
    chain = _figure_2_3(n, 1, 0, 0)
    assert simulate(chain, persistent.build(chain, 15, 15).schedule(15)).time == persists
    assert simulate(chain, floating.build(chain, 15, 15).schedule(15)).time == floats
    assert simulate(chain, exact.schedules(chain, 15)[0]).time == announced


@settings(max_examples=everyday(300), deadline=None, phases=PHASES)
@given(
    st.integers(4, 8),
    st.integers(1, 40),
    st.integers(0, 30),
    st.integers(0, 30),
    st.lists(st.integers(1, 12), max_size=2),
    st.integers(8, 60),
)
def test_moves_fit_and_keep_the_promise_of_the_table(n, scale, scratch, more, passed, slots):
    chain = _figure_2_3(n, scale, scratch, more, [size * scale for size in passed])
    mem = 15 * scale + scratch + more
    for steps in (slots, mem):
        table = floating.build(chain, mem, steps)
        timeline = simulate(chain, table.schedule(max(mem, table.least)))
        assert timeline.peak <= max(mem, table.least)
    # in fewer steps a move, a difference of rounded sizes, may promise too much
    assert timeline.time <= chain.least_time + table.curve[-1]


@settings(max_examples=everyday(300), deadline=None, phases=PHASES)
@given(chains(6), extra)
def test_schedule_costs_what_the_table_says(chain, more):
    table = _exact(chain, more)
    timeline = simulate(chain, table.schedule(table.mem))
    assert timeline.peak <= table.mem
    assert timeline.time == pytest.approx(chain.least_time + table.curve[-1])
    assert table.curve[-1] <= persistent.build(chain, table.mem, table.mem).curve[-1] + 1e-9


@settings(max_examples=everyday(100), deadline=None, phases=PHASES)
@given(chains(5), extra)
def test_never_faster_than_everything(chain, more):
    table = _exact(chain, more)
    optimum = simulate(chain, exact.schedules(chain, table.mem)[0]).time
    assert optimum - 1e-9 <= chain.least_time + table.curve[-1]


@settings(max_examples=everyday(150), deadline=None, phases=PHASES)
@given(chains(6))
def test_the_least_budget_is_exact(chain):
    table = floating.build(chain, 64, 64)
    assert simulate(chain, table.schedule(table.least)).peak == table.least
    with pytest.raises(BudgetTooSmall, match=str(table.least)):
        table.schedule(table.least - 1)


@settings(max_examples=everyday(100), deadline=None, phases=PHASES)
@given(chains(6), extra)
def test_more_memory_never_costs_time(chain, more):
    table = _exact(chain, more)
    times = [simulate(chain, table.schedule(mem)).time for mem in range(table.least, table.mem + 1)]
    assert all(after <= before + 1e-9 for before, after in pairwise(times))


@settings(max_examples=everyday(300), deadline=None, phases=PHASES)
@given(chains(7), st.floats(1.0, 2.5), st.integers(4, 60))
def test_a_rounded_table_keeps_its_promise(chain, room, slots):
    mem = int(floating.build(chain, 64, 8).least * room) + 1
    table = floating.build(chain, mem, slots)
    timeline = simulate(chain, table.schedule(mem))
    assert timeline.peak <= mem
    assert timeline.time <= chain.least_time + table.curve[-1] + 1e-9


def test_a_table_too_large_is_refused():
    block = Block(forward_time=1, backward_time=1, output_bytes=1, saved_bytes=2)
    with pytest.raises(FxrematError, match="too large; try"):
        floating.build(Chain(blocks=(block,) * 60, input_bytes=1), 100, 10_000)


def test_frontier():
    chain = Chain.from_json(VECTORS[1]["chain"])
    timelines = [simulate(chain, schedule) for schedule in floating.build(chain, 40, 100).frontier(100)]
    assert all(timeline.peak <= 40 for timeline in timelines)
    assert timelines[-1].peak == floating.build(chain, 40, 40).least


def _figure_2_3(n, scale, scratch, more, passed=()):
    """The chain of thesis Fig. 2.3, whose best schedules move a checkpoint; sizes times `scale`, plus some.

    The move is from a_1 to the output of the second block, and passes blocks of the sizes `passed`.
    """

    def block(time, size, scratch=0):
        numbers = {"forward_time": time, "backward_time": 0, "forward_scratch": scratch}
        return Block(**numbers, output_bytes=size, saved_bytes=size)

    first = [block(n - 2, scale), *(block(0, size) for size in passed), block(2, 3 * scale, scratch)]
    last = [block(0, 4 * scale + more), block(0, 0)]
    return Chain(blocks=(*first, *[block(0, 3 * scale)] * (n - 1), *last), input_bytes=0)


def _exact(chain, more):
    """The table for `more` bytes above the least budget, one slot a byte."""
    mem = max(1, floating.build(chain, 1, 1).least + more)
    return floating.build(chain, mem, mem)
