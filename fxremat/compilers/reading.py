"""Reading graphs of torch.fx that other tools captured as captured steps; the original graph is never changed.

    a joint graph      forward and backward, with inputs for the gradients of the outputs (tangents), as AOTAutograd
                       passes it to a partition function; decomposed or not
    a full step        forward, loss and backward in one graph; each node of the backward is marked, by
                       meta["partitioner_tag"] = "is_backward" or meta["autograd_backward"] = True
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import TreeSpec, tree_flatten

from fxremat.errors import CaptureError, FxrematError
from fxremat.graphs.captured import Captured, read_joint
from fxremat.graphs.names import note_names, parameter_of
from fxremat.graphs.nodes import NUMBERS, SYMBOLS, is_random, tangents_in, tensors_of
from fxremat.passes.collectives import start_and_wait
from fxremat.passes.pipelines import PIPELINES, normalize
from fxremat.passes.regions import inline_regions
from fxremat.passes.without_mutation import without_mutation
from fxremat.step.source import common_module
from fxremat.torch_private import copied, depends_on_data
from fxremat.units import shortened

aten = torch.ops.aten

# key and value in `meta` by which AOTAutograd marks a node of the backward
TAG, OF_BACKWARD = "partitioner_tag", "is_backward"
MARK = "autograd_backward"  # key in `meta` of nodes that autograd made while make_fx traced
NO_MARKS = (
    "the graph has neither tangents nor marks, so that nothing tells its backward from its forward: pass "
    'num_fwd_outputs if it is a joint graph; mark the nodes of the backward, node.meta["partitioner_tag"] = '
    '"is_backward", if it is a full step; or pass example_inputs if it is a forward alone'
)


@dataclass(frozen=True)
class Written:
    """A description of a new value of an input, in the form of AOTAutograd's output descriptions."""

    mutated_input: object  # the description (AOTAutograd's `desc`) of the input that this output overwrites


@dataclass(frozen=True)
class Called:
    """A description of an input by its name, if AOTAutograd gave none."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Given:
    """A graph that another tool captured, read as a step.

    Inputs that the graph overwrites are written to at the end of the forward, or at the end of a full step if
    the new value is computed in its backward. For planning, new values of inputs are further outputs, after the
    others.
    """

    captured: Captured
    is_joint: bool  # True: a joint graph with tangents; False: a full step
    outputs: tuple[int, ...]  # for each output of the step, forward first, its index among the graph's outputs
    structure: TreeSpec  # the pytree structure of the graph's outputs
    written: tuple[str, ...]  # names of the inputs that are overwritten; "" for random numbers that no op reads
    written_late: tuple[str, ...]  # names of inputs that are overwritten after the backward of a full step

    @property
    def forward_count(self) -> int:
        """The number of outputs of the forward, without new values of inputs."""
        return len(self.captured.forward_outputs) - len(self.written)

    def with_writes(self, graphs: tuple[fx.GraphModule, fx.GraphModule]) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return copies of forward and backward with only PyTorch's own ops, in which the forward overwrites inputs."""
        copies = [copied(each.graph) for each in graphs]
        for copy in copies:
            start_and_wait(copy)
        forward, backward = (fx.GraphModule(each, copy) for each, copy in zip(graphs, copies, strict=True))
        if self.written:
            graph, end = forward.graph, forward.graph.output_node()
            results: tuple[Any, ...] = end.args[0]  # type: ignore[assignment]
            first, after = self.forward_count, len(self.captured.forward_outputs)
            inputs = {node.target: node for node in graph.find_nodes(op="placeholder")}
            with graph.inserting_before(end):
                for name, value in zip(self.written, results[first:after], strict=True):
                    if not name:
                        continue
                    made = graph.call_function(aten.copy_.default, (inputs[name], value))
                    made.meta = {"val": inputs[name].meta["val"]}
            end.args = ((*results[:first], *results[after:]),)
            graph.lint()
            forward.recompile()
        return forward, backward

    def put_back(self, outputs: Sequence[Any]) -> Any:
        """Arrange the outputs of the step in the order and structure of the graph's outputs."""
        ordered: list[Any] = [None] * len(outputs)
        for place, output in zip(self.outputs, outputs, strict=True):
            ordered[place] = output
        return self.structure.unflatten(ordered)


