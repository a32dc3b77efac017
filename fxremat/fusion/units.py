"""Cutting the steps of a program into units: groups that are compiled together (regions), and ops that run uncompiled.

    by_block           consecutive steps of one block: its forward, or its recomputation and its backward
    by_phase           the whole forward, and the whole backward
    pointwise          groups of pointwise ops, reductions and normalizations; matrix products, convolutions and
                       attention between them run uncompiled
    alone              every op by itself, uncompiled
    worth_compiling    the same units, without regions that would gain little

Values that are used only inside a unit never occupy memory, and inputs that are not needed afterwards may be
overwritten by its outputs. So a program may need less memory in units than op by op; it may need more if ops
are moved to earlier ones, which `pointwise` does only as far as the budget allows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from torch import fx

from fxremat.graphs.captured import Captured, captured_of
from fxremat.graphs.nodes import is_number, tensors_of
from fxremat.ops.decompositions import DECOMPOSITIONS
from fxremat.ops.seeded import ALWAYS_COMPILED
from fxremat.step.liveness import Sizes, live_bytes
from fxremat.step.program import Program, Step, Transfer

aten = torch.ops.aten
LARGEST = 40  # largest number of steps in a group of pointwise ops
WORTH = 4096  # an op joins a group only if they share a value of at least this many bytes
TRIES = 40  # number of attempts to lower the peak by not moving some ops


@dataclass(frozen=True)
class Unit:
    """A group of steps of a program that run together: a compiled region, or a single op."""

    steps: tuple[int, ...]  # indices of the steps in the program
    compiled: bool  # True: a region that Inductor compiles; False: one op that runs uncompiled


Units = tuple[Unit, ...]


def by_block(program: Program) -> Units:
    """Return groups of consecutive steps of the same block. O(steps)."""
    may = compilable(captured_of(program.layout.graph))

    def key(position: int) -> tuple[object, ...]:
        step = program.steps[position]
        if step.op is None or step.op not in may:
            return ("alone", position)
        return (step.block, position >= program.split)

    groups = itertools.groupby(range(len(program.steps)), key)
    return tuple(_unit(program, tuple(places), may) for _, places in groups)


def by_phase(program: Program) -> Units:
    """Return the forward and the backward as a group each, where no step stays uncompiled. O(steps).

    Steps that cannot be compiled run before a group if they read nothing of it. Behind one that reads something of it,
    the steps that depend on it are another group.
    """
    may = compilable(captured_of(program.layout.graph))
    return tuple(
        _unit(program, tuple(places), may)
        for phase in (range(program.split), range(program.split, len(program.steps)))
        for places in _around_single_steps(program, phase, may)
    )


def _around_single_steps(program: Program, phase: Iterable[int], may: Set[int]) -> list[list[int]]:
    """Group steps around those whose ops are not in `may`, which stay in their order, each in a group of its own."""
    groups: list[list[int]] = []
    region: list[int] | None = None  # the last group that is compiled
    late: list[list[int]] = []  # the groups behind it
    writer: dict[int, list[int]] = {}  # version -> the group that computes it
    for position in phase:
        step = program.steps[position]
        read = [writer[version] for version in step.reads if version in writer]
        if step.op is None or step.op not in may:
            group = [position]
            before = region is not None and not late and all(one is not region for one in read)
            groups.insert(len(groups) - before, group)
            if not before:
                late.append(group)
        else:
            if region is None or any(one is other for one in read for other in late):
                region, late = [], []
                groups.append(region)
            group = region
            group.append(position)
        writer |= dict.fromkeys(step.writes, group)
    return groups


def _unit(program: Program, steps: tuple[int, ...], may: Set[int]) -> Unit:
    """Return steps as a region, or, if it is one that need not be compiled, as a single op."""
    together = len(steps) > 1 or _must_compile(program, steps[0])
    return Unit(steps, compiled=together and all(program.steps[position].op in may for position in steps))


def alone(program: Program, positions: Iterable[int]) -> Units:
    """Return one unit for each of these steps, uncompiled unless its op exists only in compiled form."""
    return tuple(Unit((position,), compiled=_must_compile(program, position)) for position in positions)


def pointwise(program: Program, sizes: Sizes, budget: int) -> Units:
    """Group pointwise ops: each op moves to the last group that shares a large tensor with it. O(tries * steps).

    If the memory during a group would exceed the budget, ops that were moved from later positions stay where
    they are.
    """
    stay: set[int] = set()
    best: tuple[int, Units] | None = None
    for _ in range(TRIES):
        units = _grouped(program, sizes, stay)
        during = unit_bytes(program, sizes, units)
        worst = max(range(len(during)), key=during.__getitem__)
        if best is None or during[worst] < best[0]:
            best = during[worst], units
        moved = _pulled_over(units, worst) if during[worst] > budget else set()
        if not moved - stay:
            break
        stay |= moved
    assert best is not None
    return best[1]


def worth_compiling(
    program: Program, units: Units, names: Sequence[str], gain: Callable[[Sequence[int]], float], least: float
) -> Units:
    """Split regions that together gain less than `least` seconds into uncompiled ops. O(steps).

    Regions of equal ops, which are compiled once, are all split or all kept.

    Args:
        names: a name for each op, equal for ops of equal cost.
        gain: returns an upper bound on the seconds that compiling these ops together saves.
    """
    left, lost = set[Unit](), 0.0
    found = alike(program, units, names).values()
    kinds = [(sum(gain(ops_of(program, unit)) for unit in kind), kind) for kind in found]
    for gained, members in sorted(kinds, key=itemgetter(0)):
        lost += max(0.0, gained)
        if lost > least:
            break
        left.update(unit for unit in members if not any(_must_compile(program, place) for place in unit.steps))
    return tuple(one for unit in units for one in (alone(program, unit.steps) if unit in left else (unit,)))


def alike(program: Program, units: Units, names: Sequence[str]) -> dict[tuple[str, ...], list[Unit]]:
    """Group the regions by the names of their ops, since regions of equal ops are compiled once. O(steps)."""
    found: dict[tuple[str, ...], list[Unit]] = {}
    for unit in units:
        if unit.compiled:
            key = tuple(names[op] for op in ops_of(program, unit))
            found.setdefault(key, []).append(unit)
    return found


def ops_of(program: Program, unit: Unit) -> list[int]:
    """Return the ops (by number) that a unit's steps execute."""
    return [op for position in unit.steps if (op := program.steps[position].op) is not None]


