"""Captures run in frames so large that calls inside of them need no memory of their own."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.data_stack import ROOM, with_room_for_calls
from fxremat.runtime import dynamo


def rooms() -> int:
    """Return how many frames of this thread have room for calls inside of them."""
    frame: types.FrameType | None = sys._getframe()
    found = 0
    while frame is not None:
        found += frame.f_code.co_stacksize >= ROOM
        frame = frame.f_back
    return found


@with_room_for_calls
def fallen(number: int, *, by: int = 0) -> int:
    """Return how many large frames there are, or fail."""
    if by > number:
        raise ValueError(f"{number} is less than {by}")
    return fallen(number, by=by + 1) if by < number else rooms()


def test_a_function_stays_as_it_is_but_for_its_frame() -> None:
    assert fallen(3) == 4
    assert fallen.__name__ == "fallen"
    with pytest.raises(ValueError, match="1 is less than 2"):
        fallen(1, by=2)
    assert rooms() == 0


class InTwoGraphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), InTwoGraphs])
def test_models_are_captured_and_planned_in_such_a_frame(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read, found = dynamo.read_joint, list[int]()

    def watched(*args: Any, **kwargs: Any) -> Any:
        found.append(rooms())
        return read(*args, **kwargs)

    monkeypatch.setattr(dynamo, "read_joint", watched)
    compiled = fxremat.compile(make(), mem="100%")
    compiled(torch.ones(2, 4)).sum().backward()
    assert found
    assert min(found) > 0
