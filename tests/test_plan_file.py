"""A saved plan runs in another process with the same bits and without planning; one that does not belong says so."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import fxremat
from benchmarks.meter import peak_bytes
from fxremat import plan_file, planning
from fxremat.errors import FxrematError, PlanMismatch
from fxremat.host.files import FileTier
from fxremat.plans import Plan
from fxremat.settings import Offload, Search
from fxremat.step.as_json import Unreadable, read, written
from fxremat.step.step_graph import Op, StepGraph
from tests.joints import joints
from tests.toys import Loss, Stack, rows

QUICK: dict[str, Any] = {"search": Search(seconds=0.0)}


def model(depth: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return Loss(Stack(depth=depth))


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    module.zero_grad()
    module(x).backward()
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


@pytest.fixture(scope="module", params=["recomputing", pytest.param("offloading", marks=pytest.mark.long)])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path]:
    """A plan that recomputes, or lets values wait in files, and the file that it was saved to."""
    torch._dynamo.reset()
    torch.set_num_threads(1)  # as in every test
    offload = request.param == "offloading"
    options = {"offload": offload, "compress": False, **QUICK}  # without search for what packing would need at least
    compiled = fxremat.compile(model(), "min" if offload else "60%", example_inputs=(rows(),), **options)
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    assert compiled.plan is not None
    assert bool(compiled.plan.chosen.transfers) is offload
    compiled.plan.save(path)
    return compiled.plan, path


pytestmark = pytest.mark.usefixtures("torch_ready")

OTHER_PROCESS = """
import sys, torch, fxremat
from fxremat import planning
from tests.test_plan_file import gradients, model, rows
planning.variants_of = planning.fastest = None  # nothing is planned
compiled = fxremat.compile(model(), plan=sys.argv[1])
torch.save(gradients(compiled, rows()), sys.argv[2])
"""


def test_it_runs_in_another_process_with_the_same_bits(saved: tuple[Plan, Path], tmp_path: Path) -> None:
    _, path = saved
    environment = os.environ | {"FXREMAT_CACHE": str(tmp_path / "empty"), "PYTHONPATH": str(Path(__file__).parents[1])}
    precision = torch.backends.mkldnn.matmul.fp32_precision  # which tests that ran before may have set
    same = f"import torch; torch.set_num_threads({torch.get_num_threads()})\n"
    same += f"torch.backends.mkldnn.matmul.fp32_precision = {precision!r}\n"
    command = [sys.executable, "-c", same + OTHER_PROCESS, str(path), str(tmp_path / "gradients.pt")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found, expected = torch.load(tmp_path / "gradients.pt"), gradients(model(), rows())
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


class Head(nn.Module):
    """A vocabulary head, whose logits are far larger than all else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 512)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.first(x).tanh()), x.argmax(1))


def test_a_plan_with_slices_runs_as_it_did(tmp_path: Path) -> None:
    torch._dynamo.reset()
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
    compiled = fxremat.compile(Head(), "40%", example_inputs=x, slices=True, **QUICK)
    plan = compiled.plan
    assert plan is not None
    assert plan.slices
    plan.save(tmp_path / "plan.json")
    found = fxremat.Plan.load(tmp_path / "plan.json")
    assert (found.slices, found.slicing, found.schedule) == (plan.slices, plan.slicing, plan.schedule)
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("variants_of", "fastest"):
            patch.setattr(planning, name, None)  # nothing is planned
        again = fxremat.compile(Head(), plan=tmp_path / "plan.json", example_inputs=x)
    assert again.plan is not None
    assert again.plan.program.steps == plan.program.steps
    assert all(map(torch.equal, gradients(again, x), gradients(compiled, x)))
    peak = peak_bytes(lambda: again(x).backward())
    assert peak <= plan.budget
    other = refused(Head(), x[:128], tmp_path / "plan.json")
    assert "is of another step: " in other
    fxremat.compile(Head(), plan=tmp_path / "plan.json", slices=True)
    for option, value in (("slices", False), ("exact", True)):
        with pytest.raises(FxrematError, match=f"runs ops in slices.* does not go with {option}={value}"):
            fxremat.compile(Head(), plan=tmp_path / "plan.json", **{option: value})