def unit_bytes(program: Program, sizes: Sizes, units: Units) -> list[int]:
    """Return the bytes allocated during each group of steps, if compiled groups need no workspace. O(steps).

    The last number is the bytes between forward and backward.
    """
    memory = live_bytes(_of_units(program, units), sizes)
    return [*memory.during, memory.at_split]


def _of_units(program: Program, units: Units) -> Program:
    """Return a program with one step for each group of steps, for computing memory.

    Values that only one group reads and writes do not occur in it.
    """
    steps, joint = program.steps, program.layout.graph
    unit_of = {position: place for place, unit in enumerate(units) for position in unit.steps}
    returned = joint.pinned | joint.freed_at_split
    leaving = {version for value, version in program.first.items() if value in returned}
    inside: list[set[int]] = [{v for p in unit.steps for v in steps[p].writes} for unit in units]
    for position, step in enumerate(steps):
        leaving.update(set(step.reads) - inside[unit_of[position]])

    def merged(unit: Unit, made: set[int]) -> Step | Transfer:
        first = steps[unit.steps[0]]
        if not unit.compiled:
            return first
        reads = {version for position in unit.steps for version in steps[position].reads} - made
        return Transfer(first.block, first.role, -1, tuple(reads), tuple(made & leaving))

    split = next((place for place, unit in enumerate(units) if unit.steps[0] >= program.split), len(units))
    return replace(program, steps=tuple(map(merged, units, inside)), split=split)


def _must_compile(program: Program, position: int) -> bool:
    step = program.steps[position]
    return step.op is not None and captured_of(program.layout.graph).nodes[step.op].target in ALWAYS_COMPILED


def compilable(joint: Captured) -> frozenset[int]:
    """Return the ops that may be part of a compiled region."""
    return frozenset(op.index for op in joint.ops if not op.random and op.writes and may_compile(joint.nodes[op.index]))


