"""The function by which generated graphs start an all-gather that is waited for later."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from fxremat.graphs.collectives import wait
from fxremat.torch_private import group_named

ONE_AT_A_TIME = ("gloo",)  # backends whose all-gathers corrupt memory if several in one group overlap
_under_way: dict[str, list[weakref.ref[torch.Tensor]]] = {}  # process group -> results of its latest all-gather


def start_gather(start: Any, *args: Any) -> Any:
    """Start an all-gather, and return its unfinished result; over gloo, wait for the group's previous one first.

    Concurrent all-gathers in one gloo group may corrupt the heap: with torch 2.13, in some of a thousand runs
    of a hundred each, with plain `torch.distributed`. One together with any number of reductions does not.

    Args:
        start: the op that starts it.
        args: its arguments, the name of the group last.
    """
    name = args[-1]
    group = group_named(name)
    if group is None or group.name() not in ONE_AT_A_TIME:
        return start(*args)
    for earlier in _under_way.pop(name, ()):
        if (tensor := earlier()) is not None:
            wait(tensor)
    made = start(*args)
    _under_way[name] = [weakref.ref(made)] if isinstance(made, torch.Tensor) else list(map(weakref.ref, made))
    return made
