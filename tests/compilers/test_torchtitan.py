"""The pass in torchtitan: its Llama 3 debug model, as its graph trainer traces forward, loss and backward."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxremat
from benchmarks import meter
from fxremat.passes import StepPass, as_emitted, step_pass
from fxremat.torch_private import copied

pytest.importorskip("torchtitan")

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("torch_ready"),
]

BATCH, LENGTH, WORDS = 4, 256, 2048
QUICK = fxremat.Search(seconds=1, progress=False)


@dataclass(frozen=True)
class Traced:
    """A model, and its step (tokens, labels, number of tokens) -> [loss, *gradients] as torchtitan traces it."""

    model: nn.Module
    result: Any  # torchtitan's TracedResult
    batch: tuple[Tensor, ...]

    @property
    def graph(self) -> fx.GraphModule:
        found: fx.GraphModule = self.result.gm
        return found

    @property
    def inputs(self) -> list[Tensor]:
        """The inputs of the graph: parameters, buffers and batch."""
        return [*self.model.parameters(), *self.model.buffers(), *self.batch]

    def run(self, graph: fx.GraphModule) -> list[Tensor]:
        """Run a graph as torchtitan runs the traced one."""
        from torchtitan.experiments.graph_trainer.make_fx_tracer import run_traced

        run: Callable[..., list[Tensor]] = run_traced(
            replace(self.result, gm=graph), module=self.model, _validate_runtime=True
        )
        return run(*self.batch)

    def peak(self, graph: fx.GraphModule) -> int:
        """Measured peak bytes of a graph."""
        call, inputs = as_emitted(fx.GraphModule(graph, copied(graph.graph))), self.inputs
        with torch.no_grad():
            call([*inputs])
            return meter.peak_bytes(lambda: call([*inputs]) and None)


def traced() -> Traced:
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.experiments.graph_trainer.common_utils import (
        annotate_module_fqns,
        build_decoder_config_for_backend,
        compute_annotated_loss,
    )
    from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer
    from torchtitan.models.llama3 import Llama3Model, llama3_configs

    config = build_decoder_config_for_backend(llama3_configs["debugmodel"], "sdpa")
    for layer in config.layers:
        layer.attention.rope.max_seq_len = LENGTH
    model = Llama3Model(config)
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    annotate_module_fqns(model)

    def loss_of(logits: Tensor, labels: Tensor, count: Tensor) -> Tensor:
        loss: Tensor = cross_entropy_loss(logits, labels)
        return loss / count

    def step(tokens: Tensor, labels: Tensor, count: Tensor) -> list[Tensor]:
        loss = compute_annotated_loss(loss_of, model(tokens), labels, {"count": count})
        return [loss, *torch.autograd.grad(loss, [*model.parameters()])]

    tokens, labels = (torch.randint(0, WORDS, (BATCH, LENGTH)) for _ in range(2))
    batch = tokens, labels, torch.tensor(float(BATCH * LENGTH))
    return Traced(model, minimal_fx_tracer(step, module=model)(*batch), batch)


def test_results_are_the_same_and_the_peak_is_as_predicted() -> None:
    step = traced()
    expected = step.run(step.graph)
    for mem in ("100%", "60%", "40%", "min"):
        within = step_pass(mem, costs="measure", search=QUICK)
        try:
            graph = within(step.graph, step.inputs)
        except fxremat.BudgetTooSmall:
            assert mem in ("60%", "40%")
            continue
        assert all(map(torch.equal, step.run(graph), expected)), mem
        plan = within.plan
        assert plan is not None
        assert plan.predicted_peak <= plan.budget
        assert plan.check().peak == plan.predicted_peak
        assert plan.predicted_peak * 0.98 <= step.peak(graph) <= plan.predicted_peak, mem
        _check_notes(step.graph, graph, {op.name for op in plan.graph.ops})


def _check_notes(given: fx.GraphModule, graph: fx.GraphModule, ops: set[str]) -> None:
    """Check that ops keep the sizes, module names and marks of the backward that torchtitan's later passes read."""
    noted = {node.name: node for node in given.graph.nodes}
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        assert "val" in node.meta, node.name
        name = re.sub(r"__r\d+$", "", node.name)
        if name in ops:  # views of the backward have other names than in the given graph
            of_backward = name != node.name or noted[name].meta.get("autograd_backward", False)
            assert node.meta.get("autograd_backward", False) == of_backward, node.name
            assert noted[name].meta.get("custom", {}).items() <= node.meta["custom"].items(), node.name


def test_it_is_a_memory_policy_among_the_passes_of_the_package() -> None:
    from torchtitan.experiments.graph_trainer.cpu_offload import apply_cpu_offload_pass
    from torchtitan.experiments.graph_trainer.memory_policy import tag_with_memory_policy_pass
    from torchtitan.experiments.graph_trainer.registry import MEMORY_POLICY_REGISTRY, register_memory_policy
    from torchtitan.experiments.graph_trainer.remove_noop_passes import (
        canonicalize_graph_pass,
        eliminate_dead_code_pass,
    )
    from torchtitan.experiments.graph_trainer.selective_activation_remat import (
        selective_activation_remat_pass,
    )

    step = traced()
    expected = step.run(step.graph)
    within: StepPass = register_memory_policy("fxremat")(step_pass("50%", search=QUICK))
    config = SimpleNamespace(compile=SimpleNamespace(memory_policy="fxremat"))
    graph = step.graph
    try:
        for each in (
            eliminate_dead_code_pass,
            canonicalize_graph_pass,
            functools.partial(tag_with_memory_policy_pass, config=config),
            apply_cpu_offload_pass,
            selective_activation_remat_pass,
        ):
            graph = each(graph, step.result.example_inputs)
    finally:
        del MEMORY_POLICY_REGISTRY["fxremat"]
    assert all(map(torch.equal, step.run(graph), expected))
    plan = within.plan
    assert plan is not None
    assert plan.predicted_peak * 0.98 <= step.peak(graph) <= plan.predicted_peak <= plan.budget
    assert within.__name__ == "step_pass"  # apply_graph_passes logs and filters passes by this name
