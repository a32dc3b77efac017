"""Weight offloading on paper: vectors, tables of the paper, an independent checker of what the clock says."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.weight_reference.cycle import Cycle, CycleOp, Gap, one_by_one
from benchmarks.weight_reference.cycle_clock import TimedCycle, run
from benchmarks.weight_reference.selection import select
from benchmarks.weight_reference.step_bound import lower_bound
from benchmarks.weight_reference.weight_plan import plan
from fxremat.errors import BudgetTooSmall, InvalidChain, InvalidSchedule
from tests.draws import everyday

pytestmark = pytest.mark.long

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "weights.json").read_text())
TINY = 1e-6


def cycle_of(inst: dict[str, Any]) -> Cycle:
    if "L" in inst:
        count = inst["L"]
        inst = (
            inst
            | {name: [inst[name]] * count for name in ("uF", "uB", "w")}
            | {"a": [inst["a"]] * (count + 1)}
        )
    return Cycle.of_layers(inst["uF"], inst["uB"], inst["w"], inst["a"], inst["M"], inst["beta"])


def kind(*names: str) -> list[Any]:
    found = [vector for vector in VECTORS if vector["kind"] in names]
    return [pytest.param(vector, id=f"{vector['kind']}{number}") for number, vector in enumerate(found)]


def as_printed(cycle: Cycle, chosen: tuple[Gap, ...]) -> list[list[int]]:
    """(k, 1): away between F_k and B_k; (k, 0): between B_k and F_k."""
    return sorted([gap.unit + 1, int(not cycle.ops[gap.start].writes)] for gap in chosen)


@pytest.mark.parametrize("vector", kind("exact", "selection", "certified"))
def test_selections_are_those_of_the_vectors(vector: dict[str, Any]) -> None:
    cycle = cycle_of(vector["inst"])
    assert as_printed(cycle, select(cycle, cycle.memory)) == vector["greedy_selection"]


@pytest.mark.parametrize("vector", kind("gpt2_like"))
def test_uniform_layers_are_selected_in_the_numbers_of_the_vectors(vector: dict[str, Any]) -> None:
    cycle = cycle_of(vector["inst"])
    assert len(select(cycle, cycle.memory)) == vector["n_selected"]


@pytest.mark.parametrize("vector", kind("exact"))
def test_bound_optimum_and_greedy_are_in_order(vector: dict[str, Any]) -> None:
    cycle = cycle_of(vector["inst"])
    bound, optimum, found = lower_bound(cycle), vector["T_opt_1periodic_integer"], plan(cycle).time
    assert bound == pytest.approx(vector["milp_lower_bound"], rel=1e-5)
    assert bound <= optimum + TINY
    assert optimum <= found + TINY
    assert found <= vector["greedy_T"] + TINY
    assert one_by_one(cycle) == vector["l2l"]
    assert (cycle.most_memory, cycle.least_memory) == (vector["memory_to_keep_all"], vector["memory_min"])


@pytest.mark.parametrize("vector", kind("selection", "3partition_gadget"))
def test_greedy_is_no_slower_than_the_vectors_and_no_faster_than_the_bound(vector: dict[str, Any]) -> None:
    cycle = cycle_of(vector["inst"])
    bound = lower_bound(cycle)
    assert bound == pytest.approx(vector.get("lower", vector.get("milp_lower_bound")), rel=1e-5)
    assert bound - TINY <= plan(cycle).time <= vector["greedy"] + TINY


@pytest.mark.parametrize("vector", kind("certified"))
def test_certified_instances_are_solved(vector: dict[str, Any]) -> None:
    cycle = cycle_of(vector["inst"])
    assert plan(cycle).time == pytest.approx(vector["T_opt"])
    assert lower_bound(cycle) == pytest.approx(vector["T_opt"], rel=1e-6)
    assert one_by_one(cycle) == vector["l2l"]


@pytest.mark.parametrize("vector", kind("gpt2_like"))
def test_with_a_margin_no_op_of_uniform_layers_waits(vector: dict[str, Any]) -> None:
    cycle = cycle_of(vector["inst"])
    assert plan(cycle).time == pytest.approx(cycle.seconds)
    without = plan(cycle, margins=(0.0,)).time
    assert cycle.seconds < without <= vector["greedy"] + TINY
    assert one_by_one(cycle) == pytest.approx(vector["l2l"], abs=0.1)


def test_the_paper_s_layers_cost_l2l_what_its_table_says() -> None:
    """GPT-2: 432 MiB a layer, twice a step, at 12000 MiB/s."""
    (table,) = (vector for vector in VECTORS if vector["kind"] == "table1")
    rows = {(row["net"], row["depth"], row["batch"]): row for row in table["rows"]}

    def exposed(depth: int) -> float:
        blocks = depth - 2
        cycle = Cycle.of_layers(
            [0.0] * blocks, [0.0] * blocks, [432.0] * blocks, [0.0] * (blocks + 1), 1e9, 12.0
        )
        return one_by_one(cycle)

    for batch in (64, 32, 16):
        for deep, shallow in ((74, 56), (56, 38)):
            ours = exposed(deep) - exposed(shallow)
            theirs = [rows["GPT-2", depth, batch] for depth in (deep, shallow)]
            printed = (theirs[0]["l2l"] - theirs[0]["sum_u"]) - (theirs[1]["l2l"] - theirs[1]["sum_u"])
            assert ours == pytest.approx(printed, abs=3)


def test_a_hundred_and_twenty_eight_layers_take_seconds() -> None:
    count = 128
    cycle = Cycle.of_layers(
        [38.1] * count,
        [114.4] * count,
        [432.0 + k % 7 for k in range(count)],
        [20.0] * (count + 1),
        12000.0,
        12.0,
    )
    start = time.process_time()
    found = plan(cycle)
    assert time.process_time() - start < 60  # measured: benchmarks.weights
    assert found.time >= cycle.seconds - TINY


sizes = st.integers(0, 6)


@st.composite
def cycles(draw: st.DrawFn) -> Cycle:
    count = draw(st.integers(1, 6))

    def numbers(elements: st.SearchStrategy[int], length: int = count) -> list[int]:
        return draw(st.lists(elements, min_size=length, max_size=length))

    forward, backward = numbers(st.integers(0, 6)), numbers(st.integers(1, 9))
    weights, activations = numbers(st.integers(1, 6)), numbers(sizes, count + 1)
    roomy = Cycle.of_layers(forward, backward, weights, activations, 1e9, draw(st.sampled_from([0.5, 1, 4])))
    low, high = roomy.least_memory, roomy.most_memory
    memory = low + (high - low) * draw(st.integers(0, 10)) / 10
    return _with(_recomputed(draw, roomy), memory)


def _with(cycle: Cycle, memory: float) -> Cycle:
    return Cycle(
        ops=cycle.ops,
        units=cycle.units,
        memory=max(memory, cycle.least_memory),
        to_host=cycle.to_host,
        from_host=cycle.from_host,
    )


def _recomputed(draw: st.DrawFn, cycle: Cycle) -> Cycle:
    """Some forwards run again right before their backward, or a few ops before."""
    ops = list(cycle.ops)
    for unit in draw(st.sets(st.integers(0, len(cycle.units) - 1), max_size=2)):
        place = next(k for k, op in enumerate(ops) if op.unit == unit and op.writes)
        ops.insert(
            max(0, place - draw(st.integers(0, 1))),
            CycleOp(name=f"F{unit + 1} again", seconds=1, unit=unit, beside=0, writes=False),
        )
    return Cycle(
        ops=tuple(ops), units=cycle.units, memory=1e9, to_host=cycle.to_host, from_host=cycle.from_host
    )


@settings(max_examples=everyday(150))
@given(cycles(), st.booleans())
def test_plans_keep_the_memory_and_the_order_and_are_between_the_bounds(cycle: Cycle, discount: bool) -> None:
    found = plan(cycle, discount=discount)
    assert list(faults(cycle, found.timed)) == []
    assert found.time >= lower_bound(cycle) - TINY
    if cycle.memory >= cycle.most_memory:
        assert found.time == pytest.approx(cycle.seconds)


def faults(cycle: Cycle, timed: TimedCycle) -> Iterator[str]:
    """Yield what is wrong with a log of events, by rules written apart from the clock."""
    count = len(cycle.ops)
    ops = sorted((e for e in timed.events if e.kind == "op"), key=lambda e: e.place)
    for before, after in itertools.pairwise(ops):
        if after.start < before.end - TINY:
            yield f"op {after.place} starts before op {before.place} ends"
    for kinds in (("back",), ("out", "ahead")):
        lane = sorted((e for e in timed.events if e.kind in kinds), key=lambda e: e.start)
        for before, after in itertools.pairwise(lane):
            if after.start < before.end - TINY:
                yield f"two copies at a time: {before}, {after}"
    moments = sorted({e.start for e in timed.events} | {e.end for e in timed.events})
    stays = _stays(cycle, timed)
    for start, end in itertools.pairwise(moments):
        middle = (start + end) / 2
        here = [unit for unit, first, last in stays if first < middle < last]
        if len(here) != len(set(here)):
            yield f"a unit twice on the device at {middle}"
        running = [e for e in ops if e.start < middle < e.end]
        beside = sum(cycle.ops[e.place % count].beside for e in running)
        if sum(cycle.units[unit] for unit in here) + beside > cycle.memory + TINY:
            yield f"out of memory at {middle}"
        for op in running:
            if op.unit not in here:
                yield f"op {op.place} runs without its unit"
            if any(e.kind == "back" and e.unit == op.unit and e.start < middle < e.end for e in timed.events):
                yield f"op {op.place} runs while its unit still comes"
            copied = any(
                e.kind in ("out", "ahead") and e.unit == op.unit and e.start < middle < e.end
                for e in timed.events
            )
            if cycle.ops[op.place % count].writes and copied:
                yield f"op {op.place} writes a unit that is being copied"
    yield from _lost(cycle, timed)


def _stays(cycle: Cycle, timed: TimedCycle) -> list[tuple[int, float, float]]:
    """(unit, from, to) of every stay on the device."""
    found = []
    for unit in range(len(cycle.units)):
        marks = sorted(
            (e.start, 1) if e.kind == "back" else (e.end, -1)
            for e in timed.events
            if e.unit == unit and e.kind in ("back", "out", "drop")
        )
        begun: float | None = None if marks and marks[0][1] == 1 else -1.0
        for moment, sign in marks:
            if sign == 1:
                begun = moment
            elif begun is not None:
                found.append((unit, begun, moment))
                begun = None
        if begun is not None:
            found.append((unit, begun, float("inf")))
    return found


def _lost(cycle: Cycle, timed: TimedCycle) -> Iterator[str]:
    """Copies back and drops of a unit whose latest version the host does not have."""
    count = len(cycle.ops)
    for unit in range(len(cycle.units)):
        written = [
            e.end
            for e in timed.events
            if e.kind == "op" and e.unit == unit and cycle.ops[e.place % count].writes
        ]
        sent = [(e.start, e.end) for e in timed.events if e.unit == unit and e.kind in ("out", "ahead")]
        for event in timed.events:
            if event.unit == unit and event.kind in ("back", "drop"):
                latest = max((end for end in written if end <= event.start + TINY), default=None)
                if latest is not None and not any(
                    start >= latest - TINY and end <= event.start + TINY for start, end in sent
                ):
                    yield f"{event}: the host has an old version"


def test_one_copy_out_serves_two_gaps() -> None:
    vector = next(v for v in VECTORS if v["kind"] == "selection" and len(v["greedy_selection"]) == 2)
    cycle = cycle_of(vector["inst"])
    chosen = select(cycle, cycle.memory)
    assert {gap.unit for gap in chosen} == {1}
    events = run(cycle, chosen, cycles=6).events
    late = [e for e in events if e.place >= 2 * len(cycle.ops) and e.place < 5 * len(cycle.ops)]
    copies = [e.kind for e in late if e.kind in ("out", "ahead", "back")]
    assert copies.count("back") == 2 * copies.count("out") == 6


def test_gaps_that_make_too_little_room_are_refused() -> None:
    cycle = cycle_of(next(v for v in VECTORS if v["kind"] == "selection")["inst"])
    with pytest.raises(InvalidSchedule, match="never starts: too little leaves"):
        run(cycle, ())


def test_an_op_that_does_not_fit_alone_says_how_much_would_do() -> None:
    cycle = Cycle.of_layers([1], [1], [4], [1, 2], 10, 1)
    with pytest.raises(BudgetTooSmall) as small:
        select(cycle, 9)
    assert small.value.minimum == 11
    with pytest.raises(BudgetTooSmall):
        lower_bound(cycle)


@pytest.mark.parametrize(
    ("ops", "units", "speed", "message"),
    [
        (
            (CycleOp(name="B1", seconds=-1, unit=0, beside=0, writes=True),),
            (1.0,),
            1.0,
            "neither is negative",
        ),
        (
            (CycleOp(name="F1", seconds=1, unit=0, beside=0, writes=False),),
            (1.0,),
            1.0,
            "0 ops that write it",
        ),
        ((CycleOp(name="B1", seconds=1, unit=0, beside=0, writes=True),), (1.0,), 0.0, "both are above 0"),
    ],
)
def test_cycles_that_cannot_be_are_refused(
    ops: tuple[CycleOp, ...], units: tuple[float, ...], speed: float, message: str
) -> None:
    with pytest.raises(InvalidChain, match=message):
        Cycle(ops=ops, units=units, memory=1.0, to_host=speed, from_host=1.0)
