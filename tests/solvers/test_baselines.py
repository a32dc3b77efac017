"""keep_all, periodic, and the front: schedules by hand, and bad arguments refused."""

import pytest
from hypothesis import given, settings

from fxremat.chains.chain import Block, Chain
from fxremat.chains.schedule import Schedule
from fxremat.chains.simulate import simulate
from fxremat.errors import BudgetTooSmall, FxrematError, InvalidBudget
from fxremat.solvers import best, keep_all, solve
from fxremat.solvers.periodic import periodic, schedules
from tests.draws import everyday
from tests.solvers.chains import chains

BLOCK = Block(forward_time=1.0, backward_time=2.0, output_bytes=1, saved_bytes=3)


def chain(n):
    return Chain(blocks=(BLOCK,) * n, input_bytes=1)


def test_keep_all():
    assert solve(chain(3), 100, solver="keep_all") == Schedule.parse("Fall1 Fall2 Fall3 B3 B2 B1")


@pytest.mark.parametrize(
    ("n", "k", "text"),
    [
        (4, 2, "Fck1 Fnone2 Fall3 Fall4 B4 B3 Fall1 Fall2 B2 B1"),
        (5, 2, "Fck1 Fnone2 Fall3 Fall4 Fall5 B5 B4 B3 Fall1 Fall2 B2 B1"),
        (3, 3, "Fck1 Fck2 Fall3 B3 Fall2 B2 Fall1 B1"),
        (2, 1, "Fall1 Fall2 B2 B1"),
    ],
)
def test_periodic(n, k, text):
    assert periodic(chain(n), k) == Schedule.parse(text)


def test_periodic_tries_ten_numbers_of_segments():
    assert len(schedules(chain(100))) == 10
    assert len(schedules(chain(1))) == 1


@settings(max_examples=everyday(10), deadline=None)
@given(chains(6))
def test_the_default_is_no_worse_than_the_baselines(chain):
    for baseline in [*keep_all.schedules(chain), *schedules(chain)]:
        timeline = simulate(chain, baseline)
        if timeline.peak:
            assert best(chain, timeline.peak, slots=1000).time <= timeline.time + 1e-9


@pytest.mark.parametrize("solver", ["keep_all", "periodic"])
def test_the_least_budget_of_a_baseline(solver):
    with pytest.raises(BudgetTooSmall) as error:
        solve(chain(9), 3, solver=solver)
    assert best(chain(9), error.value.minimum, solver=solver).peak == error.value.minimum


@pytest.mark.parametrize("mem", [1.5, "4GiB", None, True, -1])
def test_solvers_take_bytes(mem):
    with pytest.raises(InvalidBudget, match="whole number of bytes"):
        solve(chain(2), mem)


@pytest.mark.parametrize("bad", [{"solver": "magic"}, {"slots": 0}, {"slots": 2.5}, {"slots": True}])
def test_bad_arguments(bad):
    with pytest.raises(FxrematError, match=r"there are auto|whole number from 1"):
        solve(chain(2), 50, **bad)
