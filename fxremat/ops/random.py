"""Replay of random ops that run more than once: save the generator's state the first time, and restore it later.

    state, output, mask = draw_saving(aten.native_dropout.default, x, 0.1, True)     the first execution
    output, mask        = draw_again(state, aten.native_dropout.default, x, 0.1, True)     every later one

`draw_again` leaves the generator as it found it, so that all other random numbers are those of the plain model.
A state has about 5 KB on a CPU; on CUDA it has a few bytes (seed and offset) in host memory.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Set
from typing import Any

import numpy
import torch

from fxremat.device import Ability, accelerates, kind_of

HOST = torch.device("cpu")


@torch.library.custom_op("fxremat::bernoulli_as", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def bernoulli_as(like: torch.Tensor, p: float) -> torch.Tensor:
    """Return the result of `empty_like(like).bernoulli_(p)`; `aten.bernoulli.p` may draw in another order."""
    return torch.empty_like(like).bernoulli_(p)


@bernoulli_as.register_fake
def _(like: torch.Tensor, p: float) -> torch.Tensor:
    return torch.empty_like(like)


def generator_of(arguments: tuple[Any, ...], options: dict[str, Any]) -> torch.Generator:
    """Return the default generator of the device that an op with these arguments draws from."""
    device = options.get("device") or next((t.device for t in _tensors(arguments)), torch.device("cpu"))
    return kind_of(device if isinstance(device, torch.device) else HOST).generator(device)


def _tensors(arguments: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, tuple | list):
            yield from _tensors(tuple(argument))


def devices_of(values: Iterable[Any]) -> set[torch.device]:
    """Return the devices of the tensors among these values."""
    return {value.device for value in values if isinstance(value, torch.Tensor)}


class GeneratorStates:
    """Saved states of the generators that a step on these devices may use, in memory outside of PyTorch's allocators.
    """

    def __init__(self, devices: Set[torch.device]) -> None:
        kinds = [(kind_of(device), device) for device in filter(accelerates, devices)]
        others = [kind.generator(device) for kind, device in kinds if kind.can(Ability.GENERATORS)]
        self._states = [(generator, generator.clone_state()) for generator in (torch.default_generator, *others)]

    def restore(self) -> None:
        """Set the generators to the saved states."""
        for generator, then in self._states:
            generator.set_state(then.get_state())

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Set the generators to the saved states when this context ends."""
        try:
            yield
        finally:
            self.restore()

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Within this context, the generators have the saved states; afterwards they are as before."""
        before = [(generator, generator.get_state()) for generator, _ in self._states]
        try:
            self.restore()
            yield
        finally:
            for generator, state in before:
                generator.set_state(state)


class HostDraws:
    """The current states of the generators of Python's `random` and of `numpy.random`."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), numpy.random.get_state()  # noqa: NPY002 - what models use

    def restore(self) -> None:
        """Set the generators to the saved states."""
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)  # noqa: NPY002


@contextlib.contextmanager
def host_draws_kept() -> Iterator[None]:
    """After this context, the generators of Python's `random` and of `numpy.random` are as before."""
    draws = HostDraws()
    try:
        yield
    finally:
        draws.restore()


def draw_saving(op: Any, *arguments: Any, **options: Any) -> tuple[Any, ...]:
    """Run a random op; return the generator's state before it, followed by the op's results."""
    state = generator_of(arguments, options).get_state()
    given = op(*arguments, **options)
    return (state, *given) if isinstance(given, tuple | list) else (state, given)


def draw_again(state: torch.Tensor, op: Any, *arguments: Any, **options: Any) -> Any:
    """Run a random op from a saved generator state; afterwards the generator is as before."""
    generator = generator_of(arguments, options)
    with kind_of(generator.device).drawing_from(generator, state):
        return op(*arguments, **options)
