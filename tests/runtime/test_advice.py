"""Errors of capture blame the right party: data, shapes, the model itself, or a line that cannot be traced."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from tests.toys import WIDTH, rows

pytestmark = pytest.mark.usefixtures("torch_ready")


class Calls(nn.Module):
    """A function of a linear layer and the input."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.recurrent = nn.LSTM(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {
    "a selection": (lambda m, x: m.linear(x)[x > 0].sum(), (rows(),), r"depends on data, .*test_advice.py:\d+"),
    "repeats": (
        lambda m, x, r: m.linear(x).repeat_interleave(r, 0),
        (rows(4), torch.tensor([1, 2, 3, 4])),
        r"depends on data, .*test_advice.py:\d+.*output_size=",
    ),
    "a wrong shape": (
        lambda m, x: m.linear(x),
        (rows()[:, :3],),
        r"fails on these inputs at .*RuntimeError: .*reduction dim.*plain model",
    ),
    "a batch of one": (
        lambda m, x: m.norm(m.linear(x)),
        (rows(1),),
        "fails on these inputs at .*ValueError: Expected more than 1 value per channel",
    ),
    "a recurrent layer": (
        lambda m, x: m.recurrent(x)[0],
        (rows(),),
        r"not one graph: tracing stops at .*test_advice.py:\d+.*LSTMCell",
    ),
    "a branch on data": (
        lambda m, x: m.linear(x) if x.sum() > 0 else x,
        (rows(),),
        r"not one graph: tracing stops at .*test_advice.py:\d+.*values of tensors",
    ),
    "an input that wants a gradient": (
        lambda m, x: m.linear(x.requires_grad_()),
        (rows(),),
        r"requires_grad_\(\) on the input before the call",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_went_wrong_and_where(name: str, caplog: pytest.LogCaptureFixture) -> None:
    function, given, says = CASES[name]
    with caplog.at_level(logging.ERROR), pytest.raises(fxremat.CaptureError, match=says) as error:
        fxremat.compile(Calls(function), "100%", effort=0.0, progress=False)(*given)
    assert "\n" not in str(error.value)
    assert str(Path(fxremat.__file__).parent) not in str(error.value), "lines are the model's"
    assert caplog.records == []
