"""A joint graph laid out as a chain: which op belongs to which block, what crosses each boundary, what each saves.

    boundary l   the values made in blocks 1..l and read by the forward of later blocks, held ones apart
    held         values that are kept from their forward to their last use: carried skips, anchors, outputs
    saved l, o   what block l keeps for its backward under option o; option 0 is everything that B_l reads

Blocks are numbered 0..n-1 here (tokens of a schedule count from 1). Sizes and times are not known at this level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxremat.linearize.joint import Joint, Origin, Value


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """One block: its ops (numbers into `Joint.ops`) and its values (numbers into `Joint.values`)."""

    name: str
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    boundary: frozenset[int]  # a_l
    made: frozenset[int]  # every value that the forward of this block writes
    saved: tuple[frozenset[int], ...]  # made in this block; each holds the boundary values made here


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """The chain of blocks of one joint graph."""

    joint: Joint
    blocks: tuple[BlockLayout, ...]
    held: frozenset[int]

    def boundary_before(self, block: int) -> frozenset[int]:
        """The values that enter a block (a_{l-1}); none enter the first: inputs are primals."""
        return self.blocks[block - 1].boundary if block else frozenset()

    def with_options(self, options: Sequence[Sequence[frozenset[int]]]) -> Layout:
        """The same layout with further save sets (options 1, 2, ...) for each block."""
        blocks = [
            replace(block, saved=(block.saved[0], *more))
            for block, more in zip(self.blocks, options, strict=True)
        ]
        return replace(self, blocks=tuple(blocks))


def lay_out(joint: Joint, ends: Sequence[int], carried: frozenset[int] = frozenset()) -> Layout:
    """Cut the forward after the ops `ends` (the last op is always an end) and place every op of the backward.

    Any positions make a valid layout: what crosses them is the boundary. Cost O(reads * log(blocks)).
    """
    ends = sorted({*ends, joint.forward_count - 1})
    block_of_op = _forward_blocks(joint, ends)
    backward = assign_backward(joint, block_of_op, len(ends))
    born = {value.index: block_of_op[_producer(joint, value.index)] for value in _forward_values(joint)}
    read_forward = dict(born)  # last block whose forward reads it
    read_backward: dict[int, set[int]] = {value: set() for value in born}
    held = set(carried) | (joint.kept_outputs & born.keys()) | (joint.returned & born.keys())
    for op in joint.forward_ops:
        for value in op.again_reads:
            if value in born:
                read_forward[value] = max(read_forward[value], block_of_op[op.index])
        held.update(value for value in op.reads if value in born and value not in op.again_reads)
    for op in joint.backward_ops:
        for value in op.reads:
            if value in born:
                read_backward[value].add(backward[op.index])
    for value in born:
        producer = joint.ops[_producer(joint, value)]
        crosses = read_forward[value] > born[value] or any(
            block != born[value] for block in read_backward[value]
        )
        late = any(block < born[value] or block > read_forward[value] for block in read_backward[value])
        if (producer.anchored and crosses) or late:
            held.add(value)
    blocks = []
    for number in range(len(ends)):
        boundary = {v for v in born if born[v] <= number < read_forward[v] and v not in held}
        made = {v for v in born if born[v] == number}
        saved = {v for v in made - held if number in read_backward[v]} | (made & boundary)
        forward = tuple(op.index for op in joint.forward_ops if block_of_op[op.index] == number)
        blocks.append(
            BlockLayout(
                name=joint.ops[forward[-1]].name if forward else f"block{number}",
                forward=forward,
                backward=tuple(op.index for op in joint.backward_ops if backward[op.index] == number),
                boundary=frozenset(boundary),
                made=frozenset(made),
                saved=(frozenset(saved),),
            )
        )
    return Layout(joint=joint, blocks=tuple(blocks), held=frozenset(held))


def _producer(joint: Joint, value: int) -> int:
    producer = joint.values[value].producer
    assert producer is not None
    return producer


def _forward_values(joint: Joint) -> list[Value]:
    return [value for value in joint.values if value.origin is Origin.FORWARD and value.producer is not None]


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
        if wanted is None or (len(before) > 1 and _accumulates(op.node)):
            wanted = min(before, default=count - 1)
        placed[op.index] = min([wanted, *before, *stored])
    _pull_to_users(joint, placed)
    return placed


def _accumulates(node: object) -> bool:
    """True for the sum of two gradients, which autograd numbers after the op that made the last of them."""
    return "Gradient addition" in str(getattr(node, "meta", {}).get("stack_trace", "")) or "aten.add." in str(
        getattr(node, "target", "")
    )


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