def is_marked(graph: fx.Graph) -> bool:
    """Tell whether the backward of a graph can be distinguished from its forward: by tangents, or by marks."""
    return bool(tangents_in(graph)) or any(map(_is_of_backward, graph.nodes))


def read_given(module: fx.GraphModule, num_fwd_outputs: int | None = None, *, pipeline: str = "as given") -> Given:
    """Read a joint graph, or the graph of a full step. O(nodes).

    Args:
        module: ops of ATen or other registered ops, without side effects, with fake tensors of fixed sizes in
            meta["val"].
        num_fwd_outputs: the number of outputs that belong to the forward of a joint graph; the others are a gradient
            or None for each input. None: the graph is a full step.
        pipeline: the name, in `PIPELINES`, of the passes that run on the copy of the graph.

    Raises:
        CaptureError: the backward cannot be distinguished from the forward; or a node cannot be planned, which is
            named.
        FxrematError: it is no graph of torch.fx.
    """
    if not isinstance(module, fx.GraphModule):
        raise FxrematError(f"a pass takes a torch.fx.GraphModule, not {shortened(module)}")
    copy = fx.GraphModule(module, copied(module.graph))
    inline_regions(copy)
    graph = copy.graph
    _check(graph)
    without_mutation(graph)
    outputs, structure = tree_flatten(graph.output_node().args[0])
    if num_fwd_outputs is None:
        if tangents_in(graph):
            raise CaptureError("the graph has tangents: pass num_fwd_outputs, how many outputs are the forward's")
        order = _mark(graph, outputs)
        count = sum(not _is_late(outputs[place]) for place in order)
    else:
        if not 0 < num_fwd_outputs <= len(outputs):
            raise CaptureError(f"num_fwd_outputs is {num_fwd_outputs}, and the graph has {len(outputs)} outputs")
        order, count = [*range(len(outputs))], num_fwd_outputs
        _check_forward(graph, outputs[:count])
    written, late_writes = _take_writes(graph), []
    if num_fwd_outputs is None:
        draws = _unread_draws(graph, [*outputs, *(value for _, value in written)])
        late_writes = [(name, value) for name, value in written if _is_late(value)]
        written = [*(each for each in written if each not in late_writes), *(("", node) for node in draws)]
    _sort_outputs(graph, outputs, order, count, written, late_writes)
    normalize(copy, PIPELINES[pipeline])
    _note_names(copy.graph, type(module).__name__)
    _note_modules(copy.graph)
    differentiable = None if num_fwd_outputs is not None else [*_floats(copy.graph)]
    captured = read_joint(copy, count + len(written), differentiable)
    return Given(
        captured=captured,
        is_joint=num_fwd_outputs is not None,
        outputs=tuple(order),
        structure=structure,
        written=tuple(name for name, _ in written),
        written_late=tuple(name for name, _ in late_writes),
    )


def _check_forward(graph: fx.Graph, outputs: Sequence[Any]) -> None:
    """Raise `CaptureError` if an output of the forward depends on an incoming gradient."""
    late = set(tangents_in(graph))
    for node in graph.nodes:
        if not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    for place, output in enumerate(outputs):
        if output in late:
            raise CaptureError(
                f"output {place}, {output}, depends on a tangent, so that it is none of the forward's {len(outputs)}: "
                f"num_fwd_outputs is {place} at most"
            )


