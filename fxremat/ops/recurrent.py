"""`nn.LSTM`, `nn.GRU` and `nn.RNN` as one op each, with what the backward needs among the results of the op.

    [output, *states, token, *tape]  =  fxremat::recurrent([x, *states, *weights], layer)
    gradients                        =  fxremat::recurrent_backward(gradients, which, token, sources, layer, sums, of)

PyTorch runs its own kernels inside of the op (cuDNN's, oneDNN's, or its loops over time), and its own autograd, so that
numbers are eager mode's to the bit. Where a layer is called several times, the backward of a call goes on with the sums
of gradients that those of later calls have begun, as autograd adds up the steps of all calls one by one.

What autograd saves is taken from it and returned as the tape: autograd keeps only positions, and a plan decides whether
the tape is kept, made again, or moved to the host. A tape of many small tensors is copied into a few.

The token is a tensor of one number. PyTorch's autograd graph hangs on it, and is freed with it. A token without a graph
was made up to measure the backward: the forward runs first then.

What results and tape look like is found by running the layer once for each combination of sizes: on tensors of the step
that is captured, where there are some of these shapes (`lending`), since copies would take memory, else on zeros.

cuDNN needs all weights of a layer in one storage, where `RNNBase.flatten_parameters` puts them, and copies them there
itself where they are not, which autograd saves. Layers whose weights lie otherwise in a run than in the step that was
captured work too: what autograd saves in addition waits at the token, and what it saves no longer is copied.
The state of cuDNN's dropout, one tensor of the process that autograd saves in each layer, waits there as well.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from fxremat.device import kind_of
from fxremat.errors import FxrematError, NotSymbolic
from fxremat.ops.random import HOST, GeneratorStates
from fxremat.torch_private import (
    autograd_inside_of_ops,
    is_real,
    real_tensors,
    recurrent_kernels,
    storage_of,
    storage_watch,
)

KINDS = recurrent_kernels()  # "LSTM", "GRU", "RNN_TANH", "RNN_RELU" -> PyTorch's function
ELSEWHERE = -1  # instead of a position, for a saved tensor whose storage outlives all runs
MOST_TENSORS = 16  # a tape of more tensors is copied into fewer
MERGED = 16  # number of these: one of them exists twice while it is made
ALIGNED = 64  # bytes at whose multiples tensors begin in it


@dataclass(frozen=True)
class Shape:
    """Size, stride and dtype of a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(tensor: Tensor) -> Shape:
        """Return the shape of a tensor. Raises `NotSymbolic` if its sizes may change."""
        if not all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride())):
            raise NotSymbolic("the sizes of a recurrent layer")
        return Shape(tuple(tensor.shape), tensor.stride(), str(tensor.dtype).removeprefix("torch."))

    def empty(self, device: torch.device) -> Tensor:
        """Return a tensor of this shape whose numbers are not set."""
        return torch.empty_strided(self.size, self.stride, dtype=getattr(torch, self.dtype), device=device)


