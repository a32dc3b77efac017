"""The search op by op: its replay is exact liveness, it never makes a program worse, and it finds what it should."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fxremat
from fxremat.chains.schedule import Schedule
from fxremat.linearize.crossings import Crossing
from fxremat.linearize.lay_out import lay_out
from fxremat.search.candidate import Frontier
from fxremat.search.executions import Executions, keep_all_peak
from fxremat.search.improve import improve
from fxremat.search.lower_bound import lower_bound
from fxremat.search.refine import Ladder
from fxremat.search.replay import Tape, blank_pages, replay, spend
from fxremat.search.skeleton import Skeleton, Skeletons
from fxremat.search.survey import survey
from fxremat.settings import Search
from fxremat.step.costs import Costs
from fxremat.step.layout import Layout
from fxremat.step.liveness import Sizes, live_bytes
from fxremat.step.order import rematerialize
from fxremat.step.program import Order
from fxremat.step.step_graph import Origin, StepGraph
from tests.dags import few
from tests.draws import everyday
from tests.joints import graph_of, op
from tests.saved_steps import RANDOM, saved
from tests.test_planner import INPUTS, Deep


class Searched(NamedTuple):
    joint: StepGraph
    costs: Costs
    frontier: Frontier

    @property
    def skeletons(self) -> Skeletons:
        return Skeletons(self.joint, self.costs)


@cache
def searched(name: str, effort: float = 0.0, *, dropping: bool = False) -> Searched:
    """The frontier of a saved step after a search on all rungs; the caller drops all outputs, or holds them."""
    graph, costs = saved(name)
    if dropping:
        graph = replace(graph, dropped_outputs=graph.kept_outputs)
    given = survey(graph, costs, effort=effort)
    most = given.keep_all.peak
    return Searched(graph, costs, Ladder(given=given).to(most, costs, effort=effort).frontier(most))


STEPS = st.sampled_from([*RANDOM, "gpt", "unet", "shared_pair", "overwriting"])


@few(everyday(40))
@given(STEPS, st.integers(0, 2**32 - 1), st.booleans())
def test_a_replay_is_exact_liveness(name: str, seed: int, dropping: bool) -> None:
    """For the programs of schedules, and for any choice of recomputations."""
    joint, costs, frontier = found = searched(name, dropping=dropping)
    assert keep_all_peak(joint, costs) == Executions(joint, costs).judge(frontier.keep_all.order())[0]
    rng = np.random.default_rng(seed)
    for candidate in (frontier.candidates[0], frontier.candidates[-1]):
        program = candidate.program()
        exact = (live_bytes(program, costs.sizes).peak, costs.time(program))
        assert (candidate.peak, candidate.time) == exact == Executions(joint, costs).judge(candidate.order())
        skeleton = found.skeletons.around(candidate.order())
        assert skeleton.judge(skeleton.choice)[0] <= candidate.peak
        assert skeleton.judge(skeleton.choice)[1] <= candidate.time * (1 + 1e-9), "less what nothing reads"
        for choice in (skeleton.choice, *(_some(skeleton, rng, share) for share in (0.2, 0.7, 1.0))):
            program = skeleton.order(choice).program()
            peak, time = live_bytes(program, costs.sizes).peak, costs.time(program)
            assert skeleton.judge(choice) == (peak, pytest.approx(time))


def test_towers_whose_shared_gradients_wait_too_long_are_planned_otherwise() -> None:
    """Backward ops of one tower wait for the other's gradients here, until the values that they read are gone."""
    found = searched("waiting_towers")
    assert found.frontier.minimum < found.frontier.keep_all.peak


def test_copies_of_what_the_forward_overwrites_count_where_the_backward_reads_them() -> None:
    _, costs, frontier = searched("overwriting", effort=1)
    programs = [candidate.program() for candidate in frontier.candidates]
    peaks = [live_bytes(program, costs.sizes).peak for program in programs]
    assert [candidate.peak for candidate in frontier.candidates] == peaks
    copied = [bool(program.preserved) for program in programs]
    assert any(copied)
    assert not all(copied)


def test_outputs_that_are_dropped_are_there_while_the_loss_runs() -> None:
    origins = [Origin.PRIMAL, Origin.FORWARD, Origin.FORWARD, Origin.TANGENT, Origin.BACKWARD]
    ops = [op([0], [1]), op([0], [2]), op([3, 2], [4], backward=True)]
    both = frozenset({1, 2})
    joint = graph_of(origins, ops, kept_outputs=both, dropped_outputs=both, returned=frozenset({4}))
    sizes = Sizes(values=(0, 50, 20, 5, 1), workspace=(0, 0, 0), outside=30)
    costs = Costs(seconds=(1.0, 1.0, 1.0), sizes=sizes)
    order = Order(Layout(graph=joint, blocks=(), held=frozenset()), (0, 1, 2), (0, 0, 0), 2)
    assert keep_all_peak(joint, costs) == 50 + 20 + 30 == Executions(joint, costs).judge(order)[0]


