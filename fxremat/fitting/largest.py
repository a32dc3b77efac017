"""The largest batch or length with which a model trains on a device, everything on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Unpack

from fxremat.cost.devices import Device
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.fitting import device_with_memory, needed
from fxremat.fitting.settings import Training, TrainingSettings, training_of
from fxremat.units import format_bytes, shortened
from fxremat.what_if import largest

SIZES = ("batch", "length")
PROBES = (1, 2)  # multiples of the least size at which the memory is compared, to guess the largest
LEAST = {"batch": 1, "length": 128}


def _of_size(training: Training, of: str, size: int) -> Training:
    return replace(training, batch=size) if of == "batch" else replace(training, length=size)


@dataclass(frozen=True, kw_only=True)
class LargestThatFits:
    """The largest batch or length of a model on a device, and the memory that it takes there at least, in bytes."""

    model: str
    device: str
    of: str
    size: int
    total: int
    next_total: int | None  # at the next size; None: larger ones were not tried
    device_memory: int

    def __str__(self) -> str:
        found = (
            f"{self.model} on {self.device}: the largest {self.of} is {self.size}, in {format_bytes(self.total)} of "
            f"{format_bytes(self.device_memory)} at least"
        )
        if self.next_total is None:
            return f"{found}; larger ones were not tried"
        step = LEAST[self.of]
        return f"{found}; {self.size + step} would take {format_bytes(self.next_total)}"


def largest_that_fits(
    model: str,
    of: str,
    *,
    on: str | Device,
    device_mem: int | str | None = None,
    config: Mapping[str, Any] | None = None,
    up_to: int = 65536,
    **settings: Unpack[TrainingSettings],
) -> LargestThatFits:
    """Return the largest batch, or the largest length in steps of 128 tokens, with which a model trains on a device.

    Every size that is tried is captured; there are about five of them, of some 10 s each for a decoder of 8B.

    Args:
        of: "batch" or "length".
        on, device_mem: those of `fxremat.fits`.
        settings: those of `fxremat.fits`.

    Raises:
        FxrematError: not even the least size fits, or a setting has a value that it cannot have.
    """
    if of not in SIZES:
        raise FxrematError(f"largest is {shortened(of)}; it is one of {', '.join(SIZES)}")
    device, training, unit = device_with_memory(on, device_mem), training_of(settings), LEAST[of]
    memory = device.memory or 0
    if up_to < unit:
        raise FxrematError(f"up_to is {up_to}; it is {unit} or more")

    @cache
    def total(count: int) -> int:
        """Return the least bytes of a process at a size of `count` units."""
        return needed(model, _of_size(training, of, count * unit), config or {}, device)

    one, two = map(total, PROBES)
    guess = 1 + max(0, memory - one) // max(1, two - one)
    try:
        found = largest(total, memory, max(1, up_to // unit), start=max(1, guess))
    except BudgetTooSmall as error:
        raise FxrematError(
            f"{model} does not train on {device} at {of} {unit}: {format_bytes(error.minimum)} at least, and "
            f"{'it has' if device_mem is None else 'device_mem is'} {format_bytes(memory)}"
        ) from None
    return LargestThatFits(
        model=model,
        device=device.name,
        of=of,
        size=found.size * unit,
        total=found.least,
        next_total=found.next_least,
        device_memory=memory,
    )
