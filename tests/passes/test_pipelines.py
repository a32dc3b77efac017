"""Passes by name: pipelines of them, what each did, and leaving one out."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import fxremat
from benchmarks.capture import joint_graph
from fxremat.errors import FxrematError
from fxremat.graphs.captured import read_joint
from fxremat.passes.pipelines import PASSES, PIPELINES, SKIPPED, normalize
from fxremat.settings import Search

pytestmark = pytest.mark.usefixtures("torch_ready")


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).relu().sum()


X = torch.linspace(-1, 1, 32).reshape(8, 4)


def test_every_pipeline_is_of_passes_that_there_are_and_each_says_what_it_does() -> None:
    for names in PIPELINES.values():
        assert len(set(names)) == len(names)
        assert set(names) <= PASSES.keys()
        assert "note_overwriting" not in names[:-1]  # it reads what the others leave
    assert all(each.purpose for each in PASSES.values())
    assert set().union(*PIPELINES.values()) == PASSES.keys()


def test_a_captured_step_lists_what_passes_did() -> None:
    step = fxremat.capture(Normed(), (X,), search=Search(seconds=0), costs="estimate")
    assert tuple(each.name for each in step.graph.passes) == PIPELINES["eager"]
    assert [each.after for each in step.graph.passes[:-1]] == [each.before for each in step.graph.passes[1:]]
    (detached,) = (each for each in step.graph.passes if each.name == "drop_detach")
    assert detached.after < detached.before
    assert detached.diff == ""


def test_the_log_shows_how_a_pass_changes_the_graph(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FXREMAT_LOG", "passes")
    module, outputs = joint_graph(Normed(), X)
    with caplog.at_level(logging.INFO, "fxremat.passes"):
        joint = read_joint(normalize(module), outputs)
    (halved,) = (line for line in caplog.messages if line.startswith("halve_exactly: "))
    assert "\n-" in halved
    assert "\n+" in halved
    assert halved == str(next(each for each in joint.passes if each.name == "halve_exactly"))


def test_a_pass_can_be_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(SKIPPED, "halve_exactly, drop_detach")
    plan = fxremat.plan(Normed(), (X,), mem="100%", search=Search(seconds=0), costs="estimate")
    assert not {"halve_exactly", "drop_detach"} & {each.name for each in plan.captured.passes}
    assert any("_native_batch_norm_legit_functional" in op.target for op in plan.graph.ops)
    assert "halve_exactly is left out, as FXREMAT_SKIP_PASSES says" in caplog.messages
    monkeypatch.setenv(SKIPPED, "")
    whole = fxremat.plan(Normed(), (X,), mem="100%", search=Search(seconds=0), costs="estimate")
    assert not any("_native_batch_norm_legit_functional" in op.target for op in whole.graph.ops)


@pytest.mark.parametrize("names", ["halve_exactyl", "halve_exactly,all"])
def test_leaving_out_what_there_is_not_is_refused(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SKIPPED, names)
    with pytest.raises(FxrematError, match=f"there is no pass {names.rpartition(',')[2]!r}; there are share, "):
        fxremat.plan(Normed(), (X,), mem="100%", search=Search(seconds=0), costs="estimate")
