"""Seconds of ops from elsewhere: a Chrome trace of torch.profiler, or a function of the user's.

    with torch.profiler.profile(record_shapes=True) as profiled:      # on the device that the plan is for
        model(x).backward()
    profiled.export_chrome_trace("step.json")
    fxremat.plan(model, (x,), mem="4GiB", costs=fxremat.Trace("step.json", device="H100"))

An op of the graph is matched with one of the trace by its name and the shapes of its inputs; several with the
same name and shapes are matched in order; an op that the model ran in place counts as the op that the graph has
instead. On a GPU the seconds of an op are those of its kernels: a kernel names the op that launched it by its
"External id", or by the "correlation" of its launch (an event of category cuda_runtime or cuda_driver), which has that
id or lies inside of the op. Ops that the trace lacks are estimated, and the estimates are scaled by the ratio of traced
to estimated seconds of the other ops.
"""

from __future__ import annotations

import gzip
import json
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxremat.cost.devices import Device
from fxremat.errors import FxrematError, answer_of

Key = tuple[str, tuple[tuple[int, ...], ...]]  # the name of an op, and the shapes of its inputs
ID = "External id"  # key by which events refer to the op that started them
Timer = Callable[[fx.Node], float]  # returns the seconds of a node's op

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of trace events that ran on a GPU
LAUNCHES = ("cuda_runtime", "cuda_driver")  # categories of trace events that start work on a GPU
NO_TENSOR = ("Scalar", "ScalarList", "")  # types of inputs that are not tensors