@dataclass(frozen=True)
class Layer:
    """A call of a recurrent layer, without the numbers of its tensors.

    Attributes:
        kind: a key of `KINDS`.
        numbers: the arguments of PyTorch's function after its tensors: whether there are biases, the number of layers,
            the probability of dropout, whether it is training, bidirectional, and whether batches come first.
        states: number of initial states: 2 for an LSTM, else 1.
        given: shapes of `[x, *states, *weights]`.
        trained: positions of those that need gradients.
        leaves: positions of parameters among them, where autocast casts a parameter only once.
        autocast: the dtype of autocast where the layer is called; "" if it is off.
        offsets: of the weights in the storage that they share; empty if they share none.
    """

    kind: str
    numbers: tuple[bool | int | float, ...]
    states: int
    given: tuple[Shape, ...]
    trained: tuple[int, ...]
    leaves: tuple[int, ...]
    autocast: str
    offsets: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The layer as an argument of an op; `parse` reads it."""
        return json.dumps(asdict(self))

    @staticmethod
    @functools.cache
    def parse(text: str) -> Layer:
        """Return the layer of a text."""
        known = json.loads(text)
        given = (Shape(tuple(one["size"]), tuple(one["stride"]), one["dtype"]) for one in known["given"])
        places = {name: tuple(known[name]) for name in ("numbers", "trained", "leaves", "offsets")}
        return Layer(**{**known, **places, "given": tuple(given)})

    @property
    def draws(self) -> bool:
        """True if it draws dropout masks."""
        _, layers, dropout, training, *_ = self.numbers
        return bool(training and dropout > 0 and layers > 1)

    def run(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Run the layer in PyTorch's own kernels; return its output and its final states.

        Autocast casts each weight once, as by default outside of a trace, which switches that off.
        """
        x, states, weights = given[0], list(given[1 : 1 + self.states]), list(given[1 + self.states :])
        dtype = getattr(torch, self.autocast) if self.autocast else None
        cast = torch.autocast(x.device.type, dtype=dtype, cache_enabled=True) if dtype else contextlib.nullcontext()
        with cast:
            return list(KINDS[self.kind](x, states if self.states > 1 else states[0], weights, *self.numbers))


@dataclass(frozen=True)
class _Saved:
    """A tensor that autograd saved, as a view of a given tensor, of a result, or of a tensor of the tape."""

    source: int  # position in [*given, *results, token, *tape], or `ELSEWHERE`
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # of its first element from that of the source
    dtype: torch.dtype

    def of(self, sources: Mapping[int, Tensor]) -> Tensor:
        """Return the saved tensor."""
        source = sources[self.source]
        if source.dtype != self.dtype:  # in merged tensors of bytes
            source = source.view(self.dtype)
        return source.as_strided(self.size, self.stride, source.storage_offset() + self.offset)


