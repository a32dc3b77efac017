"""The lower bound is one, and where it is known how far it is from the truth it is near."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.chains.chain import Block, Chain
from fxremat.chains.platform import Platform
from fxremat.solvers import lower_bound
from tests.dags import few
from tests.draws import everyday
from tests.solvers.chains import chains
from tests.solvers.oracle import fastest


@few(everyday(150))
@given(chains(4, options=1), st.integers(0, 60), st.integers(1, 6))
def test_nothing_beats_the_bound(chain, mem, instants):
    bound = lower_bound(chain, mem, instants=instants)
    optimum = fastest(chain, mem)
    if optimum is not None:
        assert chain.least_time <= bound <= optimum + 1e-9
    assert lower_bound(chain, mem + 3, instants=instants) <= bound + 1e-6


def uniform(length: int) -> Chain:
    block = Block(forward_time=1.0, backward_time=2.0, output_bytes=1, saved_bytes=10)
    return Chain(blocks=(block,) * length, input_bytes=1)


def test_half_the_memory_runs_half_the_forwards_again():
    # of 20 saved sets of 10 bytes, 100 - a_0 - d_20 - d_19 leave room for 9.7, the others run again
    assert lower_bound(uniform(20), 100) == pytest.approx(60 + 20 - 9.7, rel=0.01)


def test_no_bound_is_tight_where_everything_fits():
    assert lower_bound(uniform(20), 1000) == uniform(20).least_time


def test_the_impossible_has_no_finite_bound():
    assert lower_bound(uniform(20), 10) == float("inf")


def test_a_link_can_carry_what_is_not_run_again():
    slow, fast = (Platform(to_host=speed, from_host=speed) for speed in (1e-3, 1e3))
    alone = lower_bound(uniform(20), 100)
    assert lower_bound(uniform(20), 100, fast) == uniform(20).least_time
    assert lower_bound(uniform(20), 100, slow) == pytest.approx(alone, rel=0.02)
    # 20 * 10 bytes less the 98 that fit go out and come back at 2 bytes a second: 102 s instead of 80 s
    crossing = Platform(to_host=2.0, from_host=2.0)
    assert uniform(20).least_time < lower_bound(uniform(20), 100, crossing) < alone
