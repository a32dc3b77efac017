"""Liveness against a naive replay: a set of living versions, and a look ahead at every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fxremat.step.layout import Layout
from fxremat.step.liveness import Memory, Sizes, live_bytes, lives, seed_lives
from fxremat.step.program import Order, Program, Recorder, Role, Step, Transfer
from fxremat.step.step_graph import Origin
from tests.dags import few
from tests.joints import graph_of, joints, op, orders, sizes_of

MANY = few(100)


def naive(
    program: Program, sizes: Sizes, at_hand: Mapping[int, int] | None = None, kept: frozenset[int] = frozenset()
) -> Memory:
    """The memory of a program, seen by somebody who knows no better than to look at all of it at every step."""
    joint, steps, whole = program.layout.graph, program.steps, at_hand is None
    value_of, given = program.version_of, dict(at_hand or {})
    held = (joint.kept_outputs - joint.dropped_outputs) | joint.returned | kept
    to_the_end = {version for value, version in program.first.items() if value in held}
    dropped = {program.first[value] for value in joint.dropped_outputs if value in program.first}

    def bytes_of(version: int) -> int:
        return sizes.values[value_of[version]]

    def is_update(version: int) -> bool:
        return value_of[version] in joint.updates and program.first[value_of[version]] == version

    def is_used_after(version: int, position: int, *, in_backward: bool = False) -> bool:
        if is_update(version) and position < program.split - 1:
            return True  # the forward returns it
        if version in dropped and not in_backward and position < program.split - (not whole):
            return True  # the caller has it while the loss runs
        if joint.values[value_of[version]].origin is Origin.TANGENT and value_of[version] in joint.held_tangents:
            return version not in given
        return version in to_the_end or any(
            version in step.reads + step.writes for step in steps[position + 1 :]
        )

    used = {version for step in steps for version in step.reads + step.writes}
    returned = {v for v in range(len(value_of)) if is_update(v) or v in dropped} if program.split else set()
    never = {v for v in range(len(value_of)) if v not in used | returned}
    alive = given | {program.first[value]: bytes_of(program.first[value]) for value in program.preserved}
    states: dict[int, int] = {}  # op -> bytes of its generator's state
    start, during, at_split = sum(alive.values()) + program.resident, [], None
    other = program.resident  # bytes that belong to no version
    for position, step in enumerate(steps):
        if position == program.split:
            tangents = {
                v: bytes_of(v) for v, value in enumerate(value_of) if value in joint.tangent_values and v not in given
            }
            brought = sum(tangents.values()) + sizes.root if whole else 0
            at_split = sum(alive.values()) + sum(states.values()) + other + (sizes.outside or sizes.root)
            gone = {v for v in dropped if not is_used_after(v, position - 1, in_backward=True)} if whole else set()
            alive = {v: size for v, size in alive.items() if v not in gone}
            at_split = max(at_split, sum(alive.values()) + sum(states.values()) + other + brought)
            if whole:
                alive |= tangents
                other += sizes.root
        for version in step.writes:
            if joint.values[value_of[version]].origin is not Origin.PRIMAL or version in program.fetched:
                alive[version] = bytes_of(version)
        if isinstance(step, Transfer):
            other += max(step.takes, 0)
        later = {s.op for s in steps[position + 1 :] if s.role is not Role.BACKWARD}
        again = step.op is not None and (step.op in states or (step.op in later and step.role is not Role.BACKWARD))
        if again and joint.ops[step.op].random:
            states[step.op] = sizes.seed
        total = sum(alive.values()) + sum(states.values()) + other
        during.append(total + (step.workspace if isinstance(step, Transfer) else sizes.workspace[step.op]))
        alive = {v: size for v, size in alive.items() if v in never or is_used_after(v, position)}
        states = {op: size for op, size in states.items() if op in later}
        if isinstance(step, Transfer):
            other -= max(-step.takes, 0)
    end = sum(alive.values()) + sum(states.values()) + other
    return Memory(tuple(during), start if at_split is None else at_split, end)


@MANY
@given(st.data(), orders())
def test_a_whole_step_is_that_of_the_naive_replay(data: st.DataObject, order: Order) -> None:
    program = order.program()
    sizes = data.draw(sizes_of(program))
    kept = data.draw(st.frozensets(st.integers(0, len(program.layout.graph.values) - 1)))
    assert live_bytes(program, sizes) == naive(program, sizes)
    assert live_bytes(program, sizes, kept=kept) == naive(program, sizes, kept=kept)


@MANY
@given(st.data(), orders())
def test_transfers_take_what_they_write_and_say(data: st.DataObject, order: Order) -> None:
    """A copy to the host reads a version, one from the host writes another one of it; state comes and goes."""
    program = order.program()
    steps: list[Step | Transfer] = list(program.steps)
    version_of, split, fetched = list(program.version_of), program.split, set()
    tangents = program.layout.graph.tangent_values
    for trip in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(steps)))
        born = sorted({v for step in steps[:place] for v in step.writes})
        reads, writes = (), ()
        if data.draw(st.booleans()):
            value = data.draw(st.sampled_from([v for v in program.version_of if v not in tangents]))
            writes = (len(version_of),)
            version_of.append(value)
            if program.layout.graph.values[value].origin is Origin.PRIMAL:
                fetched.update(writes)
        elif born:
            reads = (data.draw(st.sampled_from(born)),)
        takes, workspace = data.draw(st.integers(-20, 20)), data.draw(st.integers(0, 9))
        steps.insert(place, Transfer(0, Role.WAIT, trip, reads, writes, takes=takes, workspace=workspace))
        split += place <= split
    changed = replace(
        program, steps=tuple(steps), split=split, version_of=tuple(version_of), fetched=frozenset(fetched),
        resident=data.draw(st.integers(0, 99)),
    )  # fmt: skip
    sizes = data.draw(sizes_of(changed))
    assert live_bytes(changed, sizes) == naive(changed, sizes)


@MANY
@given(st.data(), joints())
def test_a_part_of_a_step_begins_with_what_is_at_hand(data: st.DataObject, joint: Any) -> None:
    recorder = Recorder(Layout(graph=joint, blocks=(), held=frozenset()), set(range(joint.forward_count)))
    for item in joint.forward_ops:
        for value in item.writes:
            recorder.give(value)
    for index in range(joint.forward_count, len(joint.ops)):
        recorder.run(index, 0)
    program = recorder.program(data.draw(st.sampled_from([len(recorder.steps), 0])))
    sizes = data.draw(sizes_of(program))
    forward = [v for v, value in enumerate(program.version_of) if joint.values[value].origin is Origin.FORWARD]
    at_hand = {version: data.draw(st.integers(0, 50)) for version in forward}
    assert live_bytes(program, sizes, at_hand=at_hand) == naive(program, sizes, at_hand)


def small() -> Program:
    """v0 -> v1 (random) -> v2 | v3, v2, v1 -> v4; the random op runs again, last."""
    joint = graph_of(
        [Origin.PRIMAL, Origin.FORWARD, Origin.FORWARD, Origin.TANGENT, Origin.BACKWARD],
        [op([0], [1], random=True), op([1], [2]), op([3, 2, 1], [4], backward=True)],
        returned=frozenset({4}),
    )
    return Order(Layout(graph=joint, blocks=(), held=frozenset()), (0, 1, 0, 2), (0, 0, 0, 0), 2).program()


def test_by_hand() -> None:
    """Sizes are powers of two, so that each sum says what is in it."""
    sizes = Sizes(values=[1, 2, 4, 8, 16], workspace=[32, 64, -1], seed=128, outside=256, root=512)
    memory = live_bytes(small(), sizes)
    assert memory.during == (2 + 32 + 128, 2 + 4 + 64 + 128, 4 + 8 + 2 + 32 + 128 + 512, 4 + 8 + 2 + 16 - 1 + 512)
    assert (memory.at_split, memory.end) == (4 + 128 + 8 + 512, 16 + 512)
    assert memory.peak == memory.during[2]
    assert live_bytes(small(), replace(sizes, outside=1024)).peak == 4 + 128 + 1024
    assert Memory((1, 2), 3, 4).peak == 4


def test_the_last_use_of_every_version() -> None:
    sizes = Sizes(values=[1, 2, 4, 8, 16], workspace=[0] * 3)
    assert (sizes.seed, sizes.outside, sizes.root) == (0, 0, 0)
    assert small().version_of == (0, 1, 2, 1, 3, 4)
    assert lives(small(), sizes) == [(4, 0), (1, 2), (3, 4), (3, 2), (3, 8), (4, 16)]
    assert lives(small(), sizes, {1: 5}, [2], whole=False) == [(4, 0), (1, 5), (4, 4), (3, 2), (3, 0), (4, 16)]
    assert list(seed_lives(small()).values()) == [(0, 2)]


def test_what_nothing_uses() -> None:
    """A tangent that the first step reads, one that nothing reads, and a value at hand that nothing reads."""
    joint = graph_of(
        [Origin.TANGENT, Origin.TANGENT, Origin.FORWARD, Origin.BACKWARD], [op([0], [3], backward=True)]
    )
    recorder = Recorder(Layout(graph=joint, blocks=(), held=frozenset()))
    recorder.give(2)
    recorder.run(0, 0)
    program, sizes = recorder.whole_program(0), Sizes(values=[1, 2, 4, 8], workspace=[0])
    assert [program.version_of[version] for version in range(4)] == [2, 0, 3, 1]
    assert lives(program, sizes) == [(-1, 4), (0, 1), (0, 8), (1, 2)]
