"""The plain model's own error at a call that cannot be captured, such as a wrong argument, shape, dtype or device.

For dynamo such a call may look like a graph break. To tell the two apart, the plain forward is run without data and
with few effects, where dynamo stopped at an op or a call that may have rejected its arguments:

    parameters, buffers, inputs        fake tensors of the same shapes, dtypes and devices
    attributes and containers          of modules, and of objects that they have: copies; the originals are put back
    generators, standard output        states are restored; output is dropped
"""

from __future__ import annotations

import contextlib
import copy
import io
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxremat.ops.random import GeneratorStates, devices_of, host_draws_kept
from fxremat.runtime.shapes_alone import Call, Fakes
from fxremat.torch_private import as_without_fakes, real_tensors, silent, tensor_places

NOTE = "fxremat ran the plain forward on tensors without data, since the call could not be captured: it fails, too"
OF_FAKES = (
    r"[Ff]ake ?[Tt]ensor|data pointer|data_ptr|tensor subclass|[Mm]eta ?[Tt]ensor|numpy\(\)|[Ss]torage|Couldn't swap"
)
"""A pattern that matches errors which only tensors without data raise."""


def plain_error(model: nn.Module, forward: Callable[..., Any], call: Call) -> Exception | None:
    """Return the exception that the model's plain forward raises at a call; None if it raises none, or is not run.

    This costs the time of one forward without kernels, and allocates nothing on the device. The model, its
    inputs and the random states do not change, but what the forward writes elsewhere stays. Models with tensors of
    other classes than PyTorch's own (shards, quantized weights) or with TorchScript in them, whose tensors cannot be
    replaced, are not run, and None is returned.
    """
    args, kwargs = call
    tensors = [x for x in (*model.parameters(), *model.buffers(), *pytree.tree_leaves(call)) if isinstance(x, Tensor)]
    scripted = any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())
    if scripted or not all(type(x) in (Tensor, nn.Parameter, nn.Buffer) for x in tensors):
        return None
    fakes = Fakes()
    draws = GeneratorStates(devices_of(tensors)).replayed()
    quiet = contextlib.redirect_stdout(io.StringIO()), silent("torch._subclasses.fake_tensor")
    with real_tensors(), _put_back(model), draws, host_draws_kept(), quiet[0], quiet[1]:
        for holder, name, tensor in list(tensor_places(model)):
            holder[name] = fakes.like(tensor)
        args, kwargs = pytree.tree_map_only(Tensor, fakes.like, (args, kwargs))
        try:
            with fakes.mode:
                forward(*args, **kwargs)
        except Exception as error:
            return _told(error)
    return None


def _told(error: Exception) -> Exception | None:
    clear = as_without_fakes(error)
    if clear is None or re.search(OF_FAKES, str(clear)):
        return None
    clear.add_note(NOTE)
    return clear


def _keeps_attributes(value: object) -> bool:
    """Tell whether a value is an object with a `__dict__` that can be saved and restored."""
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, Tensor | nn.Module | ModuleType)


@contextlib.contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """After this context, restore attributes of the model's modules, of objects in them, and of containers among them.

    Such objects may cache tensors in their attributes.
    """
    owners: dict[int, Any] = {id(module): module for module in model.modules()}
    for module in list(owners.values()):
        owners |= {id(value): value for value in vars(module).values() if _keeps_attributes(value)}
    before = [(vars(owner), dict(vars(owner))) for owner in owners.values()]
    try:
        for attributes, originals in before:
            for name, value in originals.items():
                if type(value) in (dict, list, set):
                    attributes[name] = copy.copy(value)
        yield
    finally:
        for attributes, originals in before:
            attributes.clear()
            attributes.update(originals)