def _take_writes(graph: fx.Graph) -> list[tuple[str, fx.Node]]:
    """Remove the nodes that overwrite inputs; return the names of these inputs, with the new values."""
    found = []
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        to, value = node.args[:2]
        if isinstance(to, fx.Node) and to.op == "placeholder" and isinstance(value, fx.Node) and not node.users:
            to.meta.setdefault("desc", Called(to.name))
            graph.erase_node(node)
            found.append((to.name, value))
    return found


def _unread_draws(graph: fx.Graph, results: Iterable[object]) -> list[fx.Node]:
    """Return random numbers of the forward that no result needs.

    They must be drawn nevertheless, since later random numbers depend on that.
    """
    needed = {result for result in results if isinstance(result, fx.Node)}
    found = []
    for node in reversed(graph.nodes):
        if node.op == "output":
            continue
        if node not in needed and is_random(node) and not _is_of_backward(node):
            needed.add(node)
            found.append(node if isinstance(node.meta["val"], torch.Tensor) else _first_of(node))
        if node in needed:
            needed.update(node.all_input_nodes)
    return found[::-1]


def _first_of(node: fx.Node) -> fx.Node:
    """Insert a getitem for the first result of an op, and return it."""
    with node.graph.inserting_after(node):
        first = node.graph.call_function(operator.getitem, (node, 0))
    first.meta = {**node.meta, "val": node.meta["val"][0]}
    return first


def _sort_outputs(
    graph: fx.Graph,
    outputs: Sequence[Any],
    order: Sequence[int],
    count: int,
    written: Sequence[tuple[str, fx.Node]],
    late_writes: Sequence[tuple[str, fx.Node]],
) -> None:
    """Reorder the graph's outputs: first the forward's, with new values of inputs, then those of the backward."""
    node = graph.output_node()
    descs: Any = node.meta.get("desc")
    if not (isinstance(descs, Sequence) and len(descs) == len(outputs)):
        descs = [None] * len(outputs)
    inputs = {each.name: each for each in graph.find_nodes(op="placeholder")}
    writes = [Written(inputs[name].meta["desc"] if name else Called(value.name)) for name, value in written]
    early, late = order[:count], order[count:]
    behind = [descs[each] for each in late] + [None] * len(late_writes)
    node.meta["desc"] = [*(descs[each] for each in early), *writes, *behind]
    first = [*(outputs[each] for each in early), *(value for _, value in written)]
    node.args = ([*first, *(outputs[each] for each in late), *(value for _, value in late_writes)],)


def _mark(graph: fx.Graph, outputs: Sequence[Any]) -> list[int]:
    """Mark the backward of a full step as AOTAutograd does; return the indices of its outputs, the forward's first."""
    marked = [node for node in graph.nodes if _is_of_backward(node)]
    if not marked:
        raise CaptureError(NO_MARKS)
    late = set(marked)
    for node in graph.nodes:
        if node in late or (node.op == "call_function" and not late.isdisjoint(node.all_input_nodes)):
            # nodes that read results of the backward, such as optimizer updates, belong to the backward too
            late.add(node)
            node.meta[TAG] = OF_BACKWARD
    return sorted(range(len(outputs)), key=lambda place: _is_late(outputs[place]))


def _is_late(output: object) -> bool:
    return isinstance(output, fx.Node) and _is_of_backward(output)


def _is_of_backward(node: fx.Node) -> bool:
    return node.meta.get(TAG) == OF_BACKWARD or bool(node.meta.get(MARK))