def _some(skeleton: Skeleton, rng: np.random.Generator, share: float) -> np.ndarray:
    taken = rng.random(skeleton.choice.size) < share
    return np.where(skeleton.tape.optional == 1, taken, 1).astype(np.uint8)


@few(everyday(40))
@given(STEPS, st.integers(0, 100))
def test_a_search_makes_no_program_worse(name: str, share: int) -> None:
    found = searched(name)
    frontier = found.frontier
    least, most = frontier.minimum, frontier.keep_all.peak
    budget = least + share * (most - least) // 100
    start = frontier.within(budget)
    skeleton = found.skeletons.around(start.order())
    choice = skeleton.choice.copy()
    peak, time = improve(skeleton.tape, choice, budget, 3_000, 1)
    assert (peak, pytest.approx(time)) == skeleton.judge(choice), (
        "pages that were not replayed did not change"
    )
    assert peak <= budget
    assert time <= start.time + 1e-9


@few(everyday(40))
@given(STEPS)
def test_what_does_not_fit_is_made_smaller(name: str) -> None:
    found = searched(name)
    frontier = found.frontier
    skeleton = found.skeletons.around(frontier.keep_all.order())
    choice = skeleton.choice.copy()
    peak, _ = improve(skeleton.tape, choice, frontier.minimum, 3_000, 1)
    assert peak <= frontier.keep_all.peak


def test_leaving_out_recomputations_exceeds_a_budget_by_no_more_than_before() -> None:
    """Each one counts, where a choice does not fit on some of many pages; kept pages are those of what is left."""
    joint, costs = saved("deeper")
    frontier = survey(joint, costs, effort=0)
    skeleton = Skeletons(joint, costs).around(frontier.candidates[-1].order())
    assert blank_pages(skeleton.tape).peaks.size > 5
    for seed in range(40):
        rng = np.random.default_rng(seed)
        choice, budget = _some(skeleton, rng, 0.7), int(frontier.minimum * rng.uniform(0.3, 1.2))
        pages, spare = blank_pages(skeleton.tape), blank_pages(skeleton.tape)
        _, before = replay(skeleton.tape, choice, pages, budget)
        for place in rng.permutation(np.flatnonzero(skeleton.tape.optional)):
            exceeded = pages.excess.sum()
            spend(skeleton.tape, choice, pages, spare, np.array([place]), budget)
            assert pages.excess.sum() <= exceeded
        _, after = replay(skeleton.tape, choice, spare, budget)
        assert after <= before + 1e-9
        assert (spare.excess == pages.excess).all()
        assert (spare.times == pages.times).all()


def test_what_nothing_reads_takes_memory_while_it_is_made() -> None:
    """A generator's state is the exception: it is saved only for a second draw."""
    none, one = np.zeros(2, np.int64), np.array([0, 1], np.int64)
    for seeds, peak in ((1, 5), (0, 0)):
        tape = Tape(
            optional=np.zeros(1, np.uint8),
            read_from=none,
            reads=np.zeros(0, np.int64),
            write_from=one,
            writes=np.zeros(1, np.int64),
            sizes=np.array([5]),
            extra=np.zeros(1, np.int64),
            seconds=np.ones(1),
            seeds=seeds,
        )
        assert replay(tape, np.ones(1, np.uint8), blank_pages(tape), 0) == (peak, 1.0)


def test_room_that_a_schedule_of_blocks_leaves_is_spent() -> None:
    """Keeping one value of twelve more than a schedule does saves its recomputation."""
    joint, costs = saved("deep")
    blocks = survey(joint, costs, effort=0)
    small = blocks.candidates[-1]
    skeleton = Skeletons(joint, costs).around(small.order())
    choice = skeleton.choice.copy()
    peak, time = improve(skeleton.tape, choice, blocks.keep_all.peak, 3_000, 0)
    assert time == pytest.approx(blocks.keep_all.time), "with all the memory nothing is recomputed"
    assert small.peak < peak <= blocks.keep_all.peak


def test_refined_frontiers_are_no_worse_anywhere_and_the_same_each_time() -> None:
    plain, better, again = searched("deep"), searched("deep", effort=2), searched.__wrapped__("deep", effort=2)
    for candidate in plain.frontier.candidates:
        assert better.frontier.within(candidate.peak).time <= candidate.time + 1e-12
    assert curve(better.frontier) == curve(again.frontier)
    for candidate in better.frontier.candidates:
        program = candidate.program()
        assert live_bytes(program, better.costs.sizes).peak == candidate.peak
        assert better.costs.time(program) == candidate.time


def curve(frontier: Frontier) -> list[tuple[int, float]]:
    return [(candidate.peak, candidate.time) for candidate in frontier.candidates]


