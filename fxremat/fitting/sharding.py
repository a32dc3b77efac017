"""Memory of one device among several, by formula of what PyTorch's wrappers keep; nothing of it is captured.

    fsdp    each parameter is split along its first dimension, and padded; so are its gradient and optimizer state.
            Of a layer, all of its weights are there while it runs, and those of the next one; what belongs to no layer
            stays gathered. The gradients of a layer are there twice until they are reduced.
    ddp     every device has everything, and the reducer's buckets, which hold all gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fxremat.cost.optimizer_memory import Rounding
from fxremat.fitting.optimizers import bytes_of

GATHERED = 2  # layers whose weights are there at a time: the one that runs and the next
REDUCED = 2  # copies of a layer's gradients: as they are made, and as they are sent


@dataclass(frozen=True, kw_only=True)
class Shares:
    """The share that a device has of a model that is split among several."""

    parameters: Mapping[str, Tensor]  # its parts, by the names of the parameters
    gathered: int  # bytes of weights that are whole, besides these parts
    reducing: int  # bytes of gradients that are whole


def shares_of(
    parameters: Mapping[str, Tensor],
    trained: Iterable[str],
    layers: Iterable[str],
    devices: int,
    rounding: Rounding,
) -> Shares:
    """Return what each of several devices has under FSDP2, with `fully_shard` on each layer and on the model.

    Args:
        layers: the names of the modules that are sharded one by one.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    known = sorted(layers, key=len, reverse=True)
    for name, tensor in parameters.items():
        layer = next((layer for layer in known if name.startswith(f"{layer}.")), "")
        groups.setdefault(layer, {})[name] = tensor
    root = bytes_of(groups.pop("", {}).values(), rounding)
    largest = max((bytes_of(group.values(), rounding) for group in groups.values()), default=0)
    wanted = set(trained)
    graded = max(
        (bytes_of((t for n, t in group.items() if n in wanted), rounding) for group in groups.values()), default=0
    )
    return Shares(
        parameters={name: _part(tensor, devices) for name, tensor in parameters.items()},
        gathered=root + GATHERED * largest,
        reducing=REDUCED * graded,
    )


def _part(tensor: Tensor, devices: int) -> Tensor:
    """Return a tensor of the shape that the first device has of a parameter, without data."""
    if tensor.dim() == 0:
        return tensor
    return torch.empty(-(-tensor.shape[0] // devices), *tensor.shape[1:], dtype=tensor.dtype, device="meta")
