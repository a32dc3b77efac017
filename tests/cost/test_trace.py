"""Seconds of ops out of a trace of torch.profiler, or of a function of the user's."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomRuntimeEstimator

import fxremat
from fxremat.errors import FxrematError

pytestmark = pytest.mark.usefixtures("torch_ready")

QUICK = fxremat.Search(seconds=0.0, progress=False)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 32), nn.Tanh())


def x() -> torch.Tensor:
    return torch.ones(16, 32)


def captured(costs: Any) -> Any:
    return fxremat.capture(model(), (x(),), costs=costs, search=QUICK)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_trace_of_a_step_gives_its_seconds(tmp_path: Path, steps: int) -> None:
    net = model()
    net(x()).square().mean().backward()
    with torch.profiler.profile(record_shapes=True) as profiled:
        for _ in range(steps):
            net(x()).square().mean().backward()
    file = tmp_path / "step.json"
    profiled.export_chrome_trace(str(file))
    plan = captured(fxremat.Trace(file)).plan("100%")
    assert "from step.json" in plan.assumed
    events = json.loads(file.read_text())["traceEvents"]
    products = [event for event in events if event.get("name") == "aten::addmm"]
    took = [event["dur"] * 1e-6 for event in products if event["args"]["Input Dims"][1] == [16, 32]]
    assert len(took) == steps
    (op,) = [op.index for op, node in zip(plan.graph.ops, plan.captured.nodes, strict=True) if _is_first_addmm(node)]
    assert plan.costs.seconds[op] == pytest.approx(sum(took) / steps)
    known, total = map(int, plan.assumed.removeprefix("times of ").split(" ops")[0].split(" of "))
    assert known >= 0.8 * total
    assert str(plan).count("step.json") == 1


def _is_first_addmm(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.addmm.default and node.meta["val"].shape == (16, 64)


def event(name: str, start: int, took: int, number: int, dims: Any = None, **more: Any) -> dict[str, Any]:
    shapes = {} if dims is None else {"Input Dims": dims, "Input type": ["float"] * len(dims)}
    args = {"External id": number} | shapes
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": took, "tid": 1, "args": args} | more


def trace(tmp_path: Path, *events: dict[str, Any]) -> Path:
    file = tmp_path / "gpu.json.gz"
    with gzip.open(file, "wt") as opened:
        json.dump({"traceEvents": events}, opened)
    return file


def test_on_a_gpu_an_op_takes_what_its_kernels_take(tmp_path: Path) -> None:
    sin, cos = [[16, 32]], [[16, 32]]
    file = trace(
        tmp_path,
        event("aten::sin", 0, 10, 1, sin),
        event("aten::copy_", 2, 3, 2),  # inside of the sin
        event("aten::cos", 20, 10, 3, cos),
        event("copy", 100, 70, 2, cat="gpu_memcpy"),
        event("sin", 200, 500, 1, cat="kernel"),
        event("cos", 900, 40, 3, cat="kernel"),
    )
    graph = fx.Graph()
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(16, 32)
    given = graph.placeholder("x")
    nodes = [graph.call_function(op, (given,)) for op in (torch.ops.aten.sin.default, torch.ops.aten.cos.default)]
    unknown = graph.call_function(torch.ops.aten.tan.default, (given,))
    for node in (given, *nodes, unknown):
        node.meta["val"] = fake
    seconds = fxremat.Trace(file, device="H100").of([*nodes, unknown])
    assert seconds[:2] == [pytest.approx(570e-6), pytest.approx(40e-6)]
    assert seconds[2] is None


def test_what_a_trace_lacks_is_estimated_on_its_scale(tmp_path: Path) -> None:
    file = trace(tmp_path, event("aten::addmm", 0, 1000, 1, [[64], [16, 32], [32, 64]]))
    known, rough = captured(fxremat.Trace(file)).plan("100%"), captured("estimate").plan("100%")
    (op,) = [op.index for op, node in zip(known.graph.ops, known.captured.nodes, strict=True) if _is_first_addmm(node)]
    assert known.costs.seconds[op] == pytest.approx(1e-3)
    rate = 1e-3 / rough.costs.seconds[op]
    for mine, its in zip(known.costs.seconds, rough.costs.seconds, strict=True):
        assert mine == pytest.approx(its * rate)


def test_a_function_tells_seconds() -> None:
    plan = captured(lambda node: 2.0 if node.target is torch.ops.aten.tanh.default else 1.0).plan("100%")
    assert plan.predicted_time == len(plan.graph.ops) + 1
    assert "are given" in plan.assumed

    class OfTorch(CustomRuntimeEstimator):
        def __call__(self, node: fx.Node) -> float:
            return 3.0  # milliseconds

        def uuid(self) -> str:
            return "3"

    assert captured(OfTorch()).plan("100%").predicted_time == pytest.approx(3e-3 * len(plan.graph.ops))
    with pytest.raises(FxrematError, match=r"says that .* takes None; it returns seconds"):
        captured(lambda node: None).plan("100%")


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("no")
    (tmp_path / "b.json").write_text('{"traceEvents": [{"ph": "X", "name": "aten::mm", "args": {}}]}')
    with pytest.raises(FxrematError, match=r"a.json is no trace"):
        fxremat.Trace(tmp_path / "a.json")
    with pytest.raises(FxrematError, match=r"b.json has no ops with shapes: record it with .*record_shapes=True"):
        fxremat.Trace(tmp_path / "b.json")
    with pytest.raises(FxrematError, match=r"costs is 3; it is .* a fxremat.Trace, or a function"):
        captured(3)
