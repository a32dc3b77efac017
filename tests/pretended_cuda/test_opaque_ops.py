"""FlexAttention, which PyTorch differentiates on CUDA alone, is an op like any other in a plan."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.pretended_cuda.install import ROOT, Environment

ENVIRONMENT = Environment(ROOT / ".venv-pretended-2.11.0")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not ENVIRONMENT.built, reason=f"there is no {ENVIRONMENT.folder.name}: `make test-long`"),
]

PROGRAM = """
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
import fxremat

class Flex(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        for _ in range(2):
            q, k, v = self.qkv(x).view(2, 128, 3, 2, 8).permute(2, 0, 3, 1, 4)
            x = flex_attention(q, k, v).transpose(1, 2).reshape(2, 128, 16)
        return x.square().mean()

model, x = Flex().cuda(), torch.randn(2, 128, 16, device="cuda")
step = fxremat.capture(model, (x,), costs="H100", search=fxremat.Search(seconds=0))
plan = step.plan("min")
targets = [str(node.target) for node in plan.forward_graph.graph.nodes]
print(targets.count("flex_attention"), plan.predicted_peak < plan.keep_all_peak)
print(plan.check().peak == plan.predicted_peak)
"""


def test_a_model_with_flex_attention_is_planned(tmp_path: Path) -> None:
    variables = ENVIRONMENT.variables() | {"FXREMAT_CACHE": str(tmp_path)}
    done = subprocess.run(
        [ENVIRONMENT.python, "-c", PROGRAM], cwd=ROOT, env=variables, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["2", "True", "True"]
