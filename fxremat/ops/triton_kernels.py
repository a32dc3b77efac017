"""Launches of users' Triton kernels as ops: functions of tensors that return new tensors."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fxremat.torch_private import TritonLaunch, clone_with_strides


@dataclass(frozen=True)
class Operand:
    """The place of a tensor or number among the operands of a launch."""

    index: int


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A tensor that a kernel fills, and that has no content before."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, tensor: Tensor) -> Buffer:
        """Describe a tensor of known sizes."""
        return cls(
            shape=tuple(map(int, tensor.shape)),
            strides=tuple(map(int, tensor.stride())),
            dtype=tensor.dtype,
            device=tensor.device,
        )

    def made(self) -> Tensor:
        """Allocate the tensor."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


class Launch:
    """A launch of a Triton kernel that returns the tensors it writes; its operands stay as they are.

    Args:
        launch: the kernel and its constants.
        grid: the sizes of the grid of programs, for each configuration of the kernel; `Operand`s stand for numbers.
        arguments: the arguments of the kernel by name: constants, and `Operand`s for tensors and numbers.
        written: the names of those that the kernel writes, in the order of the results; a copy of each is written.
        buffers: those among them that have no content before; they are allocated, not copied.
    """

    def __init__(
        self,
        launch: TritonLaunch,
        grid: Any,
        arguments: Mapping[str, Any],
        written: Sequence[str],
        buffers: Mapping[str, Buffer],
    ) -> None:
        self.launch, self.grid, self.arguments = launch, grid, dict(arguments)
        self.written, self.buffers = tuple(written), dict(buffers)
        self.__name__ = "triton_kernel"

    def __call__(self, *operands: Any) -> tuple[Tensor, ...]:
        """Launch the kernel."""

        def given(value: Any) -> Any:
            return operands[value.index] if isinstance(value, Operand) else value

        arguments = {name: given(value) for name, value in self.arguments.items()}
        for name in self.written:
            buffer = self.buffers.get(name)
            arguments[name] = buffer.made() if buffer else clone_with_strides(arguments[name])
        self.launch.run(tree_map(given, self.grid), arguments)
        return tuple(arguments[name] for name in self.written)

    def __deepcopy__(self, _: Any) -> Launch:
        return self

    def __str__(self) -> str:
        """Return the name of the kernel and a digest of its code and of what is constant, the same in every process."""
        fixed = (self.grid, sorted(self.arguments.items()), self.written, sorted(self.buffers.items()))
        text = f"{_code(self.launch.kernel)} {sorted(self.launch.constants.items())} {fixed}"
        name = getattr(_function(self.launch.kernel), "__name__", "kernel")
        return f"triton {name} {hashlib.sha256(text.encode()).hexdigest()[:16]}"

    __repr__ = __str__


def _function(kernel: Any) -> Any:
    """Return the Python function of a kernel, which may be wrapped for autotuning and compiling."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def _code(kernel: Any) -> str:
    function = _function(kernel)
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # it was made in a shell
        return f"{function.__module__}.{function.__qualname__}"