def test_a_plan_with_copies_does_not_go_with_less_on_the_host(tmp_path: Path) -> None:
    torch._dynamo.reset()
    path = tmp_path / "plan.json"
    least = fxremat.compile(model(), "100%", example_inputs=(rows(),), **QUICK).plan.minimum
    made = fxremat.compile(model(), least, offload=True, solver="periodic", example_inputs=(rows(),), **QUICK).plan
    assert made.on_host
    made.save(path)
    fxremat.compile(model(), plan=path, offload=Offload(limit=made.on_host))
    with pytest.raises(FxrematError, match=r"wait on the host: it does not go with offload=False"):
        fxremat.compile(model(), plan=path, offload=False)
    with pytest.raises(FxrematError, match=r"wait on the host, and Offload\(limit=...\) allows"):
        fxremat.compile(model(), plan=path, offload=Offload(limit=made.on_host - 1))


def test_it_says_what_the_plan_says(saved: tuple[Plan, Path]) -> None:
    plan, path = saved
    found = fxremat.Plan.load(path)
    assert str(found) == str(plan)
    assert found.schedule == plan.schedule
    assert found.program.steps == plan.program.steps
    assert (found.memory, found.minimum, found.budget) == (plan.memory, plan.minimum, plan.budget)
    assert found.to_html()
    with pytest.raises(FxrematError, match=r"read from a file, and has no graphs yet: give it to fxremat\.compile"):
        found.graphs  # noqa: B018 - it is made when it is asked for


def test_a_plan_that_belongs_is_taken_as_it_is(saved: tuple[Plan, Path]) -> None:
    plan, path = saved
    for given_ in (str(path), path, fxremat.Plan.load(path)):
        torch._dynamo.reset()
        compiled = fxremat.compile(model(), plan=given_, example_inputs=(rows(),))
        assert compiled.plan is not None
        assert compiled.plan.program.steps == plan.program.steps
        assert compiled.plan.budget == plan.budget
    assert compiled.plan.within("100%").predicted_peak > plan.predicted_peak  # a plan like any other from here on


def refused(module: nn.Module, x: Tensor, plan: Any, **options: Any) -> str:
    torch._dynamo.reset()
    with pytest.raises(PlanMismatch) as error:
        fxremat.compile(module, plan=plan, **options)(x)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_another_model_or_size_is_refused_by_name(saved: tuple[Plan, Path]) -> None:
    _, path = saved
    assert "is of another step: it has " in refused(model(depth=3), rows(), path)
    assert "is of another step: its " in refused(model(), rows(8), path)
    other = nn.Sequential(nn.Linear(8, 1))
    assert "it was made for Loss, and this is Sequential" in refused(other, rows()[..., :8], path)


def test_with_a_budget_another_plan_is_made_and_told_of(
    saved: tuple[Plan, Path], caplog: pytest.LogCaptureFixture
) -> None:
    _, path = saved
    torch._dynamo.reset()
    compiled = fxremat.compile(model(depth=3), "70%", plan=path, **QUICK)
    with caplog.at_level(logging.WARNING):
        found = gradients(compiled, rows())
    assert "is of another step: it has " in caplog.text
    assert "another plan is made" in caplog.text
    assert compiled.plan is not None
    assert compiled.plan.predicted_peak <= 0.7 * compiled.plan.keep_all_peak
    assert all(map(torch.equal, found, gradients(model(depth=3), rows())))


