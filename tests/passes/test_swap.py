"""Transfers in a program: in order, inside the budget at every step, on time by hand, and emitted as planned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxremat.chains.schedule import Schedule
from fxremat.errors import InvalidSchedule
from fxremat.linearize.lay_out import lay_out
from fxremat.passes.lower import lower
from fxremat.search.candidate import Frontier
from fxremat.search.survey import survey
from fxremat.step.costs import Costs, Link
from fxremat.step.layout import Layout
from fxremat.step.liveness import Sizes, live_bytes
from fxremat.step.order import rematerialize
from fxremat.step.program import Program, Role, Transfer
from fxremat.step.transferred import ProgramWithTransfers
from fxremat.transfers.activations import cap, most_on_host, swap, trips, trips_of
from fxremat.transfers.copies import need_of
from tests.dags import Dag, Recipe, batch, capture, estimated, few, recipes
from tests.draws import everyday
from tests.passes.test_program import graph_memory, saved_bytes, tangent_bytes
from tests.saved_steps import VARIED, saved, surveyed
from tests.toys import FourLayers

pytestmark = pytest.mark.usefixtures("torch_ready")
KEEP = "Fall1 Fall2 Fall3 Fall4 Fall5 B5 B4 B3 B2 B1"


def chain_layout(rows: int = 4) -> Layout:
    joint = saved("four_layers" if rows == 4 else "four_layers_64").graph
    return lay_out(joint, [op.index for op in joint.forward_ops if op.name.startswith("tanh")])


def by_hand(layout: Layout) -> Costs:
    """A second an op, the graph's own bytes, no workspace."""
    joint = layout.graph
    sizes = Sizes(values=[v.bytes for v in joint.values], workspace=[0] * len(joint.ops))
    return Costs((1.0,) * len(joint.ops), sizes)


def names(program: Program) -> list[str]:
    values, found = program.layout.graph.values, []
    for step in program.steps:
        if isinstance(step, Transfer):
            (version,) = (*step.reads, *step.writes)
            found.append(f"{step.role.value} {values[program.version_of[version]].name}")
        else:
            found.append(program.layout.graph.ops[step.op].name)
    return found


def test_a_program_may_send_away_what_its_backward_reads() -> None:
    layout = chain_layout()
    program, costs = rematerialize(layout, Schedule.parse(KEEP)), by_hand(layout)
    found = trips(program, costs)
    values = layout.graph.values
    assert [values[program.version_of[trip.version]].name for trip in found] == [
        "tanh",
        "tanh_1",
        "tanh_2",
        "tanh_3",
    ]
    first = found[0]
    steps = names(program)
    assert (steps[first.made], steps[first.leaves]) == ("tanh", "addmm_1")
    assert "tanh" in {values[program.version_of[v]].name for v in program.steps[first.returns].reads}
    assert first.returns >= program.split
    assert trips(program, costs, least=129) == []


def test_the_clock_by_hand() -> None:
    """tanh (128 bytes) leaves at 2 s; at 64 bytes/s it is out at 4 s, beside addmm_1 and tanh_1, and back in time."""
    layout = chain_layout()
    program, costs = rematerialize(layout, Schedule.parse(KEEP)), by_hand(layout)
    link = Link(to_host=64.0, from_host=64.0, slowdown=0.0)
    first = trips(program, costs)[:1]
    swapped = swap(program, first, costs, link, limit=1 << 20)
    steps = names(swapped.program)
    assert steps[:6] == ["addmm", "tanh", "offload tanh", "addmm_1", "tanh_1", "release tanh"]
    assert swapped.time == len(program.steps)
    assert (swapped.bytes, swapped.copying, swapped.waiting) == (128, (2.0, 2.0), 0.0)
    assert swapped.hidden == (1.0, 1.0)
    reader = steps.index("wait tanh") + 1
    assert steps.index("prefetch tanh") == swapped.program.split
    assert swapped.program.steps[reader].reads != program.steps[first[0].returns].reads


def test_a_slow_link_makes_ops_wait_where_memory_is_short_and_only_there() -> None:
    layout = chain_layout(rows=64)
    program, costs = rematerialize(layout, Schedule.parse(KEEP)), by_hand(layout)
    slow = Link(to_host=20.48, from_host=204.8, slowdown=0.0)  # 100 s out, 10 s back
    need, possible = need_of(program, live_bytes(program, costs.sizes)), trips(program, costs)
    least = need.copy()
    for trip in possible:
        least[trip.away] -= trip.size
    limit = int(least.max())
    assert limit < need.max()
    chosen = cap(need, possible, limit)
    assert chosen
    swapped = swap(program, chosen, costs, slow, limit)
    assert swapped.memory.peak == limit
    assert swapped.time == pytest.approx(len(program.steps) + swapped.waiting)
    assert swapped.waiting > 90 * len(chosen)
    assert swapped.hidden[0] < 0.1
    roomy = swap(program, chosen, costs, slow, limit=1 << 20)
    assert roomy.waiting < swapped.waiting
    assert roomy.memory.peak > limit


