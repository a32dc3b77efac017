"""The check of emitted graphs finds what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

import fxremat
from fxremat import plan_check
from fxremat.errors import FxrematError
from fxremat.plans import Plan
from tests.compilers.models import EVERY_DAY, case, joint_graph
from tests.exported import PLANS

pytestmark = pytest.mark.usefixtures("torch_ready")

QUICK = fxremat.Search(seconds=0.2, progress=False)


@pytest.mark.parametrize("name", EVERY_DAY)
def test_the_peak_counted_on_emitted_graphs_is_the_predicted_one(name: str) -> None:
    one = case(name)
    step = fxremat.capture(one.model, (one.x,), search=QUICK)
    for mem in ("100%", "80%", "min"):
        plan = step.plan(mem)
        found = plan.check()
        assert found.peak == plan.predicted_peak == found.predicted_peak
        assert found.outputs == len(plan.captured.forward_outputs) + len(plan.captured.backward_outputs)


@pytest.mark.parametrize("kind", PLANS)
def test_every_kind_of_plan_is_checked(kind: str) -> None:
    found = PLANS[kind]().check()
    assert (found.peak is None) == (kind in ("offload", "weights", "slices"))


def spoiled(change: Callable[[fx.Graph], None]) -> Plan:
    one = case("gpt")
    plan = fxremat.capture(joint_graph(one), num_fwd_outputs=1, search=QUICK).plan("min")
    change(plan.backward_graph.graph)
    return plan


def test_a_graph_that_holds_a_value_too_long_is_found() -> None:
    def hold(graph: fx.Graph) -> None:
        large = max((n for n in graph.nodes if n.name.endswith("__r1")), key=lambda n: _bytes(n))
        with graph.inserting_before(graph.output_node()):
            graph.call_function(torch.ops.aten.relu.default, (large,)).meta = dict(large.meta)

    with pytest.raises(FxrematError, match=r"need \d+ bytes by a count of their storages; \d+ were predicted"):
        spoiled(hold).check()


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.nbytes if isinstance(value, torch.Tensor) else 0


def test_a_result_of_another_shape_is_found() -> None:
    def transpose(graph: fx.Graph) -> None:
        results = graph.output_node().args[0]
        place = next(k for k, r in enumerate(results) if isinstance(r, fx.Node) and _is_oblong(r))  # type: ignore[arg-type]
        with graph.inserting_before(graph.output_node()):
            turned = graph.call_function(torch.ops.aten.t.default, (results[place],))  # type: ignore[index]
            turned.meta = dict(results[place].meta)  # type: ignore[index]
        graph.output_node().args = ((*results[:place], turned, *results[place + 1 :]),)  # type: ignore[index]

    with pytest.raises(FxrematError, match=r"is torch.float32 \[.*\] on cpu as emitted, and torch.float32"):
        spoiled(transpose).check()


def _is_oblong(node: fx.Node) -> bool:
    return node.meta["val"].dim() == 2 and node.meta["val"].shape[0] != node.meta["val"].shape[1]


def test_ops_whose_bits_differ_from_run_to_run_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = fxremat.capture(joint_graph(case("gpt")), num_fwd_outputs=1, search=QUICK).plan("min")
    assert plan.check(runs=3).differing == ()
    calls = [0]
    original: Any = plan_check.call_of

    def noisy(node: fx.Node) -> Any:
        call = original(node)
        if node.target is not torch.ops.aten.relu.default:
            return call

        def once_more() -> torch.Tensor:
            calls[0] += 1
            return call() + calls[0]  # type: ignore[no-any-return]

        return replace(call, target=lambda *_, **__: once_more())

    monkeypatch.setattr(plan_check, "call_of", noisy)
    found = plan.check(runs=2)
    assert found.differing
    assert all(name.startswith("relu") for name in found.differing)
    assert "bits differ from run to run in relu" in str(found)