@pytest.mark.parametrize("mem", [100_000, "30%", "min"])
def test_a_plan_that_takes_more_than_the_budget_beside_it_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mem: int | str
) -> None:
    torch._dynamo.reset()
    path = tmp_path / "plan.json"
    fxremat.compile(model(), "100%", example_inputs=(rows(),), **QUICK).plan.save(path)
    compiled = fxremat.compile(model(), mem, plan=path, **QUICK)
    try:
        gradients(compiled, rows())
    except fxremat.BudgetTooSmall as error:
        assert error.minimum > error.budget  # noqa: PT017 - either outcome is right
    else:
        assert compiled.plan.predicted_peak <= compiled.plan.budget < fxremat.Plan.load(path).predicted_peak
    assert "plan.json takes " in caplog.text
    assert "another plan is made" in caplog.text


def test_a_plan_with_less_room_for_the_loss_than_it_needs_is_not_taken(tmp_path: Path) -> None:
    torch._dynamo.reset()
    path = tmp_path / "plan.json"
    fxremat.compile(Stack(depth=2), "100%", example_inputs=(rows(),), loss="100KiB", **QUICK).plan.save(path)
    message = r"plan.json sets 100.0 KiB aside for the loss outside the model, and loss= says 101.0 KiB"
    with pytest.raises(PlanMismatch, match=message):
        fxremat.compile(Stack(depth=2), plan=path, loss="101KiB")(rows())
    fxremat.compile(Stack(depth=2), plan=path, loss="100KiB")(rows()).square().mean().backward()


