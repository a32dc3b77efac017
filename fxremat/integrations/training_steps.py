"""Measures the training steps of any program: the peak of each, and which modules have the bytes at the peak.

    with TrainingSteps() as steps:
        train()
    print(steps.highest)            the step with the highest peak; None: there was no step

A step begins with a call of a module while gradients are enabled, and ends with the backward that frees its graph.
Its peak is counted as `mem` of `fxremat.compile` is: bytes on the device above those at the beginning of the step, with
saved activations, workspaces of kernels and new gradients. What is there before is not counted, nor what the optimizer
allocates, nor what is allocated while torch compiles or fxremat plans, nor what cuBLAS allocates once and keeps.

torch.profiler's recorder sees every allocation with its address, so what is alive at the peak is known. A module has

    in the forward     what is allocated while its `forward` runs, outside of those of its submodules
    in the backward    what is allocated for the backward of an op that its forward ran: both have autograd's number
    in fxremat's       what the plan says, whose peak is the one that is measured

The graph that torch.compile makes of several modules counts as the outermost one. While nothing is measured, nothing
is slower; while it is, `nn.Module.__call__` is replaced by a function that notes which module runs.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxremat.cost.workspaces import make_workspaces
from fxremat.device import device_in_use
from fxremat.show.modules import Share, tree_of
from fxremat.show.profile_figures import bytes_at_peak
from fxremat.show.table import Table
from fxremat.show.tree import rows_of
from fxremat.step.kinds import MemoryKind
from fxremat.torch_private import (
    MemoryRecording,
    RecordedEvent,
    is_profiled,
    kept_graph,
    named_range,
    watch_compilation,
    watch_modules,
    watching_backward,
)
from fxremat.units import format_bytes

ROWS = 12  # maximum number of rows of modules that are shown
OUTSIDE = "outside of modules"  # ops that no module's forward runs, such as those of a loss function
UNLIKE = "unlike the plan"  # measured less planned bytes, such as of outputs that the program does not keep
ELSEWHERE = "not seen"  # allocated by other threads; negative: freed, and allocated before the step
_MODULE, _COMPILING = "fxremat, in module ", "fxremat, while torch compiles"
_NODE, _OPTIMIZER = "autograd::engine::evaluate_function: ", "Optimizer.step#"
_OF_BACKWARD = {MemoryKind.RESULTS, MemoryKind.GRADIENTS, MemoryKind.RECOMPUTED}
_ALIKE = 0.1  # a plan whose peak differs from the measured bytes by a larger fraction is of another step


@dataclass(frozen=True, kw_only=True)
class StepPeak:
    """The peak of a training step, and the bytes that each module has then."""

    number: int  # of the step, from 1
    device: str  # such as "cuda:0"
    peak: int  # bytes above those at the beginning of the step
    where: str  # what runs at the peak
    forward: Mapping[str, int]  # module -> bytes at the peak that were allocated in the forward
    backward: Mapping[str, int]  # module -> bytes at the peak that were allocated in the backward

    @property
    def modules(self) -> dict[str, int]:
        """The bytes at the peak of each module's own ops, as "GPT.blocks.0"; they add up to the peak."""
        names = dict.fromkeys((*self.forward, *self.backward))
        found = {name: self.forward.get(name, 0) + self.backward.get(name, 0) for name in names}
        return {name: size for name, size in found.items() if size}

    @property
    def table(self) -> Table:
        """The modules with most bytes at the peak; equal layers share a row."""
        shares = {
            name: Share(saved=self.forward.get(name, 0), gradients=self.backward.get(name, 0))
            for name in dict.fromkeys((*self.forward, *self.backward))
        }
        rows = [
            (
                f"{'  ' * row.depth}{row.label}",
                f"{row.count} x" if row.count > 1 else "",
                *(format_bytes(size) if size else "-" for size in (*_two(row.each), sum(_two(row.each)))),
            )
            for row in rows_of(tree_of(shares), ROWS, "all", _two)
        ]
        return Table(
            heads=("module", "each of", "forward", "backward", "at the peak"), rows=tuple(rows), left=frozenset([0])
        )

    def __str__(self) -> str:
        line = f"step {self.number} has {format_bytes(self.peak)} on {self.device} at its peak, {self.where}"
        return f"{line}\n{self.table}"


def _two(share: Share) -> tuple[int, int]:
    return share.saved, share.gradients


class _Change(NamedTuple):
    """An allocation, or a deallocation, in a step."""

    device: torch.device
    address: int
    size: int
    total: int
    owner: str
    backward: bool
    ignored: bool
    op: str


