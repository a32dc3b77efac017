"""Sums up what a plan does with each module: bytes saved, recomputed and offloaded, and seconds.

    tree = modules_of(plan)
    tree.total            of the entire model: the plan's own figures
    tree.at("layers.3")   of a module with all its parts

Each figure belongs to one op, and thereby to the module in whose forward the op was called, so the figures of
all modules add up to those of the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

from fxremat.planned_step import PlannedStep
from fxremat.search.candidate import Candidate
from fxremat.step.costs import Costs
from fxremat.step.kinds import MemoryKind, lives_of
from fxremat.step.program import Role
from fxremat.step.step_graph import Origin


@dataclass(frozen=True, slots=True)
class Share:
    """Figures of some ops of a step: their bytes and seconds."""

    saved: int = 0  # bytes of activations that are kept on the device from the forward until the backward reads them
    recomputed: int = 0  # bytes of activations that are recomputed
    offloaded: int = 0  # bytes of activations that are copied to the host
    gradients: int = 0  # bytes of the gradients of parameters and inputs that the step returns
    forward: float = 0.0  # seconds of the ops that the forward runs for the first time
    backward: float = 0.0  # seconds of ops of the backward
    extra: float = 0.0  # seconds of recomputations

    def __add__(self, other: Share) -> Share:
        return Share(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Share) -> Share:
        return Share(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    @property
    def seconds(self) -> float:
        """Seconds of all ops."""
        return self.forward + self.backward + self.extra


@dataclass(frozen=True, kw_only=True, eq=False)
class ModuleNode:
    """A module of the model with its submodules."""

    path: str  # path of the module, such as "layers.3"; "" for the model itself
    own: Share  # figures of the ops in the module's own forward, without those of its submodules
    parts: tuple[ModuleNode, ...]  # the module's submodules

    @property
    def name(self) -> str:
        """The last component of the module's path."""
        return self.path.rpartition(".")[2]

    @cached_property
    def total(self) -> Share:
        """Figures of the module with all its submodules."""
        return added([self.own, *(part.total for part in self.parts)])

    def at(self, path: str) -> ModuleNode:
        """Return the module with this path. Raises KeyError."""
        found = next((node for node in self.walk() if node.path == path), None)
        if found is None:
            raise KeyError(path)
        return found

    def walk(self) -> Iterator[ModuleNode]:
        """Yield the module and all modules inside of it, outer ones first."""
        yield self
        for part in self.parts:
            yield from part.walk()


def added(shares: Iterable[Share]) -> Share:
    """Return the sum of these figures."""
    columns = zip(*([getattr(share, f.name) for f in fields(Share)] for share in shares), strict=True)
    return Share(*map(sum, columns))


def module_tree(candidate: Candidate, costs: Costs) -> ModuleNode:
    """Return the tree of a model's modules with their figures in a candidate plan. O(executed ops)."""
    return tree_of(_shares(candidate, costs))


def modules_of(plan: PlannedStep) -> ModuleNode:
    """Return the modules of a plan's model as a tree, each with its share in the step. O(steps).

    Where ops are compiled together and values are offloaded, what is saved and offloaded are values of these units.
    """
    shares, running = _shares(plan.chosen, plan.costs), plan.running
    if running is not plan and running.chosen.transfers:
        units = _shares(running.chosen, running.costs)
        shares = {
            module: replace(
                shares.get(module, Share()),
                saved=units.get(module, Share()).saved,
                offloaded=units.get(module, Share()).offloaded,
            )
            for module in dict.fromkeys((*shares, *units))
        }
    return tree_of(shares)


def _shares(candidate: Candidate, costs: Costs) -> dict[str, Share]:
    """Return module path -> figures of its own ops, in the order in which modules first occur in the plan."""
    program, joint, sizes = candidate.program(), candidate.layout.graph, costs.sizes
    columns: dict[str, dict[str, float]] = {}

    def count(module: str, **amounts: float) -> None:
        column = columns.setdefault(module, {})
        for name, amount in amounts.items():
            column[name] = column.get(name, 0) + amount

    for step in program.steps:
        if step.op is None:
            value = program.version_of[step.reads[0]] if step.reads else None
            if step.role is Role.OFFLOAD and value is not None and joint.values[value].origin is Origin.FORWARD:
                count(joint.value_sources[value].module, offloaded=sizes.values[value])
            continue
        again = step.role is Role.RECOMPUTE
        column = "extra" if again else "backward" if step.role is Role.BACKWARD else "forward"
        count(joint.sources[step.op].module, **{column: costs.seconds[step.op]})
        if again:
            written = [program.version_of[version] for version in step.writes]
            count(joint.sources[step.op].module, recomputed=sum(sizes.values[value] for value in written))
    for life in lives_of(program, sizes):
        if life.value is not None and life.kind is MemoryKind.KEPT:
            count(joint.value_sources[life.value].module, saved=life.bytes)
        if life.value is not None and life.kind is MemoryKind.RESULTS:
            count(joint.value_sources[life.value].module, gradients=life.bytes)
    return {module: Share(**amounts) for module, amounts in columns.items()}  # type: ignore[arg-type]


def tree_of(shares: Mapping[str, Share]) -> ModuleNode:
    """Return the tree of modules that these figures of each module's own ops belong to, by path; "" is the model."""
    inside: dict[str, list[str]] = {"": []}
    for module in shares:
        parts = module.split(".") if module else []
        for depth in range(len(parts)):
            inner = ".".join(parts[: depth + 1])
            if inner not in inside:
                inside[inner] = []
                inside[".".join(parts[:depth])].append(inner)

    def node(path: str) -> ModuleNode:
        return ModuleNode(path=path, own=shares.get(path, Share()), parts=tuple(map(node, inside[path])))

    return node("")
