"""The exact memory of a program: allocate at the step that writes, free after the step that reads last.

    memory during step i = versions alive + what step i writes + the workspace of its op

Only storages count, which views share. Primals do not count; what the caller holds stays until the end. With measured
workspaces this reproduces the allocator's peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from fxremat.step.program import Program, Role, Transfer
from fxremat.step.step_graph import Origin


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes allocated on the device, by value and by op number."""

    values: Sequence[int]  # bytes of each value
    workspace: Sequence[
        int
    ]  # bytes that each op needs beyond what it reads and writes; < 0: an output takes the place of an input
    seed: int = 0  # bytes of one saved state of the random generator, on the device
    outside: int = 0  # between forward and backward, for a loss outside the model, with the gradients it hands in
    root: int = 0  # from there to the end: the loss outside the model, and the gradient that its backward starts from
    unsplit: int = 0  # bytes added to each size above this number: the allocator may leave so many of a block unused


@dataclass(frozen=True)
class Memory:
    """Bytes above the start of the step: `during[i]` while step i runs, `at_split` between forward and backward."""

    during: tuple[int, ...]
    at_split: int
    end: int  # after the last step

    @property
    def peak(self) -> int:
        """The largest of `during`, `at_split` and `end`."""
        return max(*self.during, self.at_split, self.end)


def live_bytes(
    program: Program,
    sizes: Sizes,
    *,
    at_hand: Mapping[int, int] | None = None,
    kept: Iterable[int] = (),
) -> Memory:
    """Replay the allocations of a program, and return the bytes that are alive during each step. O(steps).

    Args:
        at_hand: version -> bytes of what is alive before the first step (None: the program is an entire step).
        kept: values that stay alive to the end, besides what the step returns.
    """
    changes = _changes(program, sizes, at_hand, kept)
    live, during, split_bytes = changes.start, [], changes.start
    for position, step in enumerate(program.steps):
        if position == program.split:
            split_bytes = live + max(changes.tangents, sizes.outside)
            live += changes.tangents
        live += changes.born[position]
        during.append(live + (step.workspace if isinstance(step, Transfer) else sizes.workspace[step.op]))
        live -= changes.freed[position]
    if at_hand is None and program.split == len(program.steps):  # the backward has no op
        split_bytes = live + max(changes.tangents, sizes.outside)
    return Memory(tuple(during), split_bytes, live)


@dataclass(frozen=True)
class _Changes:
    """Bytes that appear before and vanish after each step."""

    start: int
    tangents: int  # bytes that the caller allocates between forward and backward: gradients to hand in, and a loss
    born: list[int]  # bytes that appear before each step
    freed: list[int]  # bytes that vanish after each step


def _changes(
    program: Program, sizes: Sizes, at_hand: Mapping[int, int] | None, kept: Iterable[int]
) -> _Changes:
    whole, at_hand = at_hand is None, at_hand or {}
    steps = program.steps
    born, freed = [0] * len(steps), [0] * len(steps)
    for position, step in enumerate(steps):
        born[position] = sum([sizes.values[program.version_of[version]] for version in step.writes])
        if isinstance(step, Transfer):
            born[position] += max(step.takes, 0)
            freed[position] += max(-step.takes, 0)
    for last, size in lives(program, sizes, at_hand, kept, whole=whole):
        if 0 <= last < len(steps):
            freed[last] += size
    for first, last in seed_lives(program).values() if sizes.seed else ():
        born[first] += sizes.seed
        freed[last] += sizes.seed
    graph = program.layout.graph
    tangents = [sizes.values[tangent] for tangent in graph.tangent_values]
    start = sum(at_hand.values()) + sum(sizes.values[primal] for primal in program.preserved)
    start += program.resident
    return _Changes(start, sum(tangents) + sizes.root if whole else 0, born, freed)


def lives(
    program: Program,
    sizes: Sizes,
    at_hand: Mapping[int, int] = MappingProxyType({}),
    kept: Iterable[int] = (),
    *,
    whole: bool = True,
) -> list[tuple[int, int]]:
    """Return (last step that uses it, bytes) for every version; -1: no step, len(steps): it is alive to the end.

    A version is a value as one step made it. Arguments are as for `live_bytes`; `whole`: it is an entire step.
    """
    graph, forever = program.layout.graph, len(program.steps)
    last = [-1] * len(program.version_of)
    for position, step in enumerate(program.steps):
        for version in (*step.reads, *step.writes):
            last[version] = position
    for value in graph.updates:  # returned by the forward, copied over its input, freed
        if value in program.first:
            last[program.first[value]] = max(last[program.first[value]], program.split - 1)
    pinned, kept = graph.pinned, set(kept)
    for value, version in program.first.items():
        if value in pinned or value in kept:
            last[version] = forever
    found = []
    for version, value in enumerate(program.version_of):
        origin = graph.values[value].origin
        if version in program.fetched:
            found.append((last[version], sizes.values[value]))
        elif version in at_hand:
            found.append((last[version], at_hand[version]))
        elif origin is Origin.TANGENT:
            ends = last[version] if last[version] >= 0 and value not in graph.held_tangents else forever
            found.append((ends, sizes.values[value] if whole else 0))
        elif origin is Origin.PRIMAL and value not in program.preserved:
            found.append((forever, 0))
        else:
            found.append((last[version], sizes.values[value]))
    return found


def seed_lives(program: Program) -> dict[int, tuple[int, int]]:
    """Return the first and last execution of each random op that runs more than once, as indices of steps.

    The state of the random generator is kept from the first to the last.
    """
    ops = program.layout.graph.ops
    random = {op for op in program.repeated if ops[op].random}
    lives: dict[int, tuple[int, int]] = {}
    for position, step in enumerate(program.steps):
        if step.op is not None and step.op in random and step.role is not Role.BACKWARD:
            lives[step.op] = (lives.get(step.op, (position, 0))[0], position)
    return lives
