"""On the pretended device, ops that wait for a collective on NCCL's stream come after it, and others race with it."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.pretended_cuda.install import ROOT, Environment

ENVIRONMENTS = [Environment(ROOT / f".venv-pretended-{release}") for release in ("2.11.0", "2.14.1")]


@pytest.mark.long
@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda environment: environment.folder.name)
def test_who_does_not_wait_for_a_collective_races_with_it(environment: Environment) -> None:
    if not environment.built:
        pytest.skip(f"there is no {environment.folder.name}")
    environment.build()
    command = [str(environment.python), "-m", "tests.pretended_cuda", "exec", "-m", "tests.pretended_cuda.collectives"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["waits"] == []
    assert found["does not"]
