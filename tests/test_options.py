"""What a user can set is checked at once, with one line that says what would do."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import torch
from torch import nn

from fxremat.cost.estimate import Device
from fxremat.errors import FxrematError, InvalidBudget
from fxremat.host.files import FileTier
from fxremat.options import NAMES, CompileOptions, Options, options_of
from fxremat.units import Bytes, Percent

ROOT = Path(__file__).parents[1]


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


def test_what_they_mean() -> None:
    options = options_of(mem="60%", slots=np.int64(100), effort=np.float32(2), offload=True, host_mem="1GiB")
    assert options.budget == Percent(60.0)
    assert (options.slots, options.effort, options.host_limit) == (100, 2.0, 2**30)
    assert (type(options.slots), type(options.effort)) == (int, float)
    assert options.loss_size is None
    assert not options.offloads_by_chain
    assert options_of(mem="1GiB", solver="pofo", offload=True).offloads_by_chain
    assert options_of(mem=np.int64(2**30), loss_bytes="1KiB").budget == Bytes(2**30)
    assert options_of(mem=1, loss_bytes="1KiB").loss_size == 1024
    tier = FileTier()
    assert options_of(mem=1, offload=tier).tier is tier
    assert options_of(mem=1, offload=True, offload_weights=tier, optimizer=sgd()).tier is tier


def test_they_are_a_value() -> None:
    options = options_of(mem="4GiB", effort=0)
    assert options == options_of(mem="4GiB", effort=0.0)
    with pytest.raises(FrozenInstanceError):
        options.effort = 3.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        Options("4GiB")  # type: ignore[misc]


TWO_TIERS = {"offload": FileTier(), "offload_weights": FileTier()}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"slots": 0}, "slots is 0; it is a whole number from 1 to 100000"),
        ({"slots": -1}, "slots is -1"),
        ({"slots": True}, "slots is True"),
        ({"slots": 10**9}, "slots is 1000000000"),
        ({"slots": "500"}, "slots is '500'"),
        ({"slots": 1.5}, "slots is 1.5"),
        ({"slots": None}, "slots is None"),
        ({"effort": math.nan}, "effort is nan; it is a number of seconds, 0 or more"),
        ({"effort": -1}, "effort is -1"),
        ({"effort": "3"}, "effort is '3'"),
        ({"effort": True}, "effort is True"),
        ({"effort": None}, "effort is None"),
        ({"effort": math.inf}, "effort is inf; it is a finite number"),
        ({"solver": "best"}, "unknown solver 'best'; those that plan models are auto, "),
        ({"solver": "imput_drop"}, "did you mean 'input_drop'?"),
        ({"solver": None}, "unknown solver None"),
        ({"solver": ["auto"]}, "unknown solver ['auto']"),
        ({"solver": "exact"}, "solver='exact' is one for chains and joins (fxremat.solve); those that plan models are"),
        ({"solver": "checkmate"}, "solver='checkmate' is one for chains"),
        ({"solver": "canonical"}, "solver='canonical' is one for chains and joins"),
        ({"solver": "pofo"}, "solver='pofo' moves values to the host; it goes with offload=True"),
        ({"cost": "guess"}, "cost is 'guess'"),
        ({"cost": ["measure"]}, "cost is ['measure']"),
        ({"device": "A100-40GB"}, 'device goes with cost="estimate"'),
        ({"cost": "estimate", "device": "abacus"}, "unknown device 'abacus'; known are "),
        ({"cost": "estimate", "device": 3}, "device is 3"),
        ({"loss_bytes": "much"}, "loss_bytes: 'much' is not a number of bytes"),
        ({"loss_bytes": 1.5e9}, "int(1.5e9)"),
        ({"only_loss": 1}, "only_loss is 1; it is True or False"),
        ({"progress": "no"}, "progress is 'no'"),
        ({"offload": "cpu"}, "offload is 'cpu'"),
        ({"offload_weights": "cpu", "optimizer": sgd()}, "offload_weights is 'cpu'"),
        ({"host_mem": "1GiB"}, "it goes with offload=True"),
        ({"host_mem": "60%", "offload": True}, "host_mem: '60%' is not a number of bytes"),
        ({"offload_weights": True}, "go together"),
        ({"optimizer": sgd()}, "go together"),
        ({"optimizer": "adamw"}, 'optimizer goes with cost="estimate", device="H100"'),
        ({"optimizer": "lion", "cost": "estimate", "device": "H100"}, "optimizer is 'lion'; it is one of torch.optim"),
        ({"optimizer": 3, "cost": "estimate", "device": "H100"}, "optimizer is 3"),
        ({"optimizer": "SGD", "offload_weights": True}, "optimizer is 'SGD'"),
        ({**TWO_TIERS, "optimizer": sgd()}, "give both the same"),
        ({"solver": "pofo", "offload": True, "offload_weights": True, "optimizer": sgd()}, 'use "auto"'),
        ({"effrt": 3}, "unknown option 'effrt', did you mean 'effort'?; there are mem, plan, solver, cost, "),
        ({"zzz": 3}, "unknown option 'zzz'; there are mem"),
        ({"budget": 3}, "unknown option 'budget'"),
        ({"x" * 100_000: 3}, "unknown option 'xxx"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",  # objects print their addresses
)  # fmt: skip
def test_wrong_options_are_one_line(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(FxrematError) as error:
        options_of(mem="4GiB", **wrong)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("mem", [1.5e9, "4e9", math.nan, 0.6, True])
def test_a_wrong_budget(mem: object) -> None:
    with pytest.raises(InvalidBudget, match="is not a budget"):
        options_of(mem=mem)


def test_the_budget_is_needed() -> None:
    with pytest.raises(InvalidBudget, match='mem="4GiB"'):
        options_of(effort=3)


def test_known_devices_are_known() -> None:
    own = Device(name="own", flops=1e12, half_flops=1e12, bandwidth=1e11)
    assert options_of(mem=1, cost="estimate", device=own).device is own
    assert options_of(mem=1, cost="estimate", device="A100-40GB").device == "A100-40GB"


def test_type_checkers_see_the_same_options() -> None:
    hints = get_type_hints(Options)
    typed = get_type_hints(CompileOptions)
    assert {*typed, "mem", "solver"} == set(NAMES)
    assert all(hints[name] == kind for name, kind in typed.items())


@pytest.mark.long
def test_a_misspelt_option_is_a_type_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from typing import Unpack\n"
        "from fxremat.options import CompileOptions\n"
        "def door(**options: Unpack[CompileOptions]) -> None: ...\n"
        "door(effort=3, slots=100)\n"
        "door(effrt=3)\n"
        "door(slots='many')\n"
    )
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(script)], cwd=ROOT, capture_output=True, text=True
    )
    lines = [line.split(": ", 1)[0] for line in found.stdout.splitlines() if "error: " in line]
    assert lines == [f"{script}:5", f"{script}:6"], found.stdout + found.stderr
