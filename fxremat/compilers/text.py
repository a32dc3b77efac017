"""Captured graphs as text that people can read and programs can parse: `to_text`, `from_text`.

    # fxremat graph {"num_fwd_outputs": 1, "name": "Net"}
    def forward(
        primals_1: "float32[16, 8] cpu",
        tangents_1: "float32[] cpu",
    ):
        sin = torch.ops.aten.sin.default(primals_1)  # {"module": "layers.0", "seq_nr": 1}
        ...
        return [sum_1, mul]

Inputs have types: dtype, shape, strides unless contiguous, and device; a parameter's name follows as a comment.
Types of results follow from the ops. A comment after an op states its module, autograd's sequence number, and
whether it belongs to the backward. A graph that a higher-order op calls, such as a branch of a `cond`, is a function
of its own before the one that reads it as `self.true_graph_0`. Reading only calls ops on fake tensors, whatever the
text contains.
"""

from __future__ import annotations

import ast
import io
import json
import keyword
import math
import operator
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from fxremat.compilers.reading import Called, Written
from fxremat.errors import CaptureError
from fxremat.graphs.names import module_of
from fxremat.graphs.nodes import attribute
from fxremat.units import shortened

HEAD = "# fxremat graph "
TYPE = re.compile(r"(\w+)\[([\d, ]*)\](?: strides \(([\d, ]*)\))? (\w+(?::\d+)?)")
# keys in the `meta` of nodes whose values are written to the text
NOTED = ("seq_nr", "partitioner_tag", "autograd_backward")
NUMBERS = {"inf": math.inf, "nan": math.nan}


@dataclass(frozen=True)
class Parameter:
    """A description of an input that is a parameter or buffer, in the form of AOTAutograd's descriptions."""

    target: str  # the parameter's name in the model


@dataclass(frozen=True)
class Text:
    """A graph that was read from text."""

    module: fx.GraphModule
    num_fwd_outputs: int | None  # number of forward outputs of a joint graph; None: the graph is a full step


def to_text(module: fx.GraphModule, num_fwd_outputs: int | None = None) -> str:
    """Return a graph of ATen ops as text. O(nodes).

    Args:
        num_fwd_outputs: the number of outputs that belong to the forward, if it is a joint graph.

    Raises:
        CaptureError: an input has no fake tensor in meta["val"].
    """
    head: dict[str, Any] = {"num_fwd_outputs": num_fwd_outputs, "name": type(module).__name__}
    if overwritten := _overwritten(module.graph):
        head["overwritten"] = overwritten
    return HEAD + json.dumps(head) + "\n" + emitted_text([("forward", module.graph)])


def _overwritten(graph: fx.Graph) -> dict[str, str]:
    """Return index of an output -> name of the input that it overwrites."""
    inputs = {str(node.meta["desc"]): node.name for node in graph.find_nodes(op="placeholder") if "desc" in node.meta}
    descs: Any = graph.output_node().meta.get("desc") or ()
    sources = {str(place): str(getattr(desc, "mutated_input", None)) for place, desc in enumerate(descs)}
    return {place: inputs[source] for place, source in sources.items() if source in inputs}


def function_text(graph: fx.Graph, name: str, path: str = "") -> str:
    """Return a graph as the text of a function; `path` comes before the names of the graphs that its ops call."""
    lines = [f"def {name}("]
    lines += [f"    {_name(node)}: {_typed(node)},{_parameter(node)}" for node in graph.find_nodes(op="placeholder")]
    lines.append("):")
    for node in graph.nodes:
        if is_subgraph(node):
            lines.append(f"    {_name(node)} = self.{_function(path, node)}")
        elif node.op == "get_attr":
            lines.append(f"    {_name(node)}: {_typed(node)} = constant")
        elif node.op == "call_function":
            lines.append(f"    {_name(node)} = {_call(node)}{_notes(node)}")
        elif node.op == "output":
            lines.append(f"    return {_written(node.args[0])}")
    return "\n".join(lines) + "\n"


def is_subgraph(node: fx.Node) -> bool:
    """Tell whether a node stands for a graph that a higher-order op calls."""
    return node.op == "get_attr" and isinstance(attribute(node), fx.GraphModule)


