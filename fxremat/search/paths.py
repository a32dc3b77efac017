"""One program for each call of each graph in a step, on every known path through the model, within one budget.

A path is the sequence of graphs that a step calls. Known paths form a tree: a node is a call, its children are the
calls that came next in some step. What is alive at a call and belongs to no call (inputs, outputs, ops between the
graphs, the loss, gradients) is the same under any plan, and was measured. With S, the bytes that the calls before have
saved, a program p of a node fits if

    S + before + p.forward                              <= mem      while its forward runs
    S + p.saved + max(after, back + p.backward)         <= mem      between its forward and its backward, and in that
    S + behind                                          <= mem      until the next backward begins

(and p.copies more in the backward, once a gradient has come that lies otherwise in memory than was traced),

and the expected seconds of a node and all that may follow are

    T(node, S) = min over p that fits:  p.time + sum over children c of share(c) * T(c, S + p.saved)

`plan` solves this from the leaves to the root, with S in `LEVELS` steps of memory, rounded up: no plan exceeds the
budget, and none is more than the rounding worse than the best. O(nodes * programs * LEVELS), some 20 to 60 ms for 26
nodes. One program is chosen for a node whatever follows, since which path a step takes is not known yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxremat.search.call_programs import CallProgram, least_of

LEVELS = 4000  # steps of memory
MOST_NODES = 1000  # of a tree; with more, those that few steps passed are forgotten
NONE = -1  # no program fits
NEVER = 1e9  # seconds: more than any step takes

Programs = Sequence[CallProgram]


@dataclass(eq=False)
class Node:
    """A call of a graph in the tree of known paths; bytes are above those at the begin of the step.

    Of all the numbers but `held`, what the calls have saved is left out. A number that is not known yet is 0.
    """

    graph: Any  # identifies the graph that is called; None: the begin of the step
    programs: Programs = ()  # of the graph, at the largest sizes of its calls
    outputs: Mapping[int, int] = field(default_factory=dict)  # bytes of each output that the graph makes, by value
    gradients: int = 0  # bytes of the gradients that its backward returns
    inputs: Mapping[int, int] = field(default_factory=dict)  # bytes of each input, by value
    children: dict[Any, Node] = field(default_factory=dict)
    count: int = 0  # steps that passed it
    before: int = 0  # when its forward begins
    after: int = 0  # the most between its forward and the next call, or the begin of the backward
    back: int = 0  # when its backward begins, the gradients of its outputs included
    behind: int = 0  # the most between its backward and the next one, or the end of the backward
    freed: frozenset[int] | None = None  # inputs that nobody but the call holds when its backward begins; None: unknown
    shared: int = 0  # bytes of gradients of its outputs that others hold until its backward is over
    strided: bool = False  # some gradient of its outputs came otherwise laid out than was traced
    measured: bool = False  # False: the numbers are assumed ones
    held: frozenset[int] = frozenset()  # outputs that were alive when its backward began, and that the numbers count
    idle: bool | None = None  # no step has run its backward, as what it returns gets no gradient; None: unknown
    policy: NDArray[np.int64] | None = None  # the number of its program, by the level of what was saved before

    @property
    def choices(self) -> Programs:
        """The programs to choose from, fastest first: where no backward comes, only the one that saves least."""
        return [least_of(self.programs)] if self.idle else self.programs

    def saved(self, program: CallProgram) -> int:
        """Return the bytes that a program keeps to its backward, with outputs that the numbers do not count yet."""
        return kept(program, self.outputs, self.held)

    def highest(self, program: CallProgram) -> int:
        """Return the most bytes from the begin of this call to the end of its backward, above what was saved before."""
        own = self.saved(program)
        if self.idle:
            return max(self.before + program.forward, own + self.after)
        return max(
            self.before + program.forward, own + self.after, own + self.back + self.backward(program), self.behind
        )

    def backward(self, program: CallProgram) -> int:
        """Return the bytes that the backward of a program needs, less the inputs that are freed when it begins.

        A program frees the gradients of its outputs after their last use; those that others hold stay.
        """
        copies = program.copies if self.strided else 0
        freed = sum(self.inputs.get(value, 0) for value in (self.freed or frozenset()) - program.inputs)
        return max(0, program.backward + self.shared + copies - freed)

    def chosen(self, saved: int, mem: int) -> CallProgram | None:
        """Return the program that the plan for `mem` bytes has where the calls before saved so many; None: it has none.
        """
        if self.policy is None:
            return None
        level = _level(saved, mem)
        number = int(self.policy[level]) if level <= LEVELS else NONE
        return None if number == NONE else self.programs[number]

    def assume(self, level: int | None, saved: int, last: Node | None) -> None:
        """Raise the numbers, which are not measured, to ones that are likely when this call begins.

        Args:
            level: bytes that are alive now; None: that is not known.
            saved: bytes that the calls before have saved.
            last: the call before, if there is one.
        """
        made = sum(self.outputs.values())
        if level is not None:
            before = level - saved
        else:
            before = last.before + sum(last.outputs.values()) if last else 0
        self.before = max(self.before, before)
        self.after = max(self.after, self.before + made)
        self.back = max(self.back, self.before + 2 * made)
        self.behind = max(self.behind, self.before + self.gradients)

    def hold(self, alive: frozenset[int]) -> None:
        """Note outputs that are alive when its backward begins in a measured step: the numbers count them already."""
        self.held |= alive

    def free(self, dead: frozenset[int]) -> None:
        """Note inputs that nobody held after its backward in a measured step."""
        self.freed = dead if self.freed is None else self.freed & dead

    def walk(self) -> Iterator[Node]:
        """Yield this node and all below it; each before its children."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def paths(self) -> Iterator[tuple[Node, ...]]:
        """Yield each known path: the calls of a step from its first to its last."""
        stack: list[tuple[Node, ...]] = [(child,) for child in self.children.values()]
        while stack:
            path = stack.pop()
            ended = path[-1].count - sum(child.count for child in path[-1].children.values())
            if ended > 0 or not path[-1].children:
                yield path
            stack += [(*path, child) for child in path[-1].children.values()]


