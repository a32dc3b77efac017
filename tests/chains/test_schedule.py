"""Schedules as text: `parse` and `str` are inverses, and an unknown token is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.chains.schedule import Backward, Drop, Forward, Keep, Offload, Prefetch, Schedule, Value
from fxremat.errors import InvalidSchedule

numbers = st.integers(1, 999)
values = st.builds(Value, st.just("A"), numbers) | st.builds(Value, st.just("a"), st.integers(0, 999))
ops = st.one_of(
    st.builds(Forward, numbers, st.sampled_from([Keep.NONE, Keep.CHECKPOINT])),
    st.builds(Forward, numbers, st.just(Keep.ALL), st.integers(0, 9)),
    st.builds(Backward, numbers),
    st.builds(Drop, values),
    st.builds(Offload, values),
    st.builds(Prefetch, values),
)


@given(st.lists(ops).map(tuple).map(Schedule))
def test_parse_and_str_are_inverses(schedule):
    assert Schedule.parse(str(schedule)) == schedule


def test_tokens():
    text = "Fck1 Fnone2 Fall3 Fall3[1] B3 Drop(a2) Drop(A2) Off(A1) Pre(A1)"
    assert str(Schedule.parse(text)) == text
    assert Schedule.parse(" Fall3[0]\n") == Schedule((Forward(3, Keep.ALL),))


@pytest.mark.parametrize(
    "token",
    ["Fsome3", "F3", "B", "B0", "B-1", "b3", "Fck", "Fck1[1]", "Fall3[]", "Fall3[-1]",
     "Drop(2)", "Drop(A0)", "Drop(b2)", "Drop(a2", "Off()", "Fall03",
     "Fall٣", "Fall1,"],
)  # fmt: skip
def test_unknown_tokens_are_named(token):
    with pytest.raises(InvalidSchedule) as error:
        Schedule.parse(f"Fck1 {token} B1")
    message = str(error.value)
    assert repr(token) in message
    assert "place 2" in message
    assert "Fnone2" in message
    assert "\n" not in message


def test_only_a_saving_forward_has_an_option():
    with pytest.raises(InvalidSchedule, match="no option"):
        Forward(1, Keep.NONE, 1)
