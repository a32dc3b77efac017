"""Mistakes in what fxremat does to order copies, each of which the race detector must find."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fxremat.host import files, pinned
from fxremat.ops.parameters import Weights


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A mistake, and the programs that show it."""

    name: str
    programs: str  # a key of `__main__.PROGRAMS`
    plant: Callable[[pytest.MonkeyPatch], None]

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Make the mistake inside."""
        with pytest.MonkeyPatch.context() as patch:
            self.plant(patch)
            yield


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing, in the place of what waits."""


def _no_wait_for_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pinned._StreamLane, "finish", nothing)


def _no_wait_for_compute(patch: pytest.MonkeyPatch) -> None:
    class Deaf(torch.Stream):
        wait_stream = nothing

    def hasty(self: Any, source: torch.Tensor, target: torch.Tensor, key: int) -> None:
        own, self.stream = self.stream, streams.setdefault(id(self), Deaf(self._device))
        try:
            copy(self, source, target, key)
        finally:
            self.stream = own  # a tier keeps its lanes, for the next mutant too

    streams: dict[int, Deaf] = {}
    copy = pinned._StreamLane.copy
    patch.setattr(pinned._StreamLane, "copy", hasty)


def _nothing_held(patch: pytest.MonkeyPatch) -> None:
    def forgetful(self: Any, source: torch.Tensor, target: torch.Tensor, key: int) -> None:
        copy(self, source, target, key)
        number = self._latest[key]
        self._under_way[number] = self._under_way[number]._replace(source=None, target=None)

    copy = pinned._StreamLane.copy
    patch.setattr(pinned._StreamLane, "copy", forgetful)


def _no_wait_for_files(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(files._ThreadLane, "finish", nothing)


def _files_on_the_threads_stream(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(files, "_after", lambda issued: contextlib.nullcontext())


def _no_wait_for_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Weights, "wait", lambda self, back, number: back)


def _no_wait_for_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Weights, "wait_for_state", nothing)


def _no_wait_after_the_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pinned.PinnedTier, "synchronize", nothing)


MUTANTS = (
    Mutant(name="nothing waits for a copy", programs="activations", plant=_no_wait_for_copies),
    Mutant(name="copies do not wait for compute", programs="activations", plant=_no_wait_for_compute),
    Mutant(name="an exception frees what is being copied", programs="activations", plant=_nothing_held),
    Mutant(name="nothing waits for a copy to or from a file", programs="files", plant=_no_wait_for_files),
    Mutant(name="files are copied on their thread's stream", programs="files", plant=_files_on_the_threads_stream),
    Mutant(name="a weight is read before it is there", programs="weights", plant=_no_wait_for_weights),
    Mutant(name="optimizer state is read before it is there", programs="weights", plant=_no_wait_for_state),
    Mutant(name="a step ends before weights are home", programs="weights", plant=_no_wait_after_the_step),
)
