"""Seconds of ops out of a trace of torch.profiler, or of a function of the user's."""

from __future__ import annotations

import gzip
import json
import re
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


def on_gpu(events: list[dict[str, Any]], linked_by: str) -> list[dict[str, Any]]:
    """What torch.profiler records of these ops on a GPU: each op without ops inside of it launches two kernels.

    Args:
        linked_by: how a kernel names the op: "id" by its "External id"; "launch" by the launch, which has the id;
            "time": the launch has no id, and lies inside of the op.
    """
    ops = [event for event in events if event.get("cat") == "cpu_op"]
    found: list[dict[str, Any]] = [event for event in events if event.get("cat") != "kernel"]
    ends = max(op["ts"] + op["dur"] for op in ops)
    found.append({"ph": "X", "cat": "gpu_user_annotation", "name": "step", "ts": ends, "dur": 1e9, "args": {}})
    for op in ops:
        if not _calls_none(op, events):
            continue
        for _ in range(2):
            args: dict[str, Any] = {"cbid": 211, "correlation": len(found)}
            launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": args}
            launch |= {"pid": op["pid"], "tid": op["tid"], "ts": op["ts"] + op["dur"] / 2, "dur": op["dur"] / 4}
            of_kernel: dict[str, Any] = {"device": 0, "stream": 7, "correlation": len(found)}
            kernel = {"ph": "X", "cat": "kernel", "name": "k", "args": of_kernel}
            kernel |= {"pid": 0, "tid": 7, "ts": ends + len(found), "dur": kernel_of(op)}
            if linked_by != "time":
                (of_kernel if linked_by == "id" else args)["External id"] = op["args"]["External id"]
            found += [launch, kernel]
    return found


def kernel_of(op: dict[str, Any]) -> float:
    """Microseconds of each kernel of an op, which tell ops apart."""
    return 1.0 + op["args"]["External id"] % 97


@pytest.mark.parametrize("linked_by", ["id", "launch", "time"])
def test_a_trace_of_steps_on_a_gpu_gives_the_seconds_of_kernels(tmp_path: Path, linked_by: str) -> None:
    net = model()
    net(x()).square().mean().backward()
    with torch.profiler.profile(record_shapes=True) as profiled:
        for _ in range(2):
            net(x()).square().mean().backward()
    file = tmp_path / "step.json"
    profiled.export_chrome_trace(str(file))
    events = on_gpu(json.loads(file.read_text())["traceEvents"], linked_by)
    file.write_text(json.dumps({"traceEvents": events}))
    plan = captured(fxremat.Trace(file, device="H100")).plan("100%")
    matched = re.search(r"times of (\d+) of (\d+) ops, (\d+)% of all, are from step.json$", plan.assumed)
    assert matched
    assert int(matched[1]) >= 0.8 * int(matched[2])
    assert 50 < int(matched[3]) <= 100
    ops = [event for event in events if event.get("cat") == "cpu_op" and event["name"] == "aten::gelu"]
    assert len(ops) == 2
    (op,) = [op.index for op in plan.graph.ops if op.target == "aten.gelu.default"]
    assert plan.costs.seconds[op] == pytest.approx(sum(map(kernel_of, ops)) * 1e-6)  # 2 kernels, mean of 2 steps
    # an op that calls others has the kernels of all of them
    pairs = zip(plan.graph.ops, plan.captured.nodes, strict=True)
    (product,) = [one.index for one, node in pairs if _is_first_addmm(node)]
    outer = [e for e in events if e.get("name") == "aten::addmm" and e["args"]["Input Dims"][1] == [16, 32]]
    ops = [event for event in events if event.get("cat") == "cpu_op"]
    inner = [e for op in outer for e in ops if _is_inside(e, op) and _calls_none(e, events)]
    assert len(inner) > 2
    assert plan.costs.seconds[product] == pytest.approx(sum(map(kernel_of, inner)) * 1e-6)


def _is_inside(event: dict[str, Any], outer: dict[str, Any]) -> bool:
    return bool(
        event["tid"] == outer["tid"]
        and outer["ts"] <= event["ts"]
        and event["ts"] + event["dur"] <= outer["ts"] + outer["dur"]
    )


def _calls_none(event: dict[str, Any], events: list[dict[str, Any]]) -> bool:
    ops = [other for other in events if other.get("cat") == "cpu_op" and other is not event]
    return not any(_is_inside(other, event) for other in ops)


def test_ops_that_a_model_runs_in_place_are_matched(tmp_path: Path) -> None:
    file = trace(tmp_path, event("aten::tanh_", 0, 1000, 1, [[16, 32]]), event("aten::add", 5, 7, 2, [[3], [3]]))
    plan = captured(fxremat.Trace(file)).plan("100%")
    (op,) = [op.index for op in plan.graph.ops if op.target == "aten.tanh.default"]
    assert plan.costs.seconds[op] == pytest.approx(1e-3)
    assert plan.assumed.startswith("times of 1 of ")


def test_kernels_that_no_op_launched_count_for_none(tmp_path: Path) -> None:
    stray = event("stray", 100, 5000, 0, cat="kernel")
    del stray["args"]["External id"]
    without_id = event("aten::tanh", 0, 10, 1, [[16, 32]])
    del without_id["args"]["External id"]
    launched = event("tanh", 200, 30, 0, cat="kernel")
    launched["args"] = {"correlation": 9}
    ended = event("aten::empty", 1, 1, 2, [[]])  # inside of the tanh, and over when that launches
    launch = event("cudaLaunchKernel", 3, 1, 0, cat="cuda_runtime")
    launch["args"] = {"correlation": 9}
    file = trace(tmp_path, without_id, ended, launch, stray, launched)
    (seconds,) = fxremat.Trace(file).seconds["aten::tanh", ((16, 32),)]
    assert seconds == pytest.approx(30e-6)
    assert fxremat.Trace(file).seconds["aten::empty", ((),)] == [0.0]


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
