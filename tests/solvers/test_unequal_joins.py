"""Joins of unequal chains: their simulator against that of chains, and solvers against brute force."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fxremat.chains.chain import Block, Chain, Join, Option
from fxremat.chains.join_schedule import JoinSchedule, On
from fxremat.chains.simulate import simulate
from fxremat.chains.simulate_join import simulate_join
from fxremat.errors import BudgetTooSmall, FxrematError, InvalidSchedule
from fxremat.solvers import input_drop, joins, solve
from fxremat.solvers.joins import canonical
from tests.draws import everyday
from tests.solvers.chains import chains
from tests.solvers.join_oracle import fastest

PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
few_blocks, extra = chains(2, options=1), st.integers(0, 10)


def joins_of(largest, most=3):
    """Joins of 1 to `most` chains, with and without a trunk."""
    return st.builds(
        Join,
        branches=st.lists(chains(largest, options=1), min_size=1, max_size=most).map(tuple),
        trunk=st.none() | chains(largest, options=1),
    )


@settings(max_examples=everyday(150), deadline=None, phases=PHASES)
@given(chains(7), st.integers(1, 6), extra)
def test_a_branch_and_a_trunk_are_a_chain(chain, cut, more):
    """The simulators agree op by op where the last block of the branch holds nothing else before the turn."""
    cut = min(cut, len(chain) - 1)
    if cut == 0 or chain.blocks[cut - 1].held_bytes:
        return
    branch = Chain(
        blocks=chain.blocks[:cut], input_bytes=chain.input_bytes, input_grad_bytes=chain.input_grad_bytes
    )
    join = Join(branches=(branch,), trunk=Chain(blocks=chain.blocks[cut:], input_bytes=0))
    mem = max(1, input_drop.build(chain, 1, 1).least + more)
    timeline = simulate(chain, input_drop.build(chain, mem, mem).schedule(mem))
    tokens = [_moved(str(op), cut) for op in timeline.schedule.ops]
    joined = simulate_join(join, JoinSchedule.parse(" ".join(tokens)))
    assert (joined.peak, joined.time, joined.memory) == (timeline.peak, timeline.time, timeline.memory)


def _moved(token, cut):
    """A token of a chain on its branch or on the trunk that begins after block `cut`."""
    start = next(place for place, letter in enumerate(token) if letter.isdigit())
    end = next((place for place in range(start, len(token)) if not token[place].isdigit()), len(token))
    number = int(token[start:end])
    where, number = (1, number) if number <= cut else (0, number - cut)
    return f"{where}:{token[:start]}{number}{token[end:]}"


@settings(max_examples=everyday(200), deadline=None, phases=PHASES)
@given(joins_of(4), extra)
def test_schedules_cost_what_the_table_says(join, more):
    table = _exact(join, more)
    timeline = simulate_join(join, table.schedule(table.mem))
    assert timeline.peak <= table.mem
    assert timeline.time == pytest.approx(_least_time(join) + table.curve[-1])
    assert simulate_join(join, table.schedule(table.least)).peak == table.least
    with pytest.raises(BudgetTooSmall, match=str(table.least)):
        table.schedule(table.least - 1)


@settings(max_examples=everyday(150), deadline=None, phases=PHASES)
@given(joins_of(5), st.floats(1.0, 2.5), st.integers(4, 60))
def test_a_rounded_table_keeps_its_promise(join, room, slots):
    mem = int(canonical.build(join, 64, 8).least * room) + 1
    table = canonical.build(join, mem, slots)
    timeline = simulate_join(join, table.schedule(mem))
    assert timeline.peak <= mem
    assert timeline.time <= _least_time(join) + table.curve[-1] + 1e-9


@settings(max_examples=everyday(40), deadline=None, phases=PHASES)
@given(few_blocks, few_blocks, st.none() | chains(1, options=1), st.integers(0, 10))
def test_no_faster_than_everything(left, right, trunk, more):
    join = Join(branches=(left, right), trunk=trunk)
    table = _exact(join, more)
    optimum = fastest(join, table.mem)
    assert optimum is not None
    assert optimum - 1e-9 <= _least_time(join) + table.curve[-1]
    timeline = simulate_join(join, solve(join, table.mem))
    assert optimum - 1e-9 <= timeline.time <= _least_time(join) + table.curve[-1] + 1e-9


@settings(max_examples=everyday(40), deadline=None, phases=PHASES)
@given(joins_of(3))
def test_the_least_budgets_work(join):
    minima = []
    for solver in (joins.best_linear, joins.best_canonical):
        with pytest.raises(BudgetTooSmall) as error:
            solver(join, -1)
        minima.append(error.value.minimum)
        assert solver(join, minima[-1]).peak <= minima[-1]
    timeline = simulate_join(join, solve(join, min(minima)))
    assert timeline.peak <= min(minima) <= canonical.build(join, 1, 1).least


@pytest.mark.parametrize("slots", range(7, 13))
def test_uniform_branches_take_no_longer_than_one_after_another(slots):
    """Values of one byte: as one chain the branches say too much, and the canonical form is never slower."""
    join = Join(branches=(_uniform(4), _uniform(4)))
    canonical_time = joins.best_canonical(join, slots + 3).time
    assert canonical_time <= joins.best_linear(join, slots + 3).time


def test_by_hand():
    """Both branches fit into memory saved only one at a time: the first one is run again after the loss."""
    join = Join(branches=(_uniform(1, saved=5), _uniform(1, saved=5)))
    assert simulate_join(join, solve(join, 16)).time == 4  # all of it is kept
    timeline = simulate_join(join, solve(join, 12))
    assert (timeline.time, timeline.peak) == (5, 10)
    assert str(timeline.schedule) in {
        f"{a}:Fck1 {b}:Fall1 Loss {b}:B1 {a}:Fall1 {a}:B1" for a, b in [(1, 2), (2, 1)]
    }


@pytest.mark.parametrize(("barred", "recomputed"), [(1, 1 + 100), (2, 1)])
def test_a_pass_that_does_not_fit_is_not_taken(barred, recomputed):
    """As in test_tables.py: block `barred` can only be run by an Fall; barring 2 leaves Fck1 Fall2 Drop(a1)."""

    def block(number, small):
        return Block(
            forward_time=1,
            backward_time=2,
            output_bytes=1,
            saved_bytes=6,
            grad_bytes=0,
            forward_scratch=15 if number == barred else 0,
            save_scratch=0,
            options=(Option(saved_bytes=small, backward_time=102, save_scratch=0),) if small else (),
        )

    chain = Chain(blocks=(block(1, 1), block(2, 0), block(3, 5)), input_bytes=0)
    timeline = joins.best_canonical(Join(branches=(chain,)), 12)
    assert timeline.peak <= 12
    assert timeline.time == chain.least_time + recomputed


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("1:Fall1 Loss", "op 2, Loss: branch 2 has not ended: neither a1 nor A1"),
        ("1:Fall1 2:Fall1 1:B1", "op 3, 1:B1: the gradient of a1 is not there"),
        ("1:Fall1 2:Fall1 Loss 1:B1", "before all backwards of branch 2"),
        ("1:Fall1 2:Fall1 Loss Loss", "the loss has run before"),
        ("3:Fall1", "there is no branch 3"),
        ("0:Fall1", "there is no trunk"),
        ("1:Fck2", "there is no block 2"),
        ("1:Drop(a1)", "a1 is not stored"),
        ("1:Fnone1 1:Fall1", "its input is not stored"),
        ("1:Fck1 2:Fall1 Loss 1:B1", "A1 is not stored"),
        ("1:Off(a0)", "do not move values"),
        ("1:Fall1[1]", "has options 0 to 0"),
    ],
)
def test_invalid_schedules(text, match):
    join = Join(branches=(_uniform(1), _uniform(1)))
    with pytest.raises(InvalidSchedule, match=match.replace("(", r"\(")):
        simulate_join(join, JoinSchedule.parse(text))


def test_a_trunk_is_the_turn():
    join = Join(branches=(_uniform(1), _uniform(1)), trunk=_uniform(1))
    with pytest.raises(InvalidSchedule, match="meet in the trunk"):
        simulate_join(join, JoinSchedule.parse("1:Fck1 2:Fck1 Loss"))
    timeline = simulate_join(join, JoinSchedule.parse("1:Fall1 2:Fall1 0:Fall1 0:B1 2:B1 1:B1"))
    assert On(0, timeline.schedule.ops[3].op) == timeline.schedule.ops[3]
    # a_0 twice, A_1 three times, the gradient of the loss, and both gradients that B1 of the trunk writes
    assert timeline.memory[3] == 2 + 6 + 1 + 2


def test_too_large():
    with pytest.raises(FxrematError, match="too large a table"):
        canonical.build(Join(branches=(_uniform(40),) * 4), 1000, 500)


def _exact(join, more):
    """The table for `more` bytes above the least budget, one slot a byte."""
    mem = max(1, canonical.build(join, 1, 1).least + more)
    return canonical.build(join, mem, mem)


def _least_time(join):
    return sum(chain.least_time for chain in (*join.branches, *([join.trunk] if join.trunk else [])))


def _uniform(n, saved=2):
    block = Block(forward_time=1.0, backward_time=1.0, output_bytes=1, saved_bytes=saved)
    return Chain(blocks=(block,) * n, input_bytes=1)
