"""Settings and options of a user are checked at once, with one line that says what would do."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from fxremat.api import compare
from fxremat.cost.estimate import Device
from fxremat.errors import FxrematError, InvalidBudget
from fxremat.host.files import FileTier
from fxremat.options import NAMES, RENAMED, CompileOptions, Options, options_of
from fxremat.settings import Inductor, Loss, Offload, Search, Setting, Slices
from fxremat.units import Bytes, Percent

ROOT = Path(__file__).parents[1]


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


def test_what_they_mean() -> None:
    search = Search(seconds=np.float32(2), slots=np.int64(100))
    options = options_of(mem="60%", search=search, offload=Offload(limit="1GiB"))
    assert options.budget == Percent(60.0)
    assert (options.search.slots, options.search.seconds, options.host_limit) == (100, 2.0, 2**30)
    assert (type(options.search.slots), type(options.search.seconds)) == (int, float)
    assert options.loss_outside.size is None
    assert not options.offloads_by_chain
    assert options_of(mem="1GiB", solver="pofo", offload=True).offloads_by_chain
    assert options_of(mem=np.int64(2**30), loss="1KiB").budget == Bytes(2**30)


def test_short_forms_are_settings() -> None:
    tier = FileTier()
    for short, setting in ((True, Offload()), (tier, Offload(tier=tier)), (False, None)):
        assert options_of(mem=1, offload=short).host == setting
    for short, setting in ((True, Slices()), (False, None)):
        assert options_of(mem=1, slices=short).slicing == setting
    for short, setting in (("inductor", Inductor()), ("eager", None)):
        assert options_of(mem=1, backend=short).inductor == setting
    assert options_of(mem=1, loss="1KiB").loss_outside == Loss(bytes="1KiB")
    assert options_of(mem=1, loss="1KiB").loss_outside.size == 1024
    sizes = {"x": {0: Dim("rows", min=2, max=8), 1: [16, 32]}}
    assert options_of(mem=1, dynamic=sizes).ranges == {"x": {0: (2, 8), 1: (16, 32)}}
    assert options_of(mem=1, costs="h100").device is options_of(mem=1, costs="H100").device


def test_what_may_wait_on_the_host() -> None:
    tier = FileTier()
    both = options_of(mem=1, offload=Offload(tier=tier, weights=True), optimizer=sgd())
    assert both.tier is tier
    assert both.offloads
    assert both.stepping is not None
    alone = options_of(mem=1, offload=Offload(weights=True, activations=False), optimizer=sgd())
    assert (alone.offloads, alone.hosts_weights) == (False, True)


def test_they_are_a_value() -> None:
    options = options_of(mem="4GiB", search=Search(seconds=0))
    assert options == options_of(mem="4GiB", search=Search(seconds=0.0))
    with pytest.raises(FrozenInstanceError):
        options.solver = "pofo"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Options("4GiB")  # type: ignore[misc]


@pytest.mark.parametrize(
    "setting",
    [Offload(), Offload(limit="1GiB", weights=True), Slices(max_parts=2), Slices(reduce_dtype=torch.float32),
     Inductor(config={"max_autotune": True}), Loss(bytes=3, gradients="all"), Search(seconds=1, progress=False)],
    ids=repr,
)  # fmt: skip
def test_a_setting_prints_as_the_call_that_makes_it(setting: Setting) -> None:
    names = {kind.__name__: kind for kind in (Offload, Slices, Inductor, Loss, Search)} | {"torch": torch}
    assert eval(repr(setting), names) == setting


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Search(slots=0), "slots is 0; it is a whole number from 1 to 100000"),
        (lambda: Search(slots=-1), "slots is -1"),
        (lambda: Search(slots=True), "slots is True"),
        (lambda: Search(slots=10**9), "slots is 1000000000"),
        (lambda: Search(slots="500"), "slots is '500'"),
        (lambda: Search(slots=1.5), "slots is 1.5"),
        (lambda: Search(slots=None), "slots is None"),
        (lambda: Search(seconds=math.nan), "seconds is nan; it is a number of seconds, 0 or more"),
        (lambda: Search(seconds=-1), "seconds is -1"),
        (lambda: Search(seconds="3"), "seconds is '3'"),
        (lambda: Search(seconds=True), "seconds is True"),
        (lambda: Search(seconds=None), "seconds is None"),
        (lambda: Search(seconds=math.inf), "seconds is inf; it is a finite number"),
        (lambda: Search(progress="no"), "progress is 'no'; it is True or False"),
        (lambda: Loss(gradients="some"), "gradients is 'some'; it is one of loss, all"),
        (lambda: Loss(bytes="much"), "Loss: bytes: 'much' is not a number of bytes"),
        (lambda: Offload(limit="60%"), "Offload: limit: '60%' is not a number of bytes"),
        (lambda: Offload(tier="cpu"), "Offload: tier is 'cpu'; it is a host tier such as FileTier()"),
        (lambda: Offload(weights=1), "Offload: weights is 1; it is True or False"),
        (lambda: Offload(activations=False), "moves nothing; it goes with weights=True"),
        (lambda: Inductor(random="both"), "Inductor: random is 'both'; it is None or one of inductor, eager"),
        (lambda: Inductor(config=3), "Inductor: config is 3; it is settings of torch._inductor.config by name"),
    ],
)  # fmt: skip
def test_wrong_settings_are_one_line(make: Callable[[], object], says: str) -> None:
    with pytest.raises(FxrematError) as error:
        make()
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"solver": "best"}, "unknown solver 'best'; those that plan models are auto, "),
        ({"solver": "imput_drop"}, "did you mean 'input_drop'?"),
        ({"solver": None}, "unknown solver None"),
        ({"solver": ["auto"]}, "unknown solver ['auto']"),
        ({"solver": "exact"}, "solver='exact' is one for chains and joins (fxremat.solve); those that plan models are"),
        ({"solver": "checkmate"}, "solver='checkmate' is one for chains"),
        ({"solver": "canonical"}, "solver='canonical' is one for chains and joins"),
        ({"solver": "pofo"}, "solver='pofo' moves values to the host; it goes with offload=True"),
        ({"costs": "guess"}, "costs: unknown device 'guess'; known are "),
        ({"costs": "estimat"}, "costs: unknown device 'estimat'"),
        ({"costs": ["measure"]}, 'costs is [\'measure\']; it is "measure", "estimate", a device'),
        ({"loss": "much"}, "loss: 'much' is not a number of bytes"),
        ({"loss": 1.5e9}, "int(1.5e9)"),
        ({"search": 3}, "search is 3; it is a Search, such as Search(seconds=60)"),
        ({"offload": "cpu"}, "offload is 'cpu'; it is True, False, a host tier such as FileTier(), or an Offload"),
        ({"slices": 4}, "slices is 4; it is True, False, or a Slices, such as Slices(max_parts=8)"),
        ({"backend": "triton"}, "backend is 'triton'; it is one of eager, inductor, or an Inductor(...)"),
        ({"backend": "inductor", "offload": True, "solver": "pofo"}, "it does not go with 'pofo'"),
        ({"backend": "inductor", "costs": "estimate"}, 'it goes with costs="measure"'),
        ({"offload": Offload(weights=True)}, "go together"),
        ({"optimizer": sgd()}, "go together"),
        ({"optimizer": "adamw"}, 'optimizer goes with costs="H100"'),
        ({"optimizer": "lion", "costs": "H100"}, "optimizer is 'lion'; it is one of torch.optim"),
        ({"optimizer": 3, "costs": "H100"}, "optimizer is 3"),
        ({"optimizer": "SGD", "offload": Offload(weights=True)}, "optimizer is 'SGD'"),
        ({"solver": "pofo", "offload": Offload(weights=True), "optimizer": sgd()}, 'use "auto"'),
        ({"serach": 3}, "unknown option 'serach', did you mean 'search'?; there are mem, device_mem, exact, plan, "),
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
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("name", RENAMED)
def test_an_earlier_name_says_the_new_one(name: str) -> None:
    with pytest.raises(FxrematError, match=f"the option {name} has a new form: "):
        options_of(mem=1, **{name: 3})
    assert name not in NAMES
    new, *_ = RENAMED[name].partition("=")
    assert new in NAMES


@pytest.mark.parametrize("mem", [1.5e9, "4e9", math.nan, 0.6, True])
def test_a_wrong_budget(mem: object) -> None:
    with pytest.raises(InvalidBudget, match="is not a budget"):
        options_of(mem=mem)


def test_the_budget_is_needed() -> None:
    with pytest.raises(InvalidBudget, match='mem="4GiB"'):
        options_of(search=Search(seconds=3))


def test_known_devices_are_known() -> None:
    own = Device(name="own", flops=1e12, half_flops=1e12, bandwidth=1e11)
    assert options_of(mem=1, costs=own).device is own
    assert str(options_of(mem=1, costs="A100-40GB").device) == "A100-40GB"


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
        "door(backend='inductor', slices=True)\n"
        "door(bakend='inductor')\n"
        "door(slices='many')\n"
    )
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(script)], cwd=ROOT, capture_output=True, text=True
    )
    lines = [line.split(": ", 1)[0] for line in found.stdout.splitlines() if "error: " in line]
    assert lines == [f"{script}:5", f"{script}:6"], found.stdout + found.stderr


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Device(name="x", flops=-1, half_flops=1e12, bandwidth=1e9), "flops of the device x is -1"),
        (lambda: Device(name="x", flops=1e12, half_flops=math.nan, bandwidth=1e9), "half_flops of the device x is nan"),
        (lambda: Device(name="x", flops=1e12, half_flops=1e12, bandwidth="x"), "bandwidth of the device x is 'x'"),
        (lambda: options_of(mem="60%", method=3), "method is 3; it is the name of one"),
        (lambda: options_of(mem="60%", fullgraph="x"), "fullgraph is 'x'; it is True or False"),
        (lambda: compare(nn.Linear(2, 2), (torch.ones(2, 2),), "H100", mem="60%"), "it is a list of names"),
    ],
)
def test_values_of_no_use_are_one_line(make: Callable[[], object], says: str) -> None:
    with pytest.raises(FxrematError, match=says):
        make()
