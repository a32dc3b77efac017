"""Binomial checkpointing: the recursion, counts of an independent package, and schedules that take them."""

import checkpoint_schedules
import pytest
from hypothesis import Phase, given, settings

from fxremat.chains.chain import Block, Chain
from fxremat.chains.schedule import Forward, Keep, Schedule
from fxremat.chains.simulate import simulate
from fxremat.errors import FxrematError
from fxremat.solvers import binomial, exact
from tests.draws import everyday
from tests.solvers.chains import chains

PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
LENGTHS, SLOTS = range(25), range(3, 12)


def test_closed_form_is_the_recursion():
    forwards = {(0, m): 0 for m in range(2, 30)}
    for length in range(1, 40):
        forwards[length, 3] = length * (length + 1) // 2
        for m in range(4, 30):
            forwards[length, m] = min(
                i + forwards[length - i, m - 1] + forwards[i - 1, m] for i in range(1, length + 1)
            )
    assert all(binomial.count(*key) == value for key, value in forwards.items())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("slots", SLOTS)
def test_counts_of_checkpoint_schedules(length, slots):
    """Their n steps are our l + 1 backwards, their snapshots all slots but the running value and the gradient;
    they run each step once more right before its reversal, as Fall does.
    """
    theirs = checkpoint_schedules.Revolve(length + 1, slots - 2)
    forwards = 0
    for action in theirs:
        if isinstance(action, checkpoint_schedules.Forward):
            forwards += action.n1 - action.n0
        if theirs.is_exhausted:
            break
    assert forwards == binomial.count(length, slots) + length + 1
    assert forwards == sum(
        isinstance(op, Forward) for op in binomial.schedule(_uniform(length + 1), slots).ops
    )


@pytest.mark.parametrize("slots", SLOTS)
def test_slots_are_what_a_schedule_takes(slots):
    """Of the two beyond, one is A_l beside a_{l-1} and the other the gradient that B_l writes."""
    chain = _uniform(20)
    assert simulate(chain, binomial.schedule(chain, slots)).peak == slots + 2
    passes = sum(
        isinstance(op, Forward) and op.keep is not Keep.ALL for op in binomial.schedule(chain, slots).ops
    )
    assert passes == binomial.count(19, slots)


def test_by_hand():
    assert binomial.schedule(_uniform(3), 3) == Schedule.parse("Fck1 Fnone2 Fall3 B3 Fck1 Fall2 B2 Fall1 B1")
    assert binomial.schedule(_uniform(3), 4) == Schedule.parse("Fck1 Fck2 Fall3 B3 Fall2 B2 Fall1 B1")


def test_candidates():
    assert len(binomial.schedules(_uniform(1))) == 1
    assert len(set(map(str, binomial.schedules(_uniform(30))))) == 29
    assert 20 < len(binomial.schedules(_uniform(300))) <= 40


@settings(max_examples=everyday(30), deadline=None, phases=PHASES)
@given(chains(6))
def test_any_chain(chain):
    for timeline in (simulate(chain, schedule) for schedule in binomial.schedules(chain)):
        optimum = simulate(chain, exact.schedules(chain, timeline.peak)[0]).time
        assert optimum <= timeline.time + 1e-9


def test_too_few_slots():
    with pytest.raises(
        FxrematError, match="2 slots are too few for an adjoint chain of length 5; it takes 3"
    ):
        binomial.count(5, 2)


def _uniform(n):
    block = Block(forward_time=1.0, backward_time=2.0, output_bytes=1, saved_bytes=1)
    return Chain(blocks=(block,) * n, input_bytes=1)
