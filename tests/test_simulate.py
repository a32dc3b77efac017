"""The memory model, with numbers worked out by hand."""

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
