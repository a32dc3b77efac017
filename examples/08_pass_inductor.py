"""Let Inductor partition by a budget: `torch.compile` as it is, with fxremat's partition function.

    python examples/08_pass_inductor.py

Inductor fuses and reorders the ops of both graphs afterwards. So the peak of the plan is an estimate of the real one,
and gradients are those of torch.compile up to rounding.
"""

from __future__ import annotations

import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn

from fxremat.passes import InductorPartitioner

ROWS, WIDTH, DEPTH = 512, 64, 4


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the gradients of a step by torch.compile."""
    torch._dynamo.reset()
    model.zero_grad()
    torch.manual_seed(1)
    torch.compile(model)(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def main() -> None:
    """Train one step by torch.compile plainly and one within 60 %, and compare."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))] * DEPTH
    model, x = nn.Sequential(*blocks), torch.randn(ROWS, WIDTH)

    expected = gradients(model, x)
    within = InductorPartitioner("60%")
    with inductor_config.patch(custom_partitioner_fn=within):
        found = gradients(model, x)

    print(within.plans[-1])
    difference = max(float((mine - its).abs().max()) for mine, its in zip(found, expected, strict=True))
    print(f"the gradients differ by {difference:.1e} at most")


if __name__ == "__main__":
    main()
