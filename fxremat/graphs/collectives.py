"""Collectives as single ops of a step, from their start to the end of the transfer.

    captured    started = all_gather_into_tensor(shard, world, group);  whole = wait_tensor(started)
    in a step   whole = Collective(all_gather_into_tensor)(shard, world, group)

Between start and wait, the result must not be read and the operands must not be freed. With a collective as one
op, plans cannot read too early, and memory is exact; `transfers.network` separates start and wait again where
ops can run in between. Names of process groups differ from rank to rank, so text that must be equal on all
ranks does not contain them.
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
    """A function that starts a functional collective of PyTorch and waits for its result."""

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
        """Run the collective, and wait for its end."""
        return wait(self.start(*args, **kwargs))


def wait(started: Any) -> Any:
    """Wait for the end of a collective; return its results.

    Args:
        started: the result of the op that started it: a tensor, or several.
    """
    if isinstance(started, torch.Tensor):
        return torch.ops._c10d_functional.wait_tensor.default(started)
    return [wait(tensor) for tensor in started]


@functools.cache
def collective(start: torch._ops.OpOverload) -> Collective:
    """Return the `Collective` for an op that starts a collective; calls with the same op return the same object."""
    return Collective(start)


def is_start(node: fx.Node) -> bool:
    """Tell whether an op starts a functional collective of PyTorch, without waiting for it."""
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace == NAMESPACE
        and target is not torch.ops._c10d_functional.wait_tensor.default
    )


def is_collective(node: fx.Node) -> bool:
    """Tell whether an op communicates: all ranks of its group have to run it, in the same order."""
    return isinstance(node.target, Collective) or getattr(node.target, "namespace", "").startswith((NAMESPACE, "c10d"))


def is_gather(node: fx.Node) -> bool:
    """Tell whether a node is an all-gather: a collective that assembles the parts of all ranks."""
    return isinstance(node.target, Collective) and node.target.kind is Kind.GATHER


def groups_of(node: fx.Node) -> tuple[str, ...]:
    """Return the names of the process groups among the arguments of a collective; () for other ops."""
    if not is_collective(node):
        return ()
    return tuple(argument for argument in node.args if isinstance(argument, str) and _is_group(argument))


def _is_group(name: str) -> bool:
    return group_named(name) is not None


def without_group_names(node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of a collective, with each process group's name replaced by its size and backend."""
    return tuple(_described(argument) if isinstance(argument, str) else argument for argument in node.args)


def _described(text: str) -> str:
    group = group_named(text)
    return text if group is None else f"{group.size()} ranks over {group.name()}"
