"""Sums of the gradients of parameters that several graph calls read, made while their backwards run.

Autograd adds the gradients of a parameter in a buffer, and hands it on once the backward of every call that reads the
parameter has run. The sum here is the tensor that the first of these backwards returned, which then is the buffer:
later backwards add to it in place, and return None. It is held by a weak reference, so that it is alive only as long
as it is the buffer. If autograd has replaced it by another tensor, the next backward begins another sum.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxremat.device import Ability, kind_of
from fxremat.torch_private import backward_task


class GradientSums:
    """The sums of the backward that runs.

    Args:
        device: the device of the model. On a device with streams, sums are made only on the stream that a program
            begins with: autograd waits for what it was given, and not for what is added later on another stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = _stream_of(device)
        self._device = device
        self._task: int | None = None
        self._sums: dict[int, weakref.ref[torch.Tensor]] = {}  # id of a parameter -> its sum

    def of(self, parameters: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the sums that backwards have begun, by the keys of `parameters`."""
        if self._task != (task := backward_task()):
            self._task, self._sums = task, {}
        if not self._sums or _stream_of(self._device) != self._stream:
            return {}
        found = ((key, self._sums[id(x)]()) for key, x in parameters.items() if id(x) in self._sums)
        return {key: total for key, total in found if total is not None}

    def begin(self, parameters: Mapping[int, torch.Tensor], gradients: Sequence[Any]) -> None:
        """Take gradients that a backward is about to return as sums to which later ones add.

        Args:
            parameters: by the indices of their gradients.
        """
        if _stream_of(self._device) != self._stream:
            return
        for place, parameter in parameters.items():
            gradient = gradients[place]
            if type(gradient) is torch.Tensor and gradient.dtype == parameter.dtype:
                self._sums[id(parameter)] = weakref.ref(gradient)


def _stream_of(device: torch.device) -> torch.Stream | None:
    kind = kind_of(device)
    return kind.current_stream(device) if kind.can(Ability.STREAMS) else None
