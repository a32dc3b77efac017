"""Measures each run of consecutive layers: the costs of single layers, and the ways to train a stage of several.

    layers     ops between two cuts of the graph; short neighbours are merged until few enough remain
    way        a way to train a run of layers: what is recomputed, with the seconds and bytes of that
    exact      ways found by planning the run of layers as a module of its own
    rough      estimates of ways, from the ways of single layers; they show for which runs exact ones are needed

For exact ways, a run of layers is planned as if it were a model (`fxremat.plan`): its ops are measured, and its
memory is computed op by op. Equal runs (the blocks of a GPT) are planned once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from fxremat.chains.chain import Block, Chain, Option
from fxremat.errors import CaptureError
from fxremat.graphs.accounting import device_of, held_beside_copies
from fxremat.graphs.captured import captured_of
from fxremat.options import options_of
from fxremat.pipelining.stages import Ops, StageModule
from fxremat.plans import Plan
from fxremat.runtime.module import captured, drop_in
from fxremat.search.candidate import Candidate
from fxremat.settings import Search
from fxremat.solvers.pipeline.model import Layer, Layers, Way
from fxremat.solvers.pipeline.of_chain import ways_of
from fxremat.solvers.pipeline.stage_costs import Ways
from fxremat.step.costs import Costs
from fxremat.step.liveness import live_bytes

WAYS = 12  # maximum number of exact ways for each run of layers
MOST_LAYERS = 32  # maximum number of layers of a model, or three per device if that is more
# pairs of layers whose times are within this factor of the shortest are merged in one pass, so equal layers
# stay equal
ALIKE = 1.05


@dataclass(frozen=True, kw_only=True)
class Spending:
    """Seconds and bytes of one way to train a stage, for one micro-batch and without the stage's input."""

    forward_time: float  # seconds
    backward_time: float  # seconds
    budget: int  # the `mem` in bytes with which `fxremat.compile` recomputes this much
    kept: int  # bytes saved from forward to backward, the output included
    returned: int  # bytes of the output; a loss is kept until the step ends
    forward_peak: int  # bytes in addition to what other micro-batches have saved
    backward_peak: (
        int  # peak bytes of the backward, with what this micro-batch saved and the gradient of the stage's output
    )

    @property
    def peak(self) -> int:
        """The larger of the two peaks, in bytes."""
        return max(self.forward_peak, self.backward_peak)


@dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """A model in layers; it plans runs of consecutive layers on demand and remembers their costs."""

    ops: Ops
    inputs: tuple[Tensor, ...]  # inputs of one micro-batch
    target: Tensor  # target of one micro-batch
    effort: float  # seconds of search, op by op, for each run of layers
    cuts: tuple[int, ...]  # index of the first op of each layer, and the number of ops
    copies: float = 2.0  # what a trained parameter takes in all, over its own bytes
    _known: dict[str, tuple[Spending, ...]] = field(default_factory=dict)

    def module(self, first: int, last: int) -> StageModule:
        """Return the layers `first` to `last`, both included, as a module."""
        return self.ops.module(self.cuts[first], self.cuts[last + 1])

    def examples(self, first: int, last: int) -> tuple[Tensor, ...]:
        """Return example arguments of the module of layers `first` to `last`; the previous layer's output is random."""
        target = (self.target,) if last == self.count - 1 else ()
        if first == 0:
            return (*self.inputs, *target)
        made = torch.randn(self.crossing(first).shape, device=self.device)
        return (made.to(self.crossing(first).dtype).requires_grad_(), *target)

    def crossing(self, layer: int) -> Tensor:
        """Return a meta tensor like the one that the previous layer passes to this layer."""
        value: Tensor = self.ops.cuts[self.cuts[layer]].meta["val"]
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    def entering(self, layer: int) -> tuple[Tensor, ...]:
        """Return the inputs of a layer as meta tensors; for the first layer, the model's inputs."""
        if layer:
            return (self.crossing(layer).requires_grad_(),)
        return tuple(torch.empty_like(value, device="meta") for value in self.inputs)

    def leaving(self, layer: int) -> Tensor:
        """Return the output of a layer as a meta tensor; for the last layer, the loss."""
        if layer + 1 < self.count:
            return self.crossing(layer + 1).requires_grad_()
        return torch.empty((), device="meta", requires_grad=True)

    def input_bytes(self, layer: int) -> int:
        """Return the bytes of the tensor that the previous layer passes to this one; 0 for the first layer."""
        return self.crossing(layer).nbytes if layer else 0

    @property
    def count(self) -> int:
        """The number of layers."""
        return len(self.cuts) - 1

    def weight_bytes(self, first: int, last: int) -> int:
        """Return the bytes of the parameters of layers `first` to `last`, of which a device keeps `copies`.

        Frozen ones, which it keeps once, count for the less.
        """
        parameters = [*self.module(first, last).parameters()]
        trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
        frozen = sum(parameter.nbytes for parameter in parameters if not parameter.requires_grad)
        return trained + math.ceil(frozen / self.copies)

    @property
    def device(self) -> torch.device:
        """The device that the model is on."""
        return self.ops.device

    def spendings(self, first: int, last: int) -> tuple[Spending, ...]:
        """Return the costs of all ways to train layers `first` to `last`, fastest first.

        Equal runs of layers share them.
        """
        module, examples = self.module(first, last), self.examples(first, last)
        key = _text(module, examples)
        if key not in self._known:
            plan = captured(drop_in(module, options_of(mem="100%", **self.settings)), examples, {}).plan()
            self._known[key] = _spendings(plan)
        return self._known[key]

    @property
    def settings(self) -> dict[str, Any]:
        """The options that every stage is compiled with; `loss` is 1 byte, since the loss is counted separately here.
        """
        return {"loss": 1, "search": Search(seconds=self.effort, progress=False)}

    def ways(self, first: int, last: int) -> Sequence[Way]:
        """Return at most `WAYS` of the ways to train layers `first` to `last`, as the planner's input, fastest first.
        """
        return [self._way(first, last, spending) for spending in _spread(self.spendings(first, last), WAYS)]

    def _way(self, first: int, last: int, spending: Spending) -> Way:
        entering = self.input_bytes(first)
        return Way(
            forward_time=spending.forward_time,
            backward_time=spending.backward_time,
            kept_bytes=spending.kept + entering,
            peak_bytes=max(0, spending.peak + entering - self._counted_twice(last)),
        )

    def _counted_twice(self, last: int) -> int:
        """Return the bytes of a stage's output and its gradient.

        They are in the stage's peak, and again in the planner's buffers.
        """
        return 2 * self.input_bytes(last + 1) if last + 1 < self.count else 0

    @cached_property
    def rough(self) -> Ways:
        """A function that estimates the ways to train a run of layers from the ways of its single layers."""
        ways = ways_of(self._chain)

        def rough(first: int, last: int) -> Sequence[Way]:
            twice = self._counted_twice(last)
            return [replace(way, peak_bytes=max(0, way.peak_bytes - twice)) for way in ways(first, last)]

        return rough

    @property
    def _chain(self) -> Chain:
        sizes = [self.input_bytes(number) for number in range(1, self.count)] + [0]
        blocks = (self._block(number, size) for number, size in enumerate(sizes))
        return Chain(
            blocks=tuple(blocks), input_bytes=self.input_bytes(0), input_grad_bytes=self.input_bytes(0)
        )

    def _block(self, layer: int, size: int) -> Block:
        """Return a layer whose output has `size` bytes as a block of a chain, with an option for each way to train it.
        """
        around = self.input_bytes(layer) + size  # bytes of the gradients of input and output
        first, *others = (
            Option(
                saved_bytes=max(spending.kept, size),  # `kept` is smaller if the output is a view
                backward_time=spending.backward_time,
                backward_scratch=max(0, spending.backward_peak - spending.kept - around),
                save_scratch=max(0, spending.forward_peak - spending.kept),
            )
            for spending in self.spendings(layer, layer)
        )
        return Block(
            forward_time=self.spendings(layer, layer)[0].forward_time,
            backward_time=first.backward_time,
            output_bytes=size,
            saved_bytes=first.saved_bytes,
            backward_scratch=first.backward_scratch,
            save_scratch=first.save_scratch or 0,
            options=tuple(others),
        )

    def spending_of(self, first: int, last: int, way: Way) -> Spending:
        """Return the costs of the fastest way to train the layers that needs no more memory than `way`.

        The costs are those measured on this rank. If nothing is small enough, return those of the way with the
        lowest memory.
        """
        for spending in self.spendings(first, last):
            takes = self._way(first, last, spending)
            if takes.peak_bytes <= way.peak_bytes and takes.kept_bytes <= way.kept_bytes:
                return spending
        return self.spendings(first, last)[-1]

    def layers(self) -> Layers:
        """Return the layers as the planner's input, each with the costs of training it without recomputation."""
        chain = []
        for number in range(self.count):
            fastest = self.spendings(number, number)[0]
            leaving = self.input_bytes(number + 1) if number + 1 < self.count else 0
            chain.append(
                Layer(
                    name=str(self.ops.nodes[self.cuts[number + 1] - 1]),
                    forward_time=fastest.forward_time,
                    backward_time=fastest.backward_time,
                    weight_bytes=self.weight_bytes(number, number),
                    saved_bytes=fastest.kept + self.input_bytes(number),
                    output_bytes=leaving,
                    grad_bytes=leaving,
                )
            )
        given = sum(value.nbytes for value in self.inputs)
        return Layers(input_bytes=given, input_grad_bytes=0, layers=tuple(chain))


