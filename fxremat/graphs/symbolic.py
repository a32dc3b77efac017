"""A joint graph with symbolic sizes, and its static versions at given sizes.

    joint graph with SymInts     placeholders that are symbolic sizes, arithmetic of sizes, ops on symbolic shapes
    at(dims)                     the graph that a capture at these input sizes would have given, to be measured and
                                 planned like any other
    as_captured(joint)           a result of `at` that refers to the nodes of the symbolic graph: code generated from it
                                 runs at every size

`dims` are the values of the symbolic inputs of a call, in order. Ops and values have the same numbers at all
sizes. Symbols are never compared here, since that would add a guard and tie the graph to one size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from operator import floordiv, mod
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxremat.errors import NotSymbolic
from fxremat.graphs.captured import Captured, read_joint
from fxremat.graphs.nodes import SYMBOLS, tangents_in, tensors_of
from fxremat.torch_private import (
    depends_on_data,
    expression_of,
    fake_like,
    graph_module,
    guards_of,
    is_effect_token,
    is_symbolic,
    real_tensors,
    size_now,
    storage_of,
)

if TYPE_CHECKING:
    # only for type checkers: torch imports sympy when it captures symbolic sizes
    import sympy

QUICK: dict[str, Callable[..., Any]] = {"FloorDiv": floordiv, "Mod": mod, "PythonMod": mod, "Max": max, "Min": min}
"""Functions in expressions of sizes, by the names of their classes, that Python computes faster than sympy."""
OF_INTEGERS: dict[str, Callable[..., int | None]] = QUICK | {
    "Add": lambda *numbers: sum(numbers),
    "Mul": lambda *numbers: prod(numbers),
    "Pow": lambda base, exponent: base**exponent if exponent >= 0 else None,
}
"""Functions of integers in such expressions, operators among them; they return None if the result may be no integer."""
FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)

Dims = tuple[int, ...]
Size = Any  # an integer expression of sympy, or the node of another symbolic number, such as a float


def is_size(value: object) -> bool:
    """Tell whether a value is a symbolic number that depends only on the sizes of the inputs."""
    return isinstance(value, SYMBOLS) and not depends_on_data(value)


def is_size_node(node: object) -> bool:
    """Tell whether a node's value is a symbolic number that depends only on the sizes of the inputs."""
    return isinstance(node, fx.Node) and is_size(node.meta.get("val"))


def has_symbolic_sizes(graph: fx.Graph) -> bool:
    """Tell whether a joint graph has symbolic numbers or shapes, even if only one value is possible."""
    tensors = (tensor for node in graph.nodes for tensor in tensors_of(node) if tensor is not None)
    return any(map(is_size_node, graph.nodes)) or any(map(is_symbolic, tensors))


def _by_sympy(function: Callable[..., Any], *numbers: int) -> Any:
    import sympy

    return function(*map(sympy.sympify, numbers))


def same_size(one: Any, other: Any) -> bool:
    """Tell whether two numbers, symbolic or not, are equal at all sizes, without adding a guard."""
    first, second = (expression_of(n) if isinstance(n, SYMBOLS) else n for n in (one, other))
    if isinstance(first, int) and isinstance(second, int):
        return first == second
    return bool(first == second or (first - second).expand() == 0)


def memory_format_of(tensor: torch.Tensor) -> torch.memory_format | None:
    """Return the memory format in which a tensor is contiguous at all sizes; None if there is none. Adds no guard."""
    return next((layout for layout in FORMATS if _lies_as(tensor, layout)), None)


def _lies_as(tensor: torch.Tensor, layout: torch.memory_format) -> bool:
    dims = [*range(tensor.dim())]
    if layout is not torch.contiguous_format:
        if tensor.dim() != (4 if layout is torch.channels_last else 5):
            return False
        dims = [0, *dims[2:], 1]
    stride: Any = 1
    for dim in reversed(dims):
        size = tensor.shape[dim]
        if not (same_size(size, 1) or same_size(tensor.stride(dim), stride)):
            return False
        stride = stride if same_size(size, 0) else stride * size
    return True