def _function(path: str, node: fx.Node) -> str:
    """Return the name of the function that a subgraph is written as."""
    name = str(node.target).replace(".", "__")
    return name if not path or name.startswith(f"{path}__") else f"{path}__{name}"


def _subgraphs(graph: fx.Graph, path: str = "") -> Iterator[tuple[str, fx.Graph]]:
    """Yield (name of the function, graph) of the graphs that ops of a graph call, innermost first."""
    for node in graph.nodes:
        if is_subgraph(node):
            name, called = _function(path, node), attribute(node).graph
            yield from _subgraphs(called, name)
            yield name, called


def _name(node: fx.Node) -> str:
    return f"{node.name}_" if keyword.iskeyword(node.name) else node.name


def _typed(node: fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise CaptureError(f'{node.name} has no fake tensor in meta["val"], which tells its size')
    strides = "" if value.is_contiguous() else f" strides ({', '.join(map(str, value.stride()))})"
    shape = ", ".join(map(str, value.shape))
    return f'"{str(value.dtype).removeprefix("torch.")}[{shape}]{strides} {value.device}"'


def _parameter(node: fx.Node) -> str:
    name = getattr(node.meta.get("desc"), "target", None)
    return f"  # {json.dumps({'parameter': name})}" if isinstance(name, str) else ""


def _call(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return f"{_written(node.args[0])}[{_written(node.args[1])}]"
    given = [*map(_written, node.args), *(f"{name}={_written(value)}" for name, value in node.kwargs.items())]
    return f"{_target(node.target)}({', '.join(given)})"


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"torch.ops.{target.namespace}.{target.name()}"
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def _written(value: Any) -> str:
    match value:
        case fx.Node():
            return _name(value)
        case list():
            return f"[{', '.join(map(_written, value))}]"
        case tuple():
            return f"({''.join(f'{_written(item)}, ' for item in value).rstrip()})"
        case Mapping():
            return f"{{{', '.join(f'{key!r}: {_written(item)}' for key, item in value.items())}}}"
        case torch.device():
            return f'torch.device("{value}")'
        case torch._ops.OpOverload():
            return _target(value)
    return repr(value)


def _notes(node: fx.Node) -> str:
    notes = {key: node.meta[key] for key in NOTED if key in node.meta}
    if module := module_of(node):
        notes["module"] = module
    if isinstance(ours := node.meta.get("fxremat"), Mapping):
        notes["role"] = ours["role"]
    return f"  # {json.dumps(notes)}" if notes else ""




def from_text(text: str) -> Text:
    """Return the graph that `to_text` wrote. O(nodes).

    Raises `CaptureError`, with the line, for other text.
    """
    if not isinstance(text, str):
        raise CaptureError(f"the text is {shortened(text)}; it is a str that to_text returned")
    head, _, body = text.partition("\n")
    try:
        if not head.startswith(HEAD):
            raise _Wrong(f"the first line is no {HEAD!r}", 1)
        about = json.loads(head.removeprefix(HEAD))
        functions = ast.parse(body).body
        notes, mode, called = _notes_in(body), _mode_for(body), dict[str, fx.GraphModule]()
        for function in functions:
            if not isinstance(function, ast.FunctionDef):
                raise _Wrong("it is no function", function.lineno + 1)
            graph, constants = _Reader(function, notes, mode, called).read()
            if function is not functions[-1]:
                called[function.name] = fx.GraphModule(constants, graph, class_name=function.name)
        if not functions:
            raise _Wrong("there is no function", 2)
        _note_overwritten(graph, about.get("overwritten", {}))
    except _Wrong as error:
        raise CaptureError(f"line {error.line} is no graph as to_text writes it: {error}") from None
    except (SyntaxError, ValueError, tokenize.TokenError) as error:
        raise CaptureError(f"the text is no graph as to_text writes it: {error}") from None
    return Text(fx.GraphModule(constants, graph, class_name=str(about.get("name", "Graph"))), about["num_fwd_outputs"])


def _mode_for(body: str) -> FakeTensorMode:
    """Return a mode for fake tensors; loops among the ops (`while_loop`) need a ShapeEnv, which is slow to import."""
    if "torch.ops.higher_order." not in body:
        return FakeTensorMode()
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def _note_overwritten(graph: fx.Graph, overwritten: Mapping[str, str]) -> None:
    """Describe the outputs that overwrite inputs in the form of AOTAutograd's descriptions."""
    if not overwritten:
        return
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
    if unknown := [name for name in overwritten.values() if name not in inputs]:
        raise _Wrong(f"{unknown[0]} is no input", 1)
    end = graph.output_node()
    descs: list[object] = [None] * len(tree_leaves(end.args[0], is_leaf=lambda each: each is None))
    for place, name in overwritten.items():
        descs[int(place)] = Written(inputs[name].meta.setdefault("desc", Called(name)))
    end.meta["desc"] = descs


class _Wrong(Exception):
    def __init__(self, what: str, line: int) -> None:
        super().__init__(what)
        self.line = line


def _notes_in(body: str) -> dict[int, Mapping[str, Any]]:
    """Return the comments after ops, parsed from JSON, by line of the text's function."""
    tokens = tokenize.generate_tokens(io.StringIO(body).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    return {token.start[0]: json.loads(token.string.removeprefix("#")) for token in comments}


class _Reader:
    """Reads one function of a text; `called` has the graphs of the functions before it."""

    def __init__(
        self,
        function: ast.FunctionDef,
        notes: Mapping[int, Mapping[str, Any]],
        mode: FakeTensorMode,
        called: Mapping[str, fx.GraphModule],
    ) -> None:
        self.function, self.notes, self.called = function, notes, called
        self.graph, self.mode = fx.Graph(), mode
        self.nodes: dict[str, fx.Node] = {}
        self.constants: dict[str, torch.Tensor | fx.GraphModule] = {}

    def read(self) -> tuple[fx.Graph, dict[str, torch.Tensor | fx.GraphModule]]:
        for argument in self.function.args.args:
            node = self.graph.placeholder(argument.arg)
            node.meta["val"] = self._fake(argument.annotation, argument.lineno)
            if name := self.notes.get(argument.end_lineno or 0, {}).get("parameter"):
                node.meta["desc"] = Parameter(str(name))
            self.nodes[argument.arg] = node
        for statement in self.function.body:
            self._statement(statement)
        return self.graph, self.constants

    def _statement(self, statement: ast.stmt) -> None:
        line = statement.lineno + 1  # line in the text, which has a header line before the function
        match statement:
            case ast.Return(value=ast.expr() as value):
                self.graph.output(self._value(value, line))
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                fake = self._fake(annotation, statement.lineno)
                self.constants[name] = torch.zeros(fake.shape, dtype=fake.dtype)
                self.nodes[name] = node = self.graph.create_node("get_attr", name, name=name)
                node.meta["val"] = fake
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute(value=ast.Name(id="self"), attr=called)):
                if called not in self.called:
                    raise _Wrong(f"there is no function {called} before it", line)
                self.constants[called] = self.called[called]
                self.nodes[name] = self.graph.create_node("get_attr", called, name=name)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.nodes[name] = node = self._called(name, value, line)
                notes = self.notes.get(statement.end_lineno or 0, {})
                node.meta |= {key: value for key, value in notes.items() if key in NOTED}
                if module := notes.get("module"):
                    path = "".join(f"._modules[{part!r}]" for part in str(module).split("."))
                    node.meta["nn_module_stack"] = {"": (f"L['self']{path}", torch.nn.Module)}
                try:
                    with self.mode:
                        node.meta["val"] = self._evaluated(node)
                except Exception as error:  # an op may raise anything for invalid arguments
                    raise _Wrong(f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}", line) from None
            case _:
                raise _Wrong("it is neither an assignment nor a return", line)

    def _evaluated(self, node: fx.Node) -> Any:
        args: Any = fx.node.map_arg(node.args, self._shown)
        kwargs: Any = fx.node.map_arg(node.kwargs, self._shown)
        target: Any = node.target
        return target(*args, **kwargs)

    def _shown(self, node: fx.Node) -> Any:
        """Return the fake tensor of a node, or the graph that it stands for."""
        return node.meta["val"] if "val" in node.meta else self.constants[str(node.target)]

    def _called(self, name: str, value: ast.expr, line: int) -> fx.Node:
        match value:
            case ast.Subscript(value=of, slice=place):
                arguments = (self._value(of, line), self._value(place, line))
                return self.graph.create_node("call_function", operator.getitem, arguments, name=name)
            case ast.Call(func=called, args=given, keywords=named):
                target = self._op(called, line)
                arguments = tuple(self._value(each, line) for each in given)
                options = {str(each.arg): self._value(each.value, line) for each in named}
                return self.graph.create_node("call_function", target, arguments, options, name=name)
        raise _Wrong("it calls no op", line)

    def _op(self, called: ast.expr, line: int) -> Any:
        path = ast.unparse(called).split(".")
        if path[:3] == ["torch", "ops", "higher_order"] and len(path) == 4:
            higher = getattr(torch.ops.higher_order, path[3], None)
            if isinstance(higher, torch._ops.HigherOrderOperator):
                return higher
        if path[:2] != ["torch", "ops"] or len(path) != 5:
            raise _Wrong(f"{'.'.join(path)} is no op, such as torch.ops.aten.sin.default", line)
        found: Any = torch.ops
        for part in path[2:]:
            found = getattr(found, part, None)
        if not isinstance(found, torch._ops.OpOverload):
            raise _Wrong(f"there is no op {'.'.join(path)} here", line)
        return found

    def _value(self, value: ast.expr, line: int) -> Any:
        match value:
            case ast.Constant(value=constant):
                return constant
            case ast.Name(id=name):
                if name not in self.nodes and name not in NUMBERS:
                    raise _Wrong(f"{name} is not known", line)
                return self.nodes[name] if name in self.nodes else NUMBERS[name]
            case ast.List(elts=items):
                return [self._value(item, line) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self._value(item, line) for item in items)
            case ast.Dict(keys=keys, values=values):
                return {ast.literal_eval(k): self._value(v, line) for k, v in zip(keys, values, strict=True) if k}
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand, line)
            case ast.BinOp(left=real, op=ast.Add() | ast.Sub() as sign, right=ast.Constant(value=complex(imag=part))):
                return complex(self._value(real, line), -part if isinstance(sign, ast.Sub) else part)
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                found = getattr(torch, name, None)
                if isinstance(found, torch.dtype | torch.layout | torch.memory_format):
                    return found
            case ast.Attribute() if ast.unparse(value).startswith("torch.ops."):
                return self._op(value, line)  # an argument of a higher-order op, such as auto_functionalized
            case ast.Call(func=called, args=[ast.Constant(value=name)]) if ast.unparse(called) == "torch.device":
                return torch.device(str(name))
        raise _Wrong(f"{ast.unparse(value)} is no argument of an op", line)

    def _fake(self, annotation: ast.expr | None, line: int) -> torch.Tensor:
        given = annotation.value if isinstance(annotation, ast.Constant) else None
        found = TYPE.fullmatch(str(given))
        dtype = getattr(torch, found[1], None) if found else None
        if found is None or not isinstance(dtype, torch.dtype):
            raise _Wrong(f'{given!r} is no type, such as "float32[16, 8] cpu"', line + 1)
        shape = [*_integers(found[2])]
        with self.mode:
            if found[3] is None:
                return torch.empty(shape, dtype=dtype, device=found[4])
            return torch.empty_strided(shape, [*_integers(found[3])], dtype=dtype, device=found[4])


def _integers(text: str) -> Iterator[int]:
    return (int(part) for part in text.split(",") if part.strip())


def emitted_text(graphs: Sequence[tuple[str, fx.Graph]]) -> str:
    """Return graphs, each with a name, as the text of functions, after those of the graphs that their ops call."""
    called = dict(each for _, graph in graphs for each in _subgraphs(graph))
    texts = [function_text(graph, name, name) for name, graph in called.items()]
    return "\n\n".join([*texts, *(function_text(graph, name) for name, graph in graphs)])