@dataclass(frozen=True)
class _Recording:
    """The tensors that autograd saves in a layer, the same in each run, and the tape that is made of them."""

    saved: tuple[_Saved, ...]
    own: tuple[int, ...]  # numbers of the saved tensors whose storages the tape consists of
    whole: tuple[int, ...]  # elements of each of these storages
    known: int  # number of the given tensors and the results
    # for each merged tensor, the elements of each of these, then those left free; for a tensor of one, its elements
    groups: tuple[tuple[int, ...], ...] = ()
    dtype: torch.dtype = torch.uint8  # of merged tensors

    @functools.cached_property
    def lasting(self) -> tuple[int, ...]:
        """Numbers of the saved tensors whose storages outlive all runs."""
        return tuple(number for number, one in enumerate(self.saved) if one.source == ELSEWHERE)

    @functools.cached_property
    def of_known(self) -> dict[_Saved, list[int]]:
        """View of a given tensor or a result -> numbers of the saved tensors that are this view."""
        found: dict[_Saved, list[int]] = {}
        for number, one in enumerate(self.saved):
            if ELSEWHERE < one.source < self.known:
                found.setdefault(one, []).append(number)
        return found

    def apart(self, held: Sequence[Tensor], known: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return those saved tensors, by number, that are no views of what was given or made in this run.

        Args:
            known: what was given, and the results.
        """
        moved = [
            number
            for view, numbers in self.of_known.items()
            if storage_of(held[numbers[0]]) != storage_of(known[view.source])
            for number in numbers
        ]
        return {number: held[number] for number in (*self.lasting, *moved)}

    @torch.no_grad()
    def tape(self, held: list[Tensor], known: Sequence[Tensor]) -> list[Tensor]:
        """Return the tape of the tensors that autograd saved; `held` is emptied, since their graph refers to it.

        Args:
            known: what was given, and the results, of which an op must not return views.

        Raises:
            FxrematError: autograd saves tensors of other sizes than it did before.
        """
        others = set(map(storage_of, known))
        owned = zip(self.own, self.whole, strict=True)
        storages = [_part(held[k], n) if storage_of(held[k]) in others else _whole(held[k]) for k, n in owned]
        if tuple(one.numel() for one in storages) != self.whole:
            raise FxrematError("autograd saves tensors of other sizes in a recurrent layer than it saved before")
        held.clear()
        if not self.groups:
            return storages
        storages, tape = storages[::-1], list[Tensor]()
        for parts in self.groups:  # one after the other, so that only one of them exists twice
            if len(parts) == 1:
                tape.append(storages.pop().view(self.dtype))
                continue
            merged = torch.empty(sum(parts), dtype=self.dtype, device=storages[0].device)
            own = [storages.pop() for _ in parts[::2]]
            own = [one if one.dtype == self.dtype else one.view(self.dtype) for one in own]
            torch._foreach_copy_(list(merged.split_with_sizes(parts)[::2]), own)
            del own
            tape.append(merged)
        return tape


@dataclass(eq=False)
class _Graph:
    """PyTorch's autograd graph of one run of a layer, which holds positions in the tape instead of tensors."""

    root: Tensor = field(default_factory=lambda: torch.empty(0, requires_grad=True))  # the leaf that it begins at
    leaves: dict[int, Tensor] = field(default_factory=dict)  # position of a given tensor -> another leaf
    begins: dict[int, Any] = field(default_factory=dict)  # position of another given tensor -> the edge to its gradient
    outputs: list[Any] = field(default_factory=list)  # an edge of the graph for each result; None: needs no gradient
    saved: Sequence[_Saved] = ()
    apart: Mapping[int, Tensor] = field(default_factory=dict)  # saved tensors that are no views of sources in this run
    sources: Mapping[int, Tensor] = field(default_factory=dict)  # while the backward runs, what `saved` are views of
    gradients: dict[int, Tensor] = field(default_factory=dict)  # position of a given tensor -> its gradient


class _Given(torch.autograd.Function):
    """Lets a tensor begin a graph that does not hold it: its gradient goes to the graph's `gradients`."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, tensor: Tensor, graph: Callable[[], Any], position: int) -> Tensor:
        ctx.graph, ctx.position = graph, position
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.graph().gradients[ctx.position] = gradients[0]
        return None, None, None, None


def _run(given: Sequence[Tensor], layer: Layer) -> tuple[list[Tensor], list[Tensor], _Graph]:
    """Run a layer; return its results, what autograd saved, and the graph that its backward runs."""
    graph, held = _Graph(), list[Tensor]()
    known: Callable[[], Any] = weakref.ref(graph)  # autograd's nodes must not keep alive what keeps them alive

    def pack(tensor: Tensor) -> int:
        held.append(tensor)
        return len(held) - 1

    def unpack(place: int) -> Tensor:
        now = known()
        if place in now.apart:
            return now.apart[place]  # type: ignore[no-any-return]
        return now.saved[place].of(now.sources)  # type: ignore[no-any-return]

    def inside(place: int, tensor: Tensor) -> Tensor:
        if place in layer.leaves:
            return graph.leaves.setdefault(place, tensor.detach().requires_grad_())
        if place in layer.trained:
            begun: Tensor = _Given.apply(graph.root, tensor, known, place)  # type: ignore[no-untyped-call]
            graph.begins[place] = get_gradient_edge(begun)
            return begun
        return tensor.detach()

    with autograd_inside_of_ops(), torch.enable_grad():
        with saved_tensors_hooks(pack, unpack):
            made = layer.run(list(itertools.starmap(inside, enumerate(given))))
        graph.outputs = [get_gradient_edge(one) if one.requires_grad else None for one in made]
        for leaf in graph.leaves.values():
            leaf.data = leaf.new_empty(0)  # the graph needs its place only, not its numbers
    results = list[Tensor]()
    for one in made:
        shared = any(storage_of(one) == storage_of(other) for other in (*given, *results))
        results.append(one.detach().clone() if shared else one.detach())  # ops must not return what they were given
    return results, held, graph


def _recorded(held: Sequence[Tensor], known: Sequence[Tensor], lasting: Sequence[int] = ()) -> _Recording:
    """Return the recording of a run.

    Args:
        known: what was given, and the results.
        lasting: numbers of the saved tensors whose storages outlive all runs.
    """
    source = {storage_of(tensor): place for place, tensor in enumerate(known)}
    exactly = {(storage_of(tensor), tensor.storage_offset()): place for place, tensor in enumerate(known)}
    own: dict[int, int] = {}  # storage -> number of the first saved tensor in it
    for number, tensor in enumerate(held):
        if storage_of(tensor) not in source and number not in lasting:
            own.setdefault(storage_of(tensor), number)
    dtypes = {held[number].dtype for number in own.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    tape = len(known) + 1  # after the token
    if len(own) <= MOST_TENSORS:
        groups: list[list[int]] = []
        begins = {storage: (tape + number, 0) for number, storage in enumerate(own)}
    else:
        groups, begins = _merged([(one, held[k].untyped_storage().nbytes()) for one, k in own.items()], dtype, tape)
        own = {storage: own[storage] for storage in begins}
    saved = list[_Saved]()
    for number, tensor in enumerate(held):
        storage, offset = storage_of(tensor), int(tensor.storage_offset())
        if number in lasting:
            at, begin = ELSEWHERE, 0
        elif storage in source:
            at = exactly.get((storage, tensor.storage_offset()), source[storage])
            begin = -int(known[at].storage_offset()) * tensor.element_size()
        else:
            at, begin = begins[storage]
        offset += begin // tensor.element_size()
        saved.append(_Saved(at, tuple(tensor.shape), tensor.stride(), offset, tensor.dtype))
    return _Recording(
        saved=tuple(saved),
        own=tuple(own.values()),
        whole=tuple(_whole(held[number]).numel() for number in own.values()),
        known=len(known),
        groups=tuple(map(tuple, groups)),
        dtype=dtype,
    )


def _merged(
    storages: Sequence[tuple[int, int]], dtype: torch.dtype, tape: int
) -> tuple[list[list[int]], dict[int, tuple[int, int]]]:
    """Divide storages into about `MERGED` tensors of about equal size, or of one larger storage.

    Args:
        storages: each with its bytes.
        tape: position of the first tensor of the tape.

    Returns:
        for each tensor, the elements of each storage followed by those left free, or those of its only storage; and by
        storage, in the same order, the position of its tensor, and the byte at which it begins there.
    """
    most, groups, begins = sum(size for _, size in storages) // MERGED, list[list[int]](), dict[int, tuple[int, int]]()
    for storage, size in storages:
        if size > most:
            begins[storage] = tape + len(groups), 0
            groups.append([size // dtype.itemsize])
    end = most + 1
    for storage, size in (each for each in storages if each[1] <= most):
        if end > most:
            groups.append([])
            end = 0
        begins[storage] = tape + len(groups) - 1, end
        count = size // dtype.itemsize
        groups[-1] += [count, -count % (ALIGNED // dtype.itemsize)]
        end += sum(groups[-1][-2:]) * dtype.itemsize
    return groups, begins


def _whole(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor in one dimension."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def _part(tensor: Tensor, elements: int) -> Tensor:
    """Return a copy of the first elements of the storage of a tensor, or of all, if there are fewer."""
    return _whole(tensor)[:elements].clone()


def _owned(tensor: Tensor) -> Tensor:
    """Return a tensor that has a storage of its own size: the same, or a copy."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _backward(
    graph: _Graph,
    gradients: Sequence[Tensor],
    which: Sequence[int],
    sources: Mapping[int, Tensor],
    layer: Layer,
    sums: Mapping[int, Tensor],
) -> list[Tensor]:
    """Run PyTorch's backward of a layer; return the gradients of `layer.trained`.

    Args:
        sums: position of a given tensor -> the sum to which its gradient is added, step by step.
    """
    graph.sources = sources
    try:
        with autograd_inside_of_ops(), torch.enable_grad():
            pairs = [(graph.outputs[k], g) for k, g in zip(which, gradients, strict=True) if graph.outputs[k]]
            pairs += [(graph.begins[place], total) for place, total in sums.items()]
            edges, given = [edge for edge, _ in pairs], [gradient for _, gradient in pairs]
            leaves = [graph.root, *graph.leaves.values()]
            _, *found = torch.autograd.grad(edges, leaves, given, retain_graph=True, allow_unused=True)
        graph.gradients.update((k, g) for k, g in zip(graph.leaves, found, strict=True) if g is not None)
        device = gradients[0].device
        return [
            _owned(graph.gradients[place].detach())  # cuDNN's are views of one tensor
            if place in graph.gradients
            else layer.given[place].empty(device).zero_()
            for place in layer.trained
        ]
    finally:
        graph.sources, graph.gradients = {}, {}


