"""Kinds of devices: one module names them, and what one of them cannot do is refused by its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat import device as devices
from fxremat.cost.measure import quiet_world
from fxremat.cost.metering import peak_of
from fxremat.device import CPU, CUDA, KINDS, MPS, ROCM, XPU, Ability, Kind, kind_of
from fxremat.errors import FxrematError, InvalidBudget
from fxremat.host.default import default_tier
from fxremat.host.files import FileTier
from fxremat.host.pinned import PinnedTier
from fxremat.runtime.loss_meter import levels_of
from fxremat.settings import Search

PACKAGE = Path(__file__).parents[1] / "fxremat"
HERE = torch.device("cpu")
NAMED_IN = {  # modules that name CUDA, and why
    "device.py": "knows kinds of devices",
    "cost/devices.py": "a description of a device that is not named",
    "cost/environment.py": "switches of cuBLAS and cuDNN, and CUDA's hardware",
    "cost/allocator.py": "the state of CUDA's caching allocator",
    "cost/segments.py": "settings of CUDA's caching allocator",
    "runtime/target_kernels.py": "a field of such descriptions",
    "torch_private.py": "private names of CUDA's caching allocator and of the profiler",
}


def names_of_cuda(file: Path) -> Iterator[str]:
    """The places where a module says "cuda", or uses `torch.cuda` or `is_cuda`, outside of what people read."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.split(":")[0] == "cuda":
            yield f"{file.name}:{node.lineno}"
        if isinstance(node, ast.Attribute) and node.attr in ("is_cuda", "is_xpu", "is_mps"):
            yield f"{file.name}:{node.lineno}"
        if isinstance(node, ast.Attribute) and node.attr == "cuda" and ast.unparse(node.value) == "torch":
            yield f"{file.name}:{node.lineno}"


def test_one_module_names_kinds_of_devices() -> None:
    naming = {str(file.relative_to(PACKAGE)): list(names_of_cuda(file)) for file in sorted(PACKAGE.rglob("*.py"))}
    assert {name: places for name, places in naming.items() if places and name not in NAMED_IN} == {}
    assert [name for name in NAMED_IN if not naming[name]] == []


def test_every_kind_is_found_by_its_type() -> None:
    assert [kind_of(torch.device(kind.type)) for kind in KINDS.values()] == list(KINDS.values())
    unknown = kind_of(torch.device("meta"))
    assert unknown.abilities == frozenset()
    assert unknown.type == "meta"


def test_the_page_says_what_each_kind_can_do() -> None:
    kinds = (CPU, CUDA, ROCM, XPU, MPS)
    rows = {
        "": [kind.name for kind in kinds],
        **{ability.value: [_yes(kind.can(ability)) for kind in kinds] for ability in Ability},
        "allocations that PyTorch's profiler records": [_yes(kind.recorded) for kind in kinds],
        "bytes to a multiple of which sizes are rounded up": [str(kind.block) for kind in kinds],
        "bytes that a block may have left unsplit": [str(kind.unsplit) for kind in kinds],
        "random numbers of Inductor's kernels": ["own" if kind.in_triton else "eager's" for kind in kinds],
    }
    page = (Path(__file__).parents[1] / "docs" / "devices.md").read_text()
    for name, cells in rows.items():
        assert f"\n| {name}{' ' if name else ''}| {' | '.join(cells)} |\n" in page, name


def _yes(it: bool) -> str:
    return "yes" if it else "no"


@pytest.mark.parametrize("kind", [CPU, MPS], ids=lambda kind: kind.name)
def test_what_a_kind_lacks_is_refused_by_its_name(kind: Kind) -> None:
    device = torch.device(kind.type)
    calls = {
        Ability.STATISTICS: [kind.allocated, kind.most_allocated, kind.forget_most],
        Ability.FREE: [kind.free],
        Ability.STREAMS: [kind.stream, kind.current_stream, kind.event],
        Ability.TIMING: [lambda device: kind.event(device, timed=True)],
        Ability.PINNED: [lambda device: kind.pinned(8, torch.float32, device)],
        Ability.GENERATORS: [kind.generator],
    }
    assert calls.keys() == set(Ability)
    for ability in set(Ability) - kind.abilities:
        for call in calls[ability]:
            with pytest.raises(FxrematError, match=f"^PyTorch has no {ability.value} for {kind.name} devices") as error:
                call(device)
            assert "\n" not in str(error.value)


def test_blocks_of_the_allocators() -> None:
    assert [kind.block for kind in (CPU, CUDA, XPU, MPS)] == [1, 512, 512, 1]
    assert [kind.unsplit for kind in (CPU, CUDA, XPU, MPS)] == [0, 2**20, 2**20, 0]


# --- a CPU that plays a device which lacks something ---------------------------------------------------------


class Toy(nn.Module):
    """Two layers, and a dropout if asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Kind:
    """The CPU as a kind that can do nothing."""
    kind = replace(CPU, name="Toy", abilities=frozenset(), recorded=False)
    monkeypatch.setitem(devices.KINDS, "cpu", kind)
    return kind


OPTIONS = {"search": Search(seconds=0.0)}


@pytest.mark.usefixtures("torch_ready", "lacking")
def test_a_kind_without_statistics_is_estimated_and_not_measured() -> None:
    x = torch.ones(4, 8)
    with pytest.raises(FxrematError, match=r'no statistics of allocated memory for Toy devices.*costs="estimate"'):
        fxremat.plan(Toy(), (x,), mem="100%", **OPTIONS)
    assert fxremat.plan(Toy(), (x,), mem="100%", costs="estimate", **OPTIONS).predicted_peak > 0
    assert levels_of(HERE) is None


@pytest.mark.usefixtures("torch_ready", "lacking")
def test_a_kind_without_generators_trains_what_draws_nothing() -> None:
    x = torch.ones(4, 8)
    model = fxremat.compile(Toy(), mem="100%", costs="estimate", **OPTIONS)
    model(x).backward()
    with pytest.raises(FxrematError, match=r"random generators whose state can be kept for Toy devices.*draws"):
        fxremat.plan(Toy(dropout=0.5), (x,), mem="100%", costs="estimate", **OPTIONS)


@pytest.mark.usefixtures("lacking")
def test_a_kind_without_pinned_memory_has_files() -> None:
    assert isinstance(default_tier(HERE), FileTier)
    with PinnedTier() as tier, pytest.raises(FxrematError, match=r"no pinned host memory for Toy devices.*FileTier"):
        tier.offload(torch.ones(4))


@pytest.mark.usefixtures("torch_ready", "lacking")
def test_a_kind_without_a_count_of_free_bytes_has_no_auto() -> None:
    with pytest.raises(InvalidBudget, match='mem="auto" reads the free memory'):
        fxremat.plan(Toy(), (torch.ones(4, 8),), mem="auto", costs="estimate", **OPTIONS)


def test_a_kind_that_the_profiler_does_not_record_is_metered_by_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = iter([100, 164])
    kind = replace(CPU, name="Toy", abilities=frozenset({Ability.STATISTICS}), recorded=False)
    monkeypatch.setitem(devices.KINDS, "cpu", kind)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.accelerator, name, lambda _: next(levels))
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda _: None)
    assert peak_of(lambda: "result", HERE) == (64, "result")


@pytest.mark.usefixtures("lacking")
def test_a_quiet_world_needs_no_ability() -> None:
    state = torch.get_rng_state()
    with quiet_world(HERE):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), state)
