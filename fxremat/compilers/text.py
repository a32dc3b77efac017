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
whether it belongs to the backward. Reading only calls ops on fake tensors, whatever the text contains.
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
    return HEAD + json.dumps(head) + "\n" + function_text(module.graph, "forward")


def _overwritten(graph: fx.Graph) -> dict[str, str]:
    """Return index of an output -> name of the input that it overwrites."""
    inputs = {str(node.meta["desc"]): node.name for node in graph.find_nodes(op="placeholder") if "desc" in node.meta}
    descs: Any = graph.output_node().meta.get("desc") or ()
    sources = {str(place): str(getattr(desc, "mutated_input", None)) for place, desc in enumerate(descs)}
    return {place: inputs[source] for place, source in sources.items() if source in inputs}


def function_text(graph: fx.Graph, name: str) -> str:
    """Return a graph as the text of a function."""
    lines = [f"def {name}("]
    lines += [f"    {_name(node)}: {_typed(node)},{_parameter(node)}" for node in graph.find_nodes(op="placeholder")]
    lines.append("):")
    for node in graph.nodes:
        if node.op == "get_attr":
            lines.append(f"    {_name(node)}: {_typed(node)} = constant")
        elif node.op == "call_function":
            lines.append(f"    {_name(node)} = {_call(node)}{_notes(node)}")
        elif node.op == "output":
            lines.append(f"    return {_written(node.args[0])}")
    return "\n".join(lines) + "\n"


def _name(node: fx.Node) -> str:
    return f"{node.name}_" if keyword.iskeyword(node.name) else node.name


def _typed(node: fx.Node) -> str:
    value = node.meta.get("val")
    if node.op == "get_attr" and "val" not in node.meta:
        raise CaptureError(f"{node.name} is a graph inside of the graph, which text cannot hold")
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
    head, _, body = text.partition("\n")
    try:
        if not head.startswith(HEAD):
            raise _Wrong(f"the first line is no {HEAD!r}", 1)
        about = json.loads(head.removeprefix(HEAD))
        (function,) = ast.parse(body).body
        if not isinstance(function, ast.FunctionDef):
            raise _Wrong("the text is no function", 2)
        graph, constants = _Reader(function, _notes_in(body)).read()
        _note_overwritten(graph, about.get("overwritten", {}))
    except _Wrong as error:
        raise CaptureError(f"line {error.line} is no graph as to_text writes it: {error}") from None
    except (SyntaxError, ValueError, tokenize.TokenError) as error:
        raise CaptureError(f"the text is no graph as to_text writes it: {error}") from None
    return Text(fx.GraphModule(constants, graph, class_name=str(about.get("name", "Graph"))), about["num_fwd_outputs"])


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
    def __init__(self, function: ast.FunctionDef, notes: Mapping[int, Mapping[str, Any]]) -> None:
        self.function, self.notes = function, notes
        self.graph, self.mode = fx.Graph(), FakeTensorMode()
        self.nodes: dict[str, fx.Node] = {}
        self.constants: dict[str, torch.Tensor] = {}

    def read(self) -> tuple[fx.Graph, dict[str, torch.Tensor]]:
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
        args: Any = fx.node.map_arg(node.args, lambda argument: argument.meta["val"])
        kwargs: Any = fx.node.map_arg(node.kwargs, lambda argument: argument.meta["val"])
        target: Any = node.target
        return target(*args, **kwargs)

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
    """Return graphs, each with a name, as the text of functions."""
    return "\n\n".join(function_text(graph, name) for name, graph in graphs)
