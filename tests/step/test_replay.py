"""Tests of what schedules and orders execute, on joint graphs of numbers alone: by hand, and op by op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.chains.schedule import Backward, Drop, Forward, Keep, Schedule, Value
from fxremat.errors import InvalidSchedule
from fxremat.linearize.lay_out import lay_out
from fxremat.step.layout import BlockLayout, Layout
from fxremat.step.order import Counts, Replay, order_of, rematerialize
from fxremat.step.program import Order, Program, Recorder, Role, Transfer
from fxremat.step.step_graph import Origin, bits_of, numbers_of
from tests.dags import few
from tests.joints import graph_of, joints, op, orders

PRIMAL, TANGENT, FORWARD, BACKWARD = Origin.PRIMAL, Origin.TANGENT, Origin.FORWARD, Origin.BACKWARD


@few(100)
@given(orders())
def test_an_order_reads_the_latest_versions(order: Order) -> None:
    program, joint = order.program(), order.layout.graph
    assert [(step.op, step.block) for step in program.steps] == list(zip(order.ops, order.blocks, strict=True))
    first: dict[int, int] = {}
    latest: dict[int, int] = {}
    values: list[int] = []
    ran: set[int] = set()

    def new_version(value: int) -> int:
        values.append(value)
        latest[value] = len(values) - 1
        return first.setdefault(value, latest[value])

    for step in program.executions:
        executed, again = joint.ops[step.op], step.op in ran
        reads = executed.again_reads if again else executed.reads
        for value in reads:
            if value not in latest:
                assert joint.values[value].origin in (PRIMAL, TANGENT)
                new_version(value)
        held = joint.kept_outputs - joint.dropped_outputs | joint.returned  # the caller has the first version
        if len(ran) < joint.forward_count:
            held |= joint.dropped_outputs
        assert step.reads == tuple(latest[v] for v in reads)
        writes = executed.again_writes if again else executed.writes
        assert step.writes == tuple(range(len(values), len(values) + len(writes)))
        for value in writes:
            new_version(value)
            latest[value] = first[value] if value in held else latest[value]
        assert step.role is (Role.BACKWARD if executed.backward else Role.RECOMPUTE if again else Role.FORWARD)
        ran.add(step.op)
    for value in sorted(joint.given - latest.keys()):
        new_version(value)
    assert program.version_of == tuple(values)
    assert program.first == first
    assert program.split == order.split
    assert program.repeated == {o for o in order.ops if order.ops.count(o) > 1}
    late = {program.version_of[v] for step in program.steps[program.split :] for v in step.reads}
    assert program.preserved == late & joint.mutated_primals
    assert program.recomputed == sum(step.role is Role.RECOMPUTE for step in program.executions)


def test_an_order_that_reads_what_is_not_made_is_refused() -> None:
    joint = graph_of([PRIMAL, FORWARD, FORWARD], [op([0], [1]), op([0, 1], [2])])
    layout = Layout(graph=joint, blocks=(), held=frozenset())
    with pytest.raises(InvalidSchedule, match="op1 runs before v1, which it reads"):
        Order(layout, (1, 0), (0, 0), 2).program()
    with pytest.raises(ValueError, match="zip"):
        Order(layout, (0, 1), (0,), 2).program()


def chain(**sets: Any) -> Layout:
    """Three blocks: x -> u_b -> y_b forward, g_b, u_b -> h_b and h_b, y_(b-1) -> g_(b-1) backward.

    Values: 0 x | 1 u1, 2 y1, 3 u2, 4 y2, 5 u3, 6 y3 | 7 g3 (tangent) | 8 h3, 9 g2, 10 h2, 11 g1, 12 h1, 13 g0.
    Ops: 0 .. 5 forward, 6 .. 11 backward. Option 1 of a block saves its output alone.
    """
    forward = [op([b], [b + 1]) for b in range(6)]
    gradients = [(7, 8), (9, 10), (11, 12)]
    backward = []
    for (g, h), u, x in zip(gradients, (5, 3, 1), (4, 2, 0), strict=True):
        backward += [op([g, u], [h], backward=True), op([h, x], [h + 1], backward=True)]
    joint = graph_of(
        [PRIMAL, *[FORWARD] * 6, TANGENT, *[BACKWARD] * 6],
        [*forward, *backward],
        **{"kept_outputs": frozenset(), "returned": frozenset({13}), **sets},
    )
    blocks = tuple(
        BlockLayout(
            forward=(2 * b, 2 * b + 1),
            backward=(10 - 2 * b, 11 - 2 * b),
            boundary=frozenset({2 * b + 2}) if b < 2 else frozenset(),
            made=frozenset({2 * b + 1, 2 * b + 2}),
            saved=(frozenset({2 * b + 1, 2 * b + 2}), frozenset({2 * b + 2})),
        )
        for b in range(3)
    )
    return Layout(graph=joint, blocks=blocks, held=frozenset())


def text(program: Program) -> str:
    """Numbers of ops as they run, the ones that run again in brackets, and where the forward ends."""
    words = [f"({step.op})" if step.role is Role.RECOMPUTE else f"{step.op}" for step in program.executions]
    words.insert(program.split, "|")
    return " ".join(words)


@pytest.mark.parametrize(
    ("schedule", "runs"),
    [
        ("Fall1 Fall2 Fall3 B3 B2 B1", "0 1 2 3 4 5 | 6 7 8 9 10 11"),
        ("Fck1 Fall2 Fall3 B3 B2 Fall1 B1", "0 1 2 3 4 5 | 6 7 8 9 (0) (1) 10 11"),
        ("Fck1 Fnone2 Fall3 B3 Fall1 Fall2 B2 B1", "0 1 2 3 4 5 | 6 7 (0) (1) (2) (3) 8 9 10 11"),
        ("Fnone1 Fnone2 Fall3 B3 Fck1 Fall2 B2 Fall1 B1", "0 1 2 3 4 5 | 6 7 (0) (1) (2) (3) 8 9 (0) (1) 10 11"),
        # what an option does not save is made for the backward that reads it
        ("Fall1[1] Fall2 Fall3 B3 B2 B1", "0 1 2 3 4 5 | 6 7 8 9 (0) 10 11"),
        ("Fall1 Fall2[1] Fall3 B3 B2 B1", "0 1 2 3 4 5 | 6 7 (2) 8 9 10 11"),
        # a discarded input of a saved block is made before the backward that reads it
        ("Fck1 Fall2 Drop(a1) Fall3 B3 Fall1 B2 B1", "0 1 2 3 4 5 | 6 7 (0) (1) 8 9 10 11"),
        ("Fall1 Drop(A1) Fall1 Fall2 Fall3 B3 B2 B1", "0 1 (0) (1) 2 3 4 5 | 6 7 8 9 10 11"),
        # stored twice: dropping one leaves the other
        ("Fck1 Fall1 Drop(a1) Fall2 Fall3 B3 B2 B1", "0 1 (0) 2 3 4 5 | 6 7 8 9 10 11"),
        ("Fall1 Fck1 Drop(A1) Fall2 Fall3 B3 B2 Fall1 B1", "0 1 2 3 4 5 | 6 7 8 9 (0) (1) 10 11"),
        # saved again under another option: the first is forgotten
        ("Fall1 Fall1[1] Fall2 Fall3 B3 B2 B1", "0 1 2 3 4 5 | 6 7 8 9 (0) 10 11"),
    ],
)
def test_by_hand(schedule: str, runs: str) -> None:
    assert text(rematerialize(chain(), Schedule.parse(schedule))) == runs


def test_held_values_and_outputs_are_made_once_and_stay() -> None:
    layout = replace(chain(), held=frozenset({1}))
    program = rematerialize(layout, Schedule.parse("Fck1 Fck2 Fall3 B3 Fall2 B2 Fall1 B1"))
    assert text(program) == "0 1 2 3 4 5 | 6 7 (2) (3) 8 9 (1) 10 11"


@pytest.mark.parametrize("output", [True, False])
def test_the_first_forward_of_a_block_makes_what_the_caller_gets(output: bool) -> None:
    """u3, which crosses no boundary: an output of the model, or held from the forward to the backward."""
    layout = chain(output_values=frozenset({5})) if output else replace(chain(), held=frozenset({5}))
    replay = Replay(layout)
    for block in range(3):
        replay.forward(block, Keep.CHECKPOINT)
    assert replay.ops == [0, 1, 2, 3, 4]
    replay.forward(2, Keep.CHECKPOINT)
    assert len(replay.ops) == 5
    assert (5 in numbers_of(replay.current)) is not output  # nothing holds it until the layout says so


def test_an_op_that_returns_nothing_runs_once() -> None:
    """A check of an input, before its block."""
    joint = graph_of(
        [PRIMAL, FORWARD, TANGENT, BACKWARD],
        [op([0], []), op([0], [1]), op([2, 1], [3], backward=True)],
    )
    block = BlockLayout(
        forward=(0, 1), backward=(2,), boundary=frozenset({1}), made=frozenset({1}), saved=(frozenset({1}),)
    )
    layout = Layout(graph=joint, blocks=(block,), held=frozenset())
    assert text(rematerialize(layout, Schedule.parse("Fck1 Drop(a1) Fall1 B1"))) == "0 1 (1) | 2"


@st.composite
def layouts(draw: Any) -> Layout:
    """A random joint graph cut anywhere, some of whose values are held, with a second save option for each block.

    Backward ops may be in any block, so that some wait for gradients that backwards of others make.
    """
    joint = draw(joints())
    joint = replace(joint, ops=tuple(replace(one, again_writes=one.writes) for one in joint.ops))
    ends = draw(st.sets(st.integers(0, joint.forward_count - 1)))
    layout = lay_out(joint, sorted(ends))
    if draw(st.booleans()):
        backward = [one.index for one in joint.backward_ops]
        block_of = {one: draw(st.integers(0, len(layout.blocks) - 1)) for one in backward}
        blocks = (
            replace(block, backward=tuple(one for one in backward if block_of[one] == number))
            for number, block in enumerate(layout.blocks)
        )
        layout = replace(layout, blocks=tuple(blocks))
    made = sorted(value for block in layout.blocks for value in block.made)
    layout = replace(layout, held=layout.held | frozenset(value for value in made if draw(st.integers(0, 4)) == 0))
    options = [[block.saved[0] & block.boundary] for block in layout.blocks]
    return layout.with_options(options)


@st.composite
def schedules(draw: Any, blocks: int) -> Schedule:
    """Forwards, backwards and drops of any blocks, in any order; most of them cannot run to the end."""
    block = st.integers(1, blocks)
    forward = st.one_of(
        st.builds(Forward, block, st.sampled_from([Keep.NONE, Keep.CHECKPOINT])),
        st.builds(Forward, block, st.just(Keep.ALL), st.integers(0, 1)),
    )
    drop = st.builds(Drop, st.builds(Value, st.sampled_from(["a", "A"]), block))
    keep_all = [*(Forward(b, Keep.ALL) for b in range(1, blocks + 1)), *map(Backward, range(blocks, 0, -1))]
    others = draw(st.lists(st.tuples(st.integers(0, 2 * blocks), st.one_of(forward, drop, st.builds(Backward, block)))))
    for place, other in others:
        keep_all.insert(place, other)
    return Schedule(tuple(keep_all))


def _outcome(run: Callable[[], Sequence[tuple[int, int]]]) -> object:
    try:
        return run()
    except InvalidSchedule as error:
        return str(error)


class _Forgets(dict[Any, Any]):
    def __setitem__(self, key: object, value: object) -> None:
        pass


@few(300)
@given(st.data())
def test_what_a_block_ran_before_is_remembered_only_where_it_runs_the_same_again(data: Any) -> None:
    layout = data.draw(layouts())
    for schedule in data.draw(st.lists(schedules(len(layout.blocks)), min_size=1, max_size=4)):
        forgetful = replace(layout)
        forgetful.__dict__["ran"] = _Forgets()

        def order(layout: Layout, schedule: Schedule = schedule) -> Sequence[tuple[int, int]]:
            order = order_of(layout, schedule)
            return [(order.split, -1), *zip(order.ops, order.blocks, strict=True)]

        assert _outcome(lambda layout=layout: order(layout)) == _outcome(lambda layout=forgetful: order(layout))


@few(300)
@given(st.data())
def test_an_order_runs_what_can_run_and_never_what_is_in_memory(data: Any) -> None:
    """Each op finds what it reads, and no forward op runs while the values that it made are stored."""
    layout = data.draw(layouts())
    schedule = data.draw(schedules(len(layout.blocks)))
    replay, recorder = Replay(layout), Recorder(layout)
    computed = layout.graph.bits.computed
    for one in schedule.ops:
        before, begin = replay.current, len(replay.ops)
        try:
            replay.execute(one)
        except InvalidSchedule:
            return
        available = before
        for index in replay.ops[begin:]:
            executed = layout.graph.ops[index]
            again = index in recorder.ran
            reads = bits_of(executed.again_reads if again else executed.reads) & computed
            assert reads & ~available == 0
            made = bits_of(executed.writes)
            assert executed.backward or not made or made & ~available
            available |= made
            recorder.run(index, 0)
        assert replay.current & ~available == 0


def towers() -> Layout:
    """Two blocks of one op; the backward of the later one reads a gradient that the earlier one's makes."""
    joint = graph_of(
        [PRIMAL, FORWARD, FORWARD, TANGENT, BACKWARD, BACKWARD],
        [op([0], [1]), op([1], [2]), op([3, 5], [4], backward=True), op([3, 1], [5], backward=True)],
    )
    blocks = [
        BlockLayout(
            forward=(b,), backward=(3 - b,), boundary=frozenset({b + 1}), made=frozenset({b + 1}),
            saved=(frozenset({b + 1}),),
        )
        for b in range(2)
    ]  # fmt: skip
    return Layout(graph=joint, blocks=tuple(blocks), held=frozenset())


