"""Planning models without data, by fake CPU tensors, which have shapes, dtypes and layouts, but no memory.

    parameters and buffers on the meta device, or fake       are replaced by fake CPU tensors, and put back afterwards
    inputs on the meta device, fake or real                  fake CPU tensors are passed instead

Many ops have no gradient on the meta device, so a graph that is captured there has no backward. Fake CPU
tensors are traced like real ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxremat.errors import FxrematError
from fxremat.options import Options
from fxremat.torch_private import fake_mode, has_data, real_tensors, tensor_places

Call = tuple[tuple[Any, ...], dict[str, Any]]


WHAT_IF = 'look at a plan with fxremat.plan(..., costs="H100")'


def refuse_without_data(model: nn.Module, what: str, instead: str = WHAT_IF) -> None:
    """Raise `FxrematError` if a parameter or buffer of the model has no data.

    Args:
        what: a clause of the message that says what needs data.
        instead: advice for the message.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not has_data(tensor):
            where = "on the meta device" if tensor.is_meta else "a fake tensor"
            raise FxrematError(
                f"{name} is {where}, without data, and {what}: {instead}, or give the model data with "
                "model.to_empty(...)"
            )


@contextlib.contextmanager
def with_fakes(model: nn.Module, call: Call, options: Options) -> Iterator[Call]:
    """Replace the parameters and buffers of a model without data by fake tensors; yield fake arguments for a call.

    The model can then be captured. If model and arguments have data, nothing is replaced, and the arguments are
    yielded unchanged. Afterwards all original tensors are put back.

    Raises:
        FxrematError: there is no data, but costs are to be measured, or weights to be updated.
    """
    if options.measures:
        refuse_without_data(model, "ops are measured on real values")
        yield call
        return
    tensors = (*model.parameters(), *model.buffers(), *pytree.tree_leaves(call))
    if all(has_data(tensor) for tensor in tensors if isinstance(tensor, Tensor)):
        yield call
        return
    if options.stepping is not None:
        what = "Offload(weights=True) measures how long copies and updates of the weights take, in an estimate too"
        refuse_without_data(model, what, "leave weights=True out")
    fakes = Fakes(torch.device("cpu"))
    places = list(tensor_places(model))
    try:
        with real_tensors():  # otherwise a fake mode of the caller would also make planning's own tensors fake
            for holder, name, tensor in places:
                holder[name] = fakes.like(tensor)
            yield pytree.tree_map_only(Tensor, fakes.like, call)
    finally:
        for holder, name, tensor in places:
            holder[name] = tensor


class Fakes:
    """Fake counterparts of tensors; equal tensors get the same one, so that tied parameters stay tied.

    Args:
        device: the device of all fake tensors; None: for each, the device of its original.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.mode, self.device = fake_mode(), device
        self.made: dict[int, Tensor] = {}

    def like(self, tensor: Tensor) -> Tensor:
        """Return the fake counterpart of a tensor; a tensor that is not strided is returned unchanged."""
        if tensor.layout is not torch.strided:
            return tensor
        if id(tensor) not in self.made:
            self.made[id(tensor)] = self._make(tensor)
        return self.made[id(tensor)]

    def _make(self, tensor: Tensor) -> Tensor:
        with self.mode:
            device = self.device or tensor.device
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(made, requires_grad=tensor.requires_grad)
            return made.requires_grad_(tensor.requires_grad)
