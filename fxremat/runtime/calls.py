"""The graph calls of a step, for models that consist of several graphs, and what each saves for its backward."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fxremat.graphs.symbolic import Dims
from fxremat.ops.random import GeneratorStates
from fxremat.planning.graph_programs import SizedPrograms
from fxremat.planning.paths import PathPlans
from fxremat.runtime.called_graph import CalledGraph, saved_calls
from fxremat.runtime.emitted import Emitted
from fxremat.runtime.loss_meter import made_from
from fxremat.runtime.step_memory import Border, Meter
from fxremat.search.call_programs import CallProgram
from fxremat.search.paths import Node, kept
from fxremat.torch_private import (
    current_node,
    holders_of,
    is_allocated,
    storage_of,
    storage_watch,
    versions_of,
)

_tokens = itertools.count(1)
MOST_FORWARDS = 64  # forwards of one step; backwards that have not run by then are taken never to run


Output = tuple[int, torch.dtype]
"""The number of elements of an output, and its dtype."""


class BackwardRunner(Protocol):
    """The object that runs the backward of graph calls."""

    def backward(self, call: Call, tangents: list[Any]) -> Sequence[Any]:
        """Run the backward of a call; return the gradients."""


@dataclass(frozen=True)
class Moment:
    """A point in time within a step at which memory was measured.

    `kind`: "forward": the forward of a call begins; "ran": it has ended; "backward": the backward of a call
    begins; "returned": it has ended; "loss": the backward of the whole step begins; "end": it has ended; "sizes":
    before the forward of a call, programs are looked at for new input sizes, for which ops may run that do not count.
    """

    kind: str
    node: Node | None  # the call in the tree of known paths, if the moment belongs to one
    border: Border
    saved: int  # bytes that calls of graphs had saved for their backwards at this moment, without outputs


@dataclass(eq=False)
class Step:
    """One forward of the model and its backward, or several forwards before one backward."""

    runner: BackwardRunner
    plans: PathPlans  # the known sequences of calls of such steps, and the plans for them
    node: Node  # the latest graph call, as a node in the tree of known sequences of calls
    meter: Meter
    measured: bool  # True if memory is measured at each moment, with the peaks in between
    # id of a parameter -> bytes of its gradient, for gradients that existed before the first call of a graph
    added: dict[int, int] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    saved: int = 0  # bytes that calls of graphs have saved for their backwards so far
    hosted: int = 0  # bytes of these values that wait on the host, besides those in `saved`
    in_backward: bool = False  # True once the first backward of a call has begun
    over: bool = False  # True once the backward of the step has ended
    forwards: int = 1  # number of forwards so far
    # number of a forward -> bytes assumed for the loss that is computed from its outputs, until its backward has run
    outside: dict[int, int] = field(default_factory=dict)
    # the `storage_of` what Python holds of these losses, and is counted
    held_of_losses: set[int] = field(default_factory=set)

    @property
    def goes_on(self) -> bool:
        """True if another forward belongs to this step, since the backward of a call may still run."""
        waits = any(call.token in saved_calls for call in self.calls)
        return waits and not self.in_backward and self.forwards < MOST_FORWARDS

    def enter(self) -> None:
        """Begin another forward of the step."""
        self.forwards += 1
        self.meter.enter()

    def give_up(self, before: int) -> None:
        """Go on without the calls of a forward that failed, and without measuring.

        Args:
            before: the number of calls of earlier forwards.
        """
        del self.calls[before:]
        self.node, self.measured = self.calls[-1].node, False
        self.meter.end()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The calls so far, as nodes in the tree of known paths."""
        return tuple(call.node for call in self.calls)

    @property
    def gradients_behind(self) -> list[int]:
        """For each call, the bytes of new parameter gradients that the backwards of later calls make.

        A gradient counts for one call only, and not at all if it goes to the host.
        """
        behind, seen, total = [], set[int](), 0
        for call in reversed(self.calls):
            behind.append(total)
            tensors = (x for x in call.on_device if x.requires_grad and x.is_leaf)
            for tensor in tensors:
                if tensor.grad is None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    total += tensor.nbytes
        return behind[::-1]

    def expect_sums(self) -> None:
        """Assume for calls that were not measured that they add gradients to those of all later calls."""
        seen = set[int]()
        for call in reversed(self.calls):
            values = {id(x): call.graph.gradients_apart[place] for place, x in call.summed.items()}
            if not call.node.measured:
                call.node.added = frozenset(value for key, value in values.items() if key in seen)
            seen |= values.keys()

    @property
    def _taken(self) -> set[int]:
        """The `storage_of` each tensor that a call took as input."""
        return {storage_of(x) for call in self.calls for x in call.primals if isinstance(x, torch.Tensor)}

    @property
    def outputs_held(self) -> list[Output]:
        """The floating-point outputs of calls that are still alive, and that no call took as input; [] if not measured.
        """
        taken = self._taken
        return [output for call in self.calls for output in call.floats_held(taken)] if self.measured else []

    def apart_from_losses(self, shown: Set[int] | None = None) -> list[Output]:
        """Return outputs of calls that no other call read, and that no single number of the same call was made from.

        A loss outside the model may read them beside a loss that the model returns. [] if the step is not measured.

        Args:
            shown: the `storage_of` each output that counts. None: those that are still alive.
        """
        taken = self._taken
        return [output for call in self.calls for output in call.floats_apart(taken, shown)] if self.measured else []

    def note(self, kind: str, node: Node | None = None) -> Border | None:
        """Record a moment, and return it as a border; None if the step is not measured."""
        if not self.measured:
            return None
        border = self.meter.border(in_backward=self.in_backward)
        saved = sum(call.program.saved for call in self.calls if call.saved is not None)
        self.moments.append(Moment(kind, node, border, saved))
        return border

    def reach(self, call: Call) -> None:
        """Record that the backward has reached a call: it has passed the loss that the call's forward was for."""
        if self.in_backward and call.forward not in self.outside:
            return
        self.in_backward = True
        outside = self.outside.pop(call.forward, 0)
        if (border := self.note("loss")) is not None and outside:
            self.meter.reach(border, outside, self._held)

    def _held(self) -> int:
        """Return the bytes of what Python holds that was computed from results of the running backward's call.

        The calls' own outputs do not count, nor what was counted before.
        """
        held = {storage_of(each): each.untyped_storage().nbytes() for each in made_from(current_node())}
        known = self.held_of_losses.union(*(call.float_storages for call in self.calls))
        self.held_of_losses |= held.keys()
        return sum(size for storage, size in held.items() if storage not in known)

    @property
    def spared(self) -> dict[Node, tuple[int, int]]:
        """For each call, the bytes that the step saved because gradients existed when it began.

        They are given for the beginning and the end of the call's backward: autograd adds to an existing
        gradient, but keeps a new one. It is not known when parameters outside of graphs get their gradients;
        they count from the beginning of the backward on.
        """
        of_graphs = {key for call in self.calls for key in call.leaves}
        found, total = {}, sum(size for key, size in self.added.items() if key not in of_graphs)
        left = dict(self.added)
        for call in reversed(self.calls):
            before = total
            total += sum(left.pop(key, 0) for key in call.leaves)
            found[call.node] = before, total
        return found

    def level(self, known: int) -> int:
        """Return the bytes that are allocated now.

        Args:
            known: bytes that belong to no call, as measured in earlier steps: used on devices that do not count
                bytes.
        """
        level = self.meter.level()
        return known + self.saved if level is None else level


