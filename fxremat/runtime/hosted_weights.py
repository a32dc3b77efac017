"""The weights of a model that is several graphs, on the host: a call of a graph has on the device those that it reads.

    forward of a call     its weights come before it; views of them that its backward reads are described, not kept
    backward of a call    the weights that it reads come again
    its gradients         go to the host when it has ended, where they are added up until autograd has all of a weight's
    optimizer.step()      updates one parameter after the other (`ops.parameters`)

A weight that several calls read comes for each of them, and waits nowhere in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from fxremat.cost.updates import units_of_optimizer
from fxremat.errors import FxrematError
from fxremat.graphs.symbolic import Dims
from fxremat.ops.parameters import Weights
from fxremat.runtime.called_graph import CalledGraph
from fxremat.runtime.emitted import Emitted
from fxremat.torch_private import after_backward, backward_task, storage_of, storage_watch
from fxremat.transfers.weights import step_bytes

RETURNED = (
    "forward returns a view of parameter {number} of the optimizer from one of its graphs, and it lives on the host "
    "between them: return a copy"
)


@dataclass(frozen=True)
class _View:
    """A view of a parameter that a call saves, without its memory."""

    number: int  # the parameter's index in the optimizer
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, number: int) -> _View:
        return cls(number, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def within(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the same view of another copy of the parameter."""
        empty = torch.empty(0, dtype=self.dtype, device=weight.device)
        return empty.set_(weight.untyped_storage(), self.offset, self.shape, self.stride)