@dataclass(frozen=True)
class _Looks:
    """The shapes of what a layer returns, and its recording: found by running it on zeros."""

    made: tuple[Shape, ...]  # of [*results, token, *tape]
    gradients: tuple[Shape, ...]
    recording: _Recording

    @functools.cached_property
    def sources(self) -> tuple[int, ...]:
        """Positions in `[*given, *results, token, *tape]` of what the backward reads, in order."""
        return tuple(sorted({one.source for one in self.recording.saved} - {ELSEWHERE}))


_lent: ContextVar[Sequence[Tensor]] = ContextVar("fxremat_lent", default=())


@contextlib.contextmanager
def lending(tensors: Iterable[object]) -> Iterator[None]:
    """Within this context, layers may be run on real tensors among these, to see what they return; none is changed."""
    token = _lent.set([one for one in tensors if isinstance(one, Tensor) and is_real(one)])
    try:
        yield
    finally:
        _lent.reset(token)


def _samples(layer: Layer, device: torch.device) -> list[Tensor]:
    """Return tensors to run a layer on, each with a storage of its own, but for weights that share one."""
    if layer.offsets:
        first = len(layer.given) - len(layer.offsets)
        return [*_apart(layer.given[:first], device), *_together(layer.given[first:], layer.offsets, device)]
    return _apart(layer.given, device)


