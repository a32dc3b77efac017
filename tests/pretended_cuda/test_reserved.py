"""The bytes that torch's caching allocator really reserves, beside those of its model and those that plans predict."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.pretended_cuda.install import ROOT, Environment
from tests.pretended_cuda.reserved import Row

ENVIRONMENT = Environment(ROOT / ".venv-pretended-2.11.0")
MISSING = f"there is no {ENVIRONMENT.folder.name}: `make test-long` and `make pretend-cuda` make it"
EXPANDABLE, IN_BLOCKS = "expandable_segments:True", "expandable_segments:False"
RESNET = "ResNet-50, 96 x 224 px"
REAL = ("GPT-2 medium, 8 x 1024", "Llama 1B, 4 x 2048", "SDXL's UNet, 2 x 128 px", RESNET)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not ENVIRONMENT.built, reason=MISSING),
]


def run(setting: str, *arguments: str) -> str:
    """Run the program on the pretended device, with a setting of the allocator; returns its output."""
    ENVIRONMENT.build()
    command = [str(ENVIRONMENT.python), "-m", "tests.pretended_cuda", "exec", "-m", "tests.pretended_cuda.reserved"]
    variables = {**os.environ, "PRETENDED_CUDA_DRY": "1", "PYTORCH_ALLOC_CONF": setting}
    done = subprocess.run([*command, *arguments], cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def rows(folder: Path, setting: str, model: str, *mems: str) -> list[Row]:
    out = folder / "reserved.json"
    run(setting, "--models", model, "--mems", *mems, "--out", str(out))
    return [Row(**row) for row in json.loads(out.read_text())["rows"]]


@pytest.mark.parametrize("setting", [EXPANDABLE, IN_BLOCKS])
def test_the_model_of_the_allocator_reserves_as_the_real_one(setting: str) -> None:
    found = re.search(r"(\d+) of 100 are equal", run(setting, "--random", "100"))
    assert found
    # segments of fixed sizes lie where the driver puts them, which decides between free blocks of one size
    assert int(found[1]) >= (100 if setting == EXPANDABLE else 97)


@pytest.mark.parametrize("setting", [EXPANDABLE, IN_BLOCKS])
@pytest.mark.parametrize("model", REAL)
def test_plans_predict_what_is_reserved(model: str, setting: str, tmp_path: Path) -> None:
    for row in rows(tmp_path, setting, model, "60%"):
        assert row.expandable is (setting == EXPANDABLE)
        assert abs(row.deviation) <= 0.02, str(row)
        assert not row.over, str(row)


# with the variable set, ResNet-50's least plan deviates by more; 0.00 % where fxremat switches segments on itself
OFF = pytest.mark.xfail(reason="deviates by more than 2 % or 10 %: to be looked into", strict=False)


@pytest.mark.parametrize("setting", [pytest.param(EXPANDABLE, marks=OFF), IN_BLOCKS])
def test_the_least_budget_of_reserved_bytes_holds(setting: str, tmp_path: Path) -> None:
    for row in rows(tmp_path, setting, RESNET, "min"):
        assert -0.02 <= row.deviation <= 0.1, str(row)
        assert not row.over, str(row)
