"""Fit the graph of a full training step, forward, loss and backward in one, into a budget: one graph in, one out.

    python examples/09_full_step.py

This is how graph trainers hold a step. The graph is traced with `make_fx`; the nodes of its backward are marked, since
nothing else tells them from those of the forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fxremat.passes import step_pass

ROWS, WIDTH, DEPTH = 512, 64, 8


def main() -> None:
    """Trace a step, rewrite its graph within 40 %, run both, and compare."""
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))]
    model, x = nn.Sequential(*layers), torch.randn(ROWS, WIDTH)
    names = [name for name, _ in model.named_parameters()]

    def step(parameters: list[Tensor], x: Tensor) -> list[Tensor]:
        leaves = [parameter.detach().requires_grad_() for parameter in parameters]
        loss = torch.func.functional_call(model, dict(zip(names, leaves, strict=True)), (x,)).square().mean()
        return [loss, *torch.autograd.grad(loss, leaves)]

    parameters = list(model.parameters())
    graph = make_fx(step, tracing_mode="fake")(parameters, x)
    outputs: Any = graph.graph.output_node().args[0]
    behind = False
    for node in graph.graph.nodes:
        if behind and node.op == "call_function":
            node.meta["partitioner_tag"] = "is_backward"
        behind |= node is outputs[0]

    within = step_pass("40%")
    planned = within(graph)
    print(within.plan)
    with torch.no_grad():
        expected, found = graph(parameters, x), planned(parameters, x)
    same = all(map(torch.equal, found, expected))
    print("loss and gradients are identical" if same else "loss and gradients differ")


if __name__ == "__main__":
    main()
