"""Arguments of a wrong kind end in one line that names the argument and what it may be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from fxremat.compilers.text import from_text
from fxremat.passes import tag

CHAIN = fxremat.Chain(
    blocks=(fxremat.Block(forward_time=1.0, backward_time=2.0, output_bytes=4, saved_bytes=9),) * 2, input_bytes=4
)
MODEL, INPUTS = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (torch.randn(4, 8),)


def _fits(model: Any = MODEL, **given: Any) -> Any:
    return fxremat.fits(model, **{"on": "H200", "inputs": INPUTS if model is MODEL else None, **given})


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: fxremat.solve(3, 45), "the chain is 3"),
        (lambda: fxremat.solve(CHAIN, 45, platform=3), "platform is 3"),
        (lambda: fxremat.capture(MODEL, INPUTS, num_fwd_outputs=1), "num_fwd_outputs is for a joint graph"),
        (lambda: fxremat.capture(MODEL, INPUTS).plan(plan="x"), "a captured step makes plans"),
        (lambda: fxremat.capture(MODEL, INPUTS).plan("100%").check(0), "runs is 0"),
        (lambda: fxremat.capture(MODEL, INPUTS).plan("100%").check("x"), "runs is 'x'"),
        (lambda: fxremat.compile(3, mem="50%"), "model is an int"),
        (lambda: fxremat.Plan.load(3), "the path of a plan is 3"),
        (lambda: tag(MODEL, 3), "tag marks a torch.fx.GraphModule by a plan"),
        (lambda: from_text(3), "the text is 3"),
        (lambda: _fits(3), "model is 3"),
        (lambda: _fits(on=3), "on is 3"),
        (lambda: _fits(lenght=3), "unknown setting 'lenght', did you mean 'length'?"),
        (lambda: _fits(image=224), "image is 224"),
        (lambda: _fits(batch=2), "batch is 2"),
        (lambda: _fits(config={"layers": 3}), "config changes a configuration"),
        (lambda: _fits(config="layers=3"), "config is 'layers=3'; it maps names"),
        (lambda: fxremat.compare(MODEL, INPUTS, 5, mem="50%"), "devices is 5; it is a list"),
        (lambda: fxremat.Schedule.parse(5), "the schedule is 5; it is a text"),
        (lambda: fxremat.Profile.from_json(5), ".*it is not JSON"),
        (lambda: fxremat.compile(MODEL, mem="50%", solvr="x"), "unknown option 'solvr', did you mean 'solver'?"),
    ],
)
def test_it_is_told_in_one_line(call: Callable[[], Any], told: str) -> None:
    with pytest.raises(fxremat.FxrematError, match="^" + told.replace("?", r"\?")) as raised:
        call()
    assert "\n" not in str(raised.value)
