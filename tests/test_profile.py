"""A profile says where the memory goes, and its advice does what it says."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fxremat
from fxremat.__main__ import main
from fxremat.profiles import BEST, WORTH, Profile, Saving, best_of, enough, knee_of
from fxremat.settings import Search
from fxremat.show.page_data import page_data
from fxremat.show.profile_figures import bytes_at_peak
from fxremat.step.kinds import MemoryKind
from fxremat.units import format_bytes, parse_bytes
from tests.show.test_page import read

pytestmark = pytest.mark.usefixtures("torch_ready")
OPTIONS: dict[str, Any] = {"search": Search(seconds=0), "costs": "estimate"}


class Words(nn.Module):
    """A language model of one layer, whose vocabulary is far larger than its width."""

    def __init__(self, vocabulary: int = 8000, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Both(Words):
    """The same, which returns its scores beside the loss."""

    def forward(self, tokens: Tensor) -> Any:
        scores = self.head(self.embed(tokens))
        return {"loss": F.cross_entropy(scores.flatten(0, 1), tokens.flatten()), "scores": scores}


class Deep(nn.Module):
    """Sixteen times linear and tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(16)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "words": lambda: (Words(), torch.arange(256).view(4, 64)),
    "both": lambda: (Both(), torch.arange(256).view(4, 64)),
    "deep": lambda: (Deep(), torch.ones(512, 16)),
    "nothing": lambda: (nn.Linear(4, 4), torch.ones(2, 4)),
}


@cache
def profiled(name: str) -> tuple[nn.Module, Any, Profile]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return model, inputs, fxremat.profile(model, inputs, **OPTIONS)


@pytest.mark.parametrize("name", MODELS)
def test_the_text_is_narrow_and_has_the_figures(name: str) -> None:
    *_, profile = profiled(name)
    text = str(profile)
    assert max(map(len, text.splitlines())) <= 100
    assert text.splitlines()[0].startswith(f"fxremat profile of {profile.plan.graph.model} on ")
    assert profile.peak == profile.plan.keep_all_peak == profile.plan.predicted_peak
    assert profile.time == profile.plan.keep_all_time
    assert profile.plan.program.recomputed == 0
    words = " ".join(text.split())
    assert f"peak {format_bytes(profile.peak)}, where " in words
    total = profile.plan.modules.total
    table = text.split("\n\n")[1].splitlines()
    assert table[0].split()[-4:] == ["saved", "gradients", "forward", "backward"]
    assert f" {format_bytes(total.saved)} " in table[1]
    assert f" {format_bytes(total.gradients)} " in table[1]
    for change in profile.changes:
        assert " ".join(str(change).split()) in words


@pytest.mark.parametrize("name", MODELS)
def test_changes_are_worth_it_and_sorted_by_what_they_save(name: str) -> None:
    *_, profile = profiled(name)
    saved = [change.saved for change in profile.changes]
    assert saved == sorted(saved, reverse=True)
    assert len(saved) <= BEST
    assert all(size >= WORTH * profile.peak for size in saved)
    for change in profile.changes:
        assert (change.whole, change.fastest) == (profile.peak, profile.time)
        assert change.saved == profile.peak - change.peak


@pytest.mark.parametrize("name", ["words", "deep", pytest.param("both", marks=pytest.mark.long)])
def test_advice_does_what_it_says(name: str) -> None:
    model, inputs, profile = profiled(name)
    assert profile.changes
    for change in profile.changes:
        torch._dynamo.reset()
        call = f"{change.how.removesuffix(')')}, example_inputs=inputs, **options)"
        made = eval(call, {"fxremat": fxremat, "model": model, "inputs": inputs, "options": OPTIONS})
        mem = re.search(r'mem="([^"]+)"', change.how)
        assert mem is not None
        assert made.plan.budget == parse_bytes(mem[1])
        assert made.plan.predicted_peak <= change.peak <= parse_bytes(mem[1])
        assert made.plan.predicted_time <= 1.05 * change.time


def test_a_large_vocabulary_is_cut_into_slices() -> None:
    *_, profile = profiled("words")
    best = profile.changes[0]
    assert best.what.startswith("run head ")
    assert best.what.endswith(" in slices")
    assert best.how.endswith(", slices=True)")
    assert best.saved > profile.peak / 2
    assert "head" in str(profile)


