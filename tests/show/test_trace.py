"""A plan as a trace: valid by the Trace Event Format, lanes that never overlap themselves, the plan's time and peak."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

import fxremat
from fxremat.plans import Plan
from fxremat.settings import Search
from fxremat.show import trace as module
from fxremat.step.program import Role
from tests.exported import PLANS, Deep, planned, rows
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("torch_ready")
ROUNDING = 2e-3  # microseconds: times are whole nanoseconds
NEEDED = {  # by phase ("Trace Event Format", the document of the Catapult project), beside phase and process
    "X": {"name", "ts", "dur", "tid"},
    "C": {"name", "ts", "args"},
    "M": {"name", "args"},
    "i": {"name", "ts", "s"},
}
METADATA = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return PLANS[request.param]()


def checked(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a trace, which is valid by the format."""
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = found["traceEvents"]
    for event in events:
        assert {"pid", *NEEDED[event["ph"]]} <= event.keys()
        assert isinstance(event["name"], str)
        assert event["name"].isprintable()
        assert all(isinstance(event[key], int) for key in ("pid", "tid"))
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
        if event["ph"] == "C":
            assert all(isinstance(size, int) and size >= 0 for size in event["args"].values())
        if event["ph"] == "M":
            assert METADATA[event["name"]] in event["args"]
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
    return events


def lanes(events: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """The starts and ends of the events of each lane, by the lane's name."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[names[event["tid"]]].append((event["ts"], event["ts"] + event["dur"]))
    return {name: sorted(spans) for name, spans in found.items()}


def test_a_trace_is_valid_and_no_lane_overlaps_itself(plan: Plan, tmp_path: Path) -> None:
    plan.save_trace(tmp_path / "plan.json")
    found = json.loads((tmp_path / "plan.json").read_bytes())
    assert found == plan.trace()
    for spans in lanes(checked(found)).values():
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(spans))


def test_the_counters_have_the_peak_of_the_plan(plan: Plan) -> None:
    counters = [event for event in checked(plan.trace()) if event["ph"] == "C"]
    sizes = [sum(event["args"].values()) for event in counters]
    assert max(sizes) == plan.predicted_peak
    assert sizes == [*plan.moments.bytes, plan.memory.end]
    assert len({tuple(event["args"]) for event in counters}) == 1  # each has all kinds: stacked areas
    times = [event["ts"] for event in counters]
    assert times == sorted(times)


@pytest.mark.parametrize("name", ["plain", "keep_all", "outside", "slices"])
def test_the_events_take_the_time_of_the_plan(name: str) -> None:
    plan = PLANS[name]()
    spans = lanes(checked(plan.trace()))
    seconds = sum(end - start for lane in spans.values() for start, end in lane) / 1e6
    count = sum(map(len, spans.values()))
    assert seconds == pytest.approx(plan.predicted_time, abs=count * ROUNDING * 1e-6)
    again = sum(end - start for start, end in spans.get("ops that run again", [])) / 1e6
    assert again == pytest.approx(plan.modules.total.extra, abs=count * ROUNDING * 1e-6)
    assert ("ops that run again" in spans) == bool(plan.modules.total.recomputed)
    assert set(spans) <= {"ops", "ops that run again"}


def test_every_execution_and_every_copy_is_an_event(plan: Plan) -> None:
    events = checked(plan.trace())
    kinds = [event["cat"] for event in events if event["ph"] == "X"]
    for role in (Role.FORWARD, Role.RECOMPUTE, Role.BACKWARD, Role.UPDATE, Role.PREFETCH):
        assert kinds.count(role.value) == sum(step.role is role for step in plan.program.steps)
    copies = plan.chosen.transfers.copies if plan.chosen.transfers else {}
    assert kinds.count("offload") + kinds.count("prefetch") == len(copies)
    out = [event["args"]["bytes"] for event in events if event.get("cat") == "offload"]
    assert sum(out) == (plan.chosen.transfers.bytes if plan.chosen.transfers else 0)


def test_events_say_what_they_are_of() -> None:
    events = checked(PLANS["plain"]().trace())
    linear = next(event for event in events if event["name"] == "addmm_2")
    assert linear["args"]["module"] == "layers.2"
    assert linear["args"]["bytes written"] == 256 * 16 * 4
    assert linear["args"]["source"].endswith("in forward: x = torch.tanh(layer(x))")
    assert linear["args"]["block"] >= 1
    names = [event["name"] for event in checked(PLANS["weights"]().trace())]
    assert {"update of layers.5.weight", "optimizer state of layers.5.weight", "layers.5.weight"} <= {*names}


def test_the_backward_begins_where_the_forward_ends() -> None:
    for name in ("plain", "outside"):
        events = checked(PLANS[name]().trace())
        (split,) = (event for event in events if event["ph"] == "i")
        by_kind = defaultdict(list)
        for event in events:
            if event["ph"] == "X":
                by_kind[event["cat"]].append(event)
        assert max(e["ts"] + e["dur"] for e in by_kind["forward"]) <= split["ts"] + ROUNDING
        assert min(e["ts"] for e in by_kind["backward"]) >= split["ts"]
        assert ("loss" in by_kind) == (name == "outside")


def test_names_of_modules_do_no_harm(tmp_path: Path) -> None:
    hostile = '</script>"\n\x00\udc80 é'

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(hostile, nn.Linear(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            return self.get_submodule(hostile)(x).sum()

    plan = planned(Named(), "100%", rows())
    plan.save_trace(tmp_path / "plan.json")
    events = checked(json.loads((tmp_path / "plan.json").read_bytes()))
    modules = {event["args"].get("module", "") for event in events if event["ph"] == "X"}
    assert "</script>" in "".join(modules)


def _sharded(rank: int, world: int) -> tuple[list[tuple[str, float, float]], dict[str, Any], int]:
    from torch.distributed.fsdp import fully_shard

    model = Deep()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    compiled = fxremat.compile(model, mem="90%", search=Search(seconds=0.0))
    compiled(rows()).backward()
    plan = compiled.plan
    spans = [(one.name, one.begins, one.ends) for one in plan.chosen.communication.collectives]
    return spans, plan.trace(), plan.predicted_peak


@pytest.mark.long
@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_communication_has_a_lane(tmp_path: Path) -> None:
    for collectives, found, peak in run_ranks(_sharded, 2, tmp_path):
        spans = lanes(checked(found))
        assert len(spans[module.LANES[module.LINK]]) == len(collectives) > 0
        ops = {event["name"] for event in found["traceEvents"] if event["ph"] == "X" and event["tid"] <= module.AGAIN}
        assert not ops & {name for name, _, _ in collectives}
        for lane in spans.values():
            assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(lane))
        assert max(sum(e["args"].values()) for e in found["traceEvents"] if e["ph"] == "C") == peak