@dataclass
class _Reader:
    """Reads recorded events of a step as changes of its memory, each with the module that it belongs to."""

    owners: dict[int, str] = field(default_factory=dict)  # autograd's number of an op -> the module that ran it
    latest: str = OUTSIDE  # the module of the latest node of the backward, to which accumulated gradients belong

    def changes(
        self,
        events: Iterable[RecordedEvent],
        owner: str = OUTSIDE,
        op: str = "",
        backward: bool = False,
        ignored: bool = False,
    ) -> Iterator[_Change]:
        """Yield the changes inside of events of which `owner` runs the op `op`, in the backward or before."""
        for event in events:
            if event.device is not None:
                yield _Change(event.device, event.address, event.size, event.total, owner, backward, ignored, op)
            elif event.name.startswith(_MODULE):
                yield from self.changes(event.inside, event.name.removeprefix(_MODULE), op, backward, ignored)
            elif event.name.startswith(_NODE):
                self.latest = self.owners.get(event.sequence, self.latest)
                name = event.name.removeprefix(_NODE)
                yield from self.changes(event.inside, self.latest, name, True, ignored)
            else:
                if event.sequence >= 0:
                    self.owners[event.sequence] = owner
                aside = ignored or event.name == _COMPILING or event.name.startswith(_OPTIMIZER)
                yield from self.changes(event.inside, owner, op if backward else event.name, backward, aside)


class _Alive(NamedTuple):
    """Memory that a step has allocated."""

    size: int
    owner: str
    backward: bool


@dataclass
class _Memory:
    """The memory of a step on a device, from its beginning on."""

    device: torch.device
    base: int | None = None  # bytes of an accelerator that do not count for the step
    level: int = 0
    peak: int = 0
    alive: dict[int, _Alive] = field(default_factory=dict)  # by address
    ignored: set[int] = field(default_factory=set)  # addresses of memory that does not count for the step
    at_peak: tuple[_Alive, ...] = ()
    where: str = ""

    def run(self, changes: list[_Change]) -> None:
        """Let the changes of this device take place."""
        before, ignored = dict(self.alive), set(self.ignored)
        highest = max((place for place, change in enumerate(changes) if self._goes_up(change)), default=None)
        if highest is None:
            return
        replayed = _Memory(self.device, alive=before, ignored=ignored)
        for change in changes[: highest + 1]:
            replayed._change(change)
        self.at_peak = tuple(replayed.alive.values())
        last = changes[highest]
        moment = "backward" if last.backward else "forward"
        self.where = f"in {last.op or 'Python'} of the {moment} of {last.owner}"
        if last.owner == OUTSIDE:
            self.where = f"in {last.op or 'Python'}, {'in the backward ' if last.backward else ''}{OUTSIDE}"

    def _goes_up(self, change: _Change) -> bool:
        """Let a change take place, and tell whether the level is higher than ever."""
        if self.base is None:
            self.base = change.total - change.size
        counts = self._change(change)
        if self.device.type == "cpu":
            self.level += change.size if counts else 0
        else:
            self.base += 0 if counts else change.size
            self.level = change.total - self.base
        if self.level <= self.peak:
            return False
        self.peak = self.level
        return True

    def _change(self, change: _Change) -> bool:
        """Note what is alive; tell whether the change counts for the step.

        On an accelerator it counts where memory is freed that was there before the step, as in the allocator's own
        statistics; on a CPU the recorder does not know of all such memory.
        """
        if change.size > 0:
            if change.ignored:
                self.ignored.add(change.address)
            else:
                self.alive[change.address] = _Alive(change.size, change.owner, change.backward)
            return not change.ignored
        if change.address in self.ignored:
            self.ignored.discard(change.address)
            return False
        known = self.alive.pop(change.address, None)
        return known is not None or (self.device.type != "cpu" and not change.ignored)


class _Graph:
    """Lives as long as the autograd graph in whose metadata it is."""


_KEY = "fxremat.integrations.training_steps"