@dataclass(frozen=True)
class _Brought:
    """The inputs of a call, with its weights on the device, where they stay as long as something refers to them."""

    primals: list[Any]
    # `storage_of` a weight on the device -> its index in the optimizer, and whether the storage is still in memory
    _storages: Mapping[int, tuple[int, Callable[[], bool]]]

    def _number_of(self, x: Any) -> int | None:
        if not isinstance(x, torch.Tensor):
            return None
        number, is_alive = self._storages.get(storage_of(x), (None, bool))
        return number if is_alive() else None

    def without_weights(self, saved: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Return the saved values with descriptions of those that are weights, or views of weights.

        Raises:
            FxrematError: one of the outputs is such a view.
        """
        returned = (number for x in outputs if (number := self._number_of(x)) is not None)
        if (number := next(returned, None)) is not None:
            raise FxrematError(RETURNED.format(number=number))
        numbers = map(self._number_of, saved)
        return [x if number is None else _View.of(x, number) for x, number in zip(saved, numbers, strict=True)]


class ResidentWeights:
    """The parameters of a model, where calls find them: on the device."""

    def begin(self) -> None:
        """Begin a forward of the model."""

    def __contains__(self, tensor: Any) -> bool:
        """Tell whether a tensor is a parameter that lives on the host."""
        return False

    def brought(self, primals: Sequence[Any]) -> list[Any]:
        """Return the inputs of a graph with all of them on the device."""
        return list(primals)

    def run_forward(
        self, graph: CalledGraph, emitted: Emitted, dims: Dims, primals: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Run the forward of a call; return its outputs and what it saves for its backward."""
        return graph.run_forward(emitted, dims, self.brought(primals))

    def run_again(
        self, graph: CalledGraph, emitted: Emitted, dims: Dims, primals: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Run the forward of a call just before its backward; return its outputs and what the backward reads."""
        return graph.run_forward(emitted, dims, self.brought(primals))

    def begin_backward(self) -> None:
        """Begin the backward of a call."""

    def restored(self, saved: Sequence[Any]) -> list[Any]:
        """Return what a backward reads, of what `run_forward` returned for it."""
        return list(saved)

    def keep(self, graph: CalledGraph, gradients: Sequence[Any], primals: Sequence[Any]) -> Sequence[Any]:
        """Move the gradients of parameters to where these live; return the others in their places."""
        return gradients


class HostedWeights(ResidentWeights):
    """All parameters of an optimizer, on the host.

    Attributes:
        held: bytes of the parameters, their gradients and their optimizer state, if all were on the device.
        most_updated: bytes on the device while `optimizer.step()` updates the parameter that needs most.
    """

    def __init__(self, weights: Weights) -> None:
        weights.later = True
        self._weights = weights
        units = units_of_optimizer(weights.optimizer, weights.device)
        self.held = sum(unit.held for unit in units)
        self.most_updated = step_bytes(units, {unit.value for unit in units})
        self._numbers: dict[int, int] = {}  # id of a parameter -> its index in the optimizer
        self._nodes: dict[int, tuple[Node, Any]] = {}  # by this index: where autograd has all of it
        self._task: int | None = None  # the backward that runs

    @property
    def bytes(self) -> int:
        """Bytes of the parameters."""
        return sum(parameter.nbytes for parameter in self._weights.parameters())

    def begin(self) -> None:
        """Begin a forward: move parameters to the host that are not there yet, with their gradients and state."""
        parameters = self._weights.parameters()
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._weights.settle(range(len(parameters)))
        self._weights.begin()

    def __contains__(self, tensor: Any) -> bool:
        return id(tensor) in self._numbers

    def brought(self, primals: Sequence[Any]) -> list[Any]:
        return self._bring(primals).primals

    def run_forward(
        self, graph: CalledGraph, emitted: Emitted, dims: Dims, primals: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        brought = self._bring(primals)
        outputs, saved = graph.run_forward(emitted, dims, brought.primals)
        return outputs, brought.without_weights(saved, outputs)

    def _bring(self, primals: Sequence[Any]) -> _Brought:
        """Copy the weights among the inputs of a call to the device."""
        given = list(primals)
        numbers = {place: self._numbers[id(x)] for place, x in enumerate(primals) if x in self}
        for place, number in numbers.items():
            if primals[place].requires_grad:
                self._look_at(number, primals[place])
        weights = self._on_device(dict.fromkeys(numbers.values()))
        for place, number in numbers.items():
            given[place] = weights[number]
        storages = {storage_of(weight): (number, storage_watch(weight)) for number, weight in weights.items()}
        return _Brought(given, storages)

    def restored(self, saved: Sequence[Any]) -> list[Any]:
        weights = self._on_device(dict.fromkeys(x.number for x in saved if isinstance(x, _View)))
        return [x.within(weights[x.number]) if isinstance(x, _View) else x for x in saved]

    def _on_device(self, numbers: Mapping[int, None]) -> dict[int, torch.Tensor]:
        """Copy parameters to the device; return them there by their indices in the optimizer."""
        coming = {number: self._weights.prefetch(self._weights.device, number) for number in numbers}
        return {number: self._weights.wait(weight, number) for number, weight in coming.items()}

    def begin_backward(self) -> None:
        """Begin to add up the gradients of the backward that runs, unless that has begun."""
        if self._task != (task := backward_task()):
            self._task = task
            self._weights.forget_sums()  # of a backward that failed
            self._weights.begin()
            after_backward(self._weights.forget_sums)

    def _look_at(self, number: int, parameter: torch.Tensor) -> None:
        """Complete a parameter's gradient when autograd has all parts of it, before hooks that look at `.grad`."""
        node = get_gradient_edge(parameter).node
        if (known := self._nodes.get(number)) is None or known[0] is not node:
            weights = self._weights
            self._nodes[number] = node, node.register_prehook(lambda _: weights.add_sum(number))

    def keep(self, graph: CalledGraph, gradients: Sequence[Any], primals: Sequence[Any]) -> Sequence[Any]:
        left = list(gradients)
        for place, at in graph.gradients_of(graph.hosted):
            gradient, left[at] = left[at], None
            if gradient is not None:
                self._weights.add_up(self._numbers[id(primals[place])], gradient)
        return left
