"""Times of calls on a CUDA device whose clock is pretended: events tell what the calls between them take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.meter import storage_peak
from fxremat.cost.measure import raise_clocks
from fxremat.cost.metering import peaks_of, seconds_of
from fxremat.torch_private import unprofiled

CUDA = torch.device("cuda", 0)


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Callable[[], None]]:
    """Makes calls that take so many seconds of the pretended device."""
    clock = [0.0]

    class Event:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = clock[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, later: Event) -> float:
            return (later.at - self.at) * 1e3

    def call_of(seconds: float) -> Callable[[], None]:
        def call() -> None:
            clock[0] += seconds

        return call

    monkeypatch.setattr(torch, "Event", Event)
    return call_of


def test_what_is_prepared_before_a_call_is_no_part_of_its_time(
    takes: Callable[[float], Callable[[], None]],
) -> None:
    assert seconds_of(takes(0.25), CUDA) == pytest.approx(0.25)
    assert seconds_of(takes(0.25), CUDA, prepare=takes(1.0)) == pytest.approx(0.25)
    assert seconds_of(takes(0.0), CUDA, prepare=takes(1.0)) > 0


def test_of_two_calls_only_one_result_is_there() -> None:
    def first() -> Tensor:
        return torch.rand(1000)

    def second(result: Tensor) -> None:
        torch.rand(500)

    peaks: list[tuple[int, int]] = []
    assert storage_peak(lambda: peaks.append(peaks_of(first, second, torch.device("cpu")))) == 6000
    assert peaks == [(4000, 6000)]


def test_clocks_rise_before_ops_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *_, device: ones(2, 2))
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    raise_clocks(CUDA, seconds=0.01)
    assert waited
    assert set(waited) == {CUDA}
    raise_clocks(torch.device("cpu"), seconds=60)


def test_work_beside_a_profiler_runs_on_the_caller_s_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[tuple[Any, bool]] = []

    class Entering:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            entered.append((self.stream, threading.current_thread() is threading.main_thread()))

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the caller's")
    monkeypatch.setattr(torch.cuda, "stream", Entering)
    assert unprofiled(lambda: 1) == 1
    assert entered == []
    with torch.profiler.profile():
        assert unprofiled(lambda: 2) == 2
    assert entered == [("the caller's", False)]
