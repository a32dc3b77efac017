"""A plan as a memory snapshot: PyTorch's own readers take it, its peak is the plan's, and no two blocks overlap."""

from __future__ import annotations

import copy
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.cuda import _memory_viz as viz

from fxremat.plans import Plan
from fxremat.show.addresses import Addresses
from fxremat.show.labels import printable
from fxremat.show.snapshot import BASE
from fxremat.step.kinds import MemoryKind
from tests.exported import PLANS, Deep, planned, rows

pytestmark = pytest.mark.usefixtures("torch_ready")
# What pytorch.org/memory_viz can read of a pickle (MemoryViz.js beside torch 2.13).
OPCODES = {
    *("PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "MARK", "STOP"),
    *("EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "LIST", "APPEND", "APPENDS"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE"),
}


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return PLANS[request.param]()


def replayed(events: list[dict[str, Any]]) -> tuple[int, dict[int, int]]:
    """The most bytes at a time, and the blocks at the end; no block may overlap another one."""
    alive: dict[int, int] = {}
    most = now = 0
    for event in events:
        start, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            assert size > 0
            assert all(start + size <= other or other + more <= start for other, more in alive.items())
            alive[start] = size
            now += size
        elif event["action"] == "free_completed":
            assert alive.pop(start) == size
            now -= size
        most = max(most, now)
    return most, alive


def test_the_allocations_have_the_peak_of_the_plan(plan: Plan) -> None:
    found = plan.snapshot()
    (events,), (segment,) = found["device_traces"], found["segments"]
    most, alive = replayed(events)
    assert most == plan.predicted_peak == plan.memory.peak
    assert {block["address"]: block["size"] for block in segment["blocks"] if block["frames"]} == alive
    assert sum(alive.values()) == plan.memory.end == segment["allocated_size"]
    assert events[0]["action"] == "segment_alloc"
    assert all(e["addr"] >= BASE and e["addr"] + e["size"] <= BASE + segment["total_size"] for e in events)


def test_memory_goes_before_it_is_taken(plan: Plan) -> None:
    """At each moment the frees come first: a value that is read last by one op makes room for the next op's."""
    events = plan.snapshot()["device_traces"][0]
    assert [e["time_us"] for e in events] == sorted(e["time_us"] for e in events)
    sizes, now = [], 0
    for event, after in zip(events, [*events[1:], {"action": "free_requested"}], strict=True):
        now += event["size"] * {"alloc": 1, "free_completed": -1}.get(event["action"], 0)
        if event["action"] == "alloc" and after["action"] != "alloc":
            sizes.append(now)
    assert set(sizes) <= set(plan.moments.bytes)


def test_pytorch_reads_it(plan: Plan) -> None:
    found = plan.snapshot()
    flames = viz.memory(found, format_flamegraph=lambda lines: lines)
    assert viz.segments(found, format_flamegraph=lambda lines: lines).count("\n") == flames.count("\n")
    for line in flames.splitlines():
        stack, size = line.rsplit(" ", 1)
        assert int(size) > 0
        assert stack.startswith("stream_0;")
    summary = viz.segsum(found)
    assert "segments: 1" in summary
    assert f"total_allocated: {viz.Bytes(plan.memory.end)}" in summary
    assert viz.calc_active(found["segments"][0]) == plan.memory.end
    text = viz.trace(found)
    counts = [sum(e["action"] == action for e in found["device_traces"][0]) for action in ("alloc", "free_completed")]
    assert [text.count("]\n"), text.count("# free completed")] == counts
    for page in (viz.trace_plot(found), viz.trace_plot(found, plot_segments=True), viz.segment_plot(found)):
        assert "snapshot.pickle" in page
    viz.trace_plot(copy.deepcopy(found), filter_freed=True)
    assert viz.compare(found["segments"], found["segments"], format_flamegraph=lambda lines: lines) == ""


def test_a_file_comes_back_as_it_was_written(plan: Plan, tmp_path: Path) -> None:
    plan.save_snapshot(tmp_path / "plan.pickle")
    data = (tmp_path / "plan.pickle").read_bytes()
    assert pickle.loads(data) == plan.snapshot()
    assert {opcode.name for opcode, _, _ in pickletools.genops(data)} <= OPCODES


def test_every_allocation_says_what_it_is_for() -> None:
    plan = PLANS["plain"]()
    events = [event for event in plan.snapshot()["device_traces"][0] if event["action"] == "alloc"]
    kinds = {kind.value for kind in MemoryKind}
    names = [event["frames"][0]["name"] for event in events]
    assert all(event["category"] in kinds and name.startswith(event["category"]) for event, name in zip(events, names))
    assert "results: layers.0, gradient of layers.0.weight" in "\n".join(names)
    again = {node.path or "Deep" for node in plan.modules.walk() if node.own.recomputed}
    assert again == {name.split(": ")[1].split(",")[0] for name in names if name.startswith("recomputed")}
    lines = {(frame["filename"], frame["name"]) for event in events for frame in event["frames"][1:]}
    assert (Deep.forward.__code__.co_filename, "forward") in lines


def test_the_viewers_list_of_categories_has_what_it_asks_for() -> None:
    """MemoryViz.js adds "unknown" to the categories where there are any without, and fails on it (torch 2.13)."""
    events = PLANS["plain"]().snapshot()["device_traces"][0]
    assert "unknown" in {event.get("category") for event in events}


HOSTILE = '</script><script>alert(1)</script>;"\n\x00\u2028\udc80 é'


def test_names_of_modules_do_no_harm(tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(HOSTILE, nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)))

        def forward(self, x: Tensor) -> Tensor:
            return self.get_submodule(HOSTILE)(x).sum()

    plan = planned(Named(), "100%", rows())
    plan.save_snapshot(tmp_path / "plan.pickle")
    found = pickle.loads((tmp_path / "plan.pickle").read_bytes())
    flames = viz.memory(found, format_flamegraph=lambda lines: lines)
    assert all(line.rsplit(" ", 1)[1].isdigit() and line.count(";") <= 4 for line in flames.splitlines())
    assert "alert(1)" in flames
    viz.trace(found)
    viz.segsum(found)
    names = [frame["name"] for event in found["device_traces"][0] for frame in event["frames"]]
    assert all(name.isprintable() for name in names)
    assert "alert(1)" not in viz.trace_plot(found)  # it is inside of a pickle in base 64


