"""Collectives as ops of a step: each is one op, from its start to the end of its transfer.

    captured    started = all_gather_into_tensor(shard, world, group);  whole = wait_tensor(started)
    in a step   whole = Collective(all_gather_into_tensor)(shard, world, group)

The result of a start may not be read, and what it reads may not be freed, before its wait. As one op nothing can be
read too early, and memory is exact; `transfers.network` takes the two apart again where something can run in between.
What is equal on all ranks is written without names of process groups, which differ from rank to rank.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from fxremat.step.step_graph import Kind
from fxremat.torch_private import group_named

NAMESPACE = "_c10d_functional"


class Collective:
    """A functional collective that has ended when it returns: its start, and the wait for what that returned."""

    def __init__(self, start: torch._ops.OpOverload) -> None:
        self.start = start
        self.__name__ = start.overloadpacket.__name__
        self.kind = Kind.GATHER if self.__name__.startswith("all_gather") else Kind.COLLECTIVE

    def __str__(self) -> str:
        return f"collective {self.__name__}"

    __repr__ = __str__

    def __deepcopy__(self, _: Any) -> Collective:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, and wait for its end."""
        return wait(self.start(*args, **kwargs))


def wait(started: Any) -> Any:
    """Wait for the end of a collective: what its start returned, now with its data."""
    if isinstance(started, torch.Tensor):
        return torch.ops._c10d_functional.wait_tensor.default(started)
    return [wait(tensor) for tensor in started]


@functools.cache
def collective(start: torch._ops.OpOverload) -> Collective:
    """The one collective that begins with this op."""
    return Collective(start)


def is_start(node: fx.Node) -> bool:
    """True for an op that starts a functional collective, as captured."""
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace == NAMESPACE
        and target is not torch.ops._c10d_functional.wait_tensor.default
    )


def is_collective(node: fx.Node) -> bool:
    """True for an op that communicates: all ranks of its group have to run it, in the same order."""
    return isinstance(node.target, Collective) or getattr(node.target, "namespace", "").startswith((NAMESPACE, "c10d"))


def is_gather(node: fx.Node) -> bool:
    """True for a collective that puts the parts of all ranks together."""
    return isinstance(node.target, Collective) and node.target.kind is Kind.GATHER


def groups_of(node: fx.Node) -> tuple[str, ...]:
    """The names of the process groups that an op communicates over: it takes them as text."""
    if not is_collective(node):
        return ()
    return tuple(argument for argument in node.args if isinstance(argument, str) and _is_group(argument))


def _is_group(name: str) -> bool:
    return group_named(name) is not None


def without_group_names(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of a collective, with each group's size and backend in the place of its name."""
    return tuple(_described(argument) if isinstance(argument, str) else argument for argument in node.args)


def _described(text: str) -> str:
    group = group_named(text)
    return text if group is None else f"{group.size()} ranks over {group.name()}"