def may_compile(node: fx.Node) -> bool:
    """Tell whether Inductor can compile an op: it handles dense tensors of known sizes, and does not communicate."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target in RUN_AS_THEY_ARE or node.target.namespace not in ("aten", "prims"):
        return node.target in DECOMPOSITIONS
    around = [*tensors_of(node), *(tensor for parent in node.all_input_nodes for tensor in tensors_of(parent))]
    shown = [parent.meta.get("val") for parent in node.all_input_nodes]
    dense = all(tensor is None or tensor.layout is torch.strided for tensor in around)
    plain = not any(tensor is not None and (tensor.is_conj() or tensor.is_neg()) for tensor in around)
    return dense and plain and not any(is_number(value) or value is None for value in (*shown, node.meta.get("val")))


RUN_AS_THEY_ARE = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default}


NORMALIZATIONS = """native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward
    _native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
    native_batch_norm_backward
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data"""
REDUCTIONS = """sum mean amax amin var var_mean nll_loss_forward nll_loss_backward
    nll_loss2d_forward nll_loss2d_backward max_pool2d_with_indices avg_pool2d avg_pool2d_backward"""
BACKWARDS = """gelu_backward threshold_backward silu_backward sigmoid_backward tanh_backward native_dropout_backward
    slice_backward select_backward"""
MOVES = """cat constant_pad_nd clone copy _to_copy fill full full_like zeros zeros_like ones new_zeros new_ones arange
    scalar_tensor tril triu embedding where masked_fill"""
FUSED = f"{NORMALIZATIONS} {REDUCTIONS} {BACKWARDS} {MOVES}".split()
GROUPED = frozenset(getattr(aten, name) for name in FUSED if hasattr(aten, name))


def is_pointwise(node: fx.Node) -> bool:
    """Tell whether Inductor generates code for an op, which it can fuse, instead of calling a kernel."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or target.overloadpacket in GROUPED or target in DECOMPOSITIONS


@dataclass
class _Groups:
    """Groups of steps under construction, in execution order; each list has one entry per group."""

    steps: list[list[int]]  # indices of the group's steps in the program
    fused: list[bool]  # True if other steps may join the group
    # large tensors (by number of their version, the result of one execution) that the group's steps read or
    # write
    shared: list[set[int]]

    def open(self, position: int, versions: Set[int], *, fused: bool) -> int:
        """Begin a group with the step at `position`; return the group's index."""
        self.steps.append([position])
        self.fused.append(fused)
        self.shared.append(set(versions))
        return len(self.steps) - 1


def _grouped(program: Program, sizes: Sizes, stay: Set[int]) -> Units:
    """Group the steps of a program: a pointwise step joins the last group that shares a large tensor with it.

    The group must come after the steps that compute the step's inputs. Steps in `stay` may only join the group
    just before them.
    """
    joint = captured_of(program.layout.graph)
    fusable = {index for index in compilable(joint) if is_pointwise(joint.nodes[index])}
    units: list[Unit] = []
    for part in (range(program.split), range(program.split, len(program.steps))):
        groups, writer = _Groups([], [], []), dict[int, int]()
        for position in part:
            step = program.steps[position]
            fused = step.op in fusable
            touched = (*step.reads, *step.writes)
            large = {v for v in touched if sizes.values[program.version_of[v]] >= WORTH}
            behind = max((writer[version] for version in step.reads if version in writer), default=-1)
            place = _group_to_join(groups, large, behind, near=position in stay) if fused else None
            if place is None:
                place = groups.open(position, large, fused=fused)
            else:
                groups.steps[place].append(position)
                groups.shared[place] |= large
            writer |= dict.fromkeys(step.writes, place)
        for steps, fused in zip(groups.steps, groups.fused, strict=True):
            single = len(steps) == 1 and not _must_compile(program, steps[0])
            units.append(Unit(tuple(steps), compiled=fused and not single))
    return tuple(units)


def _group_to_join(groups: _Groups, large: Set[int], behind: int, *, near: bool) -> int | None:
    """Return the last group, from index `behind` on, that shares one of the `large` values with a step; else None.

    `near`: consider only the very last group.
    """
    last = len(groups.steps) - 1
    for place in range(last, max(behind, 0, last if near else 0) - 1, -1):
        if groups.fused[place] and len(groups.steps[place]) < LARGEST and not large.isdisjoint(groups.shared[place]):
            return place
    return None


def _pulled_over(units: Units, worst: int) -> set[int]:
    """Return the steps that grouping moved into unit `worst` or an earlier one from a later position."""
    if worst == len(units):
        return set()
    begins = units[worst].steps[0]
    pulled = (position for unit in units[: worst + 1] for position in unit.steps[1:])
    return {position for position in pulled if position > begins}
