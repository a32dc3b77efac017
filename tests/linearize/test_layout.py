"""A joint graph becomes a chain: every op is placed once, every cut is a cut, every boundary holds what crosses it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxremat.linearize.chain_of import chain_of
from fxremat.linearize.crossings import carry_levels, crossings
from fxremat.linearize.lay_out import lay_out
from fxremat.linearize.save_sets import add_options, save_sets
from fxremat.step.costs import Costs
from fxremat.step.layout import Layout
from fxremat.step.step_graph import Origin, StepGraph
from tests.dags import Dag, Layer, Recipe, batch, capture, estimated
from tests.saved_steps import NAMES, saved

pytestmark = pytest.mark.usefixtures("torch_ready")


def layouts(joint: StepGraph) -> list[Layout]:
    crossing = crossings(joint)
    carried = list(itertools.islice(carry_levels(joint, crossing, [1.0] * joint.forward_count), 3))
    return [lay_out(joint, crossing.cuts(values), values) for values in carried]


@pytest.mark.parametrize("name", NAMES)
def test_models_become_chains(name: str) -> None:
    joint, costs = saved(name)
    for layout in layouts(joint):
        every_op_is_in_one_block(layout)
        what_a_block_reads_is_in_it_before_it_or_held(layout)
        gradients_flow_down_the_chain(layout)
        options_save_less_and_cost_more(layout, costs)
    every_cut_is_a_cut(joint)


def every_op_is_in_one_block(layout: Layout) -> None:
    joint = layout.graph
    forward = [index for block in layout.blocks for index in block.forward]
    backward = [index for block in layout.blocks for index in block.backward]
    assert forward == list(range(joint.forward_count))
    assert sorted(backward) == list(range(joint.forward_count, len(joint.ops)))


def what_a_block_reads_is_in_it_before_it_or_held(layout: Layout) -> None:
    joint = layout.graph
    for number, block in enumerate(layout.blocks):
        there = block.made | layout.boundary_before(number) | layout.held
        for index in (*block.forward, *block.backward):
            reads = {v for v in joint.ops[index].reads if joint.values[v].origin is Origin.FORWARD}
            assert reads <= there
        read = {v for index in block.backward for v in joint.ops[index].reads}
        assert read & block.made <= block.saved[0] | layout.held


def every_cut_is_a_cut(joint: StepGraph) -> None:
    for end in crossings(joint).cuts():
        made = {v for op in joint.forward_ops[: end + 1] for v in op.writes if not op.anchored}
        needed = {v for op in joint.forward_ops[end + 1 :] for v in op.again_reads}
        assert len(made & needed) <= 1


def gradients_flow_down_the_chain(layout: Layout) -> None:
    joint = layout.graph
    block_of = {index: number for number, block in enumerate(layout.blocks) for index in block.backward}
    for op in joint.backward_ops:
        for value in op.reads:
            producer = joint.values[value].producer
            if producer in block_of:
                assert block_of[producer] >= block_of[op.index]


def options_save_less_and_cost_more(layout: Layout, costs: Costs) -> None:
    for block in layout.blocks:
        sets = save_sets(layout, block, costs.seconds, costs.sizes.values)
        assert sets[0].values == block.saved[0]
        for before, after in itertools.pairwise(sets):
            assert after.bytes < before.bytes
            assert after.seconds >= before.seconds
            assert block.boundary & block.made <= after.values


def test_no_choice_of_values_beats_a_save_set_in_both_bytes_and_seconds() -> None:
    joint = capture(Dag(Recipe((Layer("linear", 0, 1), Layer("add", 0, 2), Layer("linear", 1, 1)), 0, False)), *batch())
    costs = estimated(joint)
    (block,) = (layout := lay_out(joint, [])).blocks
    sets = save_sets(layout, block, costs.seconds, costs.sizes.values)
    assert len(sets) > 2
    candidates = sorted(block.made - layout.held - block.boundary)
    assert len(candidates) < 16
    for count in range(len(candidates) + 1):
        for chosen in itertools.combinations(candidates, count):
            kept = frozenset(chosen) | (block.boundary & block.made)
            size, seconds = priced(layout, costs, kept)
            assert not any(size < known.bytes and seconds < known.seconds * (1 - 1e-9) for known in sets)


def priced(layout: Layout, costs: Costs, kept: frozenset[int]) -> tuple[int, float]:
    """Bytes of what a single block keeps, and seconds of all that its backward then computes again."""
    joint, (block,) = layout.graph, layout.blocks
    missing = {v for index in block.backward for v in joint.ops[index].reads} & (block.made - layout.held) - kept
    again: set[int] = set()
    while missing:
        producer = joint.values[missing.pop()].producer
        assert producer is not None
        if producer not in again:
            again.add(producer)
            missing |= set(joint.ops[producer].again_reads) & (block.made - layout.held) - kept
    return sum(costs.sizes.values[v] for v in kept), sum(costs.seconds[index] for index in again)


class Packed(torch.autograd.Function):
    """A product with a weight that forward and backward unpack for themselves, in two ops."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor) -> Tensor:
        ctx.save_for_backward(packed)
        return x @ (packed.float() * 0.1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (packed,) = ctx.saved_tensors
        return gradient @ (packed.float() * 0.1).t(), None


class Unpacking(nn.Module):
    """Layers whose weights are stored in 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        for number in range(4):
            self.register_buffer(f"packed_{number}", torch.ones(32, 32, dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in range(4):
            x = Packed.apply(x, getattr(self, f"packed_{number}")).tanh()
        return x.square().mean()


def test_what_depends_on_no_gradient_is_computed_in_the_block_that_reads_it() -> None:
    joint = capture(Unpacking(), torch.ones(4, 32))
    layout = lay_out(joint, crossings(joint).cuts())
    block_of = {index: number for number, block in enumerate(layout.blocks) for index in block.backward}
    unpacked = [op for op in joint.backward_ops if op.target in ("aten._to_copy.default", "aten.mul.Tensor")]
    reader = {value: op for op in reversed(joint.backward_ops) for value in op.reads}
    made = [op for op in unpacked if joint.values[op.writes[0]].type == "float32[32, 32]"]
    assert len(made) == 8
    assert {block_of[op.index] for op in made} == {block_of[reader[op.writes[0]].index] for op in made}
    assert len({block_of[op.index] for op in made}) == 4


def test_a_long_lived_value_is_carried() -> None:
    joint = saved("carrier").graph
    crossing = crossings(joint)
    plain, carrying, *_ = carry_levels(joint, crossing, [1.0] * joint.forward_count)
    (carried,) = carrying
    assert joint.values[carried].name == "relu_5"  # the encoder's result
    assert len(crossing.cuts(carrying)) >= len(crossing.cuts(plain)) + 5


def test_masks_and_positions_are_anchors_not_boundaries() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            mask = (y > 0).float() * 2
            for layer in self.layers:
                x = torch.relu(layer(x)) * mask
            return x.square().mean()

    joint = capture(Masked(), *batch())
    layout = lay_out(joint, crossings(joint).cuts())
    mask = next(op for op in joint.forward_ops if op.name == "mul").writes[0]
    assert mask in layout.held
    assert len(layout.blocks) >= 4
    assert all(mask not in block.boundary for block in layout.blocks)


def test_tied_weights_and_accumulated_gradients_keep_their_order() -> None:
    joint = capture(Dag(Recipe((), 0, False)), *batch())
    layout = lay_out(joint, crossings(joint).cuts())
    chain = chain_of(
        add_options(layout, estimated(joint).seconds, estimated(joint).sizes.values), estimated(joint)
    )
    weight_gradients = sum(block.weight_grad_bytes for block in chain.blocks)
    assert weight_gradients == 4 * (8 * 8 + 8)  # one gradient of the shared layer, not one for each use
