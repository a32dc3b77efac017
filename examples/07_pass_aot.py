"""Plan a joint graph that AOTAutograd exported, in its own partition function.

    python examples/07_pass_aot.py

`aot_export_joint_with_descriptors` captures forward and backward of a model as one graph, and
`aot_compile_joint_with_descriptors` has a partition function cut it into two. Here that is fxremat's, which keeps and
recomputes what a budget allows. The gradients are those of the plain model, bit for bit.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import (
    aot_compile_joint_with_descriptors,
    aot_export_joint_with_descriptors,
)

from fxremat.passes import as_emitted, partitioner

ROWS, WIDTH, DEPTH = 512, 64, 8


class Deep(nn.Module):
    """Residual blocks with LayerNorm and dropout, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU()),
                *(nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)),
            )
            for _ in range(DEPTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def gradients(model: nn.Module) -> list[Tensor]:
    """Return the gradients that the parameters have."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def main() -> None:
    """Train one step plainly and one within 40 %, and compare."""
    torch.manual_seed(0)
    model, x = Deep(), torch.randn(ROWS, WIDTH)

    torch.manual_seed(1)
    model(x).backward()
    expected = gradients(model)
    model.zero_grad()

    within = partitioner("40%")
    with contextlib.ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, model, (x,))
        step = aot_compile_joint_with_descriptors(
            joint, partition_fn=within, fw_compiler=as_emitted, bw_compiler=as_emitted
        )
    torch.manual_seed(1)
    step(*model.parameters(), x).backward()

    print(within.plan)
    print(within.plan.check() if within.plan else "")
    same = all(map(torch.equal, gradients(model), expected))
    print("the gradients are identical" if same else "the gradients differ")


if __name__ == "__main__":
    main()