@dataclass(eq=False)
class Call:
    """One call of a graph in a step, from its forward to its backward."""

    step: Step
    graph: CalledGraph
    dims: Dims
    at: SizedPrograms
    node: Node
    number: int  # index of the program that runs
    emitted: Emitted
    primals: list[Any]
    forward: int  # number of the forward of the step that made the call
    random: GeneratorStates | None  # states of the random generators when the call began
    # tensors saved for the backward; None: dropped, so that the forward has to run again
    saved: list[Any] | None = None
    own: int = 0  # bytes of the saved tensors
    # bytes that its backward is known to allocate; None: unknown, since its forward ran again
    known_need: int | None = None
    differentiated: bool = False  # True once the backward of this call has begun
    outlived: frozenset[int] = frozenset()  # outputs that were alive when the call freed its saved tensors
    kept_alone: int = 0  # bytes of outputs that nothing but this call keeps alive until its backward
    token: int = field(default_factory=lambda: next(_tokens))
    # the `id` of each parameter that this call reads; filled only in measured steps
    leaves: frozenset[int] = frozenset()
    # index of a gradient -> its parameter; for those that may be added to those of other calls
    summed: dict[int, torch.Tensor] = field(default_factory=dict)
    # index of an input that the graph does not overwrite, or of a saved tensor -> its version at the end of the forward
    _given_as: dict[int, int] = field(default_factory=dict)
    _saved_as: dict[int, int] = field(default_factory=dict)
    # the `storage_of` each of these tensors, and perhaps of some that were freed; None: not asked for yet
    _storages: frozenset[int] | None = None
    _overwritten: bool = False  # True if a later graph has overwritten an input that only another forward would read
    # index of an input -> function that tells whether the input is still alive
    _inputs: dict[int, Callable[[], bool]] = field(default_factory=dict)
    # index of an output -> function that tells whether the output is still alive
    _alive: dict[int, Callable[[], bool]] = field(default_factory=dict)
    # index of a floating-point output -> (id of its storage, its size and dtype)
    _floats: dict[int, tuple[int, Output]] = field(default_factory=dict)

    @property
    def hosted(self) -> int:
        """Bytes of saved values that wait on the host."""
        return self.program.hosted if self.saved is not None else 0

    @property
    def program(self) -> CallProgram:
        """The program (order of ops with recomputations) that this call runs."""
        return self.at.programs[self.number]

    def keep(self, outputs: Sequence[Any], saved: list[Any]) -> torch.Tensor:
        """Store the tensors saved for the backward on this call, and return a token tensor that stands for them.

        Autograd saves the token instead. The saved tensors are freed when the token is freed.
        """
        self.saved = _apart(saved, outputs)
        self.own = kept(self.program, self.at.outputs, self.node.held)
        self.step.saved += self.own
        self.step.hosted += self.hosted
        self.summed = self.graph.with_gradients_apart(self.primals)
        self._given_as = _versions_at(self.graph.unwritten, self.primals)
        self._saved_as = _versions_at(range(len(self.saved)), self.saved)
        if self.step.measured:
            for value, output in zip(self.graph.output_values, outputs, strict=True):
                if value is not None and isinstance(output, torch.Tensor):
                    self._alive[value] = storage_watch(output)
                    if output.is_floating_point():
                        self._floats[value] = storage_of(output), (output.numel(), output.dtype)
            self._watch_inputs()
        saved_calls[self.token] = self
        token = torch.tensor([self.token], device="cpu")
        weakref.finalize(token, self._forget)
        return token

    @property
    def on_device(self) -> Iterator[torch.Tensor]:
        """The inputs that are tensors, without the parameters that live on the host."""
        given = (x for place, x in enumerate(self.primals) if place not in self.graph.hosted)
        return (x for x in given if isinstance(x, torch.Tensor))

    def _watch_inputs(self) -> None:
        given = zip(self.graph.input_values, self.primals, strict=True)
        tensors = [(value, x) for value, x in given if value is not None and isinstance(x, torch.Tensor)]
        shared = Counter(storage_of(x) for _, x in tensors)
        self.leaves = frozenset(id(x) for x in self.on_device if x.is_leaf and x.requires_grad)
        alone = ((value, x) for value, x in tensors if shared[storage_of(x)] == 1)
        self._inputs = {value: storage_watch(x) for value, x in alone if is_allocated(x)}

    @property
    def dead_inputs(self) -> frozenset[int]:
        """Indices of inputs that have been freed, among those with a storage of their own allocated by PyTorch."""
        return frozenset(value for value, is_alive in self._inputs.items() if not is_alive())

    @property
    def is_forgotten(self) -> bool:
        """True if autograd no longer holds the call's token, so that its backward cannot run any more."""
        return self.token not in saved_calls

    def _forget(self) -> None:
        if saved_calls.pop(self.token, None) is not None:
            self.free()
            if all(call.saved is None for call in self.step.calls):
                self.step.meter.forget()

    @property
    def held(self) -> frozenset[int]:
        """The outputs that are still alive."""
        return frozenset(value for value, is_alive in self._alive.items() if is_alive())

    def look_at_outputs(self) -> None:
        """Record which outputs are alive when the backward begins, and which others had kept alive until then."""
        held = self.held
        self.kept_alone = self.node.hold(held, (self.outlived - held) | (held & self._held_alone))

    @property
    def _held_alone(self) -> frozenset[int]:
        """The outputs that nothing but the saved tensors of this call holds."""
        tensors = {id(x): x for x in self.saved or () if isinstance(x, torch.Tensor)}
        own = Counter(map(storage_of, tensors.values()))
        alone = {storage_of(x) for x in tensors.values() if holders_of(x) <= own[storage_of(x)]}
        return frozenset(value for value, (storage, _) in self._floats.items() if storage in alone)

    @property
    def float_storages(self) -> Set[int]:
        """The `storage_of` each floating-point output."""
        return {storage for storage, _ in self._floats.values()}

    def floats_held(self, taken: Set[int]) -> list[Output]:
        """Return the floating-point outputs that are still alive, except those whose storage is in `taken`."""
        held = (self._floats[value] for value in self.held if value in self._floats)
        return [output for storage, output in held if storage not in taken]

    def floats_apart(self, taken: Set[int], shown: Set[int] | None) -> list[Output]:
        """Return the floating-point outputs that no single number among the outputs was made from, alive or `shown`.

        Storages in `taken` do not count.
        """
        values = self._floats.keys() - self.graph.behind_numbers
        found = dict(self._floats[value] for value in sorted(values if shown is not None else values & self.held))
        counted = (found.keys() if shown is None else found.keys() & shown) - taken
        return [output for storage, output in found.items() if storage in counted and output[0] > 1]

    @property
    def is_as_saved(self) -> bool:
        """True if the tensors that the backward reads have not been changed in place since the forward.

        These are the saved ones, and the inputs that the graph does not overwrite itself.
        """
        given = [self.primals[place] for place in self._given_as]
        saved = [self.saved[place] for place in self._saved_as] if self.saved else []
        return versions_of(given + saved) == [*self._given_as.values(), *self._saved_as.values()]

    @property
    def storages(self) -> frozenset[int]:
        """The `storage_of` each tensor that the backward reads, and perhaps of some that were freed. O(tensors), once.
        """
        if self._storages is None:
            held: list[Any] = self.saved or []
            tensors = [self.primals[place] for place in self._given_as] + [held[place] for place in self._saved_as]
            self._storages = frozenset(map(storage_of, tensors))
        return self._storages

    def keep_values_of(self, storage: int, copied: Callable[[], torch.UntypedStorage]) -> None:
        """Prepare for a later graph of the step that overwrites a storage: read a copy of it, if the backward reads it.

        Args:
            storage: the `storage_of` what is overwritten.
            copied: returns a copy of the storage.
        """
        held: list[Any] = self.saved or []
        given = _places_in(storage, self._given_as, self.primals)
        saved = _places_in(storage, self._saved_as, held)
        if not (given or saved):
            return
        reads = {self.graph.input_values[place] for place in given} & self.program.inputs
        if self.saved is None or saved or reads:
            for tensors, places, versions in ((self.primals, given, self._given_as), (held, saved, self._saved_as)):
                for place in places:
                    tensors[place] = _in_storage(copied(), tensors[place])
                versions |= _versions_at(places, tensors)
            self._storages = None
        else:
            self._overwritten = True
            for place in given:
                del self._given_as[place]

    @property
    def can_let_go(self) -> bool:
        """True if the call has saved tensors that its graph can recompute from its inputs."""
        return self.saved is not None and self.own > 0 and self.graph.runs_again and not self._overwritten

    def let_go(self) -> None:
        """Free the saved tensors; the forward then has to run again before the backward."""
        self._drop()
        self.outlived = self.held

    def free(self) -> None:
        """Free all that the call holds, since its backward runs now, or never."""
        self._drop()
        self.primals, self._given_as, self.summed = [], {}, {}
        saved_calls.pop(self.token, None)

    def _drop(self) -> None:
        self.step.saved -= self.own
        self.step.hosted -= self.hosted
        self.saved, self._saved_as, self.own = None, {}, 0

    def backward(self, tangents: list[Any]) -> Sequence[Any]:
        """Run the backward; return the gradients."""
        return self.step.runner.backward(self, tangents)


def _apart(saved: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Return the saved values, with outputs and views of outputs detached.

    An output refers to its autograd node, which holds the call's token, so the call would keep itself alive.
    """
    returned = {storage_of(x) for x in outputs if isinstance(x, torch.Tensor)}
    return [x.detach() if isinstance(x, torch.Tensor) and storage_of(x) in returned else x for x in saved]


def _versions_at(places: Collection[int], tensors: Sequence[Any]) -> dict[int, int]:
    """Return the versions of the tensors with these indices, by index; other values have none."""
    versions = versions_of([tensors[place] for place in places])
    return {place: version for place, version in zip(places, versions, strict=True) if version is not None}


def _places_in(storage: int, places: Iterable[int], tensors: Sequence[Any]) -> list[int]:
    """Return those of the indices whose tensors lie in a storage."""
    return [place for place in places if storage_of(tensors[place]) == storage]


def _in_storage(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor that lies in a storage as `like` lies in its own."""
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    return empty.set_(storage, like.storage_offset(), like.shape, like.stride())
