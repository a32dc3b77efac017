"""Plans of a model that is several graphs: the known paths of its steps, what was measured on them, and their programs.

    next(node, graph)       the call after a call, in the tree of known paths
    learn(numbers)          what a step has shown of the calls on its path
    renew()                 programs for all known paths, if something new is known
    number(node)            the program of a call

`search.paths` has the model of memory and the dynamic program.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import sub
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from fxremat.budget import has_shrunk
from fxremat.errors import BudgetTooSmall
from fxremat.graphs.accounting import copied_gradients, device_of, held_beside_copies, largest_tensor
from fxremat.graphs.captured import Captured
from fxremat.options import Options
from fxremat.plan_of_graphs import PlanOfGraphs
from fxremat.planned_graphs import KnownPath
from fxremat.planning.limits import Limit, limit_of_paths
from fxremat.search import paths
from fxremat.search.call_programs import CallProgram, call_programs, kept_outputs, least_of, moved
from fxremat.search.paths import Node
from fxremat.step.costs import Costs
from fxremat.units import Auto, Least, Percent, format_bytes

log = logging.getLogger(__name__)

SHARE = 0.1  # of the seconds of the user's search, for each of the surveys of a graph
REMEMBERED = 64  # graphs whose programs are remembered
MOST_IN_VAIN = 5  # steps that run their least programs to be measured; then what is likely is planned with
MARGIN = 0.01  # share of a number that it may grow before it counts as grown

Numbers = dict[str, int]  # the fields of a `Node` that were measured

_known: OrderedDict[object, Sequence[CallProgram]] = OrderedDict()


class Graph(Protocol):
    """A graph that steps call."""

    joint: Captured


@dataclass(frozen=True, kw_only=True)
class SizedPrograms:
    """The programs of a graph at some sizes of its inputs."""

    programs: Sequence[CallProgram]
    outputs: Mapping[int, int]  # bytes of each output that the graph makes, by value
    gradients: int  # bytes of the gradients that it returns
    inputs: Mapping[int, int]  # bytes of each input, by value
    largest: int  # bytes of the largest tensor that it makes
    layouts: Sequence[tuple[int, ...]]  # of the gradients of its outputs, as traced

    @classmethod
    def of(cls, graph: Captured, costs: Costs, programs: Sequence[CallProgram]) -> SizedPrograms:
        """Return these programs of a graph at the sizes that `graph` and `costs` have."""
        bytes_of = costs.sizes.values
        as_traced, copies = _apart(graph, costs)
        return cls(
            programs=list(moved(programs, graph, as_traced, copies, held_beside_copies(graph, device_of(graph)))),
            inputs={value: bytes_of[value] for value in map(graph.value_of.get, graph.primals) if value is not None},
            largest=largest_tensor(graph),
            layouts=[layout_of(node.meta.get("val")) for node in graph.tangent_nodes],
            outputs={value: bytes_of[value] for value in kept_outputs(graph)},
            gradients=sum(bytes_of[value] for value in graph.returned),
        )


def layout_of(value: object) -> tuple[int, ...]:
    """Return the strides of a tensor in its dimensions of more than one element; () for anything else."""
    if not isinstance(value, torch.Tensor):
        return ()
    return tuple(stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1)


def _apart(graph: Captured, costs: Costs) -> tuple[Costs, Sequence[int]]:
    """Return the costs where gradients lie as traced, and by op the bytes of copies of gradients that do not."""
    copied = copied_gradients(graph, device_of(graph))
    copies = [copied.get(op.index, 0) for op in graph.ops]
    workspace = tuple(map(sub, costs.sizes.workspace, copies))
    return replace(costs, sizes=replace(costs.sizes, workspace=workspace)), copies


def programs_of(graph: Captured, costs: Costs, options: Options) -> Sequence[CallProgram]:
    """Return the programs of a graph, fastest first; those of an equal graph with the same costs are used again.

    `SizedPrograms.of` gives them their numbers.
    """
    costs, _ = _apart(graph, costs)
    key = graph.digest, costs.seconds, tuple(costs.sizes.values), tuple(costs.sizes.workspace), options.search
    if key not in _known:
        _known[key] = call_programs(graph.step, costs, effort=SHARE * options.search.seconds)
        if len(_known) > REMEMBERED:
            _known.popitem(last=False)
    _known.move_to_end(key)
    return _known[key]


class PathPlans:
    """The known paths of a model that is several graphs, and the plan for all of them.

    Attributes:
        root: the begin of a step, in the tree of known paths.
        limit: the budget; None where it refers to a step that has not run yet.

    Args:
        model: the name of the model's class.
        broken_at: the line where the first graph ends.
    """

    def __init__(self, options: Options, model: str, broken_at: str, device: torch.device) -> None:
        self.root = Node(None)
        self.limit: Limit | None = None
        self._options, self._model, self._broken_at, self._device = options, model, broken_at, device
        self._names: WeakKeyDictionary[Node, str] = WeakKeyDictionary()
        self._python: dict[str, None] = {}  # functions that call graphs, and stay Python
        self._largest = 0  # bytes of the largest tensor that a known graph makes
        self._last: tuple[Node, ...] = ()  # the path of the last step
        self._in_vain = 0  # steps in a row after which a number on their path was still not measured
        self._plan: paths.Path | None = None  # for that path
        self._stale = True
        self._set_limit()

    @property
    def mem(self) -> int | None:
        """The budget in bytes; None where it refers to a step that has not run yet."""
        return self.limit.bytes if self.limit else None

    def _set_limit(self) -> None:
        if self._last or not isinstance(self._options.budget, Percent | Least):
            everything, least = lambda: paths.keep_all(self.root), lambda: paths.least(self.root)
            self.limit = limit_of_paths(self._options, self._device, self._largest, everything, least)

    # --- what is known ---

    def next(self, node: Node, graph: Graph, at: SizedPrograms) -> tuple[Node, bool]:
        """Return the call of a graph after another one, and whether no step has taken this way before.

        Args:
            at: the programs at the sizes of the call.
        """
        found = node.children.get(graph)
        if is_new := found is None:
            found = node.children[graph] = Node(graph)
        found.count += 1
        if not found.programs or sum(found.outputs.values()) < sum(at.outputs.values()):
            found.programs, found.outputs, found.gradients = at.programs, at.outputs, at.gradients
            found.inputs = at.inputs
            found.policy, found.measured = None, False
            is_new = self._stale = True
            if at.largest > self._largest:
                self._largest = at.largest
                if isinstance(self._options.budget, Auto):
                    self._set_limit()
        return found, is_new

    def name(self, node: Node, name: str, python: Iterable[str] = ()) -> None:
        """Give a call a name, for reports.

        Args:
            python: the functions that call it and stay Python.
        """
        self._names[node] = name
        self._python |= dict.fromkeys(python)

    def stride(self, node: Node) -> None:
        """Note that gradients of a call have come otherwise laid out than was traced."""
        self._stale |= not node.strided
        node.strided = True

    def differentiate(self, node: Node) -> None:
        """Note that the backward of a call runs. One that had none before is to be measured anew."""
        if node.idle:
            node.measured, self._stale = False, True
        node.idle = False

    def rest(self, node: Node) -> None:
        """Note that a step is over whose backward passed this call by: so it will be, unless it has come before."""
        if node.idle is None:
            node.idle = self._stale = True

    def learn(self, numbers: Mapping[Node, Numbers], *, exact: bool) -> bool:
        """Put what a step has shown into the tree; tell whether a number has grown that had been measured.

        Args:
            exact: False: some numbers are those of a step that was disturbed; the next step replaces them.
        """
        has_grown = False
        for node, found in numbers.items():
            for name, number in found.items():
                known = getattr(node, name)
                if node.measured and number <= known:
                    continue
                has_grown |= node.measured and number > known * (1 + MARGIN)
                setattr(node, name, number)
                self._stale = True
            node.measured |= exact
        return has_grown

    def took(self, nodes: tuple[Node, ...]) -> None:
        """Note the path of a step that is over."""
        self._stale |= nodes != self._last
        self._last = nodes
        self._in_vain = 0 if all(node.measured for node in nodes) else self._in_vain + 1

    # --- the plan ---

    def renew(self) -> None:
        """Choose the programs of all known paths anew, if something new is known and the present ones do not fit.

        Raises:
            BudgetTooSmall: the path of the last step does not fit.
        """
        if isinstance(self._options.budget, Auto) and self.mem and has_shrunk(self.mem, self._device, self._largest):
            self._set_limit()
            self.forget()
        if not self._stale or not self._last or 0 < self._in_vain < MOST_IN_VAIN:
            return
        if self.limit is None or isinstance(self._options.budget, Percent | Least):
            self._set_limit()
        if self.limit is None or self.mem is None:
            return
        if not self._still_fits(self.mem):
            paths.forget(self.root)
            paths.plan(self.root, self.mem)
            self._plan = paths.planned(self._last, self.mem)
            if self._plan is None:
                raise self.limit.explained(BudgetTooSmall(minimum=paths.least(self.root), budget=self.mem))
            if log.isEnabledFor(logging.INFO) and self.plan:  # the least budget in it takes several plans
                log.info("%s", self.plan.headline)
        self._stale = False

    def forget(self) -> None:
        """Forget the programs that are planned; `renew` chooses them anew."""
        for node in self.root.walk():
            node.policy = None
        self._stale = True

    def _still_fits(self, mem: int) -> bool:
        """Tell whether the present plan knows the path of the last step, and fits on it."""
        if self._plan is None or any(node.policy is None for node in self.root.walk() if node.graph):
            return False
        planned = paths.planned(self._last, mem)
        if planned is None or planned.peak > mem:
            return False
        self._plan = planned
        return True

    def number(self, node: Node, at: SizedPrograms, saved: int) -> int:
        """Return the number of the program of a call: the planned one, or the one that saves least.

        Args:
            at: the programs at the sizes of the call.
            saved: bytes that the calls before have saved.
        """
        chosen = node.chosen(saved, self.mem) if self.mem is not None else None
        if chosen is None:
            return at.programs.index(least_of(at.programs))
        return node.programs.index(chosen)

    def check_backward(self, nodes: Sequence[Node], gradients: Sequence[int]) -> None:
        """Raise `BudgetTooSmall` where a backward cannot fit that was not measured; no gradient is there yet.

        What is certain are the gradients that are there by then and the least that the backward of a call needs.

        Args:
            nodes: the path of the step.
            gradients: for each of its calls, bytes of gradients that the calls behind it have made for parameters.
        """
        if self.mem is None or self.is_share:
            return
        for node, made in zip(nodes, gradients, strict=True):
            needed = made + (0 if node.idle else min(program.backward for program in node.programs))
            if needed > self.mem:
                raise self.refusal(nodes, node, node.before + needed, gradients)

    @property
    def is_share(self) -> bool:
        """True if the budget is a share of what the known steps need."""
        return isinstance(self._options.budget, Percent | Least)

    def refusal(self, nodes: Sequence[Node], node: Node, needed: int, gradients: Sequence[int]) -> BudgetTooSmall:
        """Return the error for a step whose call `node` needs so many bytes.

        The least budget that it states is an estimate of what all calls so far need, from what is known by then.

        Args:
            nodes: the calls so far.
            gradients: for each of them, bytes of gradients that the calls behind it have made for parameters.
        """
        assert self.limit is not None
        self._stale = True
        path, further = ([*nodes], 0) if node in nodes else ([*nodes, node], node.gradients)
        likely = needed
        for each, made in zip(path, [*gradients, 0], strict=False):
            program = least_of(each.programs)
            back = each.back if each.measured else each.back + made + (further if each is not node else 0)
            likely = max(likely, each.before + program.forward, back + each.saved(program) + each.backward(program))
        place = path.index(node) + 1
        reason = f"{format_bytes(node.before)} belong to no graph when call {place} of the step begins"
        error = self.limit.explained(BudgetTooSmall(minimum=likely, budget=self.limit.bytes), reason)
        return error.explained(note="the step ended there, and what comes after it may need more")

    @property
    def plan(self) -> PlanOfGraphs | None:
        """The plan for the path of the last step; None before the first step has ended."""
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
            keep_all_peak=paths.keep_all(self.root),
            minimum=paths.least(self.root),
            paths=self._paths(self.mem),
        )

    def _paths(self, mem: int) -> tuple[KnownPath, ...]:
        found = []
        total = sum(child.count for child in self.root.children.values())
        for nodes in self.root.paths():
            ended = nodes[-1].count - sum(child.count for child in nodes[-1].children.values())
            planned = paths.planned(nodes, mem)
            found.append(
                KnownPath(calls=len(nodes), share=ended / total, peak=planned.peak if planned else None)
            )
        return tuple(sorted(found, key=lambda path: -path.share))
