"""Tests of the units into which the steps of a program are grouped: nothing is compiled here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

from benchmarks.capture import capture, joint_graph
from benchmarks.models import get
from fxremat.fusion.joint import fused_program
from fxremat.fusion.units import (
    Unit,
    Units,
    alike,
    alone,
    by_block,
    by_phase,
    compilable,
    may_compile,
    ops_of,
    pointwise,
    unit_bytes,
    worth_compiling,
)
from fxremat.graphs.accounting import costs_from, op_keys
from fxremat.graphs.captured import Captured, captured_of, read_joint
from fxremat.graphs.op_key import op_key
from fxremat.graphs.region import Kernels, Region, regions_of
from fxremat.ops.seeded import ALWAYS_COMPILED
from fxremat.passes.pipelines import normalize
from fxremat.passes.seeded_dropout import draw_from_seeds
from fxremat.search.candidate import Frontier
from fxremat.search.survey import survey
from fxremat.step.costs import Costs, OpCost
from fxremat.step.liveness import live_bytes
from fxremat.step.program import Program, Role
from tests.dags import Dag, Recipe, batch, estimated, few, small_recipes

pytestmark = pytest.mark.usefixtures("torch_ready")
KERNELS = Kernels(settings={}, decompositions={})


@pytest.fixture(scope="module")
def gpt() -> tuple[Frontier, Costs]:
    case = get("gpt", "small")
    joint = capture(case.model(), *case.batch())
    costs = estimated(joint)
    return survey(joint, costs, effort=0.0), costs


def cuts(program: Program, costs: Costs) -> list[Units]:
    most = max(unit_bytes(program, costs.sizes, alone(program, range(len(program.steps)))))
    singly = alone(program, range(len(program.steps)))
    return [by_block(program), by_phase(program), pointwise(program, costs.sizes, most), singly]


def programs_of(recipe: Recipe) -> Iterator[tuple[Captured, Costs, Program]]:
    """Some programs of a random model."""
    joint = capture(Dag(recipe).train(), *batch())
    costs = estimated(joint)
    for candidate in survey(joint, costs, effort=0.0).spread(3):
        yield joint, costs, candidate.program()


@few(4)
@given(small_recipes)
def test_every_step_is_in_one_unit_behind_what_it_reads(recipe: Recipe) -> None:
    for joint, costs, program in programs_of(recipe):
        for units in cuts(program, costs):
            assert sorted(p for unit in units for p in unit.steps) == list(range(len(program.steps)))
            there = {v for v, value in enumerate(program.version_of) if value in joint.given}
            for unit in units:
                assert len({position < program.split for position in unit.steps}) == 1
                for position in unit.steps:
                    assert there.issuperset(program.steps[position].reads)
                    there.update(program.steps[position].writes)
            may = compilable(joint)
            assert all(program.steps[p].op in may for unit in units if unit.compiled for p in unit.steps)


class Gated(nn.Module):
    """A product of what is activated and of a matrix product of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh()
        return (self.linear(y) * y).sum()


def test_an_op_joins_no_group_before_what_it_reads() -> None:
    joint = capture(Gated(), torch.randn(64, 64))
    costs = estimated(joint)
    program = survey(joint, costs, effort=0.0).keep_all.program()
    units = pointwise(program, costs.sizes, 1 << 40)
    there = {v for v, value in enumerate(program.version_of) if value in joint.given}
    for position in (position for unit in units for position in unit.steps):
        assert there.issuperset(program.steps[position].reads)
        there.update(program.steps[position].writes)