def kept(program: CallProgram, outputs: Mapping[int, int], held: frozenset[int]) -> int:
    """Return the bytes that a program keeps to its backward.

    Args:
        outputs: bytes of each output that the graph makes, by value.
        held: outputs that are alive until then anyhow.
    """
    return program.saved + sum(outputs.get(value, 0) for value in program.outputs - held)


def _level(saved: int, mem: int) -> int:
    return -(-max(0, saved) * LEVELS // max(1, mem))


def plan(root: Node, mem: int) -> float:
    """Choose a program for every call and every amount of memory saved before it; return the seconds expected.

    The choice is `policy` of each node. With `NEVER` seconds or more, no programs fit into `mem` bytes on some path;
    those that fit on the others are chosen nevertheless. Bytes are rounded up, but not where the fastest program of
    each call fits, or only the one that saves least does.
    """
    if (seconds := _chosen(root, mem, lambda programs: programs[0])) < NEVER:
        return seconds
    if (seconds := _searched(root, mem)) < NEVER:
        return seconds
    return min(seconds, _chosen(root, mem, least_of))


def _chosen(root: Node, mem: int, of: Callable[[Programs], CallProgram]) -> float:
    """Choose the same kind of program for all calls, if these fit on all paths; return the seconds expected.

    They are `NEVER` if these programs do not fit; nothing is chosen then.
    """
    if any(with_programs(path, [of(node.choices) for node in path]).peak > mem for path in root.paths()):
        return NEVER
    expected: dict[int, float] = {}
    for node in reversed(list(root.walk())):
        total = sum(child.count for child in node.children.values())
        seconds = sum(child.count / total * expected.pop(id(child)) for child in node.children.values())
        if node.graph is not None:
            program = of(node.choices)
            node.policy = np.full(LEVELS + 1, list(node.programs).index(program))
            seconds += program.time
        expected[id(node)] = seconds
    return expected[id(root)]


def _searched(root: Node, mem: int) -> float:
    """Choose programs by the dynamic program of this module; return the seconds expected."""
    expected: dict[int, NDArray[np.float64]] = {}
    for node in reversed(list(root.walk())):
        below = np.zeros(LEVELS + 1)
        total = sum(child.count for child in node.children.values())
        for child in node.children.values():
            seconds = expected.pop(id(child))
            below += child.count / total * np.where(seconds < NEVER, seconds, NEVER * total)
        if node.graph is not None:
            below = _choose(node, below, mem)
        expected[id(node)] = below
    return float(expected[id(root)][0])


def _choose(node: Node, below: NDArray[np.float64], mem: int) -> NDArray[np.float64]:
    """Choose the program of a node for each level; return the expected seconds from there on.

    Args:
        below: the expected seconds of what follows, by the level of what was saved until then.
    """
    unit = mem / LEVELS
    before = np.arange(LEVELS + 1) * unit
    best = np.full(LEVELS + 1, np.inf)
    node.policy = np.full(LEVELS + 1, NONE)
    for program in node.choices:
        number = node.programs.index(program)
        level = np.ceil((before + node.saved(program)) / unit - 1e-9).astype(np.int64)
        fits = (before + node.highest(program) <= mem) & (level <= LEVELS)
        seconds = np.where(fits, program.time + below[np.minimum(level, LEVELS)], np.inf)
        better = seconds < best
        best[better], node.policy[better] = seconds[better], number
    return best


@dataclass(frozen=True, kw_only=True)
class Path:
    """A path with the programs that a plan has for it."""

    nodes: tuple[Node, ...]
    programs: tuple[CallProgram, ...]
    saved: tuple[int, ...]  # bytes that each call keeps to its backward
    peak: int  # bytes

    @property
    def time(self) -> float:
        """The seconds of all calls."""
        return sum(program.time for program in self.programs)


def planned(nodes: Sequence[Node], mem: int) -> Path | None:
    """Return a path with its programs in the plan for `mem` bytes; None if the plan has none for a call of it."""
    programs, total = [], 0
    for node in nodes:
        program = node.chosen(total, mem)
        if program is None:
            return None
        programs.append(program)
        total += node.saved(program)
    return with_programs(nodes, programs)


def with_programs(nodes: Sequence[Node], programs: Sequence[CallProgram]) -> Path:
    """Return a path with these programs, and its peak."""
    total = peak = 0
    saved = []
    for node, program in zip(nodes, programs, strict=True):
        peak = max(peak, total + node.highest(program))
        saved.append(node.saved(program))
        total += saved[-1]
    return Path(nodes=tuple(nodes), programs=tuple(programs), saved=tuple(saved), peak=peak)


def keep_all(root: Node) -> int:
    """Return the largest peak in bytes of a known path, if each call runs its fastest program. 0: no path is known."""
    return max((with_programs(path, [n.choices[0] for n in path]).peak for path in root.paths()), default=0)


def least(root: Node) -> int:
    """Return the least budget in bytes with which a plan exists for every known path. O(log(bytes)) plans."""
    enough = max((with_programs(path, [least_of(n.choices) for n in path]).peak for path in root.paths()), default=1)
    policies = [(node, node.policy) for node in root.walk()]
    low, high = 0, max(1, min(enough, keep_all(root)))
    while high - low > max(1, high // (4 * LEVELS)):
        middle = (low + high) // 2
        low, high = (low, middle) if plan(root, middle) < NEVER else (middle, high)
    for node, policy in policies:
        node.policy = policy
    return high


def forget(root: Node, most: int = MOST_NODES) -> None:
    """Halve the counts of a tree until it has at most `most` nodes; those that few steps passed vanish."""
    while sum(1 for _ in root.walk()) > most:
        for node in list(root.walk()):
            for graph, child in list(node.children.items()):
                child.count //= 2
                if not child.count:
                    del node.children[graph]