class Numbers:
    """A function from symbolic numbers to their values at particular input sizes."""

    def __init__(self, symbols: Sequence[sympy.Expr], dims: Sequence[int]) -> None:
        """Assign values to symbols.

        Args:
            symbols: the expression of each symbolic input: a symbol, or an expression of other inputs' symbols.
            dims: the value of each symbolic input.
        """
        import sympy

        given = zip(symbols, dims, strict=True)
        self._given = {symbol: sympy.Integer(dim) for symbol, dim in given if symbol.is_Symbol}
        self._known: dict[sympy.Expr, Any] = {symbol: int(dim) for symbol, dim in self._given.items()}

    def __call__(self, value: Any) -> Any:
        """Return the int, float or bool of a symbolic number; return other values, and data-dependent ones, unchanged.
        """
        if not self.knows(value):
            return value
        for symbolic, kind in ((torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool)):
            if isinstance(value, symbolic):
                return kind(self._value(expression_of(value)))
        return value

    def of(self, size: Size) -> Any:
        """Return the value of an expression, or of the number that a node computes.

        Floats are computed node by node, as in the model, since simplified expressions would round differently.
        """
        if not isinstance(size, fx.Node):
            return int(self._value(size))
        shown: Any = size.meta["val"]
        if not isinstance(shown, torch.SymFloat) or size.op != "call_function":
            return self(shown)
        args, kwargs = fx.node.map_arg(size.args, self.of), fx.node.map_arg(size.kwargs, self.of)
        target: Any = size.target
        return float(target(*args, **kwargs))

    def holds(self, guard: sympy.Basic) -> bool:
        """Tell whether a guard (a comparison of sizes) is true, or undetermined by these sizes."""
        return bool(guard.xreplace(self._given) != False)  # noqa: E712 - an undetermined guard is no `False`

    def knows(self, symbol: Any) -> bool:
        """Tell whether a number is determined by the sizes of the inputs."""
        return not isinstance(symbol, SYMBOLS) or bool(expression_of(symbol).free_symbols <= self._given.keys())

    def _value(self, expression: sympy.Expr) -> Any:
        if expression not in self._known:
            found = self._integer(expression)
            self._known[expression] = expression.xreplace(self._given) if found is None else found
        return self._known[expression]

    def _integer(self, expression: sympy.Basic) -> int | None:
        """Return the value of an expression of integers, much faster than sympy; None for other expressions."""
        if expression.is_Integer:
            return int(expression)
        if expression.is_Symbol:
            return self._known.get(expression)
        if not (function := OF_INTEGERS.get(type(expression).__name__)):
            return None
        numbers = [self._integer(argument) for argument in expression.args]
        return None if None in numbers else function(*numbers)


