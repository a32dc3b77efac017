"""Steps under autocast that a CPU captures for an H100 have the ops and bytes of those that a CUDA build captures."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.pretended_cuda.install import ROOT, Environment

RELEASES = ("2.11.0", "2.14.1")
MODELS = ("norms", "attention by hand", "losses", "upsampling", "reductions", "gpt")

pytestmark = pytest.mark.long

PROGRAM = """
import collections, json, logging, sys
import torch
import torch.nn.functional as F
from torch import nn
import fxremat
from benchmarks.models import on_gpus

logging.disable(logging.CRITICAL)

class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 64), nn.Conv1d(64, 64, 1), nn.Linear(64, 64)
        self.layer, self.group = nn.LayerNorm(64), nn.GroupNorm(4, 64)
    def forward(self, x):
        y = self.layer(self.first(x))
        y = self.group(self.second(y.transpose(1, 2))).transpose(1, 2)
        return self.last(y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1)).sum()

class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))
    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(1, 2) / 8
        return (F.dropout(torch.softmax(scores, -1), 0.1) @ self.v(x)).float().square().mean()

class Losses(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 64)
    def forward(self, x):
        y = self.head(x)
        target = torch.zeros(y.shape[0] * y.shape[1], dtype=torch.long, device=y.device)
        entropy = F.cross_entropy(y.flatten(0, 1), target)
        smooth = F.cross_entropy(self.head(x).flatten(0, 1), target, label_smoothing=0.1)
        distances = F.mse_loss(self.head(x), x) + F.smooth_l1_loss(self.head(x), x)
        return entropy + smooth + distances + torch.logsumexp(y, -1).mean()

class Upsampling(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)
    def forward(self, x):
        y = F.interpolate(self.first(x[:, None]), scale_factor=2, mode="bilinear")
        return self.last(F.interpolate(F.softplus(y), scale_factor=2)).mean()

class Reductions(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
    def forward(self, x):
        y = self.linear(x)
        y = y.exp().log1p() + y.cumsum(1) + y.sum(1, keepdim=True) + y.norm(dim=-1, keepdim=True)
        return F.cosine_similarity(self.linear(y), x, dim=-1).mean() + torch.cat([y, x], 1).mean()

own = {"norms": Norms, "attention by hand": ByHand, "losses": Losses}
own |= {"upsampling": Upsampling, "reductions": Reductions}

class Under(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.model(x)

def made(name):
    if name in own:
        return Under(own[name]()), (torch.randn(2, 32, 64),)
    case = on_gpus.get(name, "small")
    return case.model(), case.batch()

def ops(model, batch, **costs):
    plan = fxremat.plan(model, batch, mem="100%", search=fxremat.Search(seconds=0, progress=False), **costs)
    step = plan.captured
    return collections.Counter((op.target, step.values[value].bytes) for op in step.ops for value in op.writes)

found = {}
for name in sys.argv[1:]:
    model, batch = made(name)
    here = ops(model, batch, costs="H100")
    there = ops(model.cuda(), tuple(t.cuda() for t in batch))
    found[name] = [[*(here - there)], [*(there - here)], sum(there.values())]
print(json.dumps(found))
"""


@cache
def _found(release: str, folder: Path) -> dict[str, Any]:
    environment = Environment(ROOT / f".venv-pretended-{release}")
    if not environment.built:
        pytest.skip(f"there is no {environment.folder.name}: `make pretend-cuda VERSION={release}`")
    variables = environment.variables() | {"FXREMAT_CACHE": str(folder)}
    command = [environment.python, "-W", "ignore", "-c", PROGRAM, *MODELS]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where all programs keep their costs."""
    return tmp_path_factory.mktemp("casts")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("release", RELEASES)
def test_a_step_under_autocast_has_the_ops_and_the_bytes_of_cuda(release: str, name: str, folder: Path) -> None:
    only_here, only_there, count = _found(release, folder)[name]
    assert count > 10
    assert (only_here, only_there) == ([], [])
