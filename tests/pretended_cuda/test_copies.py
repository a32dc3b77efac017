"""Copies between the device and pinned memory are started with few Python calls, which is where their host time goes.

There are hundreds of them in a step that offloads, and they are started while the device waits for its next kernel.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.pretended_cuda.install import ROOT, Environment

ENVIRONMENT = Environment(ROOT / ".venv-pretended-2.11.0")
MOST = 60  # Python calls: 53 in torch 2.11, and three times as many with `torch.cuda.stream(...)` for `with stream`

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not ENVIRONMENT.built, reason=f"there is no {ENVIRONMENT.folder.name}: `make test-long`"),
]

PROGRAM = """
import sys
import torch
from fxremat.host.pinned import PinnedTier

tier = PinnedTier()
tensor = torch.empty(1024, device="cuda")
host = tier.host_like(tensor)

def out_and_back():
    tier.store(tensor, host)
    tier.release(host)
    tier.prefetch(host, tensor.device)
    tier.wait(host)

calls = 0

def count(frame, event, argument):
    global calls
    calls += event == "call"

out_and_back()  # makes the streams
sys.setprofile(count)
out_and_back()
sys.setprofile(None)
print(calls)
"""


def test_a_tensor_goes_out_and_comes_back_with_few_calls(tmp_path: Path) -> None:
    """Counts calls, since times mean nothing on the pretended device."""
    variables = ENVIRONMENT.variables() | {"FXREMAT_CACHE": str(tmp_path)}
    done = subprocess.run(
        [ENVIRONMENT.python, "-c", PROGRAM], cwd=ROOT, env=variables, capture_output=True, text=True, check=True
    )
    assert 0 < int(done.stdout) <= MOST