def test_scores_beside_the_loss_may_be_left_out() -> None:
    best = profiled("both")[2].changes[0]
    assert best.what == "run head in slices, and leave out the outputs beside the loss"
    assert best.how.endswith(", slices=fxremat.Slices(drop_outputs=True))")


def test_a_deep_chain_is_recomputed_or_waits_on_the_host() -> None:
    *_, profile = profiled("deep")
    whats = " ".join(change.what for change in profile.changes)
    assert "recompute what is cheap to make again" in whats
    assert "let values wait on the host" in whats
    (recomputing,) = [change for change in profile.changes if change.what.startswith("recompute")]
    assert re.fullmatch(r'fxremat\.compile\(model, mem="[^"]+"\)', recomputing.how)
    assert (recomputing.peak, recomputing.time) in profile.plan.frontier


def test_a_profile_is_of_one_device() -> None:
    with pytest.raises(fxremat.FxrematError, match=r"costs is \['A100', 'H200'\]"):
        fxremat.profile(nn.Linear(4, 4), torch.ones(2, 4), costs=["A100", "H200"])  # type: ignore[arg-type]


def test_what_the_user_says_of_the_loss_is_in_the_calls() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    x = torch.ones(256, 64)
    options: dict[str, Any] = {"search": Search(seconds=0.0), "costs": "estimate"}
    said, unsaid = fxremat.profile(model, x, loss=12_345, **options), fxremat.profile(model, x, **options)
    assert said.changes
    assert unsaid.changes
    assert all("loss=12345" in change.how for change in said.changes)
    assert not any("loss=" in change.how for change in unsaid.changes)


def test_what_more_than_doubles_the_time_is_left_out() -> None:
    def saving(what: str, peak: int, time: float) -> Saving:
        return Saving(what=what, how="h", peak=peak, time=time, whole=1000, fastest=1.0)

    changes = saving("slices", 100, 22.66), saving("offload", 300, 2.0), saving("recompute", 200, 1.3)
    assert [change.what for change in best_of([*changes, saving("little", 991, 1.0)])] == ["recompute", "offload"]


def test_where_nothing_helps_it_says_so() -> None:
    *_, profile = profiled("nothing")
    assert profile.changes == ()
    assert str(profile).endswith("No change that fxremat knows of would save one percent in at most twice the time.")
    assert "What would save most" not in str(profile)


@pytest.mark.parametrize("name", MODELS)
def test_the_page_is_that_of_the_plan_with_the_changes(name: str) -> None:
    *_, profile = profiled(name)
    reader = read(profile.to_html())
    data = json.loads(reader.texts["data"])
    expected = json.loads(json.dumps(page_data(profile.plan)))
    assert data["advice"] == [str(change) for change in profile.changes]
    model = profile.plan.graph.model
    assert model in data["title"]
    assert "cpu" not in data["title"]
    headline = data["headline"].replace("\u00a0", " ")
    assert headline.startswith(f"{model} trains in {format_bytes(profile.peak)}")
    assert headline.endswith("(estimated for cpu)")
    assert ("it could in" in headline) == bool(profile.changes)
    if profile.changes:
        assert f"it could in {format_bytes(profile.changes[0].peak)}, " in headline
    assert data["budget"] is None
    same = data.keys() - {"advice", "title", "headline", "about", "budget", "facts"}
    assert {key: data[key] for key in same} == {key: expected[key] for key in same}
    assert reader.texts["text"] == str(profile)
    shown = [label for label, _ in data["facts"]]
    assert shown == ["peak", "time", "saved", "gradients"]


@dataclass(frozen=True)
class Point:
    """A candidate of which only two numbers matter."""

    peak: int
    time: float