@few(everyday(20))
@given(STEPS, st.lists(st.integers(0, 100), min_size=1, max_size=4))
def test_more_memory_is_never_slower_whatever_was_asked_for_before(name: str, shares: list[int]) -> None:
    """The search up to a budget finds the same as the search of everything does for budgets up to there."""
    found = searched(name)
    nothing = Ladder(given=survey(found.joint, found.costs, effort=0.2))
    least, most = nothing.given.minimum, nothing.given.keep_all.peak
    everything = nothing.to(most, found.costs, effort=0.2)
    asked, times = nothing, {}
    for budget in (least + share * (most - least) // 100 for share in shares):
        asked = asked.to(budget, found.costs, effort=0.2)
        alone = nothing.to(budget, found.costs, effort=0.2)
        wanted = curve(everything.frontier(budget))
        assert curve(asked.frontier(budget)) == curve(alone.frontier(budget)) == wanted
        chosen = asked.frontier(budget).within(budget)
        assert live_bytes(chosen.program(), found.costs.sizes).peak == chosen.peak
        times[budget] = chosen.time
    slowest_first = [times[budget] for budget in sorted(times)]
    assert slowest_first == sorted(slowest_first, reverse=True)


@few(everyday(5))
@given(STEPS)
def test_the_peak_of_a_plan_on_offer_is_a_budget_for_it(name: str) -> None:
    found = searched(name)
    nothing = Ladder(given=survey(found.joint, found.costs, effort=0.2))
    everything = nothing.to(nothing.given.keep_all.peak, found.costs, effort=0.2)
    for candidate in everything.frontier(nothing.given.keep_all.peak).candidates:
        alone = nothing.to(candidate.peak, found.costs, effort=0.2).frontier(candidate.peak)
        assert alone.within(candidate.peak).time <= candidate.time


def test_rungs_go_from_the_least_to_the_most_in_small_steps() -> None:
    frontier = searched("deep").frontier
    rungs = Ladder(given=frontier).rungs
    assert (rungs[0], rungs[-1]) == (frontier.minimum, frontier.keep_all.peak)
    assert all(1 < more / less < 1.03 for less, more in itertools.pairwise(rungs))
    alone = replace(frontier, candidates=(frontier.keep_all,))
    assert Ladder(given=alone).rungs == [frontier.keep_all.peak]


def test_an_order_that_reads_what_is_not_there_is_refused() -> None:
    joint, _ = saved("deep")
    layout = lay_out(joint, [])
    program = rematerialize(layout, Schedule.parse("Fall1 B1"))
    ops = [step.op for step in program.steps]
    order = Order(layout=layout, ops=tuple(ops), blocks=(0,) * len(ops), split=program.split)
    assert [step.op for step in order.program().steps] == ops
    ops[0], ops[1] = ops[1], ops[0]
    with pytest.raises(fxremat.InvalidSchedule, match="runs before"):
        Order(layout=layout, ops=tuple(ops), blocks=(0,) * len(ops), split=program.split).program()


def test_low_points_are_where_fewer_bytes_cross_than_around_them() -> None:
    """Values 0 and 3 are large; of two neighbours that cost the same, the one is taken that the backward reads."""
    sizes = [9, 1, 1, 9, 2]
    at = [{0}, {0, 1}, {1}, {2}, {3}, {2, 4}, {3, 4}, set[int]()]
    crossing = Crossing(tuple(frozenset(values) for values in at), worth_keeping=frozenset({2, 3}))
    assert crossing.low_points(sizes) == (0, 3, 5)
    falling = Crossing((frozenset({0}), frozenset({4}), frozenset({1}), frozenset()), worth_keeping=frozenset())
    assert falling.low_points(sizes) == (2,)  # more cross position 1 than position 2


def test_a_plan_says_that_it_was_refined() -> None:
    plan = fxremat.plan(Deep(), INPUTS, mem="50%", costs="estimate")
    coarse = fxremat.plan(Deep(), INPUTS, mem="50%", search=Search(seconds=0), costs="estimate")
    assert plan.predicted_time <= coarse.predicted_time
    assert not coarse.chosen.refined


@few(everyday(25))
@given(STEPS)
def test_nothing_beats_the_lower_bound(name: str) -> None:
    """Neither a schedule, nor what the search makes of it; and where nothing fits, the bound says at most so."""
    joint, costs, frontier = searched(name, effort=0.5)
    once = sum(costs.seconds)
    for candidate in frontier.candidates[:: 1 + len(frontier.candidates) // 4]:
        if candidate.join:  # its backward has another order
            assert once <= candidate.time * (1 + 1e-6)
            continue
        bound = lower_bound(joint, costs, candidate.peak)
        assert once * (1 - 1e-6) <= bound <= candidate.time * (1 + 1e-6)


def test_the_lower_bound_of_a_deep_chain_is_near_what_the_search_finds() -> None:
    """Twelve equal layers: half of the memory costs some recomputation, and the bound knows most of it."""
    joint, costs, frontier = searched("deep", effort=1)
    once = frontier.keep_all.time
    budget = frontier.keep_all.peak // 2
    found, bound = frontier.within(budget).time, lower_bound(joint, costs, budget)
    assert once < bound <= found <= 1.1 * bound
    assert lower_bound(joint, costs, frontier.keep_all.peak) == pytest.approx(once)
    assert lower_bound(joint, costs, 100) == float("inf"), "not even the relaxation fits"