def test_a_budget_below_what_must_be_there_has_no_trips() -> None:
    layout = chain_layout()
    program, costs = rematerialize(layout, Schedule.parse(KEEP)), by_hand(layout)
    assert cap(need_of(program, live_bytes(program, costs.sizes)), trips(program, costs), 100) is None


def test_the_tokens_of_a_schedule_say_what_leaves() -> None:
    layout = chain_layout()
    schedule = Schedule.parse("Fall1 Off(A1) Fall2 Off(A2) Fall3 Fall4 Fall5 B5 B4 B3 Pre(A2) B2 Pre(A1) B1")
    program, found = trips_of(layout, schedule, by_hand(layout))
    values = layout.graph.values
    assert [values[program.version_of[trip.version]].name for trip in found] == ["tanh", "tanh_1"]
    assert [step.op for step in program.executions] == [
        step.op for step in rematerialize(layout, Schedule.parse(KEEP)).executions
    ]


def test_what_is_fetched_twice_has_stayed_since_the_first_time() -> None:
    layout = chain_layout()
    schedule = Schedule.parse("Fall1 Off(A1) Fall2 Fall3 Fall4 Fall5 B5 B4 Pre(A1) B3 Drop(A1) Pre(A1) B2 B1")
    program, found = trips_of(layout, schedule, by_hand(layout))
    assert len(found) == 1
    assert found[0].returns == trips(program, by_hand(layout))[0].returns


def test_the_copy_that_comes_back_is_read_even_where_its_op_ran_again_meanwhile() -> None:
    layout = chain_layout()
    text = "Fall1 Off(A1) Drop(A1) Fck1 Fall2 Drop(a1) Fall3 Fall4 Fall5 B5 B4 B3 Pre(A1) B2 B1"
    program, found = trips_of(layout, Schedule.parse(text), by_hand(layout))
    (trip,) = found
    again = [step for step in program.executions if program.version_of[trip.version] in {
        program.version_of[version] for version in step.writes
    }]  # fmt: skip
    assert [step.writes for step in again] == [(trip.version,), again[1].writes]
    late = [version for step in program.executions[trip.returns :] for version in step.reads]
    assert trip.version in late
    assert again[1].writes[0] not in late


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("Fall1 Off(A2) Fall2 Fall3 Fall4 Fall5 B5 B4 B3 B2 B1", r"Off\(A2\): it is not stored"),
        ("Fall1 Fall2 Fall3 Fall4 Fall5 B5 B4 B3 B2 Pre(A1) B1", r"Pre\(A1\) is not on the host"),
    ],
)
def test_impossible_transfers_are_refused(schedule: str, message: str) -> None:
    layout = chain_layout()
    with pytest.raises(InvalidSchedule, match=message):
        trips_of(layout, Schedule.parse(schedule), by_hand(layout))


SHARES, SPEEDS = st.integers(0, 100), st.sampled_from([1e3, 1e9, 1e12])


@few(everyday(60))
@given(st.sampled_from(VARIED), SHARES, SHARES, SPEEDS)
def test_transfers_keep_the_budget_at_every_step(name: str, share: int, tight: int, speed: float) -> None:
    _swapped(surveyed(name), saved(name).costs, share, tight, speed)