def test_printable() -> None:
    assert printable("h.3 é\n\x00\udc80\u2028") == "h.3 é????"


@given(st.lists(st.one_of(st.integers(1, 40), st.tuples(st.just("free"), st.integers(0, 10**6))), max_size=60))
def test_blocks_that_are_there_at_the_same_time_do_not_overlap(asked: list[Any]) -> None:
    space, alive, most = Addresses(), dict[int, int](), 0
    for one in asked:
        if isinstance(one, int):
            start = space.take(one)
            assert start >= 0
            assert start + one <= space.end
            assert all(start + one <= other or other + size <= start for other, size in alive.items())
            alive[start] = one
        elif alive:
            start = sorted(alive)[one[1] % len(alive)]
            space.give_back(start, alive.pop(start))
        most = max(most, sum(alive.values()))
    assert space.end >= most
    for start, size in alive.items():
        space.give_back(start, size)
    whole = space.end
    assert not whole or space.take(whole) == 0  # all of it is one extent again
    assert space.end == whole


def test_the_space_grows_by_no_more_than_it_must() -> None:
    space = Addresses()
    first, second, third = space.take(10), space.take(4), space.take(6)
    assert (first, second, third, space.end) == (0, 10, 14, 20)
    space.give_back(first, 10)
    space.give_back(third, 6)
    assert space.take(5) == 14  # the smaller one of two that hold it
    assert space.take(12) == 19  # neither the 10 bytes nor the last one are enough; that one is at the end
    assert space.end == 31
