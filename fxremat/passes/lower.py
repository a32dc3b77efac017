"""Lowering: turn a program into two fx graphs, a forward that also returns the saved tensors, and a backward.

    forward    (*primals)          -> (*outputs, *saved)
    backward   (*saved, *tangents) -> one gradient (or None) for each primal

A backward that adds its gradients to sums (`ops.gradient_sums`) takes these as its last input.
If the joint graph has symbolic sizes, sizes that ops need are further inputs: after the primals of the forward,
and before the saved values of the backward; `sizes_of` returns them.

Views are emitted where they are read, from the version of their storage at that point (each execution of an op
makes a new version of its result); parameters and inputs are saved as they are. A recomputation is named after
its original: `addmm_3__r1` is the first recomputation of `addmm_3`. Every node has `meta["fxremat"] = {"block",
"name", "role"}`, which `print_readable()` shows above the code.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

import torch
from torch import fx

from fxremat.graphs.batch_norm import again_call, normalized_by, runs_as_one, whole_call
from fxremat.graphs.captured import captured_of
from fxremat.graphs.collectives import Collective, is_gather
from fxremat.graphs.nodes import is_number
from fxremat.graphs.overwriting import PLACE, called, overwritten
from fxremat.graphs.symbolic import Size, is_size_node
from fxremat.ops import gradient_sums, host_copies, parameters
from fxremat.ops.collectives import start_gather
from fxremat.ops.overwriting import overwrite_where_alike
from fxremat.ops.random import draw_again, draw_saving, generator_of
from fxremat.step.liveness import last_uses
from fxremat.step.program import Program, Role, Step, Transfer
from fxremat.step.step_graph import Origin
from fxremat.step.verify import is_verified, verify
from fxremat.torch_private import expression_of

aten = torch.ops.aten
WAIT = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True, kw_only=True)
class Handles:
    """Names by which emitted graphs refer to the parameters that the step updates."""

    name: str  # name of the `ops.parameters.Weights` object that holds the parameters
    # number of a parameter's value in the joint graph -> index of the parameter in the optimizer
    numbers: Mapping[int, int]


def lower(
    program: Program,
    tier: str = "",
    handles: Handles | None = None,
    *,
    fresh: Set[int] = frozenset(),
    sums: bool = False,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Emit the forward and the backward graph of a program. O(steps); both are linted.

    Args:
        fresh: ops that allocate a new result although they might overwrite an operand (`Costs.fresh`).
        tier: the name of the host tier to which the program copies values; "" if it copies none.
        handles: how to refer to the parameters, if the step updates them.
        sums: True for a backward whose last input holds sums of gradients, to which it adds its own
            (`ops.gradient_sums`).
    """
    return Lowering(verify(program) if is_verified() else program, tier, handles, fresh, sums=sums).run()


def sizes_of(graph: fx.GraphModule) -> tuple[Size, ...]:
    """Return the symbolic sizes that an emitted graph takes as inputs, in order."""
    sizes: tuple[Size, ...] = graph.meta["sizes"]
    return sizes


