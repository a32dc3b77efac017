"""The memory model, with numbers worked out by hand."""

from dataclasses import replace

import pytest

from fxremat.chains.chain import Chain
from fxremat.chains.platform import Platform
from fxremat.chains.schedule import Schedule
from fxremat.chains.simulate import simulate
from fxremat.errors import InvalidSchedule

# Sizes are powers of two, so that each sum says what is in it.
BLOCKS = [
    {"forward_time": 1, "backward_time": 10, "output_bytes": 1, "saved_bytes": 3, "grad_bytes": 8,
     "forward_scratch": 16, "backward_scratch": 32},
    {"forward_time": 2, "backward_time": 20, "output_bytes": 64, "saved_bytes": 192, "grad_bytes": 256,
     "forward_scratch": 512, "backward_scratch": 1024, "save_scratch": 2048,
     "options": [{"saved_bytes": 128, "backward_time": 40, "backward_scratch": 4096, "save_scratch": 8192}]},
]  # fmt: skip
CHAIN = Chain.from_json({"input_bytes": 16384, "input_grad_bytes": 32768, "blocks": BLOCKS})
A0, D2 = 16384, 256


@pytest.mark.parametrize(
    ("text", "memory", "time"),
    [
        ("Fall1 Fall2 B2 B1",
         [A0 + D2 + 3 + 16, A0 + D2 + 3 + 192 + 2048, A0 + D2 + 3 + 192 + 8 + 1024,
          A0 + 8 + 3 + 32768 + 32], 33),
        ("Fck1 Fall2 B2 Fall1 B1",
         [A0 + D2 + 1 + 16, A0 + D2 + 1 + 192 + 2048, A0 + D2 + 1 + 192 + 8 + 1024, A0 + 8 + 3 + 16,
          A0 + 8 + 3 + 32768 + 32], 34),
        ("Fck1 Fck2 Drop(a2) Fall2[1] B2 Fall1 B1",
         [A0 + D2 + 1 + 16, A0 + D2 + 1 + 64 + 512, A0 + D2 + 1 + 64, A0 + D2 + 1 + 128 + 8192,
          A0 + D2 + 1 + 128 + 8 + 4096, A0 + 8 + 3 + 16, A0 + 8 + 3 + 32768 + 32], 56),
        ("Fck1 Fall2 Drop(a1) Fall1 B2 B1",  # a saved block loses its input, and finds it again in A1
         [A0 + D2 + 1 + 16, A0 + D2 + 1 + 192 + 2048, A0 + D2 + 1 + 192, A0 + D2 + 192 + 3 + 16,
          A0 + D2 + 192 + 3 + 8 + 1024, A0 + 8 + 3 + 32768 + 32], 34),
        ("Fall1 Fnone2 Drop(a2) Fall2 B2 B1",  # Fnone2 discards a1, not A1
         [A0 + D2 + 3 + 16, A0 + D2 + 3 + 64 + 512, A0 + D2 + 3 + 64, A0 + D2 + 3 + 192 + 2048,
          A0 + D2 + 3 + 192 + 8 + 1024, A0 + 8 + 3 + 32768 + 32], 35),
        ("Fck1 Fck2 Drop(a2) Drop(a1) Fall1 Fall2 B2 B1",  # the second drop begins without what the first has freed
         [A0 + D2 + 1 + 16, A0 + D2 + 1 + 64 + 512, A0 + D2 + 1 + 64, A0 + D2 + 1, A0 + D2 + 3 + 16,
          A0 + D2 + 3 + 192 + 2048, A0 + D2 + 3 + 192 + 8 + 1024, A0 + 8 + 3 + 32768 + 32], 36),
    ],
)  # fmt: skip
def test_by_hand(text, memory, time):
    timeline = simulate(CHAIN, Schedule.parse(text))
    assert list(timeline.memory) == memory
    assert timeline.peak == max(memory)
    assert timeline.time == time
    assert timeline.starts[0] == 0
    assert str(timeline).count("\n") == len(memory)


def test_held_bytes_and_weight_gradients_belong_to_a_phase():
    one = {"forward_time": 1, "backward_time": 1, "output_bytes": 0, "saved_bytes": 0}
    blocks = [
        one | {"held_bytes": 1, "weight_grad_bytes": 2},
        one | {"held_bytes": 4, "weight_grad_bytes": 8},
    ]
    timeline = simulate(
        Chain.from_json({"input_bytes": 0, "blocks": blocks}), Schedule.parse("Fall1 Fall2 B2 B1")
    )
    assert timeline.memory == (4, 4, 4, 8 + 1)
    assert timeline.peak == 8 + 2  # the end of the step


