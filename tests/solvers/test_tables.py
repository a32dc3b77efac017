"""The dynamic programs: stated values, a brute-force oracle, and what must hold on random chains."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.solvers import uneven
from fxremat.chains.chain import Block, Chain
from fxremat.chains.schedule import Drop, Schedule
from fxremat.chains.simulate import simulate
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.solvers import best, floating_drop, input_drop, persistent, rows, solve
from tests.draws import everyday
from tests.solvers.chains import chains
from tests.solvers.oracle import fastest

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "remat.json").read_text())
MOVING = json.loads((Path(__file__).parents[1] / "data" / "floating_drop.json").read_text())
TABLES = {"persistent": persistent, "input_drop": input_drop, "floating_drop": floating_drop}
COLUMNS = {"floating_drop": "optimum"}  # the vectors were drawn where it finds the best there is
extra = st.integers(0, 12)  # bytes above the least: loose budgets find no mistake


@pytest.mark.parametrize("solver", TABLES)
@pytest.mark.parametrize("case", VECTORS, ids=range(len(VECTORS)))
def test_stated_values(case, solver):
    chain = Chain.from_json(case["chain"])
    stated = case[COLUMNS.get(solver, solver)]
    if stated is None:
        with pytest.raises(BudgetTooSmall) as error:
            solve(chain, case["mem"], solver=solver)
        least = best(chain, error.value.minimum, solver=solver)
        assert least.peak == error.value.minimum > case["mem"]
        return
    timeline = best(chain, case["mem"], solver=solver)
    assert timeline.time == stated
    assert timeline.peak <= case["mem"]


@pytest.mark.parametrize(
    "case", VECTORS[2:], ids=range(len(VECTORS) - 2)
)  # the first two have 7 and 9 blocks
def test_oracle_gives_the_stated_optimum(case):
    assert fastest(Chain.from_json(case["chain"]), case["mem"]) == case["optimum"]


@pytest.mark.parametrize("case", MOVING, ids=lambda case: case["name"])
def test_checkpoints_that_move(case):
    """Random chains on which neither input_drop nor floating finds the optimum, which A* found."""
    chain = Chain.from_json(case["chain"])
    assert best(chain, case["mem"], solver="floating_drop").time == case["optimum"]


@settings(max_examples=everyday(300), deadline=None)
@given(chains(5), extra, st.sampled_from(sorted(TABLES)))
def test_schedule_costs_what_the_table_says(chain, more, solver):
    table = _exact(chain, more, solver)
    timeline = simulate(chain, table.schedule(table.mem))
    assert timeline.peak <= table.mem
    assert timeline.time == pytest.approx(chain.least_time + table.curve[-1])


@settings(max_examples=everyday(200), deadline=None)
@given(chains(6), st.sampled_from(sorted(TABLES)))
def test_the_least_budget_is_exact(chain, solver):
    table = TABLES[solver].build(chain, 64, 64)
    assert simulate(chain, table.schedule(table.least)).peak == table.least
    with pytest.raises(BudgetTooSmall, match=str(table.least)):
        table.schedule(table.least - 1)


@settings(max_examples=everyday(150), deadline=None)
@given(chains(4, options=1), extra)
def test_never_beaten_by_what_it_searches_and_never_beats_everything(chain, more):
    table = _exact(chain, more, "persistent")
    optimum = fastest(chain, table.mem)
    within_persistent = chain.least_time + table.curve[-1]
    with_drops, floating = (
        chain.least_time + TABLES[solver].build(chain, table.mem, table.mem).curve[-1]
        for solver in ("input_drop", "floating_drop")
    )
    assert optimum is not None
    assert optimum - 1e-9 <= floating <= with_drops + 1e-9 <= within_persistent + 2e-9


@settings(max_examples=everyday(150), deadline=None)
@given(chains(6), extra, st.sampled_from(sorted(TABLES)))
def test_more_memory_never_costs_time(chain, more, solver):
    table = _exact(chain, more, solver)
    times = [simulate(chain, table.schedule(mem)).time for mem in range(table.least, table.mem + 1)]
    assert all(after <= before + 1e-9 for before, after in pairwise(times))


@settings(max_examples=everyday(150), deadline=None)
@given(
    chains(7), st.integers(1, 1000), st.floats(1.0, 2.5), st.integers(1, 40), st.sampled_from(sorted(TABLES))
)
def test_rounding_never_breaks_the_budget(chain, scale, room, slots, solver):
    chain = _scaled(chain, scale)
    least = TABLES[solver].build(chain, 1 << 20, 8).least
    mem = max(1, int(least * room))
    timeline = best(chain, max(mem, least), solver=solver, slots=slots)
    assert timeline.peak <= max(mem, least)
    assert timeline.time >= chain.least_time - 1e-9


@settings(max_examples=everyday(150), deadline=None)
@given(
    chains(7),
    st.integers(2, 1000),
    st.floats(1.0, 2.5),
    st.integers(4, 60),
    st.sampled_from(["persistent", "input_drop"]),
)
def test_a_rounded_table_keeps_its_promise(chain, scale, room, slots, solver):
    chain = _scaled(chain, scale)
    table = TABLES[solver].build(chain, int(TABLES[solver].build(chain, 1 << 20, 8).least * room) + 1, slots)
    assert simulate(chain, table.schedule(table.mem)).time <= chain.least_time + table.curve[-1] + 1e-9


@settings(max_examples=everyday(60), deadline=None)
@given(chains(8), st.integers(1, 60), st.integers(2, 30), st.sampled_from(sorted(TABLES)))
def test_frontier(chain, slots, count, solver):
    chain = _scaled(chain, 37)
    mem = max(1, TABLES[solver].build(chain, 1 << 20, 8).least * 2)
    schedules = TABLES[solver].build(chain, mem, slots).frontier(count)
    timelines = [simulate(chain, schedule) for schedule in schedules]
    assert 1 <= len(schedules) == len(set(schedules)) <= count
    assert all(timeline.peak <= mem for timeline in timelines)
    assert timelines[-1].peak == min(timeline.peak for timeline in timelines)


def test_frontier_of_an_impossible_budget():
    with pytest.raises(BudgetTooSmall):
        input_drop.build(_uniform(5), 3, 500).frontier(100)


def test_input_drop_drops_an_input():
    found = (  # until one does: all of them are solved above
        solve(Chain.from_json(case["chain"]), case["mem"])
        for case in VECTORS
        if case["input_drop"] is not None
    )
    assert any(isinstance(op, Drop) for schedule in found for op in schedule.ops)


def test_gradients_of_weights_are_held_to_the_end():
    block = Block(forward_time=1, backward_time=1, output_bytes=1, saved_bytes=1, weight_grad_bytes=100)
    chain = Chain(blocks=(block, block), input_bytes=1)
    assert best(chain, 201).peak == 201  # d_0 and both weight gradients
    with pytest.raises(BudgetTooSmall, match="least that does is 201"):
        solve(chain, 200)


@pytest.mark.parametrize(
    ("barred", "solver", "recomputed"),
    [
        (2, "persistent", 1 + 100),  # Fck1 Fall2 Fall3[1], as the pass over block 2 needs 15 bytes
        (1, "persistent", 1 + 100),  # Fall1 Fck2 Fall3[1] B3 Fall2
        (1, "input_drop", 1 + 100),
        (2, "input_drop", 1),  # Fck1 Fall2 Drop(a1) Fall3 never runs block 2 without saving it
    ],
)
def test_a_pass_that_does_not_fit_is_not_taken(barred, solver, recomputed):
    def block(number, small):
        options = [{"saved_bytes": small, "backward_time": 102, "save_scratch": 0}] if small else []
        scratch = {"forward_scratch": 15 if number == barred else 0, "save_scratch": 0}
        numbers = {
            "forward_time": 1,
            "backward_time": 2,
            "output_bytes": 1,
            "saved_bytes": 6,
            "grad_bytes": 0,
        }
        return numbers | scratch | {"options": options}

    blocks = [block(1, 1), block(2, 0), block(3, 5)]
    chain = Chain.from_json({"input_bytes": 0, "blocks": blocks})
    timeline = best(chain, 12, solver=solver)
    assert timeline.peak <= 12
    assert timeline.time == chain.least_time + recomputed


def test_a_block_is_saved_the_small_way_where_memory_is_short():
    small = {"saved_bytes": 2, "backward_time": 5.0}
    block = {
        "forward_time": 9.0,
        "backward_time": 2.0,
        "output_bytes": 2,
        "saved_bytes": 9,
        "options": [small],
    }
    chain = Chain.from_json({"input_bytes": 2, "blocks": [block] * 2})
    assert solve(chain, 24) == Schedule.parse("Fall1 Fall2 B2 B1")
    assert best(chain, 17).time == 9 + 9 + 2 + 5  # one block of the two
    assert solve(chain, 10) == Schedule.parse("Fall1[1] Fall2[1] B2 B1")


def _exact(chain, more, solver):
    """The solver's table for `more` bytes above the least budget, one slot a byte."""
    build = TABLES[solver].build
    mem = max(1, build(chain, 1, 1).least + more)
    return build(chain, mem, mem)


def _scaled(chain, scale):
    """The chain with every size times `scale`, less a little: no common grain."""

    def larger(value):
        if isinstance(value, list):
            return [larger(item) for item in value]
        if isinstance(value, dict):
            return {
                key: item * scale if isinstance(item, int) else larger(item) for key, item in value.items()
            }
        return value

    data = larger(json.loads(chain.to_json()))
    return Chain.from_json(data | {"input_bytes": data["input_bytes"] + 1})


def _uniform(n):
    block = Block(forward_time=1.0, backward_time=2.0, output_bytes=1, saved_bytes=2)
    return Chain(blocks=(block,) * n, input_bytes=1)


def test_a_table_that_fits_into_no_memory_is_refused(monkeypatch):
    """With the slots that would do, as far as the chain itself allows."""
    monkeypatch.setattr(rows, "MOST_BYTES", 1 << 20)
    with pytest.raises(FxrematError, match=r"a table of 2000 slots takes .* MiB here; \d+ slots would do") as error:
        input_drop.build(uneven(60), 10**8, 2000)
    fewer = int(str(error.value).split("; ")[1].split()[0])
    assert input_drop.build(uneven(60), 10**8, fewer).slots == fewer
