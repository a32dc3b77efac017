"""The programs of one graph of several, and what they need if gradients are added to sums as they are computed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.search.call_programs import FEW, AtOtherSizes, CallProgram, call_programs, judged
from fxremat.search.survey import survey
from fxremat.step.costs import Link
from fxremat.step.liveness import live_bytes
from fxremat.step.program import Order
from fxremat.step.step_graph import Origin
from fxremat.transfers.copies import durations, need_of, time_copies
from tests.dags import few
from tests.saved_steps import Saved, saved

NAMES = ("random_0", "random_3", "random_7", "shared_pair", "four_layers")


@cache
def programs_of(name: str) -> Sequence[CallProgram]:
    step = saved(name)
    return call_programs(step.graph, step.costs, effort=0.0)


def judged_without(program: CallProgram, step: Saved, gradients: frozenset[int]) -> CallProgram:
    """Judge the program in a step that does not return these gradients, so that each is freed after its last use."""
    graph = replace(step.graph, returned=step.graph.returned - gradients)
    order = replace(program.order, layout=replace(program.order.layout, graph=graph))
    return judged(order, step.costs)


@few(20)
@given(st.sampled_from(NAMES), st.integers(0, 1000))
def test_gradients_that_are_added_take_memory_as_if_they_were_not_returned(name: str, seed: int) -> None:
    step = saved(name)
    made = sorted(v for v in step.graph.returned if step.graph.values[v].origin is Origin.BACKWARD)
    draw = random.Random(seed)
    added = frozenset(draw.sample(made, draw.randint(0, len(made))))
    for program in programs_of(name):
        assert program.backward_adding(added) == judged_without(program, step, added).backward


@few(20)
@given(st.sampled_from(NAMES), st.integers(0, 1000))
def test_inputs_from_the_host_take_memory_while_something_will_read_them(name: str, seed: int) -> None:
    step, draw = saved(name), random.Random(seed)
    given_values = sorted(step.graph.given)
    fetched = {value: draw.randint(1, 10**6) for value in draw.sample(given_values, draw.randint(0, len(given_values)))}
    for known in programs_of(name):
        program = judged(known.order, step.costs, fetched=fetched)
        steps = known.program.steps
        reads = [{known.program.version_of[version] for version in each.reads} for each in steps]
        memory = live_bytes(known.program, replace(step.costs.sizes, outside=0, root=0))
        split = known.program.split
        held = [
            sum(size for value, size in fetched.items() if any(value in later for later in reads[place:]))
            for place in range(len(steps))
        ]
        during = [bytes_of + more for bytes_of, more in zip(memory.during, held, strict=True)]
        assert program.forward == max(during[:split], default=0)
        assert program.backward == max(0, max(during[split:], default=0) - memory.at_split)
        assert (program.saved, program.time, program.inputs) == (known.saved, known.time, known.inputs)


@pytest.mark.parametrize("name", NAMES)
def test_adding_gradients_never_needs_more(name: str) -> None:
    programs, returned = programs_of(name), saved(name).graph.returned
    assert all(program.backward_adding(returned) <= program.backward for program in programs)
    assert all(program.backward_adding(frozenset()) == program.backward for program in programs)


@pytest.mark.parametrize("name", ["random_0", "encoder_decoder"])
def test_ways_to_cut_that_do_not_pay_beside_no_loss_do_not_pay_beside_one(name: str) -> None:
    step = saved(name)
    assert len(step.graph.ops) > FEW
    alone = survey(step.graph, step.costs, effort=0.0)
    sizes = replace(step.costs.sizes, outside=alone.keep_all.peak // 2, root=0)
    beside = replace(step.costs, sizes=sizes)
    few_ways, all_ways = (survey(step.graph, beside, effort=0.0, known=known) for known in (alone, None))
    assert few_ways.keep_all.peak == all_ways.keep_all.peak
    assert few_ways.minimum <= 1.02 * all_ways.minimum
    for candidate in all_ways.candidates:
        fits = [each.time for each in few_ways.candidates if each.peak <= 1.02 * candidate.peak]
        assert min(fits) <= 1.02 * candidate.time


def test_programs_at_other_sizes_are_judged_when_they_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    step, known = saved("random_0"), programs_of("random_0")
    values = tuple(2 * size for size in step.costs.sizes.values)
    costs = replace(step.costs, sizes=replace(step.costs.sizes, values=values))
    asked = list[str]()

    def judging(order: Order, *arguments: Any, **named: Any) -> CallProgram:
        asked.append("once")
        return judged(order, *arguments, **named)

    monkeypatch.setattr("fxremat.search.call_programs.judged", judging)
    at = AtOtherSizes(known, costs)
    assert len(at) == len(known)
    assert asked == []
    for _ in range(2):
        assert at[-1].forward > known[-1].forward
        assert at[-1].order.ops == known[-1].order.ops
    assert len(asked) == 1
    assert list(at) == at[:]
    assert len(asked) == len(known)


def test_copies_leave_a_program_without_a_backward_in_the_forward() -> None:
    step, costs = saved("random_0"), saved("random_0").costs
    whole = programs_of("random_0")[0].program
    forward = replace(whole, steps=whole.steps[: whole.split])
    memory = live_bytes(forward, costs.sizes)
    link = Link(to_host=1e9, from_host=1e9)
    need, seconds = need_of(forward, memory), durations(forward, costs)
    found = time_copies(forward, [], [], need, seconds, link, memory.peak).performed(costs).program
    assert found.split == len(found.steps) == len(forward.steps)
    assert step.graph.forward_count <= found.split