def test_the_first_op_that_does_not_fit_is_named():
    schedule = Schedule.parse("Fall1 Fall2 B2 B1")
    needs = simulate(CHAIN, schedule).memory
    for number, need in enumerate(needs):
        if need > max(needs[:number], default=0):
            message = rf"op {number + 1}, {schedule.ops[number]}: it needs {need} bytes, 1 more than there are"
            with pytest.raises(InvalidSchedule, match=message):
                simulate(CHAIN, schedule, Platform(memory=need - 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Fall2 B2", "op 1, Fall2: its input is not stored: neither a1 nor A1"),
        ("Fnone1 Fall2 B2 Fall1 B1", "op 4, Fall1: its input is not stored: a0 is gone"),
        ("Fall1 B1", "op 2, B1: the gradient of a1 is not there; the next backward is B2"),
        ("Fall1 Fck2 B2", "op 3, B2: A2 is not stored"),
        ("Fck1 Fall2 Drop(a1) B2", "op 4, B2: its input is not stored: neither a1 nor A1"),
        ("Fall1 Fall2 Drop(a1)", "op 3, Drop(a1): a1 is not stored"),
        ("Fall1 Fall2 B2", "the schedule ends before B1"),
        ("", "the schedule ends before B2"),
        ("Fall3", "op 1, Fall3: there is no block 3; the chain has blocks 1 to 2"),
        ("Fall1 Fall2[2]", "op 2, Fall2[2]: block 2 has options 0 to 1"),
        ("Fall1 Off(A1) Fall2 B2 B1", "op 2, Off(A1): the platform has no to_host bandwidth"),
        ("Fall1 Fall2 B2 B1 B1", "op 5, B1: the gradient of a1 is not there; the step is over"),
    ],
)
def test_what_is_missing_is_named(text, message):
    with pytest.raises(InvalidSchedule) as error:
        simulate(CHAIN, Schedule.parse(text))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


STEPS = [
    {"forward_time": f, "backward_time": b, "output_bytes": 4, "saved_bytes": 9} for f, b in ((1, 2), (3, 5), (7, 11))
]
THREE = Chain.from_json({"input_bytes": 4, "blocks": STEPS})
HOST = Platform(to_host=4.0, from_host=8.0)


def test_a_timeline_as_text():
    timeline = simulate(THREE, Schedule.parse("Fck1 Fck2 Drop(a1) Fall3 B3 Fall1 Drop(A1) Fck1 Fall2 B2 Fall1 B1"))
    assert (timeline.idle, timeline.hidden, timeline.sent, timeline.returned) == (0, 1, 0, 0)
    assert timeline.ends == (1, 4, 4, 11, 22, 23, 23, 24, 27, 32, 33, 35)
    assert timeline.starts == (0, 1, 4, 4, 11, 22, 23, 23, 24, 27, 32, 33)
    assert [line.rstrip() for line in str(timeline).splitlines()] == [
        "peak 25 B, time 35 s, 12 operations",
        "           0 s  Fck1            12 B  ###################",
        "           1 s  Fck2            16 B  ##########################",
        "           4 s  Drop(a1)        16 B  ##########################",
        "           4 s  Fall3           21 B  ##################################",
        "          11 s  B3              25 B  ########################################",
        "          22 s  Fall1           17 B  ###########################",
        "          23 s  Drop(A1)        17 B  ###########################",
        "          23 s  Fck1            12 B  ###################",
        "          24 s  Fall2           21 B  ##################################",
        "          27 s  B2              25 B  ########################################",
        "          32 s  Fall1           17 B  ###########################",
        "          33 s  B1              21 B  ##################################",
    ]


def test_copies_as_text():
    """The copies out run beneath forwards; B2 waits one second for A1."""
    schedule = Schedule.parse("Fall1 Off(A1) Fall2 Fall3 B3 Pre(A1) B2 B1")
    timeline = simulate(THREE, schedule, Platform(memory=30, to_host=9.0, from_host=9.0))
    assert (timeline.sent, timeline.returned, timeline.idle, timeline.hidden) == (9, 9, 1, 0.5)
    assert str(timeline).splitlines()[0] == (
        "peak 30 B, time 30 s, 8 operations; 9 B to the host and 9 B back, 50% of it hidden, 1 s idle"
    )
    one_way = simulate(THREE, Schedule.parse("Fck1 Fck2 Off(a1) Fall3 B3 Fall1 Fall2 B2 B1"), HOST)
    assert (one_way.sent, one_way.returned, one_way.hidden) == (4, 0, 1)
    assert "; 4 B to the host and 0 B back, 100% of it hidden, 0 s idle" in str(one_way)


