"""Copies to and from the host: by hand, against a slow simulator, and what must hold on random schedules."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fxremat.chains.chain import Chain
from fxremat.chains.platform import Platform
from fxremat.chains.resolved import read
from fxremat.chains.schedule import Drop, Offload, Prefetch, Schedule, Value
from fxremat.chains.simulate import simulate
from fxremat.errors import FxrematError, InvalidSchedule
from fxremat.solvers import input_drop, keep_all, periodic
from tests.dags import few
from tests.draws import everyday
from tests.solvers.chains import chains
from tests.ticks import Stuck, tick

BLOCK = {"forward_time": 2, "backward_time": 4, "output_bytes": 8, "saved_bytes": 16, "grad_bytes": 0}
CHAIN = Chain.from_json({"input_bytes": 0, "blocks": [BLOCK] * 4})
LINK = Platform(to_host=8, from_host=4)


@st.composite
def schedules(draw, largest=5):
    """A chain and a valid schedule for it, with copies and drops at random places."""
    chain = draw(chains(largest))
    plain = [*keep_all.schedules(chain), *periodic.schedules(chain)]
    table = input_drop.build(chain, 64, 64)
    plain.append(table.schedule(draw(st.integers(table.least, 64)) if table.least < 64 else table.least))
    ops = list(draw(st.sampled_from(plain)).ops)
    for _ in range(draw(st.integers(1, 6))):
        number = draw(st.integers(0, len(chain)))
        value = Value(draw(st.sampled_from("aA")), number) if number else Value("a", 0)
        first, last = sorted([draw(st.integers(0, len(ops))), draw(st.integers(0, len(ops)))])
        more = draw(st.sampled_from([Prefetch, Prefetch, Prefetch, Drop, None]))
        trial = [*ops[:first], Offload(value), *ops[first:last]]
        trial += [] if more is None else [more(value)]
        trial += ops[last:]
        try:
            read(chain, Schedule(tuple(trial)))
        except InvalidSchedule:
            continue
        ops = trial
    return chain, Schedule(tuple(ops))


def machine(memory, half=False, to_host=1.0, from_host=1.0):
    return Platform(memory=memory, to_host=to_host, from_host=from_host, duplex="half" if half else "full")


@pytest.mark.parametrize(
    ("text", "memory", "time", "whole", "fluid"),
    [
        # Off(A1) 2..4 beneath Fall2, which reads it; back 12..16 (4 bytes a second), once B3 has ended
        ("Fall1 Off(A1) Fall2 Fall3 Fall4 B4 B3 Pre(A1) B2 B1", 48, 16 + 4 + 8, 48, 48),
        # placed at the turn, it starts when A3 and A4 no longer need its room: no sooner than that
        ("Fall1 Off(A1) Fall2 Fall3 Fall4 Pre(A1) B4 B3 B2 B1", 48, 8 + 4 + 8 + 4, 48, 48),
        ("Fall1 Off(A1) Fall2 Fall3 Fall4 Pre(A1) B4 B3 B2 B1", None, 24, 64, 64),
    ],
)
def test_by_hand(text, memory, time, whole, fluid):
    for accounting, peak in (("whole", whole), ("fluid", fluid)):
        timeline = simulate(CHAIN, Schedule.parse(text), replace(LINK, memory=memory), accounting=accounting)
        assert (timeline.time, timeline.peak) == (time, peak), accounting


@few(everyday(300))
@given(schedules(), st.integers(0, 8), st.booleans(), st.booleans())
def test_like_the_slow_simulator(drawn, more, fluid, half):
    chain, schedule = drawn
    assume(chain.least_time < 500)
    limit = max(1, max(read(chain, schedule).base) + more)
    timeline = simulate(chain, schedule, machine(limit, half), accounting="fluid" if fluid else "whole")
    assert (timeline.time, timeline.peak) == tick(chain, schedule, limit, fluid=fluid, half=half)
    assert timeline.peak <= limit


@few(everyday(100))
@given(schedules(), st.booleans(), st.booleans())
def test_a_deadlock_is_one_for_both(drawn, fluid, half):
    chain, schedule = drawn
    assume(chain.least_time < 500)
    limit = max(read(chain, schedule).base) - 1
    assume(limit > 0)
    with pytest.raises(InvalidSchedule, match=r"needs \d+ bytes, 1 more than there are"):
        simulate(chain, schedule, machine(limit, half), accounting="fluid" if fluid else "whole")
    with pytest.raises(Stuck):
        tick(chain, schedule, limit, fluid=fluid, half=half)


@few(everyday(200))
@given(schedules(), st.integers(0, 6), st.integers(1, 9), st.sampled_from([0.5, 1.0, 3.0]), st.booleans())
def test_more_memory_or_bandwidth_never_costs_time(drawn, more, step, speed, fluid):
    chain, schedule = drawn
    accounting = "fluid" if fluid else "whole"
    limit = max(1, max(read(chain, schedule).base) + more)
    base = simulate(chain, schedule, machine(limit, False, speed, speed), accounting=accounting)
    for better in (
        machine(limit + step, False, speed, speed),
        machine(limit, False, speed * step, speed),
        machine(limit, False, speed, speed * step),
        machine(None, False, speed, speed),
    ):
        assert simulate(chain, schedule, better, accounting=accounting).time <= base.time + 1e-6


@few(everyday(200))
@given(schedules(), st.integers(0, 6), st.sampled_from([0.5, 1.0, 3.0]))
def test_fluid_is_no_slower_than_whole(drawn, more, speed):
    chain, schedule = drawn
    link = machine(max(1, max(read(chain, schedule).base) + more), False, speed, speed / 2)
    whole, fluid = (simulate(chain, schedule, link, accounting=kind) for kind in ("whole", "fluid"))
    assert fluid.time <= whole.time + 1e-6
    assert max(whole.peak, fluid.peak, *whole.memory, *fluid.memory) <= link.memory
    assert whole.idle <= whole.time
    assert 0 <= whole.hidden <= 1
    assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Off(a1)", "op 1, Off(a1): a1 is not stored"),
        ("Fall1 Pre(A1)", "op 2, Pre(A1): A1 is not on the host"),
        ("Fall1 Off(A1) Off(A1)", "op 3, Off(A1): A1 is on its way to the host already"),
        ("Fall1 Off(A1) Pre(A1) Pre(A1)", "op 4, Pre(A1): A1 is on the device already"),
        ("Fall1 Off(A1) Pre(A1) Drop(A1)", "op 4, Drop(A1): A1 has been fetched from the host and not been"),
        ("Fall1 Off(A1) Drop(A1) Fall2", "op 4, Fall2: its input is not stored"),
        ("Fall1 Fall2 Off(A1) Fall3 Fall4 B4 B3 B2 Pre(A1)", "the schedule ends before B1"),
        (
            "Fall1 Fall2 Fall3 Off(A2) Fall4 B4 B3 B2 B1 Pre(A2)",
            "op 10, Pre(A2): nothing reads A2 before the step ends",
        ),
        ("Fall1 Off(A1) Fall2 Fall3 Fall4 B4 B3 B2 B1", "op 5, Fall4: deadlock: even when no copy"),
        ("Fall1 Fall2 Fall3 Fall4 B4 B3 B2 B1", "op 4, Fall4: it needs 64 bytes, 16 more than there are"),
    ],
)
def test_what_is_missing_is_named(text, message):
    with pytest.raises(InvalidSchedule) as error:
        simulate(CHAIN, Schedule.parse(text), replace(LINK, memory=48))
    assert str(error.value).startswith(message)


def test_copies_that_are_fetched_in_the_wrong_order_may_deadlock():
    text = "Fall1 Off(A1) Fall2 Off(A2) Fall3 Fall4 {} B4 B3 B2 B1"
    machine = replace(LINK, memory=40)
    assert simulate(CHAIN, Schedule.parse(text.format("Pre(A2) Pre(A1)")), machine).peak <= 40
    with pytest.raises(InvalidSchedule, match=r"op 10, B3: deadlock: .* needs 48 bytes, 8 more"):
        simulate(CHAIN, Schedule.parse(text.format("Pre(A1) Pre(A2)")), machine)


@pytest.mark.parametrize(("lacking", "place"), [("to_host", "op 2, Off(A1)"), ("from_host", "op 6, Pre(A1)")])
def test_copies_need_a_link(lacking, place):
    schedule = Schedule.parse("Fall1 Off(A1) Fall2 Fall3 Fall4 Pre(A1) B4 B3 B2 B1")
    with pytest.raises(InvalidSchedule) as error:
        simulate(CHAIN, schedule, replace(LINK, **{lacking: None}))
    assert str(error.value) == f"{place}: the platform has no {lacking} bandwidth"


def test_an_accounting_is_whole_or_fluid():
    with pytest.raises(FxrematError, match='"whole" or "fluid"'):
        simulate(CHAIN, Schedule.parse(""), accounting="half")


def test_partial_release_starts_an_op_earlier():
    # A1 leaves from 2 to 10; Fall4 needs 48 bytes beside it, and there are 52
    schedule = Schedule.parse("Fall1 Off(A1) Fall2 Fall3 Fall4 Pre(A1) B4 B3 B2 B1")
    slow = replace(LINK, to_host=2, memory=52)
    whole, fluid = (simulate(CHAIN, schedule, slow, accounting=kind) for kind in ("whole", "fluid"))
    assert (whole.starts[4], fluid.starts[4]) == (10.0, 8.0)


def test_one_bus_takes_one_copy_at_a_time():
    schedule = Schedule.parse("Fall1 Off(A1) Fall2 Fall3 Fall4 Off(A3) Pre(A1) B4 Pre(A3) B3 B2 B1")
    full, half = (
        simulate(CHAIN, schedule, Platform(to_host=1, from_host=2, duplex=duplex))
        for duplex in ("full", "half")
    )
    assert full.starts[5:7] == (18.0, 18.0)  # A1 leaves from 2 to 18
    assert half.starts[5:7] == (18.0, 34.0)
    assert (full.sent, full.returned) == (32, 32)
    assert "32B to the host and 32B back" in str(full).replace(" B", "B").splitlines()[0]
