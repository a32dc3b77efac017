"""Tests of the first hour on a GPU that need none: parts, tables, what is known, models, and the three answers."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks import gpu, gpu_first_hour, models, report
from benchmarks.answers import Answer, answer, difference, outcome
from benchmarks.compare import compare
from benchmarks.first_hour import memory, page, part
from benchmarks.first_hour.part import Column, Measure, Results, Row, Unfinished
from benchmarks.models import Case, on_gpus
from tests.toys import Loss, Stack

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("torch_ready")]

COLUMNS = (Column(name="bytes", text=lambda r: str(r["bytes"]), width=7), Column(name="note", text=lambda r: "x"))


def test_parts_are_run_once_and_in_their_order() -> None:
    assert gpu_first_hour.parts_of(["first", "memory", "first"]) == ["memory", "first"]
    assert gpu_first_hour.parts_of(["all"]) == list(gpu_first_hour.PARTS)
    with pytest.raises(SystemExit, match=r"no part speed; there are all, facts, memory"):
        gpu_first_hour.parts_of(["facts", "speed"])
    assert gpu_first_hour.parser().parse_args([]).parts == ["facts"]


def calls_of_the_page() -> list[list[str]]:
    """The programs that docs/gpu.md calls in a first hour, as words, without what follows a pipe."""
    page = (Path(__file__).parents[1] / "docs" / "gpu.md").read_text().partition("## The first hour")[2]
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    words = [shlex.split(line.partition("2>&1")[0]) for line in lines]
    return [call for call in words if "python" in call]


def test_calls_of_the_page_are_those_of_the_programs() -> None:
    parts, models_called = list[str](), list[str]()
    for limit, seconds, python, *call in calls_of_the_page():
        assert (limit, python) == ("timeout", "python")
        assert int(seconds) <= 600
        match call:
            case ["-m", "benchmarks.gpu_first_hour", *arguments]:
                parts += gpu_first_hour.parts_of(gpu_first_hour.parser().parse_args(arguments).parts)
            case ["-m", "benchmarks.gpu", *arguments]:
                models_called += gpu.parser().parse_args(arguments).models.split(",")
            case ["-m", "pytest", file, *_]:
                assert (Path(__file__).parents[1] / file).exists()
            case ["-c", program]:
                names, budgets = re.findall(r"memory\((\(.*?\)), (\(.*?\))\)", program)[0]
                assert set(ast.literal_eval(names)) <= set(memory.MODELS)
                assert set(ast.literal_eval(budgets)) <= set(memory.BUDGETS)
            case _:
                raise AssertionError(call)
    assert parts == list(gpu_first_hour.PARTS)
    assert models_called
    assert set(models_called) <= set(on_gpus.NAMES)


def test_every_part_has_a_line_in_the_description() -> None:
    for name in gpu_first_hour.PARTS:
        assert f"gpu_first_hour {name} " in (gpu_first_hour.__doc__ or "")


def test_a_table_by_hand() -> None:
    assert part.header(COLUMNS, width=6) == "        bytes  note"
    assert part.line("gpt", {"bytes": 12}, COLUMNS, width=6) == "gpt        12  x"
    assert part.line("gpt", {"failed": "OSError: no"}, COLUMNS, width=6) == "gpt     FAILED: OSError: no"
    assert part.line("gpt", {"least": 2_500_000}, COLUMNS, width=6) == "gpt     too small: the least budget is 2.5 MB"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Results]:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    return lambda: Results.of("memory", COLUMNS)


def cases(run: list[str], **failing: str) -> dict[str, Measure]:
    """Two cases that say when they run."""

    def case(name: str) -> Row:
        run.append(name)
        if name in failing:
            raise OSError(failing[name])
        return {"bytes": len(name)}

    return {name: lambda name=name: case(name) for name in ("gpt", "resnet")}  # type: ignore[misc]


def test_what_is_known_is_not_measured_again(
    results: Callable[[], Results], capsys: pytest.CaptureFixture[str]
) -> None:
    run: list[str] = []
    results().run(cases(run, resnet="no room\nat all"))
    assert "FAILED: OSError: no room\n" in capsys.readouterr().out
    results().run(cases(run))
    assert run == ["gpt", "resnet", "resnet"]
    assert capsys.readouterr().out.count("(known)") == 1
    rows = results().run(cases(run))
    assert [row["bytes"] for row in rows] == [3, 6]
    assert len(run) == 3


def test_other_conditions_have_rows_of_their_own(
    results: Callable[[], Results], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: list[str] = []
    results().run(cases(run))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert results().rows == {}
    assert results().path == tmp_path / "memory_expandable.json"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert results().path == tmp_path / "memory.json"
    assert results().rows == {}
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    assert list(results().rows) == ["gpt", "resnet"]
    record = json.loads((tmp_path / "memory.json").read_text())
    assert {"gpu", "torch", "date"} <= record["conditions"].keys()
    monkeypatch.delenv("OUT")
    assert results().path == part.FOLDER / "memory.json"


def test_rows_of_several_days_stand_in_one_table(results: Callable[[], Results]) -> None:
    run: list[str] = []
    for date, case in (("2026-11-26", "gpt"), ("2026-11-28", "resnet")):
        some = results()
        some.conditions["date"] = date
        some.run({case: cases(run)[case]})
    assert {case: row["date"] for case, row in results().rows.items()} == {"gpt": "2026-11-26", "resnet": "2026-11-28"}
    said = page.table("facts", results().path.read_text().replace('"bytes"', '"found"'))
    assert said.endswith("measured on 2026-11-26; resnet on 2026-11-28.")


def test_what_no_time_was_left_for_is_named(results: Callable[[], Results]) -> None:
    run: list[str] = []
    results().run({"gpt": cases(run)["gpt"]})
    with pytest.raises(Unfinished, match="no time left for: resnet; the same call goes on"):
        results().run(cases(run), limit=0)
    assert run == ["gpt"]


def test_models_for_gpus_have_the_sizes_of_their_names() -> None:
    numbers = {}
    for name in ("gpt", "resnet"):
        with torch.device("meta"):
            numbers[name] = sum(p.numel() for p in on_gpus.get(name).build().parameters())
    assert numbers == {"gpt": 354_823_168, "resnet": 25_557_032}  # GPT-2 medium, ResNet-50
    assert set(models.MAIN) <= set(on_gpus.NAMES)
    with pytest.raises(KeyError, match="no model 'alexnet' for GPUs; known: gpt, gpt odd"):
        on_gpus.get("alexnet")


@pytest.mark.parametrize("name", on_gpus.NAMES)
def test_small_models_for_gpus_train(name: str) -> None:
    case = on_gpus.get(name, "small")
    assert case.name == name
    found = outcome(case.model(), case.batch())
    assert found["loss"].isfinite()
    assert len(found) > 5


# --- three answers ------------------------------------------------------------------------------------------


def numbers(*values: float) -> dict[str, Tensor]:
    return {"loss": torch.tensor(values), "random state": torch.tensor([3], dtype=torch.uint8)}


PLAIN = numbers(1.0, 2.0)
CLOSE = numbers(1.0, 2.001)
FAR = numbers(1.0, 2.5)


@pytest.mark.parametrize(
    ("ours", "again", "wanted"),
    [
        (PLAIN, CLOSE, Answer.YES),
        (CLOSE, PLAIN, Answer.NO),
        (CLOSE, CLOSE, Answer.AS_PLAIN),
        (FAR, CLOSE, Answer.NO),
        ({**CLOSE, "random state": torch.tensor([4], dtype=torch.uint8)}, CLOSE, Answer.NO),
        ({"loss": CLOSE["loss"]}, CLOSE, Answer.NO),
        (numbers(1.0, float("nan")), CLOSE, Answer.NO),
        (numbers(1.0), CLOSE, Answer.NO),
    ],
)
def test_three_answers(ours: dict[str, Tensor], again: dict[str, Tensor], wanted: Answer) -> None:
    assert answer(ours, PLAIN, lambda: again) is wanted


def test_plain_pytorch_is_asked_again_only_where_something_differs() -> None:
    def never() -> dict[str, Tensor]:
        raise AssertionError("asked again")

    assert answer(PLAIN, PLAIN, never) is Answer.YES


def test_a_difference_says_where_and_how_much() -> None:
    assert str(difference(PLAIN, PLAIN)) == "none of 2 differ"
    assert str(difference(FAR, PLAIN)) == "1 of 2 differ, most loss: 2.5e-01"


def test_an_outcome_leaves_gradients_and_buffers_as_they_were() -> None:
    norm = nn.BatchNorm1d(4)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x).square().mean()

    model, x = Model(), torch.randn(8, 4)
    first, second = outcome(model, (x,)), outcome(model, (x,))
    assert norm.num_batches_tracked == 0
    assert norm.weight.grad is None
    assert int(first["norm.num_batches_tracked"]) == 1
    assert difference(second, first).differing == 0


def test_a_table_of_budgets_says_whether_the_numbers_are_plain_pytorch_s() -> None:
    case = Case(name="stack", build=lambda: Loss(Stack(2)), draw=lambda g: (torch.randn(8, 32, generator=g),))
    (row,) = compare(case, [100], steps=1)
    assert row.measured
    assert row.measured.numbers is Answer.YES
    assert report.line(row).endswith("  yes")
    assert report.read_rows(json.dumps([asdict(row)])) == [row]