@dataclass
class Part:
    """The forward or the backward graph under construction, with the nodes that exist in it so far."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    # version (result of one execution of a value's op) -> node of its entire storage
    bases: dict[int, fx.Node] = field(default_factory=dict)
    # (version of a value, view node of the joint graph) -> the same view in the lowered graph
    views: dict[tuple[int, fx.Node], fx.Node] = field(default_factory=dict)
    seeds: dict[int, fx.Node] = field(default_factory=dict)  # random op -> the node of its saved generator state
    # number of a round trip to the host -> the node of the copy on the host
    hosts: dict[int, fx.Node] = field(default_factory=dict)
    # number of a round trip -> the node of the memory that the copy back fills
    coming: dict[int, fx.Node] = field(default_factory=dict)
    sizes: dict[Size, fx.Node] = field(default_factory=dict)  # symbolic size -> its placeholder


class Lowering:
    """Builds the forward and the backward graph of a program."""

    def __init__(
        self, program: Program, tier: str, handles: Handles | None, fresh: Set[int], *, sums: bool = False
    ) -> None:
        self.program, self.fresh = program, fresh
        self.tier, self.handles = tier, handles
        self.copies_in = {  # index of a copy from the host -> the parameter that is copied
            step.trip: program.version_of[step.writes[0]]
            for step in program.steps
            if isinstance(step, Transfer)
            and step.role is Role.PREFETCH
            and program.fetched.intersection(step.writes)
        }
        self.joint = captured_of(program.layout.graph)
        # versions (results of one execution) that a collective writes and that are waited for in a later step
        self.under_way = {
            step.reads[0] for step in program.steps if step.role is Role.COMPLETE
        }
        self.forward, self.backward = Part(), Part()
        self.started: set[fx.Node] = set()  # results of collectives that were started and not waited for yet
        self.copies: dict[int, int] = {}
        self.saved: list[
            tuple[fx.Node, fx.Node]
        ] = []  # pairs: a node of the forward graph, and its placeholder in the backward graph
        self.meta: dict[str, Any] = {}
        self.second_half = self._halves()
        self.second_halves = set(self.second_half.values())
        self.items: list[fx.Node] = []  # the results (getitem nodes) of BatchNorms that are emitted as one op
        self.symbolic = any(map(is_size_node, self.joint.module.graph.nodes))
        self.sums = self.backward.graph.placeholder("sums") if sums else None

    def run(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Emit all steps and the outputs; return the two graphs."""
        joint, program = self.joint, self.program
        for primal in joint.primals:
            self.forward.bases[self._first(primal)] = self._placeholder(self.forward, primal)
        for version, value in enumerate(program.version_of):
            if joint.values[value].origin is Origin.PRIMAL and joint.shown[value].op == "get_attr":
                for part in (self.forward, self.backward):
                    part.bases[version] = part.graph.node_copy(joint.shown[value])
        copies = {value: self._preserve(value) for value in sorted(program.preserved)}
        for step in program.steps[: program.split]:
            self._step(self.forward, step)
        for value, copy in copies.items():  # the backward reads the copy of the input instead of its overwritten value
            self.forward.bases[program.first[value]] = copy
        for tangent in joint.tangent_nodes:
            self.backward.bases[self._first(tangent)] = self._placeholder(self.backward, tangent)
        gradients = self._backward()
        outputs: list[Any] = [self._output(self.forward, node) for node in joint.forward_outputs]
        # autograd stores numbers separately from tensors, after them
        self.saved.sort(key=lambda pair: is_number(pair[0].meta["val"]))
        self.forward.graph.output((*outputs, *(node for node, _ in self.saved)))
        self.backward.graph.output(tuple(gradients))
        for item in self.items:
            if not item.users:
                item.graph.erase_node(item)
        self._order_placeholders()
        return self._module(self.forward, "Forward"), self._module(self.backward, "Backward")

    def _backward(self) -> list[Any]:
        """Emit the steps of the backward; return the gradients.

        If gradients are added to sums, each is as soon as no later step reads or writes it.
        """
        returned, steps = self.joint.backward_outputs, self.program.steps[self.program.split :]
        last, ended = last_uses(steps, len(self.program.version_of)), dict[int, list[int]]()
        for place, node in enumerate(returned):
            ended.setdefault(last[self._first(node)] if self._is_added(node) else -1, []).append(place)
        gradients: list[Any] = [None] * len(returned)
        for position, step in enumerate(steps):
            self._step(self.backward, step)
            for place in ended.get(position, ()):
                gradients[place] = self._gradient(place)
        for place in ended.get(-1, ()):
            gradients[place] = self._gradient(place)
        return gradients

    def _is_added(self, gradient: object) -> TypeGuard[fx.Node]:
        return self.sums is not None and isinstance(gradient, fx.Node) and not is_size_node(gradient)

    def _gradient(self, place: int) -> object:
        """Emit a gradient, and its addition to its sum if there are any; return what the backward returns for it."""
        node = self.joint.backward_outputs[place]
        gradient = self._output(self.backward, node)
        if not self._is_added(node):
            return gradient
        added = self.backward.graph.create_node(
            "call_function", gradient_sums.add, (self.sums, place, cast(fx.Node, gradient)), name=f"{node.name}_added"
        )
        return self._describe(added, node)

    def _first(self, node: fx.Node) -> int:
        return self.program.first[self.joint.value_of[node]]

    def _placeholder(self, part: Part, node: fx.Node) -> fx.Node:
        placeholder = part.graph.create_node("placeholder", node.name, name=node.name)
        placeholder.meta = dict(node.meta)
        return placeholder

    def _preserve(self, value: int) -> fx.Node:
        """Copy an input that the step overwrites, since the backward still reads its old value."""
        node = self.forward.bases[self.program.first[value]]
        copy = self.forward.graph.call_function(aten.clone.default, (node,))
        copy.meta = {"val": node.meta["val"], "fxremat": {"block": 0, "name": "", "role": "preserve"}}
        return copy

    def _step(self, part: Part, step: Step | Transfer) -> None:
        name = self.program.layout.names[step.block]
        about = {"block": step.block + 1, "name": name, "role": step.role.value}
        shown = {"block": f"{about['block']} {name}", "role": about["role"]}
        if step.op is not None:
            shown["module"] = about["module"] = self.joint.sources[step.op].module
        self.meta = {"fxremat": about, "custom": shown}
        if isinstance(step, Transfer):
            self._transfer(part, step)
        else:
            self._execute(part, step)

    def _transfer(self, part: Part, step: Transfer) -> None:
        if step.role is Role.COMPLETE:
            self._complete(part, step)
        elif step.role is Role.UPDATE:
            self._update(part, step)
        elif step.state_of is not None:
            self._travel_of_state(part, step, step.state_of)
        elif step.trip in self.copies_in:
            self._travel_of_weight(part, step, self.copies_in[step.trip])
        else:
            self._travel(part, step)

    def _complete(self, part: Part, step: Transfer) -> None:
        """Emit the wait for a collective that was started earlier; later readers of its results read the wait's node.
        """
        for version in step.reads:
            shown = self.joint.shown[self.program.version_of[version]]
            started = part.bases[version]
            if started in self.started:
                name = f"{started.name}_complete"
                node = part.graph.create_node("call_function", WAIT, (started,), name=name)
                part.bases[version] = self._describe(node, shown)

    def _travel(self, part: Part, step: Transfer) -> None:
        """Emit one part of copying a value to the host and back.

        The copy on the host is saved for the backward as a CPU tensor.
        """
        version = (*step.reads, *step.writes)[0]
        shown = self.joint.shown[self.program.version_of[version]]
        match step.role:
            case Role.OFFLOAD:
                node = self._call(
                    part, host_copies.offload, (self._base(part, version),), f"{shown.name}_offload", shown
                )
                node.meta["val"] = _fake_host(shown)
                part.hosts[step.trip] = node
            case Role.RELEASE:
                host, leaving = self._host(part, step.trip), self._base(part, version)
                node = self._call(part, host_copies.release, (host, leaving), f"{shown.name}_release", shown)
                node.meta["val"] = _fake_host(shown)
                part.hosts[step.trip] = node
            case Role.PREFETCH:
                device = shown.meta["val"].device
                arguments = (self._host(part, step.trip), device)
                part.coming[step.trip] = self._call(
                    part, host_copies.prefetch, arguments, f"{shown.name}_prefetch", shown
                )
            case _:
                arguments = (part.coming[step.trip], self._host(part, step.trip))
                part.bases[version] = self._call(part, host_copies.wait, arguments, f"{shown.name}_wait", shown)

    def _travel_of_weight(self, part: Part, step: Transfer, value: int) -> None:
        """Emit one part of copying a parameter between host and device: to the device, or back after its update."""
        version = (*step.reads, *step.writes)[0]
        match step.role:
            case Role.PREFETCH:
                device = self.joint.shown[value].meta["val"].device
                part.coming[step.trip] = self._call_weights(part, parameters.prefetch, value, "prefetch", device)
            case Role.WAIT:
                coming = part.coming[step.trip]
                part.bases[version] = self._call_weights(part, parameters.wait, value, "wait", coming)
            case _:
                leaving = self._base(part, version)
                self._call_weights(part, parameters.release, value, "release", leaving)

    def _travel_of_state(self, part: Part, step: Transfer, value: int) -> None:
        """Emit one part of copying optimizer state between host and device: to the device, or back after the update."""
        calls = {
            Role.PREFETCH: parameters.prefetch_state,
            Role.WAIT: parameters.wait_for_state,
            Role.RELEASE: parameters.release_state,
        }
        self._call_weights(part, calls[step.role], value, f"state_{step.role.value}")

    def _call_weights(self, part: Part, function: Any, value: int, suffix: str, *arguments: Any) -> fx.Node:
        assert self.handles is not None
        shown = self.joint.shown[value]
        where = (self.handles.numbers[value], self.handles.name)
        node = part.graph.create_node(
            "call_function", function, (*arguments, *where), name=f"{shown.name}_{suffix}"
        )
        return self._describe(node, shown)

    def _call(
        self, part: Part, function: Any, arguments: tuple[Any, ...], name: str, shown: fx.Node
    ) -> fx.Node:
        node = part.graph.create_node("call_function", function, (*arguments, self.tier), name=name)
        return self._describe(node, shown)

    def _update(self, part: Part, step: Transfer) -> None:
        """Emit the optimizer's update of a parameter, in place on its copy on the device."""
        weight, gradient = step.reads
        value = self.program.version_of[weight]
        read = self._read(part, self.joint.update_nodes[value], gradient)
        shared = self.joint.shares_gradient(value)
        self._call_weights(part, parameters.update, value, "update", self._base(part, weight), read, shared)

    def _host(self, part: Part, trip: int) -> fx.Node:
        if trip not in part.hosts:
            part.hosts[trip] = self._save(self.forward.hosts[trip])
        return part.hosts[trip]

    def _halves(self) -> dict[Step, Step]:
        """Map the statistics of a BatchNorm to its normalization if that follows directly: the two then run as one op.
        """
        steps, found = self.program.steps, {}
        for part in (steps[: self.program.split], steps[self.program.split :]):
            for first, second in itertools.pairwise(part):
                if isinstance(first, Transfer) or isinstance(second, Transfer):
                    continue
                statistics, normalized = self.joint.nodes[first.op], self.joint.nodes[second.op]
                again = Role.RECOMPUTE in (first.role, second.role)
                if normalized_by(statistics) is normalized and runs_as_one(statistics, normalized, again=again):
                    found[first] = second
        return found

    def _execute_both(self, part: Part, step: Step, second: Step) -> None:
        """Emit the statistics and the normalization of a BatchNorm as one op."""
        statistics, normalized = self.joint.nodes[step.op], self.joint.nodes[second.op]
        versions = {self.program.version_of[version]: version for version in (*step.reads, *second.reads)}
        target, arguments = whole_call(statistics, normalized, again=step.role is Role.RECOMPUTE)
        suffix, other = self._suffix(step.op), self._suffix(second.op)
        arguments = fx.node.map_arg(
            arguments, lambda node: self._read(part, node, versions[self.joint.value_of[node]], suffix)
        )
        node = part.graph.create_node("call_function", target, arguments, name=f"{statistics.name}_and_norm{suffix}")
        self._describe(node, statistics).meta["val"] = (normalized.meta["val"], *statistics.meta["val"])
        for version in (*step.writes, *second.writes):
            shown = self.joint.shown[self.program.version_of[version]]
            if shown is statistics:  # `shown` is the statistics op itself only if no op reads its results
                part.bases[version] = node
                continue
            place = 0 if shown is normalized else 1 + cast(int, shown.args[1])
            name = shown.name + (other if shown is normalized else suffix)
            item = part.graph.create_node("call_function", operator.getitem, (node, place), name=name)
            part.bases[version] = self._describe(item, shown)
            self.items.append(item)

    def _suffix(self, op: int) -> str:
        """Return the suffix for the names of an op's next execution: "" for the first, then "__r1" and so on."""
        self.copies[op] = copy = self.copies.get(op, -1) + 1
        return f"__r{copy}" if copy else ""

    def _execute(self, part: Part, step: Step) -> None:
        if step in self.second_half:
            self._execute_both(part, step, self.second_half[step])
        if step in self.second_half or step in self.second_halves:
            return
        op = self.joint.ops[step.op]
        versions = {self.program.version_of[version]: version for version in step.reads}
        suffix = self._suffix(step.op)

        def reads(node: fx.Node) -> fx.node.Argument:
            if is_size_node(node):
                return self._size(part, node)
            return self._read(part, node, versions[self.joint.value_of[node]], suffix)

        node, before = self._emit(part, step, self.joint.nodes[op.index], reads, suffix)
        for version in step.writes:
            shown = self.joint.shown[self.program.version_of[version]]
            if shown is self.joint.nodes[op.index] and not before:
                part.bases[version] = node
            else:
                place: Any = before if shown is self.joint.nodes[op.index] else before + cast(int, shown.args[1])
                item = part.graph.create_node(
                    "call_function", operator.getitem, (node, place), name=shown.name + suffix
                )
                part.bases[version] = self._describe(item, shown)
        if self._is_under_way(step):
            self.started.update(part.bases[version] for version in step.writes)

    def _is_under_way(self, step: Step) -> bool:
        """Tell whether a step starts a collective that a later step waits for."""
        collective = isinstance(self.joint.nodes[step.op].target, Collective)
        return collective and bool(step.writes) and step.writes[0] in self.under_way

    def _emit(
        self, part: Part, step: Step, original: fx.Node, reads: Any, suffix: str
    ) -> tuple[fx.Node, int]:
        """Emit the node of one execution of an op.

        Returns:
            the node, and the number of results before those of the op: 1 if a generator state comes first, else 0.
        """
        target, arguments, given = self._call_of(step, original)
        if self._is_under_way(step):
            target = target.start
            if is_gather(original):
                target, arguments = start_gather, (target, *arguments)
        arguments, options = fx.node.map_arg(arguments, reads), fx.node.map_arg(given, reads)
        if self.joint.ops[step.op].random and step.op in self.program.repeated:
            return self._draw(part, step, original, (target, *arguments), options, suffix)
        node = part.graph.create_node(original.op, target, arguments, options, name=original.name + suffix)
        return self._describe(node, original), 0

    def _call_of(self, step: Step, original: fx.Node) -> tuple[Any, Any, Any]:
        """Return the function, arguments and keyword arguments of one execution, as nodes of the joint graph."""
        if step.role is Role.RECOMPUTE:
            return *again_call(original), original.kwargs
        if self.symbolic and overwritten(original) is not None and step.op not in self.fresh:
            arguments = (original.target, original.meta[PLACE], *original.args)
            return overwrite_where_alike, arguments, original.kwargs
        return called(original, fresh=step.op in self.fresh)

    def _draw(
        self,
        part: Part,
        step: Step,
        original: fx.Node,
        arguments: tuple[Any, ...],
        options: Any,
        suffix: str,
    ) -> tuple[fx.Node, int]:
        """Emit a random op that runs more than once: the first run saves the generator's state, later ones replay it.
        """
        if step.role is Role.RECOMPUTE:
            state = self._seed(part, step.op)
            node = part.graph.create_node(
                "call_function", draw_again, (state, *arguments), options, name=original.name + suffix
            )
            return self._describe(node, original), 0
        drawn = part.graph.create_node(
            "call_function", draw_saving, arguments, options, name=f"{original.name}_drawn"
        )
        self._describe(drawn, original)
        state = part.graph.create_node(
            "call_function", operator.getitem, (drawn, 0), name=f"{original.name}_seed"
        )
        self._describe(state, original)
        given, state.meta["val"] = original.meta["val"], _fake_state(original)
        drawn.meta["val"] = (state.meta["val"], *(given if isinstance(given, tuple | list) else [given]))
        part.seeds[step.op] = state
        return drawn, 1

    def _seed(self, part: Part, op: int) -> fx.Node:
        if op not in part.seeds:
            part.seeds[op] = self._save(self.forward.seeds[op])
        return part.seeds[op]

    def _describe(self, node: fx.Node, original: fx.Node) -> fx.Node:
        node.meta = {key: value for key, value in original.meta.items() if key != PLACE} | self.meta
        if "custom" in self.meta and isinstance(own := original.meta.get("custom"), dict):
            # entries that other compilers have stored in `custom` are kept
            node.meta["custom"] = self.meta["custom"] | own
        return node

    def _read(self, part: Part, node: fx.Node, version: int, suffix: str = "") -> fx.Node:
        """Return the lowered node that corresponds to a node of the joint graph, for one version of its storage.

        A version is the result of one execution, first or recomputed.

        Args:
            suffix: appended to the names of new nodes.
        """
        value = self.joint.values[self.program.version_of[version]]
        if self.joint.shown[value.index] is node:
            return self._base(part, version)
        key = (version, node)
        if key not in part.views:

            def reads(parent: fx.Node) -> fx.node.Argument:
                if is_size_node(parent):
                    return self._size(part, parent)
                return self._read(part, parent, version, suffix)

            args, kwargs = fx.node.map_arg(node.args, reads), fx.node.map_arg(node.kwargs, reads)
            copy = part.graph.create_node(node.op, node.target, args, kwargs, name=node.name + suffix)
            part.views[key] = self._describe(copy, node)
        return part.views[key]

    def _size(self, part: Part, node: fx.Node) -> fx.node.Argument:
        """Return a number that the input sizes determine: an input of this graph, or an int if it is constant."""
        size = expression_of(node.meta["val"]) if isinstance(node.meta["val"], torch.SymInt) else node
        if not isinstance(size, fx.Node) and size.is_Integer:
            return int(size)
        if size not in part.sizes:
            part.sizes[size] = self._placeholder(part, node)
        return part.sizes[size]

    def _base(self, part: Part, version: int) -> fx.Node:
        if version not in part.bases:
            assert part is self.backward, "the forward graph reads what only the backward makes"
            part.bases[version] = self._save(self.forward.bases[version])
        return part.bases[version]

    def _save(self, node: fx.Node) -> fx.Node:
        placeholder = self._placeholder(self.backward, node)
        self.saved.append((node, placeholder))
        return placeholder

    def _output(self, part: Part, node: object) -> object:
        if not isinstance(node, fx.Node):
            return node
        return self._size(part, node) if is_size_node(node) else self._read(part, node, self._first(node))

    def _order_placeholders(self) -> None:
        """Sort the inputs of both graphs.

        The forward takes primals, then symbolic sizes. The backward takes sizes, saved numbers, saved tensors
        in the order in which the forward returns them, the incoming gradients, and sums if there are any.
        """
        primals = [node for node in self.forward.graph.nodes if node.op == "placeholder"]
        primals.sort(key=lambda node: node in self.forward.sizes.values())
        saved = [placeholder for _, placeholder in self.saved]
        saved.sort(key=lambda node: not is_number(node.meta["val"]))
        tangents = [self.backward.bases[self._first(tangent)] for tangent in self.joint.tangent_nodes]
        for part, placed in (
            (self.forward, primals),
            (self.backward, [*self.backward.sizes.values(), *saved, *tangents, *filter(None, [self.sums])]),
        ):
            for placeholder in reversed(placed):
                part.graph._root.append(placeholder)

    def _module(self, part: Part, name: str) -> fx.GraphModule:
        part.graph.lint()
        module = fx.GraphModule(self.joint.module, part.graph, class_name=name)
        module.meta["sizes"] = tuple(part.sizes)
        return module


def _fake_state(original: fx.Node) -> torch.Tensor:
    """Return a fake tensor for the state of the generator from which a random op draws."""
    value = original.meta["val"]
    shown = (
        value if isinstance(value, torch.Tensor) else next(v for v in value if isinstance(v, torch.Tensor))
    )
    size = generator_of((shown,), {}).get_state().numel()
    with shown.fake_mode:  # type: ignore[attr-defined]
        return torch.empty(size, dtype=torch.uint8)


def _fake_host(shown: fx.Node) -> torch.Tensor:
    """Return a fake CPU tensor with the layout of a node's value."""
    value = shown.meta["val"]
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