@dataclass
class _Step:
    """A step that is being measured, or was measured last."""

    number: int
    explicit: bool = False  # True: it begins and ends where the user says
    graphs: list[weakref.ref[_Graph] | None] = field(default_factory=list)  # of its forwards; None: not known
    ended: bool = False  # its graph was freed
    has_run: bool = False  # a backward was run
    reader: _Reader = field(default_factory=_Reader)
    memories: dict[torch.device, _Memory] = field(default_factory=dict)
    planned: dict[str, Any] = field(default_factory=dict)  # name of a module -> the `Inside` that has its plan

    @property
    def is_over(self) -> bool:
        """True if no graph of its forwards is alive, so that no backward of it can come."""
        return all(graph is not None and graph() is None for graph in self.graphs)

    def add(self, events: Iterable[RecordedEvent]) -> None:
        """Count further events of the step."""
        of: dict[torch.device, list[_Change]] = {}
        for change in self.reader.changes(events):
            of.setdefault(change.device, []).append(change)
        for device, changes in of.items():
            self.memories.setdefault(device, _Memory(device)).run(changes)

    def peak(self) -> StepPeak | None:
        """Return the step's peak on the device that it runs on; None if nothing was allocated.

        Of several accelerators it is the highest; a CPU counts where there is no accelerator.
        """
        on_accelerators = [memory for memory in self.memories.values() if memory.device.type != "cpu"]
        memories = [m for m in on_accelerators or self.memories.values() if m.peak > 0]
        highest = max(memories, key=lambda memory: memory.peak, default=None)
        if highest is None:
            return None
        sides: tuple[dict[str, int], dict[str, int]] = {}, {}
        for each in highest.at_peak:
            side = sides[each.backward]
            side[each.owner] = side.get(each.owner, 0) + each.size
        for name, inside in self.planned.items():
            _divide_as_planned(sides, name, inside.plan)
        if missing := highest.peak - sum(sum(side.values()) for side in sides):
            sides[0][ELSEWHERE] = sides[0].get(ELSEWHERE, 0) + missing
        return StepPeak(
            number=self.number,
            device=str(highest.device),
            peak=highest.peak,
            where=highest.where,
            forward=sides[0],
            backward=sides[1],
        )


def _divide_as_planned(sides: tuple[dict[str, int], dict[str, int]], name: str, plan: Any) -> None:
    """Divide what a module of fxremat has at the peak among its submodules, as its plan does."""
    measured = sum(side.get(name, 0) for side in sides)
    if getattr(plan, "chosen", None) is None or abs(plan.predicted_peak - measured) > _ALIKE * measured:
        return
    for side in sides:
        side.pop(name, None)
    for (path, kind), size in bytes_at_peak(plan).items():
        side, at = sides[kind in _OF_BACKWARD], f"{name}.{path}" if path else name
        side[at] = side.get(at, 0) + size
    if unlike := measured - plan.predicted_peak:
        sides[0][UNLIKE] = sides[0].get(UNLIKE, 0) + unlike


