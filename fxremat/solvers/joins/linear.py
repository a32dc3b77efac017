"""Treats a join as one chain: its branches one after another, then the trunk.

Tensors that would cross from one branch to another count as memory in use all the time instead: the inputs of
branches that have not started, and the outputs of branches that have ended.

    backwards of the trunk     use the output and the input of every branch
    backwards of branch k      use the gradients of the outputs of the branches before it, and their inputs

The boundary between two branches has no size; the gradient of a branch's input is kept like a weight gradient.

The chain needs at least as much memory as the join for most schedules, not for all, and often too much: so
schedules for several budgets are tried, and simulated on the join.
"""

from collections.abc import Sequence
from dataclasses import replace

from fxremat.chains.chain import Block, Chain, Join
from fxremat.chains.join_schedule import JoinOp, JoinSchedule, Loss, On
from fxremat.chains.schedule import Backward, Drop, Forward, Keep, Op, Schedule, Value


def chain_of(join: Join, order: Sequence[int]) -> Chain:
    """Return the join as one chain, with its branches in this order (indices from 0)."""
    branches = [join.branches[k] for k in order]
    ends = [branch.blocks[-1] for branch in branches]
    blocks: list[Block] = []
    for k, branch in enumerate(branches):
        inputs = sum(other.input_bytes for other in branches[1 : k + 1])
        held = inputs + sum(end.grad_bytes for end in ends[:k])
        crossing = k + 1 < len(branches)
        for number, block in enumerate(branch.blocks, start=1):
            changes: dict[str, int] = {"held_bytes": block.held_bytes + held}
            if number == len(branch) and crossing:
                changes |= {
                    "output_bytes": 0,
                    "forward_scratch": block.forward_scratch + block.output_bytes,
                }
            if number == 1 and k:
                changes["weight_grad_bytes"] = block.weight_grad_bytes + branch.input_grad_bytes
            blocks.append(replace(block, **changes))  # type: ignore[arg-type]
    if join.trunk is not None:
        held = sum(branch.input_bytes for branch in branches[1:])
        held += sum(end.output_bytes for end in ends[:-1]) + sum(end.held_bytes for end in ends)
        blocks += [replace(block, held_bytes=block.held_bytes + held) for block in join.trunk.blocks]
    return Chain(
        blocks=tuple(blocks),
        input_bytes=branches[0].input_bytes,
        input_grad_bytes=branches[0].input_grad_bytes,
    )


def translated(join: Join, order: Sequence[int], schedule: Schedule) -> JoinSchedule:
    """Translate the schedule of `chain_of(join, order)` to one of the join."""
    places = [(k + 1, block) for k in order for block in range(1, len(join.branches[k]) + 1)]
    turn = len(places)
    places += [(0, block) for block in range(1, len(join.trunk) + 1)] if join.trunk else []
    ops: list[JoinOp] = []
    turned = False
    for op in schedule.ops:
        if join.trunk is None and not turned and isinstance(op, Backward):
            ops.append(Loss())
            turned = True
        ops += _translate(op, places, turn, join)
    return JoinSchedule(tuple(ops))


def _translate(op: Op, places: list[tuple[int, int]], turn: int, join: Join) -> list[JoinOp]:
    """Translate one op of the chain to ops of the join."""
    match op:
        case Forward(number, Keep.NONE):
            branch, block = places[number - 1]
            if block > 1:
                return [On(branch, Forward(block, Keep.NONE))]
            read: list[JoinOp] = [On(branch, Forward(1, Keep.CHECKPOINT))]
            if branch == 0:  # branch 0 (the trunk) reads all branch outputs; only the last one can be freed then
                last, end = places[turn - 1]
                read.append(On(last, Drop(Value("a", end))))
            return read
        case Forward(number, keep, option):
            branch, block = places[number - 1]
            return [On(branch, Forward(block, keep, option))]
        case Backward(number):
            branch, block = places[number - 1]
            return [On(branch, Backward(block))]
        case Drop(Value(kind, number)) if number:
            branch, block = places[number - 1]
            crossing = block == len(join.branches[branch - 1]) and number != turn if branch else False
            return [] if kind == "a" and crossing else [On(branch, Drop(Value(kind, block)))]
    return []