def test_a_backward_op_waits_for_a_gradient_of_an_earlier_block() -> None:
    program = rematerialize(towers(), Schedule.parse("Fall1 Fall2 B2 B1"))
    assert text(program) == "0 1 | 3 2"
    assert [step.block for step in program.executions] == [0, 1, 0, 0]


def test_a_forward_that_ran_before_leaves_the_ops_that_wait() -> None:
    layout = towers()
    for schedule in ("Fall1 Fall1 Fall2 B2 B1", "Fall1 Fall2 B2 Fall1 B1"):
        assert text(rematerialize(layout, Schedule.parse(schedule))).endswith("3 2")


def test_a_schedule_that_ends_while_an_op_waits_is_refused() -> None:
    with pytest.raises(InvalidSchedule, match="the schedule ends before op2 has the gradients that it reads"):
        rematerialize(towers(), Schedule.parse("Fall1 Fall2 B2"))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("Fnone1 Fnone2 Fall3 B3 Fall2 B2 B1", "block 2 needs op0, which belongs to another block"),
        ("Fall1 Fall2 Drop(A1) Drop(A2) Fall3 B3 B2 B1", "block 3 needs op0, which belongs to another block"),
        ("Fall1[2]", "block 1 has 2 options, not 3"),
        ("Fall1 Off(A1)", r"Off\(A1\) needs a host to go to: compile with offload=True"),
    ],
)
def test_what_cannot_run_is_refused(schedule: str, message: str) -> None:
    with pytest.raises(InvalidSchedule, match=message):
        rematerialize(chain(), Schedule.parse(schedule))


