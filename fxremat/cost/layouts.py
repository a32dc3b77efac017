"""Memory layouts of ops' real results, compared with those of fake tensors while ops run to be measured.

The strides of fake tensors are not always those of the kernels' results. That matters if the traced step
contains a view that the real result does not allow: then the step has to be traced again with the observed
layouts (`runtime.real_layouts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from fxremat.errors import CaptureError

Strides = tuple[tuple[Any, ...] | None, ...]
"""The strides of each output of an op; None for an output that is not a strided tensor."""


class LayoutsDiffer(CaptureError):
    """Raised for a traced step that contains views which the layouts of real results do not allow.

    Most such steps are traced again, so that the user does not see this error.

    Attributes:
        observed: key of a call (see `key_of`) -> strides of its real outputs, where fake ones have other strides.
        ops: the names of those ops.
    """

    def __init__(self, observed: Mapping[str, Strides], ops: Iterable[str]) -> None:
        self.observed, self.ops = observed, tuple(ops)
        super().__init__(
            f"the results of {', '.join(self.ops)} lie in memory otherwise than PyTorch's fake tensors tell, so that "
            "the step cannot run as it was traced; capture it for fixed sizes (dynamic=False), or compile a submodule "
            "instead"
        )


def key_of(op: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    """Return a key of a call that determines the layouts of its results: op, constants, and layouts of its tensors."""
    return f"{op}({', '.join(map(_described, (*args, *kwargs.items())))})"


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{_strides(value)}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_described, value))}]"
    return str(value)


def _strides(value: Any) -> tuple[Any, ...] | None:
    strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return tuple(value.stride()) if strided else None


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The memory format of images or volumes whose channels are closest together, by the number of dimensions."""


def lies_in_two_layouts(value: torch.Tensor) -> bool:
    """Tell whether a tensor is contiguous and in channels_last at once, as images of one pixel or one channel are."""
    layout = CHANNELS_LAST.get(value.dim())
    if layout is None or value.layout is not torch.strided:
        return False
    return value.is_contiguous() and value.is_contiguous(memory_format=layout)


def otherwise_than_shown(node: fx.Node, result: Any) -> Strides | None:
    """Return the strides of an op's real outputs; None if the fake outputs of its node have the same, or other shapes.
    """
    shown, real = _listed(node.meta.get("val")), _listed(result)
    if len(shown) != len(real) or any(_shape(one) != _shape(other) for one, other in zip(shown, real, strict=True)):
        return None
    found = tuple(map(_strides, real))
    alike = all(
        _same_order(tensor, strides) for tensor, strides in zip(shown, found, strict=True) if strides is not None
    )
    return None if alike else found


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _same_order(shown: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Tell whether a fake tensor has these strides, ignoring dimensions of size 1, where strides have no meaning."""
    sizes = zip(shown.shape, shown.stride(), strides, strict=True)
    return shown.numel() == 0 or all(one == other for size, one, other in sizes if size != 1)
