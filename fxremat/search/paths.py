"""Choose a program for every graph call of a step, for a model that consists of several graphs, within one budget.

A path is the sequence of graphs that a step calls. The known paths form a tree, in which each node is a call
and its children are the calls that came next in some step. Memory that belongs to no call (inputs, outputs, ops
between the graphs, the loss, gradients) was measured, and is the same under any plan. Let S be the bytes that
the earlier calls of the step have saved. Then a program p of a node fits if

    ahead                                               <= mem      before the first call
    S + before + p.forward                              <= mem      while its forward runs
    S + p.saved + max(after, back + p.backward)         <= mem      between its forward and its backward, and in that
    S + behind                                          <= mem      until the next backward begins

(and p.copies is added in the backward if a gradient arrives with other strides than were traced). The expected
seconds of a node and of all calls after it are

    T(node, S) = min over p that fits:  p.time + sum over children c of share(c) * T(c, S + p.saved)

where share(c) is the fraction of steps that continue with c. `plan` solves this from the leaves to the root,
with S rounded up to one of `LEVELS` levels: no plan exceeds the budget, and none is worse than the best by more
than the rounding. O(nodes * programs * LEVELS), some milliseconds for 26 nodes. A node's program does not depend
on what follows, since which path a step takes is not known yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxremat.search.call_programs import CallProgram, least_of

LEVELS = 4000  # number of levels to which the saved bytes are rounded
MOST_NODES = 1000  # largest number of nodes of a tree; above it, calls that few steps made are forgotten
NONE = -1  # index that means: no program fits
NEVER = 1e9  # seconds; longer than any step takes
CHEAPEST, DEAREST = 1e-13, 1e-6  # lowest and highest price of a byte on the host, in seconds
NUMBER = 8  # bytes of a number that autograd keeps, such as the gradient with which a backward begins
PRICES = 12  # number of prices that are tried

Programs = Sequence[CallProgram]


@dataclass(eq=False)
class Node:
    """A graph call in the tree of known sequences of calls; bytes are above those at the beginning of the step.

    The numbers do not include what calls have saved, except in `held`. Unknown numbers are 0.
    """

    graph: Any  # the graph that is called; None for the root, which is the beginning of the step
    size_class: int | None = None  # the class of its sizes, if calls of other sizes are other nodes
    programs: Programs = ()  # ways to run the graph, at the largest sizes of its calls
    keep_all: CallProgram | None = None  # the one that recomputes nothing; None: the fastest of `programs`
    outputs: Mapping[int, int] = field(default_factory=dict)  # bytes of each output that the graph allocates, by value
    gradients: int = 0  # total bytes of the gradients that the backward of this graph call returns
    inputs: Mapping[int, int] = field(default_factory=dict)  # bytes of each input, by value
    children: dict[Any, Node] = field(default_factory=dict)
    count: int = 0  # number of steps that made this call
    ahead: int = 0  # most bytes allocated from the beginning of the step to this call, if it is the first one
    before: int = 0  # bytes allocated when the forward of this graph call begins
    # most bytes allocated from the end of this call's forward to the next call's forward, or to the first backward
    after: int = 0
    back: int = 0  # bytes allocated when this call's backward begins, with the gradients of its outputs
    behind: int = 0  # most bytes allocated from the end of this call's backward to the next backward, or to the end
    # inputs that only this call keeps alive when its backward begins; None: unknown
    freed: frozenset[int] | None = None
    shared: int = 0  # bytes of the gradients of this call's outputs that others keep alive until its backward has ended
    excess: int = 0  # most bytes that this call's backward was measured to allocate beyond all that is known of it
    strided: bool = False  # True if a gradient of this call's outputs arrived with other strides than were traced
    expected: int = 0  # bytes of parameter gradients assumed to be there when the backward of an unmeasured call begins
    measured: bool = False  # False: the numbers are assumptions, and no step has measured them yet
    # outputs of this call that were alive when its backward began; the measured bytes include them
    held: frozenset[int] = frozenset()
    # those of them that others free before its backward begins; `back` does not include them
    early: frozenset[int] = frozenset()
    # gradients that this call's backward adds to sums which backwards of later calls have begun
    added: frozenset[int] = frozenset()
    idle: bool | None = None  # True if this call's backward did not run in any step; None: unknown
    # for each level of bytes saved by earlier calls, the index of the chosen program
    policy: NDArray[np.int64] | None = None

    @property
    def choices(self) -> Programs:
        """The programs to choose from, fastest first.

        If the backward does not run, only the one that saves least, and copies nothing to the host.
        """
        return [least_of(program for program in self.programs if not program.hosted)] if self.idle else self.programs

    @property
    def everything(self) -> CallProgram:
        """The program that recomputes nothing; if the backward does not run, the one that saves least."""
        return self.choices[0] if self.idle or self.keep_all is None else self.keep_all

    def saved(self, program: CallProgram) -> int:
        """Return the bytes that a program saves for the backward, without outputs that the measured bytes include."""
        return kept(program, self.outputs, self.held)

    def highest(self, program: CallProgram) -> int:
        """Return the peak from the beginning of this call to the end of its backward, above what earlier calls saved.
        """
        return max(self.heights(program).values())

    def heights(self, program: CallProgram) -> dict[str, int]:
        """Return the peaks of the parts of `highest`: "ahead" of it, "forward", "after" it, "backward", "behind" it."""
        own = self.saved(program)
        found = {"ahead": self.ahead} if self.ahead else {}
        found |= {"forward": self.before + program.forward, "after": own + self.after}
        if not self.idle:
            kept_alone = self._bytes(program.outputs & self.early)
            found |= {"backward": own + kept_alone + self.back + self.backward(program), "behind": self.behind}
        return found

    def backward(self, program: CallProgram, added: frozenset[int] | None = None) -> int:
        """Return the bytes that the backward of a program allocates, less the inputs that are freed when it begins.

        Gradients of outputs are freed after their last use, unless others hold them.

        Args:
            added: the gradients that it adds to sums as they are computed; None: those of `added`.
        """
        freed = sum(self.inputs.get(value, 0) for value in (self.freed or frozenset()) - program.inputs)
        if self.strided:
            made = program.backward + program.copies + self.shared
        else:
            added = self.added if added is None else added
            made = program.backward_adding(added) + self.shared
            if self.shared:
                made = min(made, program.backward_adding(added, holding=True) + NUMBER)
        return max(0, made - freed) + self.excess

    def chosen(self, saved: int, mem: int) -> int | None:
        """Return the index of the program planned for `mem` bytes if earlier calls saved `saved` bytes; None: no plan.
        """
        if self.policy is None:
            return None
        level = _level(saved, mem)
        number = int(self.policy[level]) if level <= LEVELS else NONE
        return None if number == NONE else number

    def assume(self, level: int | None, saved: int, last: Node | None) -> None:
        """Raise the numbers of an unmeasured call to likely ones, when its forward begins.

        Args:
            level: bytes that are alive now; None: not known.
            saved: bytes that the earlier calls of the step have saved.
            last: the call before this one, if there is one.
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

    def hold(self, alive: frozenset[int], early: frozenset[int]) -> int:
        """Record which outputs of this call others keep alive in a measured step, whose bytes contain them already.

        Args:
            alive: those that are alive when its backward begins.
            early: those that others had freed by then.

        Returns:
            the bytes of those alive that `back` is not to contain.
        """
        self.back -= self._bytes(early & self.held - self.early)
        self.early |= early
        self.held |= alive | early
        return self._bytes(alive & self.early)

    def _bytes(self, outputs: frozenset[int]) -> int:
        return sum(self.outputs.get(value, 0) for value in outputs)

    def add(self, added: frozenset[int]) -> bool:
        """Record which gradients this call's backward added to sums in a step; tell whether they were fewer than known.
        """
        before, self.added = self.added, self.added & added if self.measured else added
        return not before <= self.added

    def free(self, dead: frozenset[int]) -> None:
        """Record which inputs of this call nothing kept alive after its backward in a measured step."""
        self.freed = dead if self.freed is None else self.freed & dead

    def walk(self) -> Iterator[Node]:
        """Yield this node and its descendants, parents before children."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def paths(self) -> Iterator[tuple[Node, ...]]:
        """Yield each known path, that is the sequence of graph calls of some step."""
        stack: list[tuple[Node, ...]] = [(child,) for child in self.children.values()]
        while stack:
            path = stack.pop()
            ended = path[-1].count - sum(child.count for child in path[-1].children.values())
            if ended > 0 or not path[-1].children:
                yield path
            stack += [(*path, child) for child in path[-1].children.values()]


def kept(program: CallProgram, outputs: Mapping[int, int], held: frozenset[int]) -> int:
    """Return the bytes that a program saves for its backward.

    Args:
        outputs: bytes of each output that the graph allocates, by value.
        held: outputs that the caller keeps alive until the backward; they do not count.
    """
    return program.saved + sum(outputs.get(value, 0) for value in program.outputs - held)


def _level(saved: int, mem: int) -> int:
    return -(-max(0, saved) * LEVELS // max(1, mem))


class _Choice(NamedTuple):
    """A program that a call may run, as numbers."""

    number: int  # its index among the node's programs
    time: float
    saved: int
    highest: int
    hosted: int


Choices = dict[Node, list[_Choice]]


def _choices(node: Node, known: Choices) -> list[_Choice]:
    """Return the choices of a node in numbers, and store them in `known`, for other budgets."""
    if node not in known:
        places = {id(program): place for place, program in enumerate(node.programs)}
        known[node] = [
            _Choice(places[id(p)], p.time, node.saved(p), node.highest(p), p.hosted) for p in node.choices
        ]
    return known[node]


def plan(root: Node, mem: int, price: float = 0.0, known: Choices | None = None) -> float:
    """Choose a program for each graph call and each level of bytes saved before it; return expected seconds of a step.

    The choice is stored in `policy` of each node. If the result is `NEVER` or more, no programs fit into `mem`
    bytes on some path; programs are then still chosen for the other paths. Bytes are rounded up, except if the
    fastest program of each call fits, or only the one that saves least.

    Args:
        price: seconds to add for each byte that a program copies to the host.
        known: choices of the same nodes in numbers, from plans for other budgets.
    """
    known = {} if known is None else known
    if price:
        return _searched(root, mem, price, known)
    if (seconds := _chosen(root, mem, lambda programs: programs[0])) < NEVER:
        return seconds
    if (seconds := _searched(root, mem, 0.0, known)) < NEVER:
        return seconds
    return min(seconds, _chosen(root, mem, least_of))


def plan_within(root: Node, mem: int, host_mem: int | None, known: Choices | None = None) -> float:
    """Choose programs as `plan` does, with at most `host_mem` bytes on the host on each known path; None: no limit.

    Bytes on the host get a price, which is bisected (Lagrangian relaxation). O(`PRICES`) plans.

    Args:
        known: choices of the same nodes in numbers, from plans for other budgets.
    """
    known = {} if known is None else known
    seconds = plan(root, mem, known=known)
    if host_mem is None or most_hosted(root, mem) <= host_mem:
        return seconds
    low, high = CHEAPEST, DEAREST
    for _ in range(PRICES):
        middle = (low * high) ** 0.5
        plan(root, mem, middle, known)
        low, high = (low, middle) if most_hosted(root, mem) <= host_mem else (middle, high)
    seconds = plan(root, mem, high, known)
    return seconds if most_hosted(root, mem) <= host_mem else plan(root, mem, np.inf, known)


def _chosen(root: Node, mem: int, of: Callable[[Programs], CallProgram]) -> float:
    """Choose the program `of(programs)` for every call if that fits on all paths; return expected seconds of a step.

    If they do not fit, return `NEVER` and choose nothing.
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