def test_the_backward_needs_nothing_of_an_empty_forward() -> None:
    """A block without forward ops refuses to make anything."""
    layout = chain()
    empty = replace(layout.blocks[1], forward=(), boundary=frozenset({4}), saved=(frozenset({3, 4}),))
    layout = replace(layout, blocks=(layout.blocks[0], empty, layout.blocks[2]))
    with pytest.raises(InvalidSchedule, match="block 2 needs op2"):
        rematerialize(layout, Schedule.parse("Fall1 Fall2"))


def test_values_that_travel_are_those_that_nothing_else_holds() -> None:
    replay = Replay(chain())
    replay.forward(0, Keep.ALL)
    assert replay.only_in("A", 0) == bits_of([1, 2])
    assert replay.only_in("a", -1) == 0  # the input of the step
    with pytest.raises(InvalidSchedule, match=r"Off\(a1\): it is not stored"):
        replay.only_in("a", 0)
    replay.forward(0, Keep.CHECKPOINT)
    assert replay.only_in("A", 0) == bits_of([1])  # a1 holds the output, too
    assert replay.only_in("a", 0) == 0
    replay.discard("A", 0)
    assert replay.current == bits_of([2])
    assert replay.restore("A", 0, bits_of([1]))
    assert replay.current == bits_of([1, 2])
    assert not replay.restore("A", 0, bits_of([1]))  # it is stored
    replay.discard("a", 0)
    assert replay.only_in("A", 0) == bits_of([1])
    replay.forward(0, Keep.ALL)
    replay.forward(0, Keep.CHECKPOINT)
    assert replay.only_in("A", 0) == bits_of([1])


