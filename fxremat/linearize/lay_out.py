"""Cut a step graph into blocks and assign every op of the backward to one of them: `lay_out`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxremat.step.layout import BlockLayout, Layout
from fxremat.step.step_graph import Origin, StepGraph, Value


def lay_out(graph: StepGraph, ends: Sequence[int], carried: frozenset[int] = frozenset()) -> Layout:
    """Cut the forward after the ops `ends` and after its last op, and assign every op of the backward to a block.

    `carried` values are kept from their forward to their backward, so that no boundary contains them. Any
    positions make a valid layout: the values that cross them are the boundary. O(reads + blocks * values).
    """
    ends = sorted({*ends, graph.forward_count - 1})
    forward = _forward_blocks(graph, ends)
    backward = assign_backward(graph, forward, len(ends))
    reach = _reach(graph, forward, backward)
    held = carried | _held(graph, reach)
    blocks = [_block(number, graph, forward, backward, reach, held) for number in range(len(ends))]
    return Layout(graph=graph, blocks=tuple(blocks), held=held)


@dataclass(frozen=True)
class _Reach:
    """The blocks in which each forward value is computed and read."""

    made: dict[int, int]
    last_forward: dict[int, int]  # value -> the last block whose forward reads it, or the block that computes it
    backwards: dict[int, set[int]]  # value -> the blocks whose backward reads it


def _reach(graph: StepGraph, forward: Sequence[int], backward: Mapping[int, int]) -> _Reach:
    made = {v.index: forward[v.producer] for v in graph.values if v.producer is not None and _is_forward(v)}
    last_forward, backwards = dict(made), {value: set[int]() for value in made}
    for op in graph.forward_ops:
        for value in made.keys() & op.again_reads:
            last_forward[value] = max(last_forward[value], forward[op.index])
    for op in graph.backward_ops:
        for value in made.keys() & op.reads:
            backwards[value].add(backward[op.index])
    return _Reach(made, last_forward, backwards)


def _held(graph: StepGraph, reach: _Reach) -> frozenset[int]:
    """Return the values that are kept from their forward to their last use whatever the plan, and are in no boundary.

    These are outputs that the caller holds; values that ops read only in their first execution; values that several
    blocks read and that depend on no trained input, such as masks; and, rarely, values that the backward of a block
    reads although they do not reach its forward.
    """
    held = graph.pinned & reach.made.keys()
    held |= {v for op in graph.forward_ops for v in op.reads if v in reach.made and v not in op.again_reads}
    for value, made in reach.made.items():
        producer = graph.values[value].producer
        assert producer is not None
        last, backwards = reach.last_forward[value], reach.backwards[value]
        crosses = last > made or backwards - {made}
        if (graph.ops[producer].anchored and crosses) or any(
            not made <= block <= last for block in backwards
        ):
            held |= {value}
    return frozenset(held)


def _block(
    number: int,
    graph: StepGraph,
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


def _is_forward(value: Value) -> bool:
    return value.origin is Origin.FORWARD


def _forward_blocks(graph: StepGraph, ends: Sequence[int]) -> list[int]:
    blocks, number = [], 0
    for index in range(graph.forward_count):
        blocks.append(number)
        if index == ends[number]:
            number += 1
    return blocks


def assign_backward(graph: StepGraph, block_of_op: Sequence[int], count: int) -> dict[int, int]:
    """Assign every backward op to a block: that of the forward op with its sequence number, as far as dataflow allows.

    A backward op must run after the ops that compute the gradients it reads, and while the forward values that
    it reads are stored: in their own block, or in a block that reads them. Random ops keep their order.
    """
    by_sequence: dict[int, int] = {}
    last_reader: dict[int, int] = {}
    for op in graph.forward_ops:
        block = block_of_op[op.index]
        number = op.sequence
        if number is not None and not op.anchored:
            by_sequence[number] = max(block, by_sequence.get(number, 0))
        for value in (*op.reads, *op.writes):
            last_reader[value] = max(block, last_reader.get(value, 0))
    placed: dict[int, int] = {}
    drawn = count - 1  # block of the latest random op; backwards run from the last block to the first
    for op in graph.backward_ops:
        gradients = [graph.values[value].producer for value in op.reads]
        before = [placed[producer] for producer in gradients if producer in placed]
        stored = [
            last_reader[v] for v in op.reads if graph.values[v].origin is Origin.FORWARD and v in last_reader
        ]
        wanted = None if op.sequence is None else by_sequence.get(op.sequence)
        if wanted is None or (len(before) > 1 and op.target == "aten.add.Tensor"):
            # the sequence number of a sum of gradients may be that of another op, so it is ignored
            wanted = min(before, default=count - 1)
        placed[op.index] = min([wanted, *before, *stored])
        if op.random:
            placed[op.index] = drawn = min(placed[op.index], drawn)
    _pull_to_users(graph, placed)
    return placed


def _pull_to_users(graph: StepGraph, placed: dict[int, int]) -> None:
    """Move backward ops that read no gradient to the block of their first reader.

    They compute masks, for example, or unpack weights that are stored in 4 bits, in one op or in several.
    """
    users: dict[int, list[int]] = {}
    unpacked = {value.index for value in graph.values if value.origin is Origin.PRIMAL}  # or computed from such alone
    for op in graph.backward_ops:
        for value in op.reads:
            users.setdefault(value, []).append(op.index)
        if not op.random and unpacked.issuperset(op.reads):
            unpacked.update(op.writes)
    for op in reversed(graph.backward_ops):
        gradients = [v for v in op.reads if graph.values[v].origin in (Origin.BACKWARD, Origin.TANGENT)]
        first = [placed[user] for value in op.writes for user in users.get(value, [])]
        if first and not op.random and unpacked.issuperset(gradients):
            placed[op.index] = min(placed[op.index], max(first))