def _together(shapes: Sequence[Shape], offsets: Sequence[int], device: torch.device) -> list[Tensor]:
    """Return tensors at these offsets of one storage; lent ones, where there are such."""
    found: dict[int, dict[tuple[Shape, int], Tensor]] = {}
    for tensor in _lent.get():
        if tensor.layout is torch.strided and tensor.device == device:
            place = Shape.of(tensor), int(tensor.storage_offset())
            found.setdefault(storage_of(tensor), {})[place] = tensor.detach()
    wanted = list(zip(shapes, offsets, strict=True))
    for lent in found.values():
        if lent.keys() >= set(wanted):
            return [lent[one] for one in wanted]
    end = max(offset + math.prod(shape.size) for shape, offset in wanted)
    biases = sum(shape.size[0] for shape in shapes)  # cuDNN has some also for layers without
    whole = Shape((end + biases,), (1,), shapes[0].dtype).empty(device).zero_()
    return [whole.as_strided(shape.size, shape.stride, offset) for shape, offset in wanted]


def _apart(shapes: Sequence[Shape], device: torch.device) -> list[Tensor]:
    """Return tensors with storages of their own; lent ones, where there are such."""
    pool: dict[tuple[Shape, torch.device], list[Tensor]] = {}
    seen = set[int]()
    for tensor in _lent.get():
        if tensor.layout is torch.strided and storage_of(tensor) not in seen:
            seen.add(storage_of(tensor))
            pool.setdefault((Shape.of(tensor), tensor.device), []).append(tensor.detach())
    lent = (pool.get((shape, device)) for shape in shapes)
    return [known.pop() if known else shape.empty(device).zero_() for known, shape in zip(lent, shapes, strict=True)]