class Normed(nn.Module):
    """BatchNorm of a transposed input, whose result lies otherwise than fake tensors tell."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm, self.head = nn.Embedding(50, 32), nn.BatchNorm1d(32), nn.Linear(32, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        normed = self.norm(self.embedding(tokens).transpose(1, 2)).transpose(1, 2)
        return nn.functional.cross_entropy(self.head(normed).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("mem", [None, "100%"])
def test_a_step_that_was_traced_with_measured_layouts_is_traced_so_again(tmp_path: Path, mem: str | None) -> None:
    torch._dynamo.reset()
    tokens, path = torch.randint(0, 50, (8, 32)), tmp_path / "plan.json"
    made = fxremat.compile(Normed(), "100%", example_inputs=(tokens,), **QUICK).plan
    assert made.layouts
    made.save(path)
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("variants_of", "fastest"):
            patch.setattr(planning, name, None)  # nothing is planned
        again = fxremat.compile(Normed(), mem, plan=path)
        assert all(map(torch.equal, gradients(again, tokens), gradients(Normed(), tokens)))
    assert again.plan.program.steps == made.program.steps


def changed(path: Path, to: Path, change: Any, *, signed: bool = True) -> Path:
    """The file with its plan changed, and signed anew or not."""
    file = json.loads(path.read_text())
    change(file["plan"])
    if signed:
        file["sha256"] = plan_file._digest(json.dumps(file["plan"], separators=(",", ":")))
    to.write_text(json.dumps(file))
    return to


def test_a_folder_that_is_missing_is_named(saved: tuple[Plan, Path], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        saved[0].save(tmp_path / "missing" / "plan.json")
    assert error.value.filename == str(tmp_path / "missing" / "plan.json")


def test_a_changed_file_is_refused(saved: tuple[Plan, Path], tmp_path: Path) -> None:
    _, path = saved
    other = changed(path, tmp_path / "other.json", lambda plan: plan.update(budget=1), signed=False)
    assert "other.json is not as it was written" in refused(model(), rows(), other)
    other = changed(path, tmp_path / "other.json", lambda plan: plan["chosen"].update(peak={"is": "Path"}))
    assert "holds no plan: Path is none of its classes" in refused(model(), rows(), other)
    other.write_text("{}")
    assert "other.json holds no plan: write one with plan.save(path)" in refused(model(), rows(), other)
    with pytest.raises(FileNotFoundError):
        fxremat.Plan.load(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("what", "value", "message"),
    [
        ("torch", "2.0.0", "was made for torch 2.0.0, and here is torch "),
        ("device", "abacus", "was made for abacus, and here is "),
        ("threads", 99, "was made for threads 99, and here is threads "),
    ],
)
def test_another_environment_is_refused(
    saved: tuple[Plan, Path], tmp_path: Path, what: str, value: object, message: str
) -> None:
    _, path = saved

    def change(plan: Any) -> None:
        pairs = plan["environment"]["map"]
        plan["environment"]["map"] = [[key, value if key == what else known] for key, known in pairs]

    assert message in refused(model(), rows(), changed(path, tmp_path / "other.json", change))


def trained(tier: FileTier, mem: str | None, make: Any = torch.optim.AdamW, **options: Any) -> tuple[Any, list[Tensor]]:
    """A model whose step updates its weights, and these after two steps."""
    torch._dynamo.reset()
    module = model()
    optimizer = make(module.parameters(), lr=0.01)
    hosted = Offload(tier=tier, weights=True, activations=False)
    compiled = fxremat.compile(module, mem, offload=hosted, optimizer=optimizer, **options, **QUICK)
    for seed in range(2):
        torch.manual_seed(seed)
        compiled(rows()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return compiled, [parameter.detach().cpu().clone() for parameter in compiled.parameters()]


def test_a_plan_that_updates_weights_runs_with_an_optimizer_of_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    compiled, weights = trained(FileTier(tmp_path), "60%")
    assert compiled.plan.weights.hosted
    compiled.plan.save(path)
    assert str(fxremat.Plan.load(path)) == str(compiled.plan)
    with monkeypatch.context() as patch:
        for name in ("variants_of", "fastest"):
            patch.setattr(planning, name, None)  # nothing is planned
        again, others = trained(FileTier(tmp_path), None, plan=path)
    assert again.plan.program.steps == compiled.plan.program.steps
    assert again.plan.weights.hosted == compiled.plan.weights.hosted
    assert all(map(torch.equal, others, weights))
    with pytest.raises(PlanMismatch, match=r"updates weights by AdamW\(.*\), and here is SGD\(\)"):
        trained(FileTier(tmp_path), None, torch.optim.SGD, plan=path)
    with pytest.raises(FxrematError, match=r"it goes with offload=Offload\(weights=True\) and the optimizer: AdamW"):
        fxremat.compile(model(), plan=path)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"plan": 3}, "plan is 3; it is a plan, or the file"), ({"slices": True}, "it does not go with slices"),
     ({"dynamic": True}, "for fixed sizes; dynamic does not go with it: leave dynamic out"),
     ({"backend": "inductor"}, "with PyTorch's kernels; backend does not"),
     ({"solver": "revolve"}, "solver is for making one"), ({"keep": "*.0"}, "keep is for making one"),
     ({"never_again": "*.0"}, "never_again is for making one")],
)  # fmt: skip
def test_options_that_do_not_go_with_a_plan(saved: tuple[Plan, Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(FxrematError, match=message):
        fxremat.compile(model(), **{"plan": saved[1]} | options)


def test_neither_budget_nor_plan() -> None:
    with pytest.raises(fxremat.InvalidBudget, match="the budget is missing"):
        fxremat.compile(model())


@given(joints())
def test_step_graphs_are_read_as_they_were_written(graph: StepGraph) -> None:
    content = json.loads(json.dumps(written(graph)))
    found = read(content, plan_file.CLASSES)
    assert found.digest == graph.digest
    assert written(found) == written(graph)
    assert (found.ops, found.values, found.returned) == (graph.ops, graph.values, graph.returned)


def test_what_is_shared_is_shared_again() -> None:
    op = Op(0, "a", "t", "k", plan_file.Kind.KERNEL, False, (), (), (), (), None, False, False, None)
    first, second = read(json.loads(json.dumps(written((op, op), [Op]))), plan_file.CLASSES)
    assert first is second
    with pytest.raises(Unreadable, match="Op cannot be made of index"):
        read({"is": "Op", "index": 0}, plan_file.CLASSES)