@dataclass(frozen=True)
class Trace:
    """The seconds of ops in a Chrome trace of torch.profiler that was recorded with shapes.

    Args:
        path: the file, which may be compressed (.gz).
        device: the device that it was recorded on, by name or as a `fxremat.Device`; used to estimate other ops, and
            for the allocator's block sizes. None: a typical device of the type that the graph is on.

    Raises:
        FxrematError: the file is not such a trace, or has no shapes of inputs; or the device is not known.
        OSError: the file cannot be read.
    """

    path: str | os.PathLike[str]
    device: str | Device | None = None
    on: Device | None = field(init=False, repr=False)  # the description of `device`
    # (name, shapes) -> seconds of each such op, in the order of the trace
    seconds: Mapping[Key, Sequence[float]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known = Device.named(self.device) if isinstance(self.device, str) else self.device
        object.__setattr__(self, "on", known)
        object.__setattr__(self, "seconds", _seconds(_events(self.path)))

    def of(self, nodes: Sequence[fx.Node]) -> list[float | None]:
        """Return the seconds of each node's op, or None if the trace lacks it; `nodes` are in execution order.

        If a trace contains several steps, each step is matched in order, and the mean is returned.
        """
        keys = [key_of(node) for node in nodes]
        places: dict[Key, int] = defaultdict(int)
        found = []
        for key in keys:
            taken = self.seconds.get(key) or self.seconds.get((f"{key[0]}_", key[1]), ())
            here, count = places[key], keys.count(key)
            places[key] += 1
            steps = len(taken) // count if len(taken) % count == 0 else 0
            if steps:
                taken = [taken[step * count + here] for step in range(steps)]
            found.append(sum(taken) / len(taken) if taken else None)
        return found


def key_of(node: fx.Node) -> Key:
    """Return the profiler's name of a node's op, and the shapes of the tensors that it reads."""
    schema = getattr(node.target, "_schema", None)
    shapes = []
    for argument in tree_leaves((node.args, node.kwargs)):
        value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
        if isinstance(value, torch.Tensor):
            shapes.append(tuple(map(int, value.shape)))
    return str(schema.name if schema else node.target), tuple(shapes)


def _events(path: str | os.PathLike[str]) -> Sequence[Mapping[str, Any]]:
    opened = gzip.open if os.fspath(path).endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8") as file:
        try:
            found = json.load(file)
        except ValueError as error:
            raise FxrematError(f"{os.fspath(path)} is no trace: {error}") from None
    events = found.get("traceEvents") if isinstance(found, dict) else found
    ops = [event for event in events or () if isinstance(event, dict) and event.get("ph") == "X"]
    if not any("Input Dims" in event.get("args", {}) for event in ops):
        raise FxrematError(
            f"{os.fspath(path)} has no ops with shapes: record it with torch.profiler.profile(record_shapes=True), and "
            "write it with export_chrome_trace"
        )
    return ops


def _seconds(events: Sequence[Mapping[str, Any]]) -> dict[Key, list[float]]:
    """Return the seconds of every op of a trace, by name and shapes, in the order in which the ops began."""
    found: dict[Key, list[float]] = defaultdict(list)
    ops = sorted((event for event in events if event.get("cat") == "cpu_op"), key=lambda event: event["ts"])
    on_gpu = any(event.get("cat") in ON_DEVICE for event in events)
    kernels = _kernels_of(ops, events) if on_gpu else []
    for place, event in enumerate(ops):
        if "Input Dims" not in event.get("args", {}):
            continue
        micros = kernels[place] if on_gpu else event["dur"]
        found[event["name"], tuple(_shapes(event["args"]))].append(micros * 1e-6)
    return dict(found)


def _kernels_of(ops: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return for each op the microseconds of the work on a GPU that it and the ops inside of it launched."""
    by_id = {event.get("args", {}).get(ID): place for place, event in enumerate(ops) if ID in event.get("args", {})}
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
    }
    threads: dict[Any, list[int]] = defaultdict(list)
    for place, event in enumerate(ops):
        threads[_thread(event)].append(place)
    starts = {thread: [ops[place]["ts"] for place in places] for thread, places in threads.items()}
    callers, found = _callers(ops), [0.0] * len(ops)
    for event in events:
        if event.get("cat") not in ON_DEVICE:
            continue
        given = event.get("args", {})
        launch = launches.get(given.get("correlation"), {})
        op: int | None = by_id.get(given.get(ID), by_id.get(launch.get("args", {}).get(ID)))
        if op is None and launch:
            began = bisect_right(starts.get(_thread(launch), []), launch["ts"])
            op = threads[_thread(launch)][began - 1] if began else None
            while op is not None and _end(ops[op]) < launch["ts"]:
                op = callers[op]
        if op is not None:
            found[op] += event["dur"]
    for place in reversed(range(len(ops))):  # ops inside of another come after it
        if (caller := callers[place]) is not None:
            found[caller] += found[place]
    return found


def _thread(event: Mapping[str, Any]) -> Any:
    return event.get("pid"), event.get("tid")


def _callers(ops: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """Return for each op the index of the op that calls it; `ops` are sorted by start time. O(ops)."""
    found: list[int | None] = []
    running: dict[Any, list[int]] = defaultdict(list)  # thread -> indices of the ops that are running
    for place, event in enumerate(ops):
        stack = running[_thread(event)]
        while stack and _end(ops[stack[-1]]) <= event["ts"]:
            stack.pop()
        found.append(stack[-1] if stack else None)
        stack.append(place)
    return found


def _end(event: Mapping[str, Any]) -> float:
    end: float = event["ts"] + event["dur"]
    return end


def _shapes(args: Mapping[str, Any]) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of the tensors that an op of a trace reads, including those in lists of tensors."""
    types = args.get("Input type") or [None] * len(args["Input Dims"])
    for shape, kind in zip(args["Input Dims"], types, strict=False):
        if kind in NO_TENSOR:
            continue
        if shape and isinstance(shape[0], list):
            yield from map(tuple, shape)
        else:
            yield tuple(shape)


@dataclass(frozen=True)
class Timed:
    """The seconds of the ops of a graph, and where they come from."""

    seconds: tuple[float, ...]
    known: int  # number of ops whose seconds come from the trace or function
    share: float  # fraction of all seconds that these ops take

    def words(self, source: str) -> str:
        """Say in words, for a plan, for how many ops the seconds are known."""
        return f"times of {self.known} of {len(self.seconds)} ops, {self.share:.0%} of all, are {source}"


def timed_by(timer: Trace | Timer, nodes: Sequence[fx.Node], estimates: Sequence[float]) -> Timed:
    """Return seconds of ops, given by a trace or by a function; for ops that these do not know, scaled estimates."""
    given = timer.of(nodes) if isinstance(timer, Trace) else [_asked(timer, node) for node in nodes]
    both = [(mine, rough) for mine, rough in zip(given, estimates, strict=True) if mine is not None]
    rate = sum(mine for mine, _ in both) / max(1e-12, sum(rough for _, rough in both)) if both else 1.0
    seconds = tuple(
        rough * rate if mine is None else mine for mine, rough in zip(given, estimates, strict=True)
    )
    return Timed(seconds, len(both), sum(mine for mine, _ in both) / max(1e-12, sum(seconds)))


def _asked(timer: Timer, node: fx.Node) -> float:
    seconds = answer_of(timer, node, option="costs")
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds < float("inf"):
        raise FxrematError(f"costs: {timer!r} says that {node.name} takes {seconds!r}; it returns seconds, 0 or more")
    return seconds * (1e-3 if _is_of_torch(timer) else 1)


def _is_of_torch(timer: Timer) -> bool:
    """Tell whether a function is a `CustomRuntimeEstimator` of torch (2.11, 2.13), which returns milliseconds."""
    return any(kind.__name__ == "CustomRuntimeEstimator" for kind in type(timer).__mro__)
