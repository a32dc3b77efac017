"""Tests of the kinds of memory: they add up to exact liveness, and are what they are called."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fxremat
from fxremat.chains.schedule import Schedule
from fxremat.linearize.lay_out import lay_out
from fxremat.search.survey import survey
from fxremat.settings import Offload, Search
from fxremat.step.kinds import MemoryKind, bytes_by_kind, host_bytes, lives_of
from fxremat.step.liveness import Sizes, live_bytes, lives
from fxremat.step.order import rematerialize
from fxremat.step.program import Program, Role
from tests.dags import few
from tests.saved_steps import VARIED, saved, surveyed
from tests.toys import FourLayers

pytestmark = pytest.mark.usefixtures("torch_ready")


def check(program: Program, sizes: Sizes) -> dict[MemoryKind, tuple[int, ...]]:
    kinds = bytes_by_kind(program, sizes)
    assert tuple(map(sum, zip(*kinds.values(), strict=True))) == live_bytes(program, sizes).during
    assert min(min(series) for series in kinds.values()) >= 0
    return kinds


@few(10)
@given(st.sampled_from(VARIED), st.integers(0, 100))
def test_kinds_add_up_to_exact_liveness(name: str, share: int) -> None:
    joint, costs = saved(name)
    for candidate in surveyed(name).candidates[:: 1 + share // 10]:
        program = candidate.program()
        kinds = check(program, costs.sizes)
        if not program.recomputed:
            assert not any(kinds[MemoryKind.RECOMPUTED])
        assert not any(kinds[MemoryKind.RESULTS][: program.split])
        assert not any(kinds[MemoryKind.TEMPORARY][program.split :])
        assert not any(kinds[MemoryKind.OFFLOADED] + kinds[MemoryKind.WEIGHTS]) or joint.mutated_primals


def test_by_hand() -> None:
    """Four layers of 4 x 8 floats, 128 bytes a value: block 1 runs again, blocks 2 to 5 keep their tanh."""
    joint, costs = saved("four_layers")
    ends = [op.index for op in joint.forward_ops if op.name.startswith("tanh")]
    schedule = Schedule.parse("Fck1 Fall2 Drop(a1) Fall3 Fall4 Fall5 B5 B4 B3 Fall1 B2 B1")
    program = rematerialize(lay_out(joint, ends), schedule)
    kinds = check(program, costs.sizes)
    again = [place for place, step in enumerate(program.steps) if step.role is Role.RECOMPUTE]
    assert max(kinds[MemoryKind.RECOMPUTED]) == 256
    assert next(place for place, size in enumerate(kinds[MemoryKind.RECOMPUTED]) if size) == again[0]
    assert kinds[MemoryKind.TEMPORARY][: program.split][:2] == (128, 256)
    weights = sum(p.numel() * 4 for p in FourLayers().parameters())
    assert kinds[MemoryKind.RESULTS][-1] == weights


def test_an_op_may_free_all_that_it_reads_before_it_makes_anything() -> None:
    joint, costs = saved("four_layers")
    program = survey(joint, costs, effort=0.0).keep_all.program()
    sizes = costs.sizes
    last = lives(program, sizes)
    freed = [{v: last[v][1] for v in s.reads if last[v] == (p, last[v][1])} for p, s in enumerate(program.steps)]
    place = max(range(len(freed)), key=lambda p: len([size for size in freed[p].values() if size]))
    assert len([size for size in freed[place].values() if size]) > 1
    workspace = list(sizes.workspace)
    workspace[program.executions[place].op] = -sum(freed[place].values())
    smaller = replace(sizes, workspace=workspace)
    check(program, smaller)
    assert all(life.bytes > 0 and life.last >= life.first for life in lives_of(program, smaller))


@pytest.mark.parametrize("weights", [False, True])
def test_what_waits_on_the_host(weights: bool) -> None:
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(6)))
    model.append(torch.nn.Flatten(0))
    inputs = (torch.ones(64, 32),)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if weights else None
    options = {"search": Search(seconds=0), "loss": 64, "costs": "estimate", "offload": True}
    if weights:
        options |= {"offload": Offload(weights=True, activations=False), "optimizer": optimizer}
    most = fxremat.plan(model, inputs, mem=2**40, **options)
    plan = fxremat.plan(model, inputs, mem=most.minimum, **options)
    kinds = check(plan.program, plan.costs.sizes)
    hosted = host_bytes(plan.program, plan.costs.sizes)
    if weights:
        assert max(kinds[MemoryKind.WEIGHTS]) > 0
    else:
        assert max(kinds[MemoryKind.OFFLOADED]) > 0
        assert plan.chosen.transfers is not None
        assert max(hosted) <= plan.chosen.transfers.bytes
        assert max(hosted) > 0
    assert min(hosted) == hosted[-1] == 0
