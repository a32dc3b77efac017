"""Regions: groups of ops that Inductor compiles to one function, which the graph calls instead of the ops.

    region = Region(root, graph, kernels, dying=..., donated=...)
    region(x, y)         runs it on tensors, which it leaves unchanged
    region.run([x, y])   runs it on a list, which it empties, so that inputs not needed afterwards are freed or
                         overwritten inside

Equal regions (of equal layers, or in plans for other budgets) have equal digests and share their kernels. A
region that Inductor cannot compile runs op by op, as it was captured.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import copy_context
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fxremat.errors import FxrematError
from fxremat.step.step_graph import Kind
from fxremat.torch_inductor import compile_region, configuration, several_at_once
from fxremat.torch_private import boxed, copied

log = logging.getLogger(__name__)
AT_ONCE = 8  # number of regions that are compiled in parallel
KEPT = 1024  # number of regions whose kernels are cached for equal regions; the oldest are dropped first

Run = Callable[[list[Any]], Sequence[Any]]
_kernels: OrderedDict[str, Run] = OrderedDict()  # digest of a region -> its compiled function


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The settings with which regions are compiled."""

    settings: Mapping[str, Any]  # values to patch in torch._inductor.config
    decompositions: Mapping[Any, Callable[..., Any]]  # decompositions of fxremat's own ops
    required: Set[Any] = frozenset()  # ops whose results differ if they are not compiled

    @cached_property
    def configuration(self) -> str:
        """All Inductor settings that kernels depend on, as a short text."""
        return configuration(self.settings)


class Region:
    """A callable that runs a group of ops, compiled by Inductor, on its inputs and returns a tuple of its outputs.

    Args:
        root: the module whose attributes the graph refers to.
        graph: a functional graph of aten ops; its inputs and outputs are tensors that fill their storages.
        dying: indices of inputs that nothing else refers to when the region runs, and that are not read afterwards.
        donated: indices of the dying inputs whose storages the kernels may overwrite.
        kernels: the settings with which the region is compiled.
    """

    kind = Kind.REGION

    def __init__(
        self,
        root: torch.nn.Module,
        graph: fx.Graph,
        kernels: Kernels,
        *,
        dying: frozenset[int] = frozenset(),
        donated: frozenset[int] = frozenset(),
    ) -> None:
        self._root, self.graph, self.dying, self.donated = root, graph, dying, donated
        self._how = kernels
        self._given = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
        self._shown = [(tensor.stride(), tensor.dtype) for tensor in self._given]
        self._layouts = [_layout_of(tensor) for tensor in self._given]
        self._run: Run | None = None  # the compiled function, from the first use on
        self.given_up = ""  # the reason why the region runs op by op; "" if it is compiled
        self.count = sum(node.op == "call_function" for node in graph.nodes)
        self.digest = hashlib.sha256(self._text().encode()).hexdigest()[:24]
        self.__name__ = "region"

    def __str__(self) -> str:
        return f"region {self.digest} freeing {sorted(self.dying)}"

    __repr__ = __str__

    def __deepcopy__(self, _: Any) -> Region:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Region) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __call__(self, *inputs: torch.Tensor) -> Sequence[Any]:
        return self.run([x.clone() if k in self.donated else x for k, x in enumerate(inputs)])

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of `torch._inductor.config` that the region is compiled with."""
        return self._how.settings

    @property
    def is_compiled(self) -> bool:
        """True if the region has a function to run, compiled or op by op."""
        return self._run is not None or self.digest in _kernels

    def compile(self) -> float:
        """Compile the region, unless kernels of an equal region are cached; return the seconds spent."""
        if self.is_compiled:
            self._run = self._run or _kernels[self.digest]
            return 0.0
        began, how = time.perf_counter(), self._how
        try:
            run = compile_region(self._module(), self._given, self.donated, how.settings, how.decompositions)
        except Exception as error:
            self.give_up(f"{type(error).__name__}: {error}")
        else:
            self._keep(run)
        return time.perf_counter() - began

    def _keep(self, run: Run) -> None:
        self._run = _kernels[self.digest] = run
        if len(_kernels) > KEPT:
            _kernels.popitem(last=False)

    def give_up(self, reason: str) -> None:
        """Run the region op by op from now on.

        Raises:
            FxrematError: it has an op whose results would differ if it is not compiled.
        """
        log.debug("%s with %d ops runs op by op: %s", self, self.count, reason)
        self.given_up = reason
        for node in self.graph.nodes:
            if node.target in self._how.required:
                raise FxrematError(
                    f'{node.target} has to be compiled, and is not ({reason}): with random="eager" it need not be'
                )
        self._keep(boxed(self._module()))

    def _module(self) -> fx.GraphModule:
        return fx.GraphModule(self._root, self.graph, class_name="Region")

    def run(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the region on a list of inputs, which is emptied; donated inputs may be overwritten.

        Compiles it if necessary.
        """
        if [(x.stride(), x.dtype) for x in inputs] != self._shown:
            self._lay_out(inputs)
        if self._run is None:
            self.compile()
            assert self._run is not None
        return self._run(inputs)

    def _lay_out(self, inputs: list[Any]) -> None:
        """Give inputs the captured layout and dtype, which depend on the kernels that made them."""
        for place, (strides, dtype) in enumerate(self._shown):
            if inputs[place].dtype != dtype:
                inputs[place] = inputs[place].to(dtype)
            if inputs[place].stride() != strides and _layout_of(inputs[place]) != self._layouts[place]:
                inputs[place] = laid_out(inputs[place], strides)

    def _text(self) -> str:
        """Return all that the region's kernels depend on as text: its code, the layouts of its inputs, and settings."""
        numbers: dict[fx.Node, str] = {}

        def told(value: Any) -> str:
            return repr(fx.node.map_arg(value, lambda node: _Name(numbers[node])))

        lines = [f"{torch.get_num_threads()} {self._how.configuration} {sorted(self.donated)}"]
        for number, node in enumerate(self.graph.nodes):
            numbers[node] = f"n{number}"
            if node.op == "placeholder":
                lines.append(_described(node.meta["val"]))
            else:
                lines.append(f"{node.target} {told(node.args)} {told(node.kwargs)}")
        return "\n".join(lines)