def _swapped(
    frontier: Frontier, costs: Costs, share: int, tight: int, speed: float
) -> tuple[Program, ProgramWithTransfers]:
    """A program of the frontier, and the same with the transfers that let it fit in less: checked."""
    candidates = frontier.candidates
    program = candidates[share * (len(candidates) - 1) // 100].program()
    need, possible = need_of(program, live_bytes(program, costs.sizes)), trips(program, costs)
    least = need.copy()
    for trip in possible:
        least[trip.away] -= trip.size
    limit = int(least.max() + (need.max() - least.max()) * tight / 100)
    chosen = cap(need, possible, limit)
    assert chosen is not None
    swapped = swap(program, chosen, costs, Link(to_host=speed, from_host=speed), limit)
    assert swapped.memory.peak <= limit
    assert swapped.time >= costs.time(program) * (1 - 1e-9)
    assert costs.time(swapped.program) == costs.time(program)
    _check_order(swapped.program)
    return program, swapped


@few(everyday(10, least=2))
@given(recipes, SHARES, SHARES, SPEEDS, st.booleans())
def test_transfers_are_emitted_as_planned(recipe: Recipe, share: int, tight: int, speed: float, holds: bool) -> None:
    joint = replace(capture(Dag(recipe), *batch()), holds_gradients=holds)  # on some releases of PyTorch it does
    costs = estimated(joint)
    program, swapped = _swapped(survey(joint, costs, slots=60, effort=0), costs, share, tight, speed)
    if any(joint.ops[op].random for op in program.repeated) or program.preserved:
        return  # generator states and preserved inputs are not storages of the joint graph
    forward, backward = lower(swapped.program, "tier")
    during = swapped.memory.during
    assert max(graph_memory(forward, {})) == max(during[: swapped.program.split])
    own = saved_bytes(forward, backward, joint) | tangent_bytes(backward, joint)
    held = sum(joint.values[value].bytes for value in (*joint.kept_outputs, *joint.held_tangents))
    held += costs.sizes.root  # of a loss outside that reads outputs beside one
    assert max(graph_memory(backward, own)) + held == max(during[swapped.program.split :])


def _check_order(program: Program) -> None:
    """Every trip has its four events in order, and nothing reads a version that has left."""
    events: dict[int, list[Role]] = {}
    gone: set[int] = set()
    for step in program.steps:
        assert gone.isdisjoint(step.reads)
        if isinstance(step, Transfer):
            events.setdefault(step.trip, []).append(step.role)
            if step.role is Role.RELEASE:
                gone.update(step.reads)
    for roles in events.values():
        assert roles == [Role.OFFLOAD, Role.RELEASE, Role.PREFETCH, Role.WAIT]


def test_nodes_are_named_after_their_values_and_say_their_block() -> None:
    joint = capture(FourLayers(), torch.ones(4, 8))
    layout = lay_out(joint, [op.index for op in joint.forward_ops if op.name.startswith("tanh")])
    program, costs = rematerialize(layout, Schedule.parse(KEEP)), by_hand(layout)
    swapped = swap(program, trips(program, costs)[:1], costs, Link(to_host=64.0, from_host=64.0), 1 << 20)
    forward, backward = lower(swapped.program, "files")
    names = [node.name for node in forward.graph.nodes if "tanh" in node.name]
    assert names == ["tanh", "tanh_offload", "tanh_1", "tanh_release", "tanh_2", "tanh_3"]
    ahead = [node for node in backward.graph.nodes if node.name in ("tanh_prefetch", "tanh_wait")]
    assert [node.meta["fxremat"]["role"] for node in ahead] == ["prefetch", "wait"]
    assert {node.meta["fxremat"]["block"] for node in ahead} == {1}
    assert "'role': 'offload'" in forward.print_readable(print_output=False)


def test_what_is_on_the_host_at_a_time() -> None:
    """Values that cross the split are all there at it; one that is back before another leaves is not counted twice."""
    layout = chain_layout()
    program, costs = rematerialize(layout, Schedule.parse(KEEP)), by_hand(layout)
    link, found = Link(to_host=1e9, from_host=1e9), trips(program, costs)
    assert most_on_host(program, costs, link) == 0
    assert most_on_host(swap(program, found, costs, link, 1 << 20).program, costs, link) == 4 * 128
    (first, second), steps = (trip.version for trip in found[:2]), program.steps
    one_by_one = [
        Transfer(0, role, trip, (version,), ())
        for trip, version in ((0, first), (1, second))
        for role in (Role.OFFLOAD, Role.RELEASE, Role.PREFETCH, Role.WAIT)
    ]
    assert most_on_host(replace(program, steps=(*steps, *one_by_one)), costs, link) == 128
    together = sorted(one_by_one, key=lambda step: step.role is Role.WAIT)
    assert most_on_host(replace(program, steps=(*steps, *together)), costs, link) == 256


def test_a_version_that_comes_back_is_another_one() -> None:
    layout = chain_layout()
    program, costs = rematerialize(layout, Schedule.parse(KEEP)), by_hand(layout)
    swapped = swap(program, trips(program, costs), costs, Link(to_host=1e9, from_host=1e9), 1 << 20)
    assert len(swapped.program.version_of) == len(program.version_of) + 4
    assert replace(swapped.program, steps=()).first == program.first