class Noisy(nn.Module):
    """Layers around a dropout, which is not compiled with eager PyTorch's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.dropout, self.after = nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(16)
        y = self.before(x).tanh()
        return (self.after(self.dropout(y)) + y.exp() * noise).sum()


def test_a_phase_is_cut_only_where_a_step_that_is_not_compiled_needs_it() -> None:
    joint = capture(Noisy(), torch.randn(4, 16))
    program = survey(joint, estimated(joint), effort=0.0).keep_all.program()
    kinds = [
        ("region" if unit.compiled else joint.ops[program.steps[unit.steps[0]].op].name, unit.steps[0] < program.split)
        for unit in by_phase(program)
    ]
    assert kinds == [
        ("randn", True), ("region", True), ("native_dropout", True), ("region", True), ("region", False)
    ]


@few(4)
@given(small_recipes)
def test_single_ops_take_what_the_program_takes(recipe: Recipe) -> None:
    for _, costs, program in programs_of(recipe):
        memory = live_bytes(program, costs.sizes)
        units = alone(program, range(len(program.steps)))
        assert unit_bytes(program, costs.sizes, units) == [*memory.during, memory.at_split]


def test_what_gains_little_is_not_compiled(gpt: tuple[Frontier, Costs]) -> None:
    program = gpt[0].keep_all.program()
    units = by_block(program)
    names = op_keys(program.layout.graph)
    kinds = sorted(alike(program, units, names).values(), key=len)
    counts = [len(kind) for kind in kinds]
    assert 1 in counts
    assert max(counts) > 1

    def compiled(least: float, gain: float = 1.0) -> list[Unit]:
        some = worth_compiling(program, units, names, lambda _: gain, least)
        assert sorted(p for unit in some for p in unit.steps) == list(range(len(program.steps)))
        return [unit for unit in some if unit.compiled]

    every = [unit for kind in kinds for unit in kind]
    assert set(compiled(0.9)) == set(every)
    assert set(compiled(1e9)) == set()
    assert set(compiled(0.9, gain=0.0)) == set()
    once = counts.count(1)
    assert set(compiled(once)) == {unit for kind in kinds if len(kind) > 1 for unit in kind}


def test_units_are_alike_where_their_ops_cost_the_same(gpt: tuple[Frontier, Costs]) -> None:
    program = gpt[0].keep_all.program()
    units = by_block(program)
    found = alike(program, units, op_keys(program.layout.graph))
    assert len(found) > 1
    for key, kind in found.items():
        for unit in kind:
            assert key == tuple(op_key(captured_of(program.layout.graph).nodes[op]) for op in ops_of(program, unit))
    assert sum(map(len, found.values())) == sum(unit.compiled for unit in units)


def test_what_must_be_compiled_is_whatever_it_gains() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())
    module, outputs = joint_graph(model, torch.randn(4, 8))
    draw_from_seeds(normalize(module).graph)
    joint = read_joint(module, outputs)
    costs = estimated(joint)
    program = survey(joint, costs, effort=0.0).keep_all.program()
    units = by_block(program)
    some = worth_compiling(program, units, op_keys(joint), lambda _: 0.0, 1e9)
    kept = [unit for unit in some if unit.compiled]
    targets = [joint.nodes[op].target for unit in kept for op in ops_of(program, unit)]
    assert any(target in ALWAYS_COMPILED for target in targets)


def test_what_is_born_and_dies_in_a_unit_takes_no_memory(gpt: tuple[Frontier, Costs]) -> None:
    frontier, costs = gpt
    program = frontier.keep_all.program()
    single, blocks, groups = (
        max(unit_bytes(program, costs.sizes, units))
        for units in (alone(program, range(len(program.steps))), by_block(program), pointwise(program, costs.sizes, 0))
    )
    assert blocks < single
    assert groups <= single


def test_pulls_stop_where_they_would_not_fit(gpt: tuple[Frontier, Costs]) -> None:
    frontier, costs = gpt
    for candidate in frontier.spread(5):
        program = candidate.program()
        wide = pointwise(program, costs.sizes, 1 << 60)
        narrow = pointwise(program, costs.sizes, candidate.peak)
        assert max(unit_bytes(program, costs.sizes, narrow)) <= max(
            candidate.peak, max(unit_bytes(program, costs.sizes, wide))
        )
        assert max(unit_bytes(program, costs.sizes, narrow)) <= 1.02 * candidate.peak


def test_products_stay_as_they_are_between_pointwise_groups(gpt: tuple[Frontier, Costs]) -> None:
    frontier, costs = gpt
    program = frontier.keep_all.program()
    ops = program.layout.graph.ops
    inside = {
        ops[op].target
        for unit in pointwise(program, costs.sizes, 1 << 60)
        if unit.compiled and len(unit.steps) > 1
        for p in unit.steps
        if (op := program.steps[p].op) is not None
    }
    assert {"aten.add.Tensor", "aten.native_layer_norm.default"} <= inside
    assert not inside & {"aten.mm.default", "aten.addmm.default", "aten.bmm.default"}


def test_equal_layers_share_their_regions(gpt: tuple[Frontier, Costs]) -> None:
    frontier, _ = gpt
    program = frontier.keep_all.program()
    fused = fused_program(program, by_block(program), KERNELS)
    regions = regions_of(fused.layout.graph.module.graph)
    assert len(set(regions)) <= len(regions) / 2


def test_a_fused_program_runs_every_unit_once_and_keeps_names_and_roles(gpt: tuple[Frontier, Costs]) -> None:
    frontier, _ = gpt
    candidate = frontier.candidates[-1]
    program = candidate.program()
    fused = fused_program(program, by_block(program), KERNELS)
    joint = fused.layout.graph
    assert not fused.repeated
    assert [step.op for step in fused.steps] == list(range(len(joint.ops)))
    assert {step.role for step in fused.steps} >= {Role.FORWARD, Role.BACKWARD}
    assert fused.layout.names == candidate.layout.names
    assert joint.model == program.layout.graph.model
    assert set(joint.parameters.values()) == set(program.layout.graph.parameters.values())
    modules = dict(get("gpt", "small").model().named_modules())
    assert all(source.module in modules for source in joint.sources)
    assert any(source.module for source in joint.sources)


class Odd(nn.Module):
    """Ops that no region may have."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.bernoulli(x.sigmoid()).sum() * x.sum()


def test_ops_that_inductor_is_not_given() -> None:
    joint = capture(Odd(), torch.rand(4, 4, requires_grad=True))
    left = {str(joint.nodes[op.index].target) for op in joint.ops if op.index not in compilable(joint)}
    assert "aten.bernoulli.default" in left
    assert any(may_compile(joint.nodes[op.index]) for op in joint.ops)


def test_the_outputs_of_a_region_are_part_of_its_peak() -> None:
    joint = capture(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0)), torch.randn(4, 8))
    program = survey(joint, estimated(joint), effort=0.0).keep_all.program()
    fused = fused_program(program, by_block(program), KERNELS).layout.graph
    peak = 1 << 20
    sizes = costs_from(fused, [OpCost(1.0, peak) for _ in fused.ops], torch.device("cpu")).sizes
    regions = [op for op in fused.ops if isinstance(fused.nodes[op.index].target, Region)]
    assert regions
    for op in regions:
        assert sizes.workspace[op.index] + sum(sizes.values[value] for value in op.writes) == peak
