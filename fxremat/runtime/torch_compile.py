"""One budget for all graphs of a step, for models passed to `torch.compile` itself.

A step has several graphs if its model is broken into them, or if a model that is one graph is called several times
before one backward.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import fx

from fxremat.errors import BudgetTooSmall, CaptureError
from fxremat.graphs.symbolic import Dims
from fxremat.options import Options
from fxremat.runtime.auxiliary_outputs import copied
from fxremat.runtime.called_graph import CalledGraph, current
from fxremat.runtime.coordinator import Coordinator
from fxremat.runtime.last_call import SEVERAL_CALLS, LastCall
from fxremat.torch_private import RunningCall, graph_break_after, running_call, running_function

log = logging.getLogger(__name__)

ONE_GRAPH = (
    "the model is not one graph: {place}. It could be trained as several graphs within one budget, but {option} needs "
    "one"
)

_known: WeakKeyDictionary[object, Graphs] = WeakKeyDictionary()
_last: WeakKeyDictionary[object, LastCall] = WeakKeyDictionary()  # of functions whose calls are one graph each


class Graphs:
    """All graphs of one function that `torch.compile` returned.

    Args:
        call: the first call of the function.
        broken_at: the source line where the first graph ends; "": not known.
        device: the device that the function computes on.
        first: no graph of the step that this call is part of has run yet.
    """

    def __init__(
        self, options: Options, call: RunningCall, broken_at: str, device: torch.device, *, first: bool = True
    ) -> None:
        self._parameters: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
        self._model = None if call.module is None else weakref.ref(call.module)
        self._option, self._trained = _needing_one_graph(options), 0
        self.coordinator: Coordinator | None = None
        if not self._option:
            self.coordinator = Coordinator(options, call.name, broken_at, device, self._named)
            if not first:
                self.coordinator.ignore_next_step()
        call.surround(self._step)

    def note(self, inputs: Iterable[Any]) -> None:
        """Record the parameters among the inputs of a graph."""
        for given in inputs:
            if isinstance(given, torch.nn.Parameter):
                self._parameters[id(given)] = given

    def once(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a graph so that it raises if a call trains it twice, since each time it would use the whole budget."""

        def call(*inputs: Any) -> Any:
            if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
                self._trained += 1
                if self._trained > 1:
                    place = "torch.compile captured parts of it, and a call runs several"
                    raise CaptureError(ONE_GRAPH.format(place=place, option=self._option))
            return run(*inputs)

        return call

    def _named(self) -> Iterable[tuple[str, torch.Tensor]]:
        if self._model is None:
            return (("", parameter) for parameter in list(self._parameters.values()))
        return model.named_parameters() if (model := self._model()) is not None else ()

    def _step(self) -> contextlib.AbstractContextManager[None]:
        self._trained = 0
        if self.coordinator is None or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        return _step(self.coordinator)


def _needing_one_graph(options: Options) -> str:
    """Name the option that needs all of a call to be one graph here; "": there is none.

    The module that `fxremat.compile` returns moves weights to the host and back, and here is none.
    """
    return "offload=Offload(weights=True)" if options.hosts_weights else options.needs_one_graph


def graphs_of(options: Options, module: fx.GraphModule, inputs: Sequence[Any]) -> Graphs | None:
    """Return the `Graphs` that the graph being compiled belongs to; None if it is the only graph of the call.

    Raises:
        CaptureError: there are several graphs, and the options need one.
    """
    call, place = running_call(), graph_break_after(module)
    if call is None or (call.is_whole and place is None and call.function not in _known):
        return None
    if (option := _needing_one_graph(options)) and place:
        raise CaptureError(ONE_GRAPH.format(place=f"it is broken at {place}", option=option))
    graphs = _known.get(call.function)
    if graphs is None:
        graphs = _known[call.function] = Graphs(options, call, place or "", _device_of(inputs))
        if not option:
            log.warning(
                "%s is trained as several graphs within one budget, and planned after its first steps, which "
                "recompute most (fullgraph=True makes this an error): %s",
                call.name,
                f"tracing stops at {place}" if place else "torch.compile captures its parts one by one",
            )
    graphs.note(inputs)
    return graphs


def _device_of(inputs: Sequence[Any]) -> torch.device:
    devices = [x.device for x in inputs if isinstance(x, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


class WholeGraph:
    """A graph that is all of a call: planned alone, until it is called again before the backward of an earlier call.

    From then on all calls before a backward are planned together.

    Args:
        options: the options of the plan.
        compiled: compiles the graph for inputs, as one of these graphs or as the only one of its call.
        module: the graph as dynamo gives it.
        inputs: the inputs to compile it for now.
    """

    def __init__(
        self,
        options: Options,
        compiled: Callable[[Graphs | None, fx.GraphModule, Sequence[Any]], Callable[..., Any]],
        module: fx.GraphModule,
        inputs: Sequence[Any],
    ) -> None:
        self._options, self._compiled = options, compiled
        self._module = copied(module)  # compiling changes the module that is given
        self._alone = compiled(None, module, inputs)
        # function -> the graph planned with others; functions of the same code may run the same graph
        self._with_others: WeakKeyDictionary[object, Callable[..., Any]] = WeakKeyDictionary()

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph."""
        function = running_function() if torch.is_grad_enabled() else None
        if function is None:
            return self._alone(*inputs)
        last = _last.setdefault(function, LastCall())
        if function not in self._with_others and (function in _known or last.awaits_backward):
            self._share(last, inputs)
        last.forget()
        if run := self._with_others.get(function):
            return run(*inputs)
        outputs = self._alone(*inputs)
        last.note(outputs)
        return outputs

    def _share(self, last: LastCall, inputs: Sequence[Any]) -> None:
        """Plan calls of the running function together; warn once if the options forbid that."""
        call = running_call()
        assert call is not None
        if option := _needing_one_graph(self._options):
            last.tell_once(call.name, option, stacklevel=4)
            return
        graphs = _known.get(call.function)
        if graphs is None:
            graphs = _known[call.function] = Graphs(self._options, call, "", _device_of(inputs), first=False)
            log.warning(SEVERAL_CALLS, call.name)
        graphs.note(inputs)
        self._with_others[call.function] = self._compiled(graphs, copied(self._module), inputs)


@contextlib.contextmanager
def _step(coordinator: Coordinator) -> Iterator[None]:
    """Run a call of the function as a step of the coordinator.

    If no step can begin, the error is raised by the first graph that is called: dynamo could not clean up after
    an error here.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(coordinator.step())
        except BudgetTooSmall as error:
            before, current.runner = current.runner, _Refusal(error)
            stack.callback(setattr, current, "runner", before)
            yield
        else:
            yield
            coordinator.leave_with_what_is_held()


class _Refusal:
    """A runner of graph calls that raises a given error."""

    def __init__(self, error: BudgetTooSmall) -> None:
        self._error = error

    def forward(self, graph: CalledGraph, dims: Dims, primals: list[Any]) -> Any:
        """Raise the error."""
        raise self._error
