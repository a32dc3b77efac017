"""Tests of the warning that cuDNN tries kernels during a step, with workspaces that no plan can count."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxremat.cost.workspaces import warn_of_trials
from fxremat.graphs.captured import Captured
from tests.dags import capture
from tests.toys import Loss, Stack, rows

pytestmark = pytest.mark.usefixtures("torch_ready")
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def convolving() -> Captured:
    return capture(nn.Sequential(nn.Conv2d(3, 3, 3), nn.Flatten(0)), torch.ones(1, 3, 5, 5))


@pytest.mark.parametrize(
    ("device", "benchmark", "told"), [(CUDA, True, True), (CUDA, False, False), (CPU, True, False)], ids=str
)
def test_kernels_that_are_tried_during_a_step_are_warned_of(
    device: torch.device, benchmark: bool, told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    joint = convolving()
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    warn_of_trials(joint, device)
    assert ("cuDNN tries its kernels for convolutions in the first step" in caplog.text) is told


def test_models_without_convolutions_are_not_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    warn_of_trials(capture(Loss(Stack(1)), rows()), CUDA)
    assert "cuDNN tries" not in caplog.text