@given(st.lists(st.tuples(st.sampled_from([1, 1, -1]), st.integers(0, 7))))
def test_counts_of_all_values_at_once(changes: list[tuple[int, int]]) -> None:
    counts, expected = Counts(), Counter[int]()
    for sign, values in changes:
        numbers = [one for one in numbers_of(values) if sign > 0 or expected[one]]
        (counts.add if sign > 0 else counts.subtract)(bits_of(numbers))
        expected.update(dict.fromkeys(numbers, sign))
        assert counts.one == bits_of(one for one, count in expected.items() if count == 1)
        assert counts.positive == bits_of(one for one, count in expected.items() if count)


def test_a_program_of_a_part_has_no_backward_and_no_inputs_that_nothing_reads() -> None:
    replay, recorder = Replay(chain()), Recorder(chain())
    replay.forward(0, Keep.ALL)
    recorder.follow(replay.ops, replay.blocks)
    part = recorder.program(2)
    assert (part.split, part.version_of) == (2, (0, 1, 2))
    assert recorder.whole_program(2).version_of == (0, 1, 2, 7)


def test_an_order_is_recorded_as_it_grows() -> None:
    order, recorder = order_of(chain(), Schedule.parse("Fck1 Fall2 Fall3 B3 B2 Fall1 B1")), Recorder(chain())
    for end in (2, 2, 7, len(order.ops)):
        recorder.follow(order.ops[:end], order.blocks[:end])
        assert len(recorder.steps) == end
    assert recorder.whole_program(order.split).steps == order.program().steps


def test_executions_leave_transfers_out() -> None:
    program = rematerialize(chain(), Schedule.parse("Fall1 Fall2 Fall3 B3 B2 B1"))
    with_one = replace(program, steps=(Transfer(0, Role.OFFLOAD, 0, (1,), ()), *program.steps))
    assert with_one.executions == program.steps
    transfer = with_one.steps[0]
    assert isinstance(transfer, Transfer)
    assert (transfer.workspace, transfer.seconds, transfer.takes, transfer.state_of) == (0, 0.0, 0, None)
    assert (program.fetched, program.resident) == (frozenset(), 0)