def _searched(root: Node, mem: int, price: float, known: Choices) -> float:
    """Choose programs by the dynamic program that this module describes; return the expected seconds of a step."""
    expected: dict[int, NDArray[np.float64]] = {}
    for node in reversed(list(root.walk())):
        below = np.zeros(LEVELS + 1)
        total = sum(child.count for child in node.children.values())
        for child in node.children.values():
            seconds = expected.pop(id(child))
            below += child.count / total * np.where(seconds < NEVER, seconds, NEVER * total)
        if node.graph is not None:
            below = _choose(node, _choices(node, known), below, mem, price)
        expected[id(node)] = below
    return float(expected[id(root)][0])


def _choose(
    node: Node, choices: Sequence[_Choice], below: NDArray[np.float64], mem: int, price: float
) -> NDArray[np.float64]:
    """Choose a node's program for each level of saved bytes; return the expected seconds from this call on, by level.

    Args:
        below: the expected seconds of the calls after it, by the level of bytes saved until then.
        price: seconds to add for each byte that a program copies to the host.
    """
    best = np.full(LEVELS + 1, np.inf)
    node.policy = np.full(LEVELS + 1, NONE)
    for choice in choices:
        more = _level(choice.saved, mem)
        # the levels of bytes saved before it with which it fits: from 0 on, and as many as the calls after it know
        fitting = min((mem - choice.highest) * LEVELS // mem, LEVELS - more) + 1
        if fitting <= 0:
            continue
        paid = price * choice.hosted if choice.hosted else 0.0
        seconds = below[more : more + fitting] + (choice.time + paid)
        better = seconds < best[:fitting]
        np.copyto(best[:fitting], seconds, where=better)
        node.policy[:fitting][better] = choice.number
    return best


@dataclass(frozen=True, kw_only=True)
class Path:
    """A sequence of graph calls, with the program that is planned for each."""

    nodes: tuple[Node, ...]
    programs: tuple[CallProgram, ...]
    saved: tuple[int, ...]  # bytes that each call saves for its backward
    peak: int  # peak bytes of the sequence of calls

    @property
    def time(self) -> float:
        """The predicted seconds of all calls."""
        return sum(program.time for program in self.programs)


def planned(nodes: Sequence[Node], mem: int) -> Path | None:
    """Return a sequence of graph calls with the programs of the plan for `mem` bytes; None if one has no program."""
    programs, total = [], 0
    for node in nodes:
        number = node.chosen(total, mem)
        if number is None:
            return None
        programs.append(node.programs[number])
        total += node.saved(programs[-1])
    return with_programs(nodes, programs)


def with_programs(nodes: Sequence[Node], programs: Sequence[CallProgram]) -> Path:
    """Return a sequence of graph calls with these programs, and its peak."""
    total = peak = 0
    saved = []
    for node, program in zip(nodes, programs, strict=True):
        peak = max(peak, total + node.highest(program))
        saved.append(node.saved(program))
        total += saved[-1]
    return Path(nodes=tuple(nodes), programs=tuple(programs), saved=tuple(saved), peak=peak)


def most_hosted(root: Node, mem: int) -> int:
    """Return the most bytes that the plan for `mem` bytes copies to the host on any known path."""
    found = (planned(nodes, mem) for nodes in root.paths())
    return max((sum(p.hosted for p in path.programs) for path in found if path is not None), default=0)


def keep_all(root: Node) -> int:
    """Return the largest peak in bytes over all known paths if nothing is recomputed; 0 without paths."""
    return max((with_programs(path, [n.everything for n in path]).peak for path in root.paths()), default=0)


def least(root: Node, host_mem: int | None = None) -> int:
    """Return the least budget in bytes with which a plan exists for every known path. O(log(bytes)) plans.

    Args:
        host_mem: bytes that may be on the host. None: no limit.
    """
    enough = max((with_programs(path, [least_of(n.choices) for n in path]).peak for path in root.paths()), default=1)
    policies = [(node, node.policy) for node in root.walk()]
    low, high, known = 0, max(1, min(enough, keep_all(root))), Choices()
    while high - low > max(1, high // (4 * LEVELS)):
        middle = (low + high) // 2
        low, high = (low, middle) if plan_within(root, middle, host_mem, known) < NEVER else (middle, high)
    for node, policy in policies:
        node.policy = policy
    return high


@dataclass(frozen=True, kw_only=True)
class Tightest:
    """The moment at which memory is largest, among all known paths."""

    path: Path
    place: int  # index of the call
    phase: str  # "ahead" of it, "forward", "after" it, "backward" or "behind" it, as in `Node.heights`

    @property
    def earlier(self) -> int:
        """Bytes that the earlier calls have saved."""
        return sum(self.path.saved[: self.place])


def tightest(root: Node, mem: int) -> Tightest | None:
    """Return the moment at which memory is largest if all paths run by the plan for `mem` bytes; None if none fits."""
    policies = [(node, node.policy) for node in root.walk()]
    plan(root, mem)
    found = [path for nodes in root.paths() if (path := planned(nodes, mem)) is not None]
    for node, policy in policies:
        node.policy = policy
    if not found:
        return None
    path = max(found, key=lambda path: path.peak)
    moments = (
        Tightest(path=path, place=place, phase=phase)
        for place, (node, program) in enumerate(zip(path.nodes, path.programs, strict=True))
        for phase in node.heights(program)
    )
    return max(moments, key=lambda m: m.earlier + path.nodes[m.place].heights(path.programs[m.place])[m.phase])


def forget(root: Node, most: int = MOST_NODES) -> bool:
    """Remove calls that few steps made until the tree has at most `most` nodes, by halving all counts.

    Returns:
        whether the tree had more.
    """
    had_more = False
    while sum(1 for _ in root.walk()) > most:
        had_more = True
        for node in list(root.walk()):
            for graph, child in list(node.children.items()):
                child.count //= 2
                if not child.count:
                    del node.children[graph]
    return had_more
