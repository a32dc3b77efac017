"""The exact memory of a program: a value is allocated by the step that writes it, and freed after its last reader.

    memory during step i = bytes alive + bytes that step i writes + workspace of its op

A storage counts once, however many views share it. Parameters and inputs do not count; values that the caller
holds stay until the end. With measured workspaces this reproduces the peak of PyTorch's allocator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from fxremat.step.program import Program, Role, Step, Transfer
from fxremat.step.step_graph import Origin


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes that a step allocates on the device: for each value, for each op, and for the loss."""

    values: Sequence[int]  # bytes of each value, by the value's index
    workspace: Sequence[
        int
    ]  # workspace: bytes that each op needs besides its inputs and outputs; negative if an output overwrites an input
    seed: int = 0  # bytes of one saved state of the random generator
    # bytes between forward and backward for a loss outside the model, with the gradients that it passes in
    outside: int = 0
    # bytes that a loss outside the model keeps during the backward, with the gradient that its own backward
    # starts from; where the model returns its loss, of numbers that a program may make of it, such as a scaled loss
    root: int = 0
    unsplit: int = 0  # bytes added to each size above this number: how much of a block the allocator may leave unused

    @property
    def of_loss(self) -> int:
        """Bytes that a loss outside the model allocates, or what a program makes of one that the model returns."""
        return self.outside or self.root


@dataclass(frozen=True)
class Memory:
    """Bytes above the level at the start of the step: `during[i]` in step i, `at_split` between forward and backward.
    """

    during: tuple[int, ...]
    at_split: int
    end: int  # bytes after the last step

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
    """Replay the allocations of a program, and return the bytes that are allocated during each step. O(steps).

    Args:
        at_hand: bytes of the versions that exist before the first step, for a part of a step; None: an entire step.
        kept: numbers of values that stay alive to the end, besides those that the step returns.
    """
    changes = _changes(program, sizes, at_hand, kept)
    live, during, split_bytes = changes.start, [], changes.start
    for position, step in enumerate(program.steps):
        if position == program.split:
            split_bytes = live + max(changes.dropped + sizes.of_loss, changes.tangents)
            live += changes.tangents
        live += changes.born[position]
        during.append(live + (step.workspace if isinstance(step, Transfer) else sizes.workspace[step.op]))
        live -= changes.freed[position]
    if at_hand is None and program.split == len(program.steps):  # there are no backward ops
        split_bytes = live + max(changes.dropped + sizes.of_loss, changes.tangents)
    return Memory(tuple(during), split_bytes, live)


@dataclass(frozen=True)
class _Changes:
    """Bytes that are allocated before each step of a program, and freed after it."""

    start: int
    tangents: int  # bytes that the caller allocates between forward and backward, for gradients and a loss
    dropped: int  # bytes of outputs that it drops before the backward, and that the backward does not read
    born: list[int]  # bytes allocated before each step
    freed: list[int]  # bytes freed after each step


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
    found = lives(program, sizes, at_hand, kept, whole=whole)
    for last, size in found:
        if 0 <= last < len(steps):
            freed[last] += size
    for first, last in seed_lives(program).values() if sizes.seed else ():
        born[first] += sizes.seed
        freed[last] += sizes.seed
    graph = program.layout.graph
    tangents = [sizes.values[tangent] for tangent in graph.tangent_values]
    start = sum(at_hand.values()) + sum(sizes.values[primal] for primal in program.preserved)
    start += program.resident
    outputs = (found[program.first[value]] for value in graph.dropped_outputs if value in program.first)
    dropped = sum(size for last, size in outputs if last < program.split) if whole else 0
    return _Changes(start, sum(tangents) + sizes.root if whole else 0, dropped, born, freed)


def last_uses(steps: Sequence[Step | Transfer], versions: int) -> list[int]:
    """Return for each version the index of the last of these steps that reads or writes it; -1: none does. O(steps)."""
    last = [-1] * versions
    for position, step in enumerate(steps):
        for version in (*step.reads, *step.writes):
            last[version] = position
    return last


def retained_peak(program: Program, sizes: Sizes, retained: int) -> int:
    """Return the peak in bytes of a step whose backward runs several times. O(steps).

    While more of them are to come, autograd keeps what the forward saved for it; gradients of the first stay.

    Args:
        retained: how many of them keep the graph, which the last may do, too; 0: there is one, which does not.
    """
    alone = live_bytes(program, sizes)
    if not retained:
        return alone.peak
    graph, last = program.layout.graph, last_uses(program.steps, len(program.version_of))
    forward = (version for step in program.steps[: program.split] for version in step.writes)
    saved = [program.version_of[version] for version in forward if last[version] >= program.split]
    keeping = live_bytes(program, sizes, kept=saved)
    gradients = sum(sizes.values[value] for value in graph.returned)
    later = (keeping if retained > 1 else alone).during[program.split :]
    return max(keeping.peak, gradients + max(later, default=0))


def lives(
    program: Program,
    sizes: Sizes,
    at_hand: Mapping[int, int] = MappingProxyType({}),
    kept: Iterable[int] = (),
    *,
    whole: bool = True,
) -> list[tuple[int, int]]:
    """Return (index of the last step that uses it, bytes) for each version, which is the result of one execution.

    Index -1: never used; len(steps): alive at the end. Arguments are those of `live_bytes`; `whole` is True for
    an entire step.
    """
    graph, forever = program.layout.graph, len(program.steps)
    last = last_uses(program.steps, len(program.version_of))
    # new values of buffers are copied over the old ones after the forward, then freed; so may outputs be
    for value in graph.freed_at_split:
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
    """Return for each random op that runs more than once the indices of its first and its last execution.

    The state of the random generator is saved from the first to the last.
    """
    ops = program.layout.graph.ops
    random = {op for op in program.repeated if ops[op].random}
    lives: dict[int, tuple[int, int]] = {}
    for position, step in enumerate(program.steps):
        if step.op is not None and step.op in random and step.role is not Role.BACKWARD:
            lives[step.op] = (lives.get(step.op, (position, 0))[0], position)
    return lives