@pytest.mark.parametrize(
    ("points", "knee"),
    [
        ([(100, 1.0)], 0),
        ([(100, 1.0), (50, 1.1)], 1),
        ([(100, 1.0), (40, 1.1), (10, 2.0)], 1),  # two thirds of the memory for a tenth of the time
        ([(100, 1.0), (95, 1.5), (90, 1.6), (0, 2.0)], 3),  # all above the line: the smallest, which is on it
        ([(100, 1.0), (80, 1.1), (30, 1.2), (20, 1.9), (0, 2.0)], 2),
        ([(100, 1.0), (50, 1.5), (0, 2.0)], 1),  # all on the line
        ([(100, 1.0), (60, 1.0), (0, 1.0)], 2),  # memory for nothing
    ],
)
def test_the_knee_of_a_frontier(points: list[tuple[int, float]], knee: int) -> None:
    candidates: Any = tuple(Point(peak, time) for peak, time in points)
    assert knee_of(candidates) is candidates[knee]


@given(st.integers(1, 2**46))
def test_enough_is_no_less_and_little_more(size: int) -> None:
    text = enough(size)
    meant = parse_bytes(text)
    step = 2**30 / 100 if size >= 2**30 else 2**20 / 10 if size >= 2**20 else 2**10 / 10 if size >= 2**10 else 0
    assert size <= meant <= size + step
    assert len(text) <= 11


def change(peak: int, time: float) -> Saving:
    return Saving(what="w", how="h", peak=peak, time=time, whole=1000, fastest=2.0)


def test_a_change_in_words() -> None:
    assert str(change(250, 3.0)) == "w: saves 750 B (75 %) for 50 % more time: h"
    assert str(change(990, 2.001)) == "w: saves 10 B (1 %) in the same time: h"
    assert change(400, 2.0).saved == 600


class Breaks(nn.Module):
    """A model that is not one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if x.sum().item() > 0:
            x = x + 1
        return x.sum()


@pytest.mark.parametrize(
    "make",
    [
        lambda: (nn.Linear(4, 4).eval(), torch.ones(2, 4)),
        lambda: (nn.Linear(4, 4), torch.ones(2, 5)),
        lambda: (Breaks(), torch.ones(2, 4)),
        lambda: (nn.Linear(4, 4).requires_grad_(False), torch.ones(2, 4)),
        lambda: ("a model", torch.ones(2, 4)),
    ],
    ids=["eval", "shapes", "two graphs", "frozen", "no model"],
)
def test_what_cannot_be_planned_is_refused_as_by_plan(make: Callable[[], tuple[Any, Any]]) -> None:
    said = []
    for look in (lambda *a: fxremat.capture(*a, **OPTIONS), lambda *a: fxremat.profile(*a, **OPTIONS)):
        torch._dynamo.reset()
        with pytest.raises((fxremat.FxrematError, RuntimeError)) as error:  # of fxremat, or the plain model's own
            look(*make())
        said.append((type(error.value), str(error.value)))
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "options", [{"costs": "guess"}, {"costs": 3}, {"search": -1.0}, {"loss": "many"}]
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(fxremat.FxrematError):
        fxremat.profile(nn.Linear(4, 4), torch.ones(2, 4), **OPTIONS | options)


def test_profiling_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1), nn.Flatten(0))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    fxremat.profile(model, torch.ones(16, 8), **OPTIONS)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "forward" not in vars(model)


FACTORY = """
import torch

def factory():
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Flatten(0)), torch.ones(16, 8)

def wider():
    return torch.nn.Sequential(torch.nn.Linear(8, 99), torch.nn.Tanh(), torch.nn.Flatten(0)), torch.ones(16, 8)

