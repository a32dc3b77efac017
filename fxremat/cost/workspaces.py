"""Memory that CUDA libraries allocate outside of plans: cuBLAS's workspaces, and those of cuDNN when it tries kernels.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from fxremat.cost.estimate import CONVOLUTIONS
from fxremat.device import kind_of
from fxremat.graphs.captured import Captured
from fxremat.torch_private import real_tensors

log = logging.getLogger(__name__)


def make_workspaces(device: torch.device) -> None:
    """Make cuBLAS allocate its workspaces before the first step, by matrix products in this thread and in autograd's.

    cuBLAS keeps a workspace for each thread and stream (32 MiB on Hopper, some 8 MiB elsewhere), and cublasLt
    another; torch allocates both from its caching allocator at the first product. If that happened in the first
    step, they would be memory above its plan; allocated before, they are part of the memory at its start. Other
    streams allocate theirs later.
    """
    kind = kind_of(device)
    if not (kind.of_cuda and kind.is_available()):
        return
    # AOTAutograd turns multithreading off while it traces
    on_its_thread = torch.autograd.set_multithreading_enabled(True)
    with real_tensors(), torch.enable_grad(), torch.autocast(device.type, enabled=False), on_its_thread:
        multiply: Any = _Multiply.apply
        multiplied = multiply(torch.zeros(16, 16, device=device, requires_grad=True))
        multiplied.sum().backward()


def warn_of_trials(joint: Captured, device: torch.device) -> None:
    """Warn if cuDNN will try its kernels for convolutions during a step, with whatever workspaces they need.

    With `torch.backends.cudnn.benchmark` each thread tries all kernels at the first convolution of its sizes.
    Autograd's thread does so in the first backward, and may choose other kernels than the ones that were
    measured.
    """
    if not kind_of(device).of_cuda or not (torch.backends.cudnn.enabled and torch.backends.cudnn.benchmark):
        return
    if any(getattr(joint.nodes[op.index].target, "overloadpacket", None) in CONVOLUTIONS for op in joint.ops):
        log.warning(
            "torch.backends.cudnn.benchmark is on: cuDNN tries its kernels for convolutions in the first step, which "
            "may then take more than mem; later steps may run other kernels than were measured. Switch it off where "
            "the budget is tight"
        )


class _Multiply(torch.autograd.Function):
    """An autograd function that returns its input, and multiplies matrices in forward and backward."""

    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor) -> torch.Tensor:
        _multiply(matrix)
        return matrix.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _multiply(gradient.contiguous())
        return gradient


def _multiply(matrix: torch.Tensor) -> None:
    torch.mm(matrix, matrix)
    torch.addmm(matrix[0], matrix, matrix)