def _floats(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the floating-point inputs and constants, for which gradients may be computed."""
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            tensors = tensors_of(node)
            if any(tensor is not None and tensor.is_floating_point() for tensor in tensors):
                yield node


def _note_names(graph: fx.Graph, model: str) -> None:
    """Record the names of parameters that the graph states, and the name of the graph's class."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    named = [(node, getattr(node.meta.get("desc"), "target", None)) for node in inputs]
    note_names([(node, name if isinstance(name, str) else None) for node, name in named], model)


def _note_modules(graph: fx.Graph) -> None:
    """Record the module of each op in a graph that has no such records, as far as names of parameters show it.

    An op belongs to the module whose parameters it reads; if it reads none, to the module around that of the op
    before it.
    """
    if any("nn_module_stack" in node.meta for node in graph.nodes):
        return
    owners: dict[fx.Node, str] = {}  # parameter, or value computed from one parameter alone -> its module
    around: dict[fx.Node, str] = {}  # result of an op -> the module that contains the op's module
    for node in graph.nodes:
        if node.op == "placeholder" and (name := parameter_of(node)):
            owners[node] = name.rpartition(".")[0]
        if node.op != "call_function" or _is_of_backward(node):
            continue
        read = [owners[each] for each in node.all_input_nodes if each in owners]
        if read and len(read) == len(node.all_input_nodes) == 1:
            module = owners[node] = read[0]
        elif read:
            module = common_module(read)
            around[node] = module.rpartition(".")[0]
        else:
            module = around[node] = next((around[each] for each in node.all_input_nodes if each in around), "")
        path = "".join(f"._modules[{part!r}]" for part in module.split(".") if part)
        node.meta["nn_module_stack"] = {"": (f"L['self']{path}", torch.nn.Module)}


def _check(graph: fx.Graph) -> None:
    """Raise `CaptureError` for a node that cannot be planned."""
    for node in graph.nodes:
        if trouble := _trouble(node):
            raise CaptureError(f"{node.name} {trouble}")
        if trouble := _symbolic_trouble(node):
            raise CaptureError(f"{node.name} {trouble}")


def _trouble(node: fx.Node) -> str:
    """Return the reason why a node cannot be planned; "" if it can."""
    if node.op in ("call_module", "call_method"):
        return (
            f"is a {node.op} of {node.target}, and not an op: trace the module with make_fx or torch.export, or pass "
            "example_inputs if the graph is a forward alone"
        )
    if node.op == "output" or (node.op == "get_attr" and "val" in node.meta) or node.target is operator.getitem:
        return ""
    if isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.returns:
        return ""  # an op that returns nothing, such as _foreach_add_
    if not _has_value(node):
        return (
            f'({node.target}) has no fake tensor in meta["val"], which tells its size: trace the graph with '
            'make_fx(..., tracing_mode="fake")'
        )
    return ""


def _symbolic_trouble(node: fx.Node) -> str:
    """Return what is wrong with the sizes of a node's value; "" if they are fixed."""
    value = node.meta.get("val")
    numbers = [value] if isinstance(value, SYMBOLS) else []
    for tensor in tensors_of(node):
        if tensor is not None and tensor.layout is torch.strided:
            numbers += [*tensor.shape, *tensor.stride(), tensor.storage_offset()]
    symbols = [number for number in numbers if isinstance(number, SYMBOLS)]
    if not symbols:
        return ""
    shown = f"[{', '.join(map(str, value.shape))}]" if isinstance(value, torch.Tensor) else str(value)
    if any(map(depends_on_data, symbols)):
        return (
            f"({node.target}) has the size {shown}, which depends on data, so that its bytes are not known before it "
            "runs: keep such ops out of the graph, or pad to a fixed size"
        )
    return (
        f"({node.target}) has the symbolic size {shown}, and a plan in bytes is for fixed ones: trace the graph with "
        'make_fx(..., tracing_mode="fake"), torch.compile(..., dynamic=False), or torch.export without dynamic_shapes'
    )


def _has_value(node: fx.Node) -> bool:
    value: Any = node.meta.get("val")
    if node.op == "placeholder" or value is None:
        return "val" in node.meta or node.op == "get_attr"
    return any(isinstance(each, (torch.Tensor, *NUMBERS)) for each in _items(value))


def _items(value: Any) -> Iterable[Any]:
    return value if isinstance(value, tuple | list) else (value,)