@functools.cache
def _looks(text: str, device: torch.device) -> _Looks:
    """Run a layer and its backward once; generators stay as they are."""
    layer = Layer.parse(text)
    with real_tensors(), GeneratorStates({device}).kept():
        given = _samples(layer, device)
        lasting = _lasting(given, layer) if layer.draws else []
        results, held, graph = _run(given, layer)
        recording = _recorded(held, [*given, *results], lasting)
        made = _made(given, results, held, graph, recording)
        known = dict(enumerate([*given, *made]))
        found = _backward(graph, results, range(len(results)), known, layer, {}) if layer.trained else []
    return _Looks(tuple(map(Shape.of, made)), tuple(map(Shape.of, found)), recording)


def _lasting(given: Sequence[Tensor], layer: Layer) -> list[int]:
    """Return the numbers of the saved tensors whose storages stay after a run, such as the state of cuDNN's dropout."""
    own = set(map(storage_of, given))
    held = _run(given, layer)[1]
    storages = {number: storage_watch(one) for number, one in enumerate(held) if storage_of(one) not in own}
    held.clear()  # autograd's hooks refer to it
    return [number for number, is_alive in storages.items() if is_alive()]


def _forward(given: Sequence[Tensor], text: str) -> tuple[list[Tensor], _Graph]:
    """Run a layer; return its results, the token and the tape, and the graph of the token.

    Raises:
        FxrematError: autograd saves other tensors than it did before.
    """
    recording = _looks(text, given[0].device).recording
    results, held, graph = _run(given, Layer.parse(text))
    if len(held) != len(recording.saved):
        before = len(recording.saved)
        raise FxrematError(f"autograd saves {len(held)} tensors in a recurrent layer, where it saved {before} before")
    return _made(given, results, held, graph, recording), graph


def _made(
    given: Sequence[Tensor], results: Sequence[Tensor], held: list[Tensor], graph: _Graph, recording: _Recording
) -> list[Tensor]:
    """Return `[*results, token, *tape]` of a run; the token has its graph, and `held` is emptied."""
    known = [*given, *results]
    graph.saved, graph.apart = recording.saved, recording.apart(held, known)
    token = torch.ones(1, dtype=torch.int64, device=given[0].device)
    token.recurrent = graph  # type: ignore[attr-defined]
    return [*results, token, *recording.tape(held, known)]


@torch.library.custom_op("fxremat::recurrent", mutates_args=())
def recurrent(given: Sequence[Tensor], layer: str) -> list[Tensor]:
    """Run a layer, and return `[output, *states, token, *tape]`.

    Args:
        given: `[x, *states, *weights]`.
        layer: `Layer.text`.
    """
    return _forward(given, layer)[0]