class TrainingSteps:
    """Measures the training steps of this thread, inside of a `with` block.

    It records them with torch's profiler, so that steps which the program itself profiles are left out: `profiled`.
    """

    def __init__(self) -> None:
        self.count = 0  # steps that were measured
        self.highest: StepPeak | None = None  # the first one with the highest peak
        self.profiled = False  # True: a profiler recorded some steps, which were not measured therefore
        self._running: list[str] = []  # names of the modules that are running, one inside of the other
        self._in_backward = False
        self._ready: set[torch.device] = set()  # devices on which cuBLAS has its workspaces
        self._names: dict[int, str] = {}  # id of a module -> name of the module, while an outermost one runs
        self._step: _Step | None = None
        self._recording: MemoryRecording | None = None
        self._ranges: list[Any] = []

    def __enter__(self) -> TrainingSteps:
        gc.collect()  # what is freed during a step makes room on an accelerator
        self._unwatch_backward = watching_backward(self._before_backward, self._after_backward)
        self._watch_modules()
        return self

    def __exit__(self, *_: object) -> None:
        self._unwatch_modules()
        watch_compilation(self._before_compiling, self._after_compiling)()
        self._unwatch_backward()
        self._pause()
        self._finish()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Measure what runs in this context as one step, for programs whose steps are not found by themselves."""
        self._pause()
        self._finish()
        device = device_in_use()
        self._begin([] if device is None else [device], explicit=True)
        try:
            yield
        finally:
            self._pause()
            if self._step is not None:
                self._step.has_run = self._step.ended = True
            self._finish()

    # --- modules ----------------------------------------------------------------------------------------------

    def _watch_modules(self) -> None:
        watch_compilation(self._before_compiling, self._after_compiling)
        self._unwatch_modules = watch_modules(self._enter, self._leave)

    def _before_compiling(self, _: Any) -> None:
        """Let dynamo see modules as they are; what is allocated until it has compiled does not count."""
        self._unwatch_modules()
        self._ranges.append(named_range(_COMPILING))
        self._ranges[-1].__enter__()

    def _after_compiling(self, _: Any) -> None:
        if self._ranges:
            self._ranges.pop().__exit__(None, None, None)
        self._watch_modules()

    def _enter(self, module: nn.Module) -> str:
        """Note that a module runs, and begin a step with an outermost one; return the name of its range."""
        if self._is_outermost:
            watch_compilation(self._before_compiling, self._after_compiling)  # torch._dynamo.reset() forgets them
            if torch.is_grad_enabled():
                self._begin(part.device for part in (*module.parameters(), *module.buffers()))
            self._names = _names_in(module)
        name = self._names.get(id(module)) or (self._running[-1] if self._running else _name_of(module))
        self._running.append(name)
        return _MODULE + name

    def _leave(self, module: nn.Module, result: Any) -> None:
        name = self._running.pop()
        if self._step is not None and not self._step.ended:
            if (inside := _inside_of(module)) is not None:
                self._step.planned[name] = inside
            if self._is_outermost and torch.is_grad_enabled():
                self._step.graphs += _graphs_of(module, result)

    @property
    def _is_outermost(self) -> bool:
        """True if no module runs now, nor a backward, which may run modules again."""
        return not self._running and not self._in_backward

    # --- steps ------------------------------------------------------------------------------------------------

    def _begin(self, devices: Iterable[torch.device], *, explicit: bool = False) -> None:
        """Begin a step on these devices, unless the one that has begun goes on."""
        if self._step is not None and not self._step.ended and (self._step.explicit or not self._step.is_over):
            return
        self._pause()
        self._finish()
        if is_profiled():
            self.profiled = True
            return
        for device in set(devices) - self._ready:
            make_workspaces(device)
            self._ready.add(device)
        self._step = _Step(self.count + 1, explicit)
        self._recording = MemoryRecording()

    def _pause(self) -> None:
        """Stop recording, and count what was recorded."""
        if self._recording is not None:
            events, self._recording = self._recording.stop(), None
            assert self._step is not None
            self._step.add(events)

    def _finish(self) -> None:
        """Take the peak of the step that has ended; one without a backward is none."""
        step, self._step = self._step, None
        if step is None or not step.has_run:
            return
        self.count += 1
        peak = step.peak()
        if peak is not None and (self.highest is None or peak.peak > self.highest.peak):
            self.highest = peak

    def _before_backward(self) -> None:
        self._in_backward = True
        if self._step is not None and self._recording is None and not is_profiled():
            self._recording = MemoryRecording()  # a second backward of the step

    def _after_backward(self) -> None:
        self._in_backward = False
        if self._step is None:
            return
        self._step.has_run = True
        if not kept_graph() and not self._step.explicit:
            self._step.ended = True
            self._pause()


def _inside_of(module: nn.Module) -> Any:
    """Return what has the plans of a module that fxremat compiled; None for others, without importing the runtime."""
    runtime = sys.modules.get("fxremat.runtime.module")
    if runtime is None or not isinstance(module, runtime.Rematerialized):
        return None
    return runtime.Inside(module)  # the model may have an attribute `fxremat` of its own


def _name_of(module: nn.Module) -> str:
    """Return the name of a module's class, of a compiled one that of the module inside."""
    return type(getattr(module, "_orig_mod", module)).__name__


def _names_in(module: nn.Module) -> dict[int, str]:
    """Return the names of a module and its submodules by id, such as "GPT.blocks.0"."""
    root = _name_of(module)
    paths = ((id(part), path.removeprefix("_orig_mod").lstrip(".")) for path, part in module.named_modules())
    return {key: f"{root}.{path}" if path else root for key, path in paths}


def _graphs_of(module: nn.Module, outputs: Any) -> list[weakref.ref[_Graph] | None]:
    """Return for each output of a module with a graph something that dies with the graph.

    None stands for the graph of a module with trained parameters in whose outputs no tensor is found.
    """
    fields = {} if isinstance(outputs, torch.Tensor) else getattr(outputs, "__dict__", {})  # of a user's own class
    leaves = pytree.tree_leaves([outputs, *fields.values()])
    nodes: list[Any] = [leaf.grad_fn for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
    found: list[weakref.ref[_Graph] | None] = [
        weakref.ref(node.metadata.setdefault(_KEY, _Graph())) for node in nodes
    ]
    if not found and not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        found += [None for parameter in module.parameters() if parameter.requires_grad][:1]
    return found
