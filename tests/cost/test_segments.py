"""Blocks of CUDA's caching allocator: counted as they may be, or made exact by expandable segments."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

import fxremat
from fxremat import torch_private
from fxremat.cost import segments
from fxremat.cost.segments import expand_segments
from fxremat.graphs import accounting
from fxremat.graphs.accounting import costs_from, held
from fxremat.settings import Search
from fxremat.step.costs import OpCost
from tests.dags import capture
from tests.graphs.test_in_place import Residual
from tests.toys import Loss, Stack, rows

CPU, CUDA, MIB = torch.device("cpu"), torch.device("cuda", 0), 2**20


@pytest.fixture
def default_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with CUDA, whose allocator is as PyTorch has it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    for module in (accounting, segments):
        monkeypatch.setattr(module, "allocates_in_expandable_segments", lambda: False)
    for name in segments.VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("asked", "device", "counted"),
    [
        (1000, CUDA, 1024),
        (MIB, CUDA, MIB),
        (MIB + 1, CUDA, 2 * MIB + 512),
        (20 * MIB, CUDA, 21 * MIB),
        (20 * MIB + 1, CPU, 20 * MIB + 1),
    ],
)
@pytest.mark.usefixtures("default_allocator")
def test_a_large_block_may_have_a_mebibyte_more(asked: int, device: torch.device, counted: int) -> None:
    assert held(asked, device) == counted


@pytest.mark.usefixtures("default_allocator")
def test_in_expandable_segments_it_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "allocates_in_expandable_segments", lambda: True)
    assert held(20 * MIB, CUDA) == 20 * MIB


@pytest.mark.usefixtures("torch_ready")
def test_values_and_workspaces_leave_room_for_it(request: pytest.FixtureRequest) -> None:
    joint = capture(Residual(), torch.ones(1 << 16, 8))
    request.getfixturevalue("default_allocator")
    found = costs_from(joint, [OpCost(1.0, 3 * MIB)] * len(joint.ops), CUDA).sizes
    assert found.unsplit == MIB
    value = next(value.index for value in joint.values if value.bytes == 2 * MIB)
    assert found.values[value] == 3 * MIB
    over = {op.index for op in joint.ops if op.overwrites is not None}
    assert over
    for op in joint.ops:  # one that overwrites a tensor of 2 MiB needs no block for its result
        assert found.workspace[op.index] == (4 * MIB - 3 * MIB if op.index in over else 4 * MIB)


@pytest.mark.usefixtures("torch_ready")
def test_a_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = fxremat.plan(Loss(Stack()), (rows(),), mem="100%", search=Search(seconds=0.0))
    assert "expandable_segments" not in str(plan)
    object.__setattr__(plan.costs.sizes, "unsplit", MIB)
    assert "1 MiB more is counted for each tensor above 1 MiB; expandable_segments:True saves" in " ".join(
        str(plan).split()
    )


@pytest.mark.usefixtures("default_allocator")
def test_they_are_switched_on_and_told_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    switched: list[bool] = []
    monkeypatch.setattr(segments, "allocate_in_expandable_segments", lambda: switched.append(True) or True)
    with caplog.at_level(logging.INFO):
        expand_segments(CUDA)
    assert switched == [True]
    assert "PYTORCH_ALLOC_CONF=expandable_segments:False keeps them off" in caplog.text


@pytest.mark.parametrize("why", ["variable", "older variable", "backend", "on", "device"])
@pytest.mark.usefixtures("default_allocator")
def test_what_the_user_has_set_stays(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "allocate_in_expandable_segments", lambda: pytest.fail("switched"))
    if why == "variable":
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    if why == "older variable":
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    if why == "backend":
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    if why == "on":
        monkeypatch.setattr(segments, "allocates_in_expandable_segments", lambda: True)
    expand_segments(CPU if why == "device" else CUDA)


@pytest.mark.parametrize("can", [True, False])
def test_a_driver_that_cannot_map_memory_is_left_with_blocks(can: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"expandable_segments": False}
    made: list[object] = []

    def set_to(text: str) -> None:
        now["expandable_segments"] = text.endswith("True")

    def pool() -> object:
        if not can:
            raise RuntimeError("CUDA driver error: operation not supported")
        return object()

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", set_to, raising=False)
    monkeypatch.setattr(torch.cuda, "MemPool", pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda _: torch.no_grad())
    monkeypatch.setattr(torch, "empty", lambda *_, **__: made.append(_get_current_dispatch_mode()))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": now})
    torch_private.allocates_in_expandable_segments.cache_clear()
    try:
        with FakeTensorMode():  # as plans are made while a step is traced
            assert torch_private.allocate_in_expandable_segments() is can
        assert now["expandable_segments"] is can
        assert made == [None] * can  # the driver was asked for real memory
    finally:
        torch_private.allocates_in_expandable_segments.cache_clear()
