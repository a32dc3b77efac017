"""Uniform joins: stated optima, and schedules judged by a machine that counts slots."""

import json
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fxremat.chains.join_schedule import JoinSchedule, Loss, On
from fxremat.chains.schedule import Backward, Forward, Keep
from fxremat.errors import BudgetTooSmall, FxrematError, InvalidSchedule
from fxremat.solvers import binomial
from fxremat.solvers.references import joins
from tests.draws import everyday

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "joins.json").read_text())
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
instances = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 1)), min_size=1, max_size=3)


def run(schedule, lengths, keep_gradient, *, forward=1.0, backward=1.0, loss=1.0):
    """Time and most slots of a schedule in the uniform model; an AssertionError where it is not valid.

    A forward needs its input and puts its output in place of it, or beside it (Fck); the loss and the backwards
    put gradients in place of what they read; a gradient that need not be kept goes when it is all that is left.
    """
    stored = {(k, "a", 0) for k, _ in enumerate(lengths, start=1)}
    time, most = 0.0, len(stored)

    def leave_behind(k):
        if not keep_gradient[k - 1]:
            stored.discard((k, "d", 0))

    for token in schedule.ops:
        match token:
            case Loss():
                ends = {(k, "a", length) for k, length in enumerate(lengths, start=1)}
                assert ends <= stored
                stored = stored - ends | {(k, "d", length) for k, _, length in ends}
                time += loss
                for k, length in enumerate(lengths, start=1):
                    if length == 0:
                        leave_behind(k)
            case On(k, Forward(block, keep)):
                assert (k, "a", block - 1) in stored
                assert 1 <= block <= lengths[k - 1]
                if keep is Keep.NONE:
                    stored.remove((k, "a", block - 1))
                stored.add((k, "a", block))
                time += forward
            case On(k, Backward(block)):
                assert {(k, "a", block - 1), (k, "d", block)} <= stored
                stored = stored - {(k, "a", block - 1), (k, "d", block)} | {(k, "d", block - 1)}
                time += backward
        most = max(most, len(stored))
        match token:
            case On(k, Backward(1)):
                leave_behind(k)
    assert stored == {(k, "d", 0) for k, kept in enumerate(keep_gradient, start=1) if kept}
    return time, most


@pytest.mark.parametrize("case", VECTORS, ids=range(len(VECTORS)))
def test_stated_optima(case):
    lengths, kept = case["lengths"], case["keep_gradient"]
    if case["optimum"] is None:
        with pytest.raises(BudgetTooSmall, match="slots") as error:
            joins.multi_chain(lengths, case["slots"], kept)
        minimum = error.value.minimum
        assert case["slots"] < minimum == joins.least_slots(lengths, kept)
        assert run(joins.multi_chain(lengths, minimum, kept)[1], lengths, kept)[1] == minimum
    else:
        makespan, schedule = joins.multi_chain(lengths, case["slots"], kept)
        assert makespan == case["optimum"]
        time, slots = run(schedule, lengths, kept)
        assert time == makespan
        assert slots <= case["slots"]


def test_the_toy_example():
    makespan, schedule = joins.multi_chain((4, 10, 12), 9)
    assert makespan == 74
    assert run(schedule, (4, 10, 12), (0, 0, 0)) == (74, 9)


@pytest.mark.parametrize(("first", "makespan"), [(7, 74), (8, 74), (9, 75)])
def test_first_decisions_of_the_toy_example(first, makespan):
    """The thesis prints branch 3, 9 forwards, which its own formula prices at 75; 7 and 8 are optimal."""
    rest = joins.multi_chain((4, 10, 12 - first), 8, (0, 0, 1))[0]
    assert first + rest + binomial.count(first - 1, 9) + first == makespan


@settings(max_examples=everyday(150), deadline=None, phases=PHASES)
@given(instances, st.integers(0, 8), st.tuples(*[st.sampled_from([0.5, 1.0, 3.0])] * 3))
def test_schedules_take_what_the_table_says(instance, more, costs):
    lengths, kept = zip(*instance)
    least = joins.least_slots(lengths, kept)
    forward, backward, loss = costs
    times = {"forward_time": forward, "backward_time": backward, "loss_time": loss}
    makespan, schedule = joins.multi_chain(lengths, least + more, kept, **times)
    time, slots = run(schedule, lengths, kept, forward=forward, backward=backward, loss=loss)
    assert time == pytest.approx(makespan)
    assert slots <= least + more
    assert JoinSchedule.parse(str(schedule)) == schedule
    assert joins.multi_chain(lengths, least + more + 1, kept, **times)[0] <= makespan
    with pytest.raises(BudgetTooSmall):
        joins.multi_chain(lengths, least - 1, kept, **times)


@settings(max_examples=everyday(100), deadline=None, phases=PHASES)
@given(instances, st.integers(0, 8))
def test_branch_by_branch_is_no_faster(instance, more):
    lengths, kept = zip(*instance)
    slots = joins.least_slots(lengths, kept) + more
    assert joins.branch_by_branch(lengths, slots, kept) >= joins.multi_chain(lengths, slots, kept)[0]


@settings(max_examples=everyday(60), deadline=None, phases=PHASES)
@given(st.integers(1, 3), st.integers(0, 8), st.integers(3, 9))
def test_one_chain_of_groups_is_no_faster(branches, length, room):
    slots = room * branches
    equiv = joins.equiv_chain(branches, length, slots)
    assert equiv >= joins.multi_chain((length,) * branches, slots, (1,) * branches)[0]
    if branches == 1:
        assert equiv == joins.multi_chain((length,), slots)[0]


@pytest.mark.parametrize("length", [5, 10])
@pytest.mark.parametrize("shape", [(1, 5), (2, 2, 2), (6,)], ids=["CM", "SNN", "RNN"])
def test_figure_1_8_of_the_thesis(shape, length):
    lengths = [length * part for part in shape]
    x, y = joins.trade_off(lengths)
    assert (x[-1], y[-1]) == (1, 1)
    assert y == sorted(y, reverse=True)
    assert y[-2] > 1
    halved = y[min(range(len(x)), key=lambda i: abs(x[i] - 0.5))]
    assert 1.24 <= halved <= 1.29  # "approximately 25 %"


def test_branches_in_another_order_take_as_long():
    assert joins.multi_chain((3, 7, 5), 9, (1, 0, 0))[0] == joins.multi_chain((5, 3, 7), 9, (0, 1, 0))[0]


def test_refused():
    with pytest.raises(FxrematError, match="keep_gradient has 1 entries for 2 branches"):
        joins.multi_chain((1, 2), 9, (1,))
    with pytest.raises(FxrematError, match="0 or more blocks"):
        joins.multi_chain((-1, 2), 9)
    with pytest.raises(FxrematError, match="practical"):
        joins.multi_chain((200, 200, 200), 400)
    with pytest.raises(BudgetTooSmall, match="in 8 slots; the least that does is 9 slots"):
        joins.equiv_chain(3, 5, 8)


@pytest.mark.parametrize("text", ["Loss 1:B", "B3", "1:", ":Fck1", "01:Fck1", "1:Fck1:B2", "loss"])
def test_tokens_that_are_none(text):
    with pytest.raises(InvalidSchedule, match=r"place|token"):
        JoinSchedule.parse(text)