def profile(
    ops: Ops, inputs: tuple[Tensor, ...], target: Tensor, *, devices: int, effort: float, copies: float = 2.0
) -> Profile:
    """Cut a model into layers and measure them. Raises `CaptureError` if there are fewer layers than devices.

    Args:
        effort: seconds of search, op by op, for each run of layers.
        copies: what a trained parameter takes with its gradient and optimizer state, over its own bytes.
    """
    finest = (0, *ops.cuts, ops.end)
    if len(finest) - 1 < devices:
        raise CaptureError(
            f"{devices} devices need a model that can be cut into {devices} layers, and this one has "
            f"{len(finest) - 1}: between layers one tensor alone may cross, no input of the model and no parameter "
            "may be used on both sides (tied weights, masks made from inputs, skip connections)"
        )
    known: dict[str, tuple[Spending, ...]] = {}
    fine = Profile(ops=ops, inputs=inputs, target=target, effort=0.0, cuts=finest)
    times = [_seconds(fine.spendings(number, number)[0]) for number in range(fine.count)]
    cuts = joined(finest, times, max(MOST_LAYERS, 3 * devices))
    if effort == 0.0:
        known = fine._known
    return Profile(ops=ops, inputs=inputs, target=target, effort=effort, cuts=cuts, copies=copies, _known=known)


def joined(cuts: Sequence[int], times: Sequence[float], most: int) -> tuple[int, ...]:
    """Merge the shortest pairs of neighbouring layers until at most `most` layers remain; return the remaining cuts.

    >>> joined((0, 1, 2, 3, 4), (5.0, 1.0, 1.0, 5.0), 3)
    (0, 1, 3, 4)
    """
    left, spans = list(cuts), list(times)
    while len(spans) > most:
        limit = ALIKE * min(one + other for one, other in pairwise(spans))
        place = 0
        while place + 1 < len(spans):
            both = spans[place] + spans[place + 1]
            if both <= limit:
                spans[place : place + 2] = [both]
                del left[place + 1]
            place += 1
    return tuple(left)


def _seconds(spending: Spending) -> float:
    return spending.forward_time + spending.backward_time


def _spendings(plan: Plan) -> tuple[Spending, ...]:
    return tuple(_spending(candidate, plan.costs) for candidate in plan.alternatives.candidates)


def _spending(candidate: Candidate, costs: Costs) -> Spending:
    program = candidate.program()
    joint = captured_of(program.layout.graph)
    # The engine passes gradients with the strides that the stage was traced with, so none is copied. Autograd
    # keeps the engine's own gradients alive.
    sizes = replace(costs.sizes, root=costs.sizes.root - held_beside_copies(joint, device_of(joint)))
    memory = live_bytes(program, sizes, kept=joint.tangent_values)
    coming = sum(sizes.values[value] for value in joint.tangent_values) + sizes.root
    halves = [0.0, 0.0]
    for position, step in enumerate(program.steps):
        if step.op is not None:
            halves[position >= program.split] += costs.seconds[step.op]
    return Spending(
        forward_time=halves[0],
        backward_time=halves[1],
        budget=candidate.peak,
        kept=memory.at_split - max(coming, costs.sizes.outside),
        returned=sum(costs.sizes.values[value] for value in joint.kept_outputs),
        forward_peak=max(memory.during[: program.split], default=0),
        backward_peak=max(*memory.during[program.split :], memory.at_split, memory.end),
    )


def _spread(spendings: Sequence[Spending], count: int) -> list[Spending]:
    """Return at most `count` of the ways to train a stage, spread evenly over the bytes they save.

    The first and the last of `spendings` are among them.
    """
    most, least = spendings[0].kept, min(spending.kept for spending in spendings)
    marks = [most - (most - least) * number / max(1, count - 1) for number in range(count)]
    places = range(len(spendings))
    chosen = {min(places, key=lambda k: abs(spendings[k].kept - mark)) for mark in marks}
    return [spendings[place] for place in sorted(chosen | {0, len(spendings) - 1})]


def _text(module: StageModule, examples: tuple[Tensor, ...]) -> str:
    """Return a text that is equal for modules with equal ops and example tensors of equal shapes and dtypes."""
    number = {node: place for place, node in enumerate(module.graph.nodes)}
    lines = [_line(node, number) for node in module.graph.nodes]
    return "\n".join([*lines, str(list(_shapes(examples)))])


def _line(node: fx.Node, number: Mapping[fx.Node, int]) -> str:
    target = "" if node.op in ("placeholder", "get_attr") else str(node.target)
    arguments = fx.map_arg((node.args, node.kwargs), lambda read: f"%{number[read]}")
    return f"{node.op} {target} {arguments} {list(_shapes(node.meta.get('val')))}"


def _shapes(value: Any) -> Iterator[tuple[Any, ...]]:
    for part in value if isinstance(value, tuple | list) else (value,):
        if isinstance(part, Tensor):
            yield tuple(part.shape), part.dtype, part.stride(), part.requires_grad
