"""Plans of a model that dynamo captures as several graphs.

Each step calls a sequence of the graphs, a path. The known paths form a tree, whose nodes are calls of a graph.
What runs between calls is not planned; its memory is measured. Where sizes change, steps share nodes if the first
calls of each forward of the model need about the same bytes (`size_class`): a short step does not recompute what a long
one has to. Sizes that come for the first time run as planned for the next larger ones that are known.

    next(node, graph)       the node of the next call
    learn(numbers)          stores the bytes that were measured during a step
    renew()                 chooses programs for all calls on known paths, if something new was learned
    number(node)            the index of the program that a call is to run

`search.paths` has the memory model and the dynamic program.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch

from fxremat.budget import has_shrunk
from fxremat.cost.devices import Device
from fxremat.errors import BudgetTooSmall
from fxremat.graphs.captured import Captured
from fxremat.options import Options
from fxremat.plan_of_graphs import PlanOfGraphs
from fxremat.planned_graphs import KnownPath
from fxremat.planning.graph_programs import SizedPrograms
from fxremat.planning.limits import Limit, limit_of_paths
from fxremat.search import paths
from fxremat.search.call_programs import CallProgram, least_of
from fxremat.search.floor import op_at
from fxremat.search.paths import Node
from fxremat.step.costs import Costs
from fxremat.step.liveness import live_bytes
from fxremat.units import Auto, Least, Percent, format_bytes

log = logging.getLogger(__name__)

MOST_IN_VAIN = 5  # number of steps with incomplete measurements after which planning goes on with what is known
CLASSES = 4  # number of classes of sizes from some bytes to twice as many
PATIENCE = 16  # number of steps that are measured while sizes which run as planned for larger ones may come again
MARGIN = 0.01  # a measured number counts as grown if it grew by more than this fraction
VARYING = 0.002  # a budget that an error names has this fraction for bytes between calls that differ from step to step
BESIDE = "beside the graphs (gradients of parameters, inputs, outputs, and what Python holds)"

Numbers = dict[str, int]  # measured fields of a `Node`, by name

# the fields of a `Node` that steps have shown, and the programs that were chosen by them
_MEASURED = [
    *("ahead", "before", "after", "back", "behind", "freed", "shared", "excess", "strided", "expected", "measured"),
    *("held", "early", "added", "idle", "policy"),
]


class Graph(Protocol):
    """The part of a captured graph that is needed: its joint forward-backward graph."""

    joint: Captured
    costs: Costs


def is_smaller(at: SizedPrograms, node: Node) -> bool:
    """Tell whether the sizes of a call need less than the largest before, in its outputs or while its forward runs."""
    return any(now < most for now, most in _needs(at, node))


def _is_larger(at: SizedPrograms, node: Node) -> bool:
    """Tell whether the sizes of a call need more than the largest before, in its outputs or while its forward runs."""
    return any(now > most for now, most in _needs(at, node))


def _needs(at: SizedPrograms, node: Node) -> Iterator[tuple[int, int]]:
    """Yield bytes at the sizes of a call and at the largest before: of its outputs, and while its forward runs."""
    yield sum(at.outputs.values()), sum(node.outputs.values())
    if node.keep_all is not None:
        yield at.keep_all.forward, node.keep_all.forward


def size_class(at: SizedPrograms) -> int:
    """Return the class of the sizes of a call, by the bytes that it takes without recomputation."""
    need = at.keep_all.forward + at.keep_all.saved + sum(at.outputs.values())
    return math.ceil(CLASSES * math.log2(max(1, need)))


class _Key(NamedTuple):
    """The key of a call among those that come after the same call."""

    graph: Any
    size_class: int | None  # if it begins a forward of the model


@dataclass(eq=False)
class _Branch:
    """The known paths of steps whose first calls have sizes of one class, and what was computed of them.

    Attributes:
        root: the root of a tree of these paths alone.
        least: the least budget in bytes; None: to be computed.
        keep_all: the largest peak in bytes without recomputation; None: to be computed.
        planned_for: the budget in bytes that programs are chosen for; None: they are to be chosen again.
    """

    root: Node
    least: int | None = None
    keep_all: int | None = None
    planned_for: int | None = None

    def change(self) -> None:
        """Discard what was computed."""
        self.least = self.keep_all = self.planned_for = None


FEWER = (
    "%s runs in a step that another compiled model has begun, whose budget bounds all of it: its own, %s = %d bytes, "
    "is less than what the step takes beside it, so that it runs with its least, %d bytes"
)
NO_ROOM = (
    "%s runs in a step that another compiled model has begun, whose budget bounds all of it and has no room for its "
    "own of %s: it runs with its least %s"
)


def _largest_op(graph: Graph, program: CallProgram, phase: str) -> str:
    """Return the op at which the "forward" or "backward" of a program needs most, at the sizes of its capture."""
    steps = program.program
    costs = program.another.costs if program.another else graph.costs
    during = live_bytes(steps, replace(costs.sizes, outside=0, root=0)).during
    places = range(steps.split) if phase == "forward" else range(steps.split, len(during))
    return op_at(steps, max(places, key=during.__getitem__)) if places else "nothing"


@dataclass(frozen=True)
class WeightsOnHost:
    """Parameters that live on the host, and come to the device for each call that reads them."""

    bytes: int  # of the parameters
    held: int  # bytes of the parameters, their gradients and optimizer state, which budgets in percent include
    updates: int  # bytes on the device while the optimizer updates the parameter that needs most


def _of_no_smaller_sizes(node: Node, path: Sequence[Node]) -> Iterator[Node]:
    """Yield the last calls of paths of these graphs after `node`, at the same or larger sizes, least first."""
    if not path:
        yield node
        return
    graph, own = path[0].graph, path[0].size_class
    alike = [key for key in node.children if key.graph is graph and (key.size_class is None) == (own is None)]
    for key in sorted(alike, key=lambda key: key.size_class or 0):
        if (key.size_class or 0) >= (own or 0):
            yield from _of_no_smaller_sizes(node.children[key], path[1:])


class PathPlans:
    """The known paths (sequences of graph calls) of a model that is several graphs, and the plan for all of them.

    Attributes:
        root: the root of the tree of known paths: the beginning of a step.
        limit: the budget; None if it is a percentage, or "min", and no step has run yet.
        within: True if the steps are parts of steps that another compiled model has begun.

    Args:
        model: the name of the model's class.
        broken_at: the source line where the first graph ends.
        within: whether they are. The other one's budget bounds them, so that these are planned for their least memory
            where they do not fit into their own.
        weights: the parameters that live on the host, if any do.
    """

    def __init__(
        self,
        options: Options,
        model: str,
        broken_at: str,
        device: torch.device,
        *,
        within: bool = False,
        weights: WeightsOnHost | None = None,
    ) -> None:
        self.limit: Limit | None = None
        self._weights = weights
        self._options, self._model, self._broken_at, self._device = options, model, broken_at, device
        self._names: WeakKeyDictionary[Node, str] = WeakKeyDictionary()
        # names of functions that call graphs and run as plain Python, as an ordered set
        self._python: dict[str, None] = {}
        self._largest = 0  # bytes of the largest tensor that a known graph allocates
        self.root = Node(None)
        self._branches: dict[_Key, _Branch] = {}  # those of the root, by the graph and the class of sizes
        self._branch_of: WeakKeyDictionary[Node, _Key] = WeakKeyDictionary()
        self._awaited = WeakSet[Node]()  # calls of which no step was measured at the sizes that they are planned for
        self._borrowed = WeakSet[Node]()  # those of them with numbers of larger sizes: see `_borrow`
        self._patience = 0  # number of steps that are still measured for their sake
        self._last: tuple[Node, ...] = ()  # the sequence of calls of the last step
        # number of consecutive steps after which some bytes between graph calls were still not measured
        self._in_vain = 0
        self._plan: paths.Path | None = None  # the plan for the path of the last step
        self.planned = 0  # number of times that programs were chosen
        self.within, self._told_of_others = within, False
        self._outdated = WeakSet[Node]()  # calls measured before other compiled models had the plans that they have now
        self._stale = True
        # the most bytes of a step within another model's, if that one shares its budget; None: they are not limited
        self._most: int | None = None
        self._retreats = False  # True while the least is taken though the budget is larger: see `retreat`
        self._set_limit()

    @property
    def mem(self) -> int | None:
        """The budget in bytes; None if it is a percentage, or "min", and no step has run yet."""
        if self.limit is None:
            return None
        return self.limit.bytes if self._most is None else min(self._most, self.limit.bytes)

    @property
    def spare(self) -> int | None:
        """Bytes of the budget beside the least of the known steps; None as long as these are to be measured."""
        if not self._last or 0 < self._in_vain < MOST_IN_VAIN:
            return None
        if self.limit is None or isinstance(self._options.budget, Percent | Least):
            self._set_limit()
        return None if self.mem is None else max(0, self.mem - self._least())

    def _set_limit(self) -> None:
        if self._last or not isinstance(self._options.budget, Percent | Least):
            self.limit = limit_of_paths(self._options, self._device, self._largest, self._everything, self._least)
            if self._weights and self.limit.bytes < self._weights.updates:
                error = BudgetTooSmall(minimum=self._weights.updates, budget=self.limit.bytes)
                raise self.limit.explained(error, "optimizer.step() updates the largest parameter")


    def next(
        self, node: Node, graph: Graph, at: SizedPrograms, before: Callable[[], Sequence[Node]], *, begins: bool
    ) -> tuple[Node, bool]:
        """Return the node for a call of `graph` after the call `node`, and whether the next steps are to be measured.

        Args:
            at: the graph's programs at the input sizes of the call.
            before: returns the calls of the step so far, of which `node` is the last.
            begins: whether the call is the first of a forward of the model.
        """
        # a model whose step this one is within expects that smaller sizes take less, and not all that a plan may take
        key = _Key(graph, size_class(at) if begins and not self.within else None)
        begun = self._branch_of.get(node, key)
        found = node.children.get(key)
        if found is None:
            found = node.children[key] = Node(*key)
            self._branch_of[found] = begun
        if node is self.root and begun not in self._branches:
            self._branches[begun] = _Branch(Node(None, children={begun: found}))
        found.count += 1
        if is_larger := not found.programs or _is_larger(at, found):
            self._change(found)
            if (known := self._of_larger_sizes([*before(), found], at)) is not None:
                self._borrow(found, known)
            else:
                found.policy, found.measured = None, False
                self._borrowed.discard(found)
                self._awaited.discard(found)
            if at.largest > self._largest:
                self._largest = at.largest
                if isinstance(self._options.budget, Auto):
                    self._set_limit()
        if is_larger or found in self._borrowed:
            found.programs, found.outputs, found.gradients = at.programs, at.outputs, at.gradients
            found.inputs, found.keep_all = at.inputs, at.keep_all
        if comes_again := found in self._borrowed and not found.count & (found.count - 1):
            self._patience = PATIENCE
        return found, is_larger or comes_again

    def _of_larger_sizes(self, path: Sequence[Node], at: SizedPrograms) -> Node | None:
        """Return the last call of a path in steps of the next larger sizes that are planned; None: there are none."""
        for found in _of_no_smaller_sizes(self.root, path):
            if found is not path[-1] and found.policy is not None and found.measured and not _is_larger(at, found):
                return found
        return None

    def _borrow(self, node: Node, known: Node) -> None:
        """Run a call as it is planned for larger sizes, with the bytes that were measured there, until it is measured.
        """
        for name in _MEASURED:
            setattr(node, name, getattr(known, name))
        self._borrowed.add(node)
        self._awaited.add(node)
        self._outdated.add(node)

    @property
    def awaits_sizes(self) -> bool:
        """True if the next step is to be measured, as sizes may come again for which numbers are too large."""
        return bool(self._awaited) and self._patience > 0

    def _change(self, node: Node) -> None:
        """Record that something new is known of a call, so that its paths are planned anew."""
        self._stale = True
        if (branch := self._branches.get(self._branch_of[node])) is not None:
            branch.change()

    def name(self, node: Node, name: str, python: Iterable[str] = ()) -> None:
        """Store the name of a call, for reports.

        Args:
            python: functions that contain the call and run as plain Python.
        """
        self._names[node] = name
        self._python |= dict.fromkeys(python)

    def stride(self, node: Node) -> None:
        """Record that gradients of the outputs of a graph call arrived with other strides than were traced."""
        if not node.strided:
            node.strided = True
            self._change(node)

    def add(self, node: Node, added: frozenset[int]) -> None:
        """Record which gradients the backward of a graph call added to sums that later calls' backwards had begun."""
        if node.add(added):
            self._change(node)

    def differentiate(self, node: Node) -> None:
        """Record that the backward of a call runs; if it was thought not to run, its memory is to be measured anew."""
        if node.idle:
            node.measured = False
            self._change(node)
        node.idle = False

    def rest(self, node: Node) -> None:
        """Record that a step ended without running the backward of this graph call.

        Later steps are assumed to do so, too.
        """
        if node.idle is None:
            node.idle = True
            self._change(node)

    def learn(self, numbers: Mapping[Node, Numbers], *, exact: bool, smaller: Set[Node] = frozenset()) -> bool:
        """Store the bytes that were measured during a step; tell whether a number grew that had been measured before.

        Args:
            exact: False if the step was disturbed: the numbers of the next step replace these.
            smaller: the calls whose inputs were smaller than in an earlier step: their numbers replace no larger ones.
        """
        has_grown = False
        self._patience = max(0, self._patience - 1)
        for begun in {self._branch_of[node] for node in numbers} & self._branches.keys():
            self._branches[begun].change()  # the step has recorded more than numbers in its calls
        for node, found in numbers.items():
            for name, number in found.items():
                known = getattr(node, name)
                is_known = node.measured and node not in self._outdated
                if number <= known and (is_known or node in smaller):
                    continue
                has_grown |= node.measured and number > known * (1 + MARGIN)
                setattr(node, name, number)
                self._stale = True
            if exact and node not in smaller:
                self._outdated.discard(node)
                if node in self._awaited:
                    self._awaited.discard(node)
                    self._borrowed.discard(node)
                    node.policy, self._stale = None, True
            elif exact and not node.measured:  # what was assumed of larger sizes stays until they come again
                self._outdated.add(node)
                self._awaited.add(node)
                self._patience = PATIENCE
            node.measured |= exact
        return has_grown

    def others_changed(self) -> None:
        """Let the numbers of the next measured steps replace what is known, as other models take other memory now."""
        self._outdated |= {*self.root.walk()}

    def took(self, nodes: tuple[Node, ...]) -> None:
        """Record the sequence of graph calls that a finished step made."""
        self._stale |= nodes != self._last
        self._last = nodes
        self._in_vain = 0 if all(node.measured for node in nodes) else self._in_vain + 1


    def renew(self, room: Callable[[], int | None] | None = None) -> None:
        """Choose programs for all known paths again, if something new was measured and the present choice does not fit.

        Args:
            room: for steps within another model's: returns the bytes that they may take more than now; if that is not
                known, they are not planned yet. None: they are not limited.

        Raises:
            BudgetTooSmall: the path of the last step does not fit.
        """
        if isinstance(self._options.budget, Auto) and self.mem and has_shrunk(self.mem, self._device, self._largest):
            self._set_limit()
            self.forget()
        if room is None:
            self._most = None
        if not self._stale or not self._last or 0 < self._in_vain < MOST_IN_VAIN:
            return
        if self.limit is None or isinstance(self._options.budget, Percent | Least):
            self._set_limit()
        if self.limit is None or self.mem is None:
            return
        if not self._still_fits(self.mem):
            if room is not None:
                if self._is_planned and not isinstance(self._options.budget, Least):
                    return  # what the other one takes meanwhile counts in its own budget, and not in this one
                if (more := room()) is None:
                    return
                self._most = self._least() + more
            self._choose(self.mem)
            if self._plan is None:
                least = self._least()
                if self.within or (self.is_share and not all(node.measured for node in self._last)):
                    self._plan_for_least(self.limit, least)
            if self._plan is None:
                where, advice = self._floor(least)
                enough = least + int(VARYING * least)
                raise self.limit.explained(BudgetTooSmall(minimum=enough, budget=self.mem, note=advice), where)
            # computing the headline's least budget takes several plans
            if log.isEnabledFor(logging.INFO) and self.plan:
                log.info("%s", self.plan.headline)
        self._stale = False

    def _choose(self, mem: int) -> None:
        if paths.forget(self.root):
            self._branches = {first: branch for first, branch in self._branches.items() if first in self.root.children}
            for branch in self._branches.values():
                branch.change()
        for branch in self._branches.values():
            if branch.planned_for != mem:
                paths.plan_within(branch.root, mem, self._host_limit)
                branch.planned_for = mem
        self._plan = paths.planned(self._last, mem)
        self.planned += 1

    def _plan_for_least(self, limit: Limit, least: int) -> None:
        """Plan for the least budget instead of one that cannot be kept.

        Memory of other models is not planned here, or the budget is a percentage of what was not measured.
        """
        self.limit = replace(limit, known=least)
        self._choose(least)
        if self.within and not self._told_of_others:
            self._told_of_others = True
            log.warning(FEWER, self._model, limit.words, limit.bytes, least)

    def take_least(self) -> None:
        """Plan for the least memory from the next call on, since the model that has begun the step needs the room."""
        if not isinstance(self._options.budget, Least):
            log.warning(NO_ROOM, self._model, self._options.mem, "in such steps from now on")
            self.take(replace(self._options, mem="min"))

    def _least(self) -> int:
        least = max(map(self._least_of, self._branches.values()), default=1)
        return max(least, self._weights.updates) if self._weights else least

    def _least_of(self, branch: _Branch) -> int:
        if branch.least is None:
            branch.least = paths.least(branch.root, self._host_limit)
        return branch.least

    def _everything(self) -> int:
        """Return the peak in bytes of a step that recomputes nothing, with all parameters on the device."""
        for branch in self._branches.values():
            if branch.keep_all is None:
                branch.keep_all = paths.keep_all(branch.root)
        everything = max((branch.keep_all or 0 for branch in self._branches.values()), default=0)
        return everything + (self._weights.held if self._weights else 0)

    @property
    def _host_limit(self) -> int | None:
        """Bytes of saved values that may be on the host at a time, beside the parameters there; None: no limit."""
        limit = self._options.host_limit
        return max(0, limit - self._weights.bytes) if limit is not None and self._weights else limit

    def take(self, options: Options) -> None:
        """Plan for another budget from the next call on."""
        self._options = options
        self._set_limit()
        self.forget()

    def begin_anew(self) -> None:
        """Discard all that is known of paths, so that the next step is measured and planned as the first one was."""
        self.root, self._last, self._plan, self._in_vain, self._stale = Node(None), (), None, 0, True
        self._branches, self._patience = {}, 0

    def add_loss(self, size: int) -> None:
        """Count these bytes after the last call of the last step, for a loss that it had not."""
        if self._last:
            self._last[-1].after += size
            self._change(self._last[-1])

    def forget(self) -> None:
        """Discard the chosen programs, so that `renew` chooses anew."""
        for node in self.root.walk():
            node.policy = None
        for branch in self._branches.values():
            branch.change()
        self._stale = True

    def retreat(self) -> None:
        """Take the least in the next step, since others take more in it than was measured; choose anew after that."""
        if self._plan is not None:
            self._choose(self._least())
            self._retreats = self._stale = True

    @property
    def _is_planned(self) -> bool:
        """True if the chosen programs cover all known graph calls."""
        covered = all(node.policy is not None for node in self.root.walk() if node.graph)
        return self._plan is not None and covered

    def _still_fits(self, mem: int) -> bool:
        """Tell whether the chosen programs cover the graph calls of the last step, and fit into `mem` bytes there."""
        if self._retreats:
            self._retreats = False
            self.others_changed()  # what is measured under the plan that is chosen now counts
            return False
        if not self._is_planned:
            return False
        planned = paths.planned(self._last, mem)
        if planned is None or planned.peak > mem:
            return False
        self._plan = planned
        return True

    def number(self, node: Node, at: SizedPrograms, saved: int, hosted: int = 0) -> int:
        """Return the index of the program that a call is to run: the planned one, else the one that saves least.

        Where that one does not even fit alone, or the budget is not known yet, it is the one with the lowest peak of
        forward and backward.

        Args:
            at: the graph's programs at the input sizes of the call.
            saved: bytes that the earlier calls of the step have saved for backward.
            hosted: bytes of theirs that wait on the host.
        """
        chosen = node.chosen(saved, self.mem) if self.mem is not None else None
        number = at.programs.index(self._unplanned(node, at)) if chosen is None else chosen
        limit = self._host_limit
        if limit is not None and hosted + at.programs[number].hosted > limit:
            return at.programs.index(least_of(at.run_again))
        return number

    def _unplanned(self, node: Node, at: SizedPrograms) -> CallProgram:
        """Return the program of a call that is not planned for."""

        def peak(program: CallProgram) -> int:
            expected = 0 if node.measured else node.expected
            back = 0 if node.idle else node.back + expected + program.saved + program.backward
            return max(node.before + program.forward, back)

        least = least_of(at.programs)
        if self.mem is None:  # a later call lets go of what this one saves
            return min(at.programs, key=peak) if node.graph and node.graph.runs_again else least
        if peak(least) <= self.mem:
            return least
        lowest = min(at.programs, key=peak)
        if peak(lowest) <= self.mem or self.is_share:
            return lowest
        # if no backward fits, perhaps none will run: that is known at the end of the forward
        return min(at.programs, key=lambda program: program.forward)

    def check_backward(self, nodes: Sequence[Node], gradients: Sequence[int]) -> None:
        """Raise `BudgetTooSmall` before the backward begins if it cannot fit.

        The check adds, for each call, the parameter gradients that exist by then to the least bytes that its
        backward allocates.

        Args:
            nodes: the calls of the step, in order.
            gradients: for each call, bytes of the parameter gradients that the backwards before it have made.
        """
        if self.mem is None or self.is_share:
            return
        for node, made in zip(nodes, gradients, strict=True):
            needed = made + (0 if node.idle else min(program.backward_adding(node.added) for program in node.programs))
            if needed > self.mem:
                raise self.refusal(nodes, node, node.before + needed, gradients)

    @property
    def is_share(self) -> bool:
        """True if the budget depends on what the known steps need: a percentage, "min", or a part of another model's.
        """
        return self.within or isinstance(self._options.budget, Percent | Least)

    @property
    def keeps_all(self) -> bool:
        """True if the budget is all that the known steps need without recomputation."""
        budget = self._options.budget
        return isinstance(budget, Percent) and budget.of_keep_all >= 100

    def refusal(self, nodes: Sequence[Node], node: Node, needed: int, gradients: Sequence[int]) -> BudgetTooSmall:
        """Return the error to raise when the graph call `node` of a step would need `needed` bytes.

        The least budget that it states is an estimate of what all calls so far need.

        Args:
            nodes: the calls so far.
            gradients: for each call, bytes of the parameter gradients that the backwards of later calls have made.
        """
        assert self.limit is not None
        self._stale = True
        path, further = ([*nodes], 0) if node in nodes else ([*nodes, node], node.gradients)
        needs: list[tuple[int, int, str]] = []
        for place, (each, made) in enumerate(zip(path, [*gradients, 0], strict=False)):
            program = least_of(each.programs)
            back = each.back if each.measured else each.back + made + (further if each is not node else 0)
            needs.append((each.before + program.forward, place, "forward"))
            if not each.idle:
                needs.append((back + each.saved(program) + each.backward(program), place, "backward"))
        likely, place, phase = max(needs)
        op = _largest_op(path[place].graph, least_of(path[place].programs), phase)
        begins = f"{format_bytes(node.before)} are {BESIDE} when call {path.index(node) + 1} of the step begins"
        reason = f"{op} runs in the {phase} of {self._call(path, place)}, and {begins}"
        error = self.limit.explained(BudgetTooSmall(minimum=max(likely, needed), budget=self.limit.bytes), reason)
        ended = "the step ended there, and what comes after it may need more"
        return error.explained(note="; ".join(filter(None, [ended, self._advice()])))

    def _call(self, nodes: Sequence[Node], place: int) -> str:
        """Return the number of a call of a path, and its name, for error messages."""
        name = self._names.get(nodes[place], "")
        return f"call {place + 1}{f' ({name})' if name else ''}"

    def _advice(self, *, outside: bool = False) -> str:
        """Return advice on what may need less memory, for error messages; "" if the first graph's end is not known.

        Args:
            outside: only what is beside the graphs takes memory where most is needed.
        """
        if not self._broken_at:
            return ""
        options = self._options
        unused = {"offload=True": not options.host, "slices=True": not options.slicing}
        compiled = options.was_told_to_compile  # which goes with neither in several graphs
        means = [name for name, is_unused in unused.items() if is_unused and not (compiled or outside)]
        others = f"{' or '.join(means)} may need less, and so may one graph" if means else "one graph may need less"
        return f"{others}: this is broken at {self._broken_at}"

    def _floor(self, least: int) -> tuple[str, str]:
        """Return what needs the least budget, for error messages, and advice; "" for what is not known."""
        found = paths.tightest(self.root, least)
        if found is None:
            return "", self._advice()
        node, program = found.path.nodes[found.place], found.path.programs[found.place]
        call = self._call(found.path.nodes, found.place)
        outside = {"ahead": node.ahead, "forward": node.before, "after": node.after}
        outside |= {"backward": node.back, "behind": node.behind}
        outside_bytes = format_bytes(outside[found.phase])
        kept = found.earlier + (node.saved(program) if found.phase in ("after", "backward") else 0)
        between = {"ahead": "before", "after": "after the forward of", "behind": "after the backward of"}
        where = f"{between[found.phase]} {call}" if found.phase in between else None
        advice = self._advice(outside=where is not None and not kept)
        if where is None:
            where = f"{_largest_op(node.graph, program, found.phase)} runs in the {found.phase} of {call}"
        return f"{where}, with {format_bytes(kept)} of saved values, and {outside_bytes} {BESIDE}", advice

    @property
    def plan(self) -> PlanOfGraphs | None:
        """The plan for the last step's sequence of calls; None before `renew` has made one."""
        if self._plan is None or self.mem is None:
            return None
        graphs = [node.graph.joint.step for node in self._plan.nodes]
        return PlanOfGraphs.of(
            self._plan,
            [self._names.get(node, "") for node in self._plan.nodes],
            graphs,
            model=self._model,
            broken_at=self._broken_at,
            python=tuple(self._python),
            budget=self.mem,
            keep_all_peak=self._everything(),
            minimum=self._least(),
            weights=self._weights.bytes if self._weights else 0,
            updates=self._weights.updates if self._weights else 0,
            paths=self._paths(self.mem),
            estimated="" if self._options.measures else self._estimated,
        )

    @property
    def _estimated(self) -> str:
        """The device and kernels that costs are estimated for, in words."""
        here = self._device.type
        device = self._options.device or Device.named(here)
        if self._options.timer is not None:
            return f"workspaces for {device}; times as given"
        kernels = "its kernels" if device.torch_device.type == here else f"the kernels of the {here}, where it ran"
        return f"times and workspaces, for {device} and {kernels}"

    def _paths(self, mem: int) -> tuple[KnownPath, ...]:
        found: dict[tuple[Graph, ...], KnownPath] = {}
        total = sum(child.count for child in self.root.children.values())
        for nodes in self.root.paths():
            ended = nodes[-1].count - sum(child.count for child in nodes[-1].children.values())
            planned = paths.planned(nodes, mem)
            path = KnownPath(calls=len(nodes), share=ended / total, peak=planned.peak if planned else None)
            graphs = tuple(node.graph for node in nodes)  # one path, whatever its sizes
            found[graphs] = path.beside(found[graphs]) if graphs in found else path
        return tuple(sorted(found.values(), key=lambda path: -path.share))