def fails():
    raise RuntimeError("no data")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package with a factory, where Python finds it."""
    name = f"profiled_{tmp_path.name.replace('-', '_')}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    (tmp_path / name / "models.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield f"{name}.models"
    for module in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[module]


def test_the_command_line(package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "out.html"
    options = ["--device", "H100", "--effort", "0", "--report", str(report)]
    assert main(["profile", f"{package}:factory", *options]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("fxremat profile of Sequential on H100 (estimated times)\n")
    assert printed.err == ""
    assert max(map(len, printed.out.splitlines())) <= 100
    reader = read(report.read_text(encoding="utf-8"))
    assert f"{reader.texts['text']}\n" == printed.out
    assert json.loads(reader.texts["data"])["model"] == "Sequential"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "required"),
        (["nocolon"], "package.module:factory"),
        (["no.such.module:f"], "no.such.module"),
        (["PACKAGE:missing"], "missing"),
        (["PACKAGE:fails"], "no data"),
        (["os:getcwd"], "it must return (model, example_inputs)"),
        (["PACKAGE:factory", "--mem", "4GiB"], "unrecognized arguments"),
        (["PACKAGE:factory", "--device", "guess"], "'guess'"),
        (["PACKAGE:factory", "--effort", "nan"], "effort is nan"),
        (["PACKAGE:factory", "--effort", "much"], "invalid float"),
        (["PACKAGE:factory", "--device", "abacus"], "'abacus'"),
        (["PACKAGE:factory", "--report", "/no/such/out.html"], "no folder /no/such"),
        (["PACKAGE:factory", "--save", "/no/such/out.json"], "no folder /no/such"),
        (["PACKAGE:factory", "--compare", "/no/such/old.json"], "cannot read '/no/such/old.json': No such file"),
        (["PACKAGE:factory", "--compare", __file__], "holds no profile: it is not JSON"),
        (["PACKAGE:factory", "--tolerance", "1%"], "--tolerance is for --compare"),
        (["PACKAGE:factory", "--compare", "x", "--tolerance", "1.5"], "--tolerance is '1.5'; it is a share"),
    ],
)
def test_wrong_arguments_are_one_line(
    package: str, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["profile", *(argument.replace("PACKAGE", package) for argument in arguments)])
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    assert printed.err.count("\n") == 1
    assert says in printed.err


@pytest.mark.parametrize("name", MODELS)
def test_figures_add_up_to_the_peak(name: str) -> None:
    *_, profile = profiled(name)
    figures = Profile.from_json(profile.to_json())
    assert figures == profile.figures
    assert figures.peak == profile.peak == sum(figures.modules.values()) == sum(figures.kinds.values())
    known = {node.path for node in profile.plan.modules.walk()}
    assert set(figures.modules) <= known


def test_a_peak_between_two_moments_is_of_the_loss() -> None:
    plan = profiled("deep")[2].plan
    higher: Any = SimpleNamespace(running=plan.running, predicted_peak=plan.predicted_peak + 7)
    found, before = bytes_at_peak(higher), bytes_at_peak(plan)
    assert sum(found.values()) == plan.predicted_peak + 7
    assert found["", MemoryKind.OUTSIDE] == before["", MemoryKind.OUTSIDE] + 7


def test_the_module_that_grew_is_named() -> None:
    torch.manual_seed(0)
    before = profiled("words")[2]
    after = fxremat.profile(Words(vocabulary=12000), torch.arange(256).view(4, 64), **OPTIONS)
    comparison = before.compare(after)
    assert comparison.bytes == after.peak - before.peak
    assert comparison.growth.grown[0].name == "Words, its own ops"  # the scores of the loss
    assert comparison.exceeds("1%")
    assert not after.compare(before).exceeds(0)
    text = str(comparison)
    assert f"{format_bytes(before.peak)} -> {format_bytes(after.peak)} (+" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_command_line_compares(package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick, file = ["--estimate", "--effort", "0"], tmp_path / "old.json"
    compare = [*quick, "--compare", str(file)]
    assert main(["profile", f"{package}:factory", *quick, "--save", str(file), "--json"]) == 0
    assert capsys.readouterr().out == file.read_text() + "\n"
    assert main(["profile", f"{package}:factory", *compare, "--tolerance", "0"]) == 0
    out = capsys.readouterr().out
    assert "(no change)" in out
    assert out.endswith("the peak grew by no more than the tolerance of 0\n")
    assert main(["profile", f"{package}:wider", *compare]) == 1
    printed = capsys.readouterr()
    assert printed.err == ""
    assert re.search(r"^  1 +\+\d", printed.out, re.MULTILINE), "what tanh saves grew"
    assert printed.out.endswith("the peak grew by more than the tolerance of 1%\n")
    assert main(["profile", f"{package}:wider", *compare, "--tolerance", "1GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["after"] - found["before"] == found["bytes"] == sum(row["bytes"] for row in found["modules"]) > 0


def test_help_tells_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "profile where the memory of a training step goes, and what would save most" in text
    with pytest.raises(SystemExit):
        main(["profile", "--help"])
    assert "--report OUT.html" in capsys.readouterr().out
