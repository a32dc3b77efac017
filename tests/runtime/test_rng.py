"""A random op that runs again draws the same numbers and leaves the generator as it found it."""

from __future__ import annotations

import pytest
import torch

from fxremat.runtime.rng import draw_again, draw_saving

pytestmark = pytest.mark.usefixtures("torch_ready")
DROPOUT = torch.ops.aten.native_dropout.default


def test_the_first_draw_is_the_plain_one_and_later_ones_repeat_it() -> None:
    x = torch.ones(64)
    torch.manual_seed(1)
    plain = DROPOUT(x, 0.5, True)
    torch.manual_seed(1)
    state, first = draw_saving(DROPOUT, x, 0.5, True)
    torch.rand(10)
    now = torch.get_rng_state()
    again = draw_again(state, DROPOUT, x, 0.5, True)
    assert torch.equal(first[0], plain[0])
    assert torch.equal(again[0], first[0])
    assert torch.equal(again[1], first[1])
    assert torch.equal(torch.get_rng_state(), now)


def test_the_generator_is_put_back_after_a_failure() -> None:
    state = torch.get_rng_state()
    torch.rand(3)
    now = torch.get_rng_state()

    def fails() -> None:
        torch.rand(1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        draw_again(state, fails)
    assert torch.equal(torch.get_rng_state(), now)
