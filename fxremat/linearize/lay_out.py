"""Cut a joint graph into blocks and place every op of the backward in one of them: `lay_out`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fxremat.step.joint import Joint, JointValue, Origin
from fxremat.step.layout import BlockLayout, Layout
from fxremat.step.overwriting import called


def lay_out(joint: Joint, ends: Sequence[int], carried: frozenset[int] = frozenset()) -> Layout:
    """Cut the forward after the ops `ends` (the last op is always an end) and place every op of the backward.

    Any positions make a valid layout: what crosses them is the boundary. O(reads + blocks * values).
    """
    ends = sorted({*ends, joint.forward_count - 1})
    forward = _forward_blocks(joint, ends)
    backward = assign_backward(joint, forward, len(ends))
    reach = _reach(joint, forward, backward)
    held = carried | _held(joint, reach)
    blocks = [_block(number, joint, forward, backward, reach, held) for number in range(len(ends))]
    return Layout(joint=joint, blocks=tuple(blocks), held=held)


@dataclass(frozen=True)
class _Reach:
    """The blocks in which each forward value is made and read."""

    made: dict[int, int]
    last_forward: dict[int, int]  # the last block whose forward reads it, the one that makes it at least
    backwards: dict[int, set[int]]  # the blocks whose backward reads it


def _reach(joint: Joint, forward: Sequence[int], backward: Mapping[int, int]) -> _Reach:
    made = {v.index: forward[v.producer] for v in joint.values if v.producer is not None and _is_forward(v)}
    last_forward, backwards = dict(made), {value: set[int]() for value in made}
    for op in joint.forward_ops:
        for value in made.keys() & op.again_reads:
            last_forward[value] = max(last_forward[value], forward[op.index])
    for op in joint.backward_ops:
        for value in made.keys() & op.reads:
            backwards[value].add(backward[op.index])
    return _Reach(made, last_forward, backwards)


def _held(joint: Joint, reach: _Reach) -> frozenset[int]:
    """What is kept from its forward to its last use whatever the plan: no boundary carries it.

    Outputs; what only first executions read; anchors that several blocks read; and the rare value that is read by the
    backward of a block which its forward never enters.
    """
    held = (joint.kept_outputs | joint.returned) & reach.made.keys()
    held |= {v for op in joint.forward_ops for v in op.reads if v in reach.made and v not in op.again_reads}
    for value, made in reach.made.items():
        producer = joint.values[value].producer
        assert producer is not None
        last, backwards = reach.last_forward[value], reach.backwards[value]
        crosses = last > made or backwards - {made}
        if (joint.ops[producer].anchored and crosses) or any(
            not made <= block <= last for block in backwards
        ):
            held |= {value}
    return frozenset(held)


def _block(
    number: int,
    joint: Joint,
    forward: Sequence[int],
    backward: Mapping[int, int],
    reach: _Reach,
    held: frozenset[int],
) -> BlockLayout:
    ops = tuple(index for index, block in enumerate(forward) if block == number)
    made = frozenset(value for value, block in reach.made.items() if block == number)
    crossing = {value for value, block in reach.made.items() if block <= number < reach.last_forward[value]}
    boundary = frozenset(crossing - held)
    read = {value for value in made - held if number in reach.backwards[value]}
    return BlockLayout(
        forward=ops,
        backward=tuple(index for index, block in backward.items() if block == number),
        boundary=boundary,
        made=made,
        saved=(frozenset(read | (made & boundary)),),
    )


def _is_forward(value: JointValue) -> bool:
    return value.origin is Origin.FORWARD


def _forward_blocks(joint: Joint, ends: Sequence[int]) -> list[int]:
    blocks, number = [], 0
    for index in range(joint.forward_count):
        blocks.append(number)
        if index == ends[number]:
            number += 1
    return blocks


def assign_backward(joint: Joint, block_of_op: Sequence[int], count: int) -> dict[int, int]:
    """The block of every backward op: that of the forward op with its `seq_nr`, as far as dataflow allows.

    A backward op runs no earlier than the gradients it reads, and no later block than the last one at which the
    forward values it reads are still stored (their own block, or a block that they enter).
    """
    by_sequence: dict[object, int] = {}
    last_reader: dict[int, int] = {}
    for op in joint.forward_ops:
        block = block_of_op[op.index]
        number = op.node.meta.get("seq_nr")
        if number is not None and not op.anchored:
            by_sequence[number] = max(block, by_sequence.get(number, 0))
        for value in (*op.reads, *op.writes):
            last_reader[value] = max(block, last_reader.get(value, 0))
    placed: dict[int, int] = {}
    for op in joint.backward_ops:
        gradients = [joint.values[value].producer for value in op.reads]
        before = [placed[producer] for producer in gradients if producer in placed]
        stored = [
            last_reader[v] for v in op.reads if joint.values[v].origin is Origin.FORWARD and v in last_reader
        ]
        wanted = by_sequence.get(op.node.meta.get("seq_nr"))
        if wanted is None or (len(before) > 1 and called(op.node)[0] is torch.ops.aten.add.Tensor):
            wanted = min(before, default=count - 1)  # a sum of gradients carries the number of another op
        placed[op.index] = min([wanted, *before, *stored])
    _pull_to_users(joint, placed)
    return placed


def _pull_to_users(joint: Joint, placed: dict[int, int]) -> None:
    """Move ops that read no gradient (masks made in the backward) next to their first user."""
    users: dict[int, list[int]] = {}
    for op in joint.backward_ops:
        for value in op.reads:
            users.setdefault(value, []).append(op.index)
    for op in reversed(joint.backward_ops):
        made_here = [v for v in op.reads if joint.values[v].origin in (Origin.BACKWARD, Origin.TANGENT)]
        first = [placed[user] for value in op.writes for user in users.get(value, [])]
        if not made_here and first:
            placed[op.index] = min(placed[op.index], max(first))
