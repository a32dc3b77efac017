"""Functions whose ops mark what they read and write, and steps that fail in the middle."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.pretended_cuda.log import has_memory, log

COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
AUTOGRAD = "what autograd's thread and the one that calls it hand to each other"


class Failed(Exception):
    """A step that was made to fail."""


class Fuse:
    """Lets a step fail after a number of ops."""

    def __init__(self) -> None:
        self._left: int | None = None
        self.blown = False  # since the last `after`

    @contextlib.contextmanager
    def after(self, ops: int | None) -> Iterator[None]:
        """Raise `Failed` in place of the op that comes after so many; never where None."""
        self._left, self.blown = ops, False
        try:
            yield
        finally:
            self._left = None

    def burn(self) -> None:
        """Count an op."""
        if self._left is None:
            return
        self._left -= 1
        if self._left < 0:
            self._left, self.blown = None, True
            raise Failed()


fuse = Fuse()


class Marking(TorchDispatchMode):
    """Marks in the log what every op reads and writes; the runtime itself logs copies between host and device."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fuse.burn()
        given = _tensors((args, kwargs))
        if op in COPIES and _crosses(args[0], args[1] if len(args) > 1 else None, kwargs):
            return op(*args, **kwargs)
        name = str(op)
        for tensor in given:
            log.read(tensor, name)
        result = op(*args, **kwargs)
        for tensor in (*_overwritten(op, args, kwargs), *_new(result, given)):
            log.write(tensor, name)
        return result


def marked(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """The function of one list, with every op marked; it may be called by autograd's thread."""

    def call(arguments: list[Any]) -> Any:
        log.join(AUTOGRAD)
        try:
            with Marking():
                return function(arguments)
        finally:
            log.post(AUTOGRAD)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _crosses(first: torch.Tensor, second: Any, kwargs: Any) -> bool:
    """Tell whether a copy's ends are on different devices."""
    other = second.device if isinstance(second, torch.Tensor) else kwargs.get("device")
    return other is not None and torch.device(other).type != first.device.type


def _overwritten(op: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The arguments that an op's schema says it writes to."""
    given = dict(zip((argument.name for argument in op._schema.arguments), args)) | kwargs
    for argument in op._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(given.get(argument.name))


def _new(result: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results in memory of their own; a schema does not always say which are views."""
    old = {tensor.untyped_storage().data_ptr() for tensor in given if has_memory(tensor)}
    return [
        tensor
        for tensor in _tensors(result)
        if has_memory(tensor) and tensor.untyped_storage().data_ptr() not in old
    ]