@torch.library.custom_op(
    "fxremat::recurrent_with_dropout", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def recurrent_with_dropout(given: Sequence[Tensor], layer: str) -> list[Tensor]:
    """Run a layer that draws dropout masks, as `recurrent`."""
    return _forward(given, layer)[0]


# the op of layers that draw dropout masks, in graphs
DROPPING = torch.ops.fxremat.recurrent_with_dropout.default


@recurrent.register_fake
@recurrent_with_dropout.register_fake
def _(given: Sequence[Tensor], layer: str) -> list[Tensor]:
    device = given[0].device
    return [shape.empty(device) for shape in _looks(layer, _real(device)).made]


@torch.library.custom_op("fxremat::recurrent_backward", mutates_args=())
def recurrent_backward(
    gradients: Sequence[Tensor],
    which: Sequence[int],
    token: Tensor,
    sources: Sequence[Tensor],
    layer: str,
    sums: Sequence[Tensor],
    of: Sequence[int],
) -> list[Tensor]:
    """Run the backward of a layer, and return the gradients of `Layer.trained`.

    Args:
        gradients: of some results of the layer.
        which: positions of these results.
        sources: what the backward reads: of `[*given, *results, token, *tape]`, those at `_Looks.sources`.
        layer: `Layer.text`.
        sums: sums to which gradients are added, step by step; the results are the new sums.
        of: positions in `given` of what these are gradients of.

    Raises:
        FxrematError: the token is a copy.
    """
    parsed, device = Layer.parse(layer), token.device
    graph = getattr(token, "recurrent", None)
    if graph is not None:
        known = dict(zip(_looks(layer, device).sources, sources, strict=True))
    elif int(token):
        raise FxrematError("the token of a recurrent layer was copied, and its autograd graph is lost")
    else:  # made up, to measure the op
        given = [shape.empty(device).zero_() for shape in parsed.given]
        made, graph = _forward(given, layer)
        known = dict(enumerate([*given, *made]))
    return _backward(graph, gradients, which, known, parsed, dict(zip(of, sums, strict=True)))


@recurrent_backward.register_fake
def _(gradients: Any, which: Any, token: Tensor, sources: Any, layer: str, *_: Any) -> list[Tensor]:
    return [shape.empty(token.device) for shape in _looks(layer, _real(token.device)).gradients]


def _real(device: torch.device) -> torch.device:
    """Return the device on which a layer is run to see what it returns."""
    return device if kind_of(device).is_available() else HOST


class _Differentiable(torch.autograd.Function):
    """A layer with its backward, while a step is traced."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, *given: Tensor) -> tuple[Tensor, ...]:
        made = (recurrent_with_dropout if layer.draws else recurrent)(given, layer.text)
        known, end = [*given, *made], 1 + layer.states
        sources = _looks(layer.text, _real(given[0].device)).sources
        ctx.layer = layer
        ctx.save_for_backward(made[end], *(known[place] for place in sources))
        ctx.set_materialize_grads(False)
        return tuple(made[:end])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        token, *sources = ctx.saved_tensors
        layer: Layer = ctx.layer
        which = [place for place, one in enumerate(gradients) if one is not None]
        given = [one for one in gradients if one is not None]
        found = recurrent_backward(given, which, token, sources, layer.text, [], [])
        made = dict(zip(layer.trained, found, strict=True))
        return None, *(made.get(place) for place in range(len(layer.given)))


def as_op(
    kind: str, parameters: Sequence[int], x: Tensor, states: Any, weights: Sequence[Tensor], *numbers: Any
) -> tuple[Tensor, ...]:
    """Run a recurrent layer as an op: called like PyTorch's function, of which it has the numbers.

    Args:
        kind: a key of `KINDS`.
        parameters: positions of the model's parameters in `[x, *states, *weights]`.
    """
    states = list(states) if isinstance(states, tuple | list) else [states]
    given = [x, *states, *weights]
    trained = tuple(place for place, one in enumerate(given) if one.requires_grad and torch.is_grad_enabled())
    device = x.device.type
    dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.") if torch.is_autocast_enabled(device) else ""
    leaves = tuple(place for place in trained if dtype and place in parameters)
    shapes = tuple(map(Shape.of, given))
    layer = Layer(kind, tuple(numbers), len(states), shapes, trained, leaves, dtype, _offsets(weights))
    return _Differentiable.apply(layer, *given)  # type: ignore[no-untyped-call, no-any-return]


def _offsets(weights: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the offsets of weights in the storage that they share; none if they share none.

    While a step is traced, the tensors' own storages do not tell: but of weights that share one, only the first begins
    at its beginning, and none begins within another.
    """
    offsets = tuple(int(weight.storage_offset()) for weight in weights)
    ends = sorted((offset, offset + weight.numel()) for offset, weight in zip(offsets, weights, strict=True))
    alone = offsets[0] or any(end > offset for (_, end), (offset, _) in itertools.pairwise(ends))
    return () if alone else offsets