class _Name(str):
    """A string whose `repr` has no quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _layout_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, without those of dimensions of size 1, which have no meaning."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.device}"


def laid_out(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Return a copy of a tensor with these strides."""
    return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)


def forget_kernels() -> None:
    """Clear the cache of kernels, so that new regions are compiled; existing regions keep their kernels."""
    _kernels.clear()


def compile_all(regions: Iterable[Region]) -> Iterator[Region]:
    """Compile regions in parallel, and yield each as soon as it is compiled."""
    todo = list(regions)
    settings = {name: value for region in todo for name, value in region.settings.items()}
    with several_at_once(settings), ThreadPoolExecutor(max(1, min(AT_ONCE, len(todo)))) as pool:
        # Inductor reads its settings from context variables
        running = {pool.submit(copy_context().run, region.compile): region for region in todo}
        for done in as_completed(running):
            done.result()
            yield running[done]


def regions_of(graph: fx.Graph) -> list[Region]:
    """Return the regions that a graph calls, in order."""
    return [node.target for node in graph.nodes if isinstance(node.target, Region)]


class _Owning:
    """A function that runs a region on a list of its inputs, and empties the list."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self.__name__ = "run_region"

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        return self._region.run(inputs)

    def __deepcopy__(self, _: Any) -> _Owning:
        return self


def hand_over(*inputs: Any) -> list[Any]:
    """Return the inputs as a list; once the graph has dropped its references, the list has the only ones."""
    return list(inputs)


def runnable(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return a graph as a function that takes one list, so that its regions can free and overwrite their inputs."""
    if not regions_of(module.graph):
        return boxed(module)
    graph = copied(module.graph)
    for node in list(graph.nodes):
        if isinstance(node.target, Region):
            with graph.inserting_before(node):
                held = graph.call_function(hand_over, node.args)
            node.target, node.args = _Owning(node.target), (held,)
    return boxed(fx.GraphModule(module, graph))