class SymbolicGraph:
    """A joint graph that takes symbolic sizes as inputs.

    Attributes:
        module: the graph.
        primals: its placeholders, without those of incoming gradients.
        places: indices of the symbolic numbers among the primals.
        inputs: the placeholders of these symbolic numbers.
        symbols: the expression of each of them.
    """

    def __init__(self, module: fx.GraphModule, forward_outputs: int) -> None:
        """Read the placeholders of a joint graph whose first `forward_outputs` outputs are the forward's.

        Raises `NotSymbolic` for a graph with side effects, or a symbolic input that is not an integer.
        """
        self.module = module
        self._forward_outputs = forward_outputs
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        if any(map(is_effect_token, placeholders)):
            raise NotSymbolic("an op with effects")
        self.places = tuple(place for place, node in enumerate(placeholders) if is_size_node(node))
        tangents = tangents_in(module.graph)
        self.primals = tuple(node for node in placeholders if node not in tangents)
        self.inputs = tuple(placeholders[place] for place in self.places)
        if not all(isinstance(node.meta["val"], torch.SymInt) for node in self.inputs):
            raise NotSymbolic("an input is a symbolic number that is no integer")
        self.symbols = tuple(expression_of(node.meta["val"]) for node in self.inputs)

    @cached_property
    def shaping(self) -> tuple[int, ...]:
        """Indices in `symbols` of the symbolic inputs on which the shape, strides or storage of some tensor depend.

        Where in a storage a tensor begins changes no program, nor does the size of a storage that the caller holds:
        batches may be slices of one long tensor.
        """
        tensors = [t for node in self.module.graph.nodes for t in tensors_of(node) if t is not None]
        given = {storage_of(t) for node in self.primals for t in tensors_of(node) if t is not None}
        numbers = [number for t in tensors for number in (*t.shape, *t.stride())]
        numbers += [t.untyped_storage().nbytes() for t in tensors if storage_of(t) not in given]
        symbols = {symbol for n in numbers if isinstance(n, SYMBOLS) for symbol in expression_of(n).free_symbols}
        return tuple(place for place, symbol in enumerate(self.symbols) if symbol in symbols)

    def shaping_of(self, dims: Dims) -> Dims:
        """Return those of the symbolic sizes on which the shape, strides or storage of some tensor depend."""
        return tuple(dims[place] for place in self.shaping)

    @property
    def dims(self) -> Dims:
        """The symbolic sizes of the call that the graph was captured from."""
        return tuple(size_now(node.meta["val"]) for node in self.inputs)

    def now(self) -> Captured:
        """Return the joint graph at the sizes of the call that this graph was captured from."""
        return self.at(self.dims)

    def numbers(self, dims: Dims) -> Numbers:
        """Return the values of the graph's symbolic numbers at these sizes."""
        return Numbers(self.symbols, dims)

    def formulas(self, numbers: Sequence[Any]) -> Callable[[Dims], list[int]]:
        """Return a function from sizes to the values of these ints and SymInts, in order; a call takes microseconds.

        Raises `NotSymbolic` if sizes of the inputs do not determine one of the numbers.
        """
        import sympy

        expressions = [sympy.sympify(expression_of(n) if isinstance(n, SYMBOLS) else n) for n in numbers]
        # several inputs may be the same symbol
        places = {symbol: place for place, symbol in enumerate(self.symbols) if symbol.is_Symbol}
        if unknown := {symbol for each in expressions for symbol in each.free_symbols} - places.keys():
            raise NotSymbolic(f"a size that depends on data: {', '.join(sorted(map(str, unknown)))}")
        functions = {type(each) for whole in expressions for each in sympy.preorder_traversal(whole) if each.args}
        by_name = {function.__name__: partial(_by_sympy, function) for function in functions} | QUICK
        function = sympy.lambdify([*places], expressions, modules=[by_name, "math"], cse=True)
        return lambda dims: [*map(int, function(*[dims[place] for place in places.values()]))]

    def serves(self, dims: Dims) -> bool:
        """Tell whether the captured graph is valid for calls with these sizes, which must satisfy the recorded guards.
        """
        numbers = self.numbers(dims)
        fixed = all(symbol == dim for symbol, dim in zip(self.symbols, dims, strict=True) if symbol.is_Integer)
        noted = guards_of(self.inputs[0].meta["val"]) if self.inputs else []
        return fixed and all(map(numbers.holds, noted))

    def at(self, dims: Dims) -> Captured:
        """Return the joint graph at these sizes. O(nodes): tens of milliseconds for a GPT of 12 layers.

        Raises:
            NotSymbolic: a value is sparse, so that its size is not known from its shape.
        """
        with real_tensors():  # needed since partition functions are called within a fake tensor mode
            return read_joint(graph_module(self.module, self._graph_at(dims)), self._forward_outputs)

    def ops_at(self, nodes: Iterable[fx.Node], dims: Dims) -> Sequence[fx.Node]:
        """Return nodes of this graph at these sizes, in a graph of nothing else: what they read are its inputs.

        O(number of these nodes). Raises `NotSymbolic` as `at`.
        """
        with real_tensors():
            copies = _Copies(self.numbers(dims))
            found = [copies.add(node) for node in nodes]
            copies.graph.output(())
            graph_module(self.module, copies.graph)
        return found

    def _graph_at(self, dims: Dims) -> fx.Graph:
        copies = _Copies(self.numbers(dims))
        for node in self.module.graph.nodes:
            if node.op == "output":
                copies.graph.output(copies.arguments(tuple(self._without_sizes(node.args[0]))))
                next(iter(reversed(copies.graph.nodes))).meta = self._output_meta(node)
            elif not is_size_node(node):
                copies.of[node] = copies.add(node)
        copies.graph.eliminate_dead_code()  # what only computed sizes, such as the condition of a check of sizes
        return copies.graph

    def as_captured(self, joint: Captured) -> Captured:
        """Return `joint`, a result of `at`, with the nodes of this symbolic graph; symbolic inputs have no gradient."""
        by_name: dict[str, fx.Node] = {node.name: node for node in self.module.graph.nodes}

        def back(nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
            return tuple(by_name[node.name] for node in nodes)

        outputs: list[Any] = list(by_name["output"].args[0])  # type: ignore[arg-type]
        return replace(
            joint,
            module=self.module,
            nodes=back(joint.nodes),
            shown=back(joint.shown),
            value_of={by_name[node.name]: value for node, value in joint.value_of.items()},
            primals=back(joint.primals),
            tangent_nodes=back(joint.tangent_nodes),
            forward_outputs=tuple(outputs[: self._forward_outputs]),
            backward_outputs=tuple(outputs[self._forward_outputs :]),
        )

    def _without_sizes(self, outputs: Any) -> list[Any]:
        """Return the graph's outputs (or their descriptions) without those that are gradients of symbolic numbers."""
        returned, places = outputs[self._forward_outputs :], set(self.places)
        gradients = [output for place, output in enumerate(returned) if place not in places]
        return [*outputs[: self._forward_outputs], *gradients]

    def _output_meta(self, end: fx.Node) -> dict[str, Any]:
        described = end.meta.get("desc")
        return dict(end.meta) | ({"desc": self._without_sizes(described)} if described else {})


class _Copies:
    """Copies nodes with symbolic sizes into a graph at particular sizes.

    Attributes:
        graph: the graph of the copies.
        of: nodes -> the copies that others read. What is missing there becomes an input, or is read from the module.
    """

    def __init__(self, numbers: Numbers) -> None:
        self.graph, self.of = fx.Graph(), dict[fx.Node, fx.Node]()
        self._numbers, self._concrete = numbers, _Concrete(numbers)

    def add(self, node: fx.Node) -> fx.Node:
        """Return a copy of a node, which reads copies."""
        return self._make(node, node.op, node.target, *self.arguments((node.args, node.kwargs)))

    def arguments(self, given: Any) -> Any:
        """Return arguments with numbers for nodes that are sizes, and copies for the other nodes."""
        return fx.node.map_arg(given, self._argument)

    def _argument(self, node: fx.Node) -> Any:
        if is_size_node(node):
            return self._numbers.of(node)
        if node not in self.of:
            attribute = node.op == "get_attr"
            self.of[node] = self.add(node) if attribute else self._make(node, "placeholder", node.name)
        return self.of[node]

    def _make(self, node: fx.Node, op: str, target: Any, args: Any = (), kwargs: Any = None) -> fx.Node:
        made = self.graph.create_node(op, target, args, kwargs, name=node.name)
        made.meta = dict(node.meta)
        if "val" in node.meta:
            made.meta["val"] = self._concrete(node.meta["val"])
        return made


class _Concrete:
    """Converts fake tensors to concrete sizes; tensors that shared a storage share one afterwards, too."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._like: Callable[..., torch.Tensor] = fake_like()

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, tuple | list):
            return type(value)(self(item) for item in value)
        return self._numbers(value)

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if value.layout is not torch.strided:
            raise NotSymbolic(f"a value of layout {value.layout}")
        number, storage = self._numbers, storage_of(value)
        shape, stride = [*map(number, value.shape)], [*map(number, value.stride())]
        offset, whole = number(value.storage_offset()), value.untyped_storage().nbytes()
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        least = value.element_size() * (last + 1) if all(shape) else 0
        # the storage's size is unknown for views of storages whose size depends on data
        size = number(whole) if number.knows(whole) else least
        known = self._storages.setdefault(storage, torch.empty(0, device="meta").untyped_storage())
        if known.nbytes() < size:
            known.resize_(size)
        made = torch.empty(0, dtype=value.dtype, device="meta")
        made.set_(known, offset, shape, stride)
        if value.is_conj():
            made = made.conj()
        if value.is_neg():
            made = torch._neg_view(made)
        return self._like(made, value.device)