def test_a_step_without_bytes_has_no_bars():
    nothing = {"forward_time": 1, "backward_time": 1, "output_bytes": 0, "saved_bytes": 0, "grad_bytes": 0}
    timeline = simulate(Chain.from_json({"input_bytes": 0, "blocks": [nothing]}), Schedule.parse("Fall1 B1"))
    assert timeline.peak == 0
    assert str(timeline).splitlines()[1].rstrip() == "           0 s  Fall1         0 B"


def test_the_two_directions_have_their_speeds_and_may_share_a_bus():
    """A1 leaves in 9 / 4 s; it is back in 9 / 8 s, once B3 has ended."""
    schedule = Schedule.parse("Fall1 Off(A1) Fall2 Fall3 B3 Pre(A1) B2 B1")
    timeline = simulate(THREE, schedule, HOST)
    assert (timeline.starts[1], timeline.ends[1]) == (1, 1 + 9 / 4)
    assert timeline.ends[5] - timeline.starts[5] == 9 / 8
    both = Schedule.parse("Fall1 Off(A1) Fall2 Off(A2) Pre(A1) Fall3 B3 Pre(A2) B2 B1")
    apart, shared = (
        simulate(THREE, both, Platform(to_host=1.0, from_host=1.0, duplex=duplex)) for duplex in ("full", "half")
    )
    assert (apart.starts[3], apart.ends[3], apart.starts[4]) == (10, 19, 10)
    assert shared.starts[4] == shared.ends[3] == 19


@pytest.mark.parametrize(
    ("platform", "speed"),
    [
        (None, "to_host"),
        (Platform(from_host=1.0), "to_host"),
        (Platform(to_host=0, from_host=1.0), "to_host"),
        (Platform(to_host=1.0), "from_host"),
    ],
)
def test_copies_need_both_speeds(platform, speed):
    with pytest.raises(InvalidSchedule, match=rf"op [26], \w+\(A1\): the platform has no {speed} bandwidth"):
        simulate(THREE, Schedule.parse("Fall1 Off(A1) Fall2 Fall3 B3 Pre(A1) B2 B1"), platform)


def test_the_op_that_leaves_too_much_is_named():
    """The gradients of the weights are there when a backward has ended, and at the end of the step."""
    one = {"forward_time": 1, "backward_time": 1, "output_bytes": 0, "saved_bytes": 0}
    blocks = [one | {"weight_grad_bytes": 2}, one | {"weight_grad_bytes": 8}]
    chain, schedule = Chain.from_json({"input_bytes": 1, "blocks": blocks}), Schedule.parse("Fall1 Fall2 B2 B1")
    for memory, message in (
        (8, "op 3, B2: it needs 9 bytes, 1 more than there are"),
        (9, "op 4, B1: it needs 10 bytes, 1 more than there are"),
        (10, "op 4, B1: it needs 11 bytes, 1 more than there are"),
    ):
        with pytest.raises(InvalidSchedule, match=message):
            simulate(chain, schedule, Platform(memory=memory))
    assert simulate(chain, schedule, Platform(memory=11)).peak == 11


def test_a_step_that_cannot_begin_names_its_first_op():
    with pytest.raises(InvalidSchedule, match=f"op 1, Fall1: it needs {A0 + D2} bytes"):
        simulate(CHAIN, Schedule.parse("Fall1 Fall2 B2 B1"), Platform(memory=A0))
    schedule, machine = Schedule.parse("Fall1 Off(A1) Fall2 Fall3 B3 Pre(A1) B2 B1"), replace(HOST, memory=7)
    with pytest.raises(InvalidSchedule, match=r"op 1, Fall1: deadlock: even when .*, it needs 8 bytes, 1 more"):
        simulate(THREE, schedule, machine)


def test_the_op_that_a_copy_comes_back_for_is_named():
    """A1, 20 bytes, is there again before B2, beside 5 of A2 and the 8 of a weight's gradient."""
    one = {"forward_time": 1, "backward_time": 1, "output_bytes": 0, "saved_bytes": 0}
    blocks = [one | {"saved_bytes": 20}, one | {"saved_bytes": 5}, one | {"weight_grad_bytes": 8}]
    chain = Chain.from_json({"input_bytes": 0, "blocks": blocks})
    schedule = Schedule.parse("Fall1 Off(A1) Fall2 Fall3 B3 Pre(A1) B2 B1")
    assert simulate(chain, schedule, replace(HOST, memory=33)).peak == 33
    with pytest.raises(InvalidSchedule, match=r"op 7, B2: deadlock: .* it needs 33 bytes, 1 more than there are"):
        simulate(chain, schedule, replace(HOST, memory=32))
