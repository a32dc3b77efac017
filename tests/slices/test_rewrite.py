"""Joint graphs whose regions run in slices: what stays as it was, which regions are equal, and what is said of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from benchmarks.capture import capture
from benchmarks.meter import storage_peak
from fxremat.cost.devices import Device
from fxremat.cost.estimate import estimate
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.graphs.captured import Captured
from fxremat.graphs.nodes import storage_bytes
from fxremat.options import options_of
from fxremat.planning.surveys import estimated_least
from fxremat.search.executions import keep_all_peak
from fxremat.settings import Search, Slices
from fxremat.slices.body import Sliced
from fxremat.slices.rewrite import SlicedJoint, Slicing, largest_need
from fxremat.slices.variants import least_of_all, variants
from fxremat.step.step_graph import Kind
from tests.slices.models import EVERYDAY, BatchNormed, Block, Example, features

pytestmark = pytest.mark.usefixtures("torch_ready")

QUICK: Any = {"search": Search(seconds=0.0)}


def joint_of(example: Example) -> Captured:
    model, inputs = example.made()
    return capture(model, *inputs)


def in_slices(name: str, **options: Any) -> SlicedJoint:
    """An example of everyday, cut until no op needs more than an eighth of what the largest did."""
    joint = joint_of(EVERYDAY[name])
    return Slicing(target=largest_need(joint) // 8, **options).of(joint)


def loops(found: SlicedJoint) -> list[Sliced]:
    """The ops that run a region in slices, in order."""
    return [node.target for node in found.joint.nodes if isinstance(node.target, Sliced)]


def text_of(joint: Captured) -> str:
    """All that a graph says: nodes, arguments, and the shapes and layouts of values."""
    shown = [
        (node.format_node(), [(t.shape, t.stride(), t.dtype) for t in tensors(node.meta.get("val"))])
        for node in joint.module.graph.nodes
    ]
    return repr(shown)


def tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, tuple | list) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]


@pytest.mark.parametrize("name", ["ignored", "class weights", "dropout", "equal layers", "images"])
@pytest.mark.parametrize("inside", [True, False])
def test_the_given_joint_graph_is_not_changed(name: str, inside: bool) -> None:
    joint = joint_of(EVERYDAY[name])
    before, nodes = text_of(joint), [id(node) for node in joint.module.graph.nodes]
    metas = [dict(node.meta) for node in joint.module.graph.nodes]
    found = Slicing(target=largest_need(joint) // 8, inside=inside).of(joint)
    assert found.regions
    assert text_of(joint) == before
    assert [id(node) for node in joint.module.graph.nodes] == nodes
    assert all(
        node.meta.keys() == meta.keys() and all(node.meta[key] is meta[key] for key in meta)
        for node, meta in zip(joint.module.graph.nodes, metas, strict=True)
    )
    joint.module.graph.lint()
    found.joint.module.graph.lint()


def test_no_op_needs_more_than_the_target_where_all_can_be_cut() -> None:
    joint = joint_of(EVERYDAY["ignored"])
    target = largest_need(joint) // 8
    assert Slicing(target=target).of(joint).floor <= target
    assert Slicing(target=largest_need(joint)).of(joint).regions == ()


def test_no_region_has_more_slices_than_asked_for() -> None:
    for most in (2, 3):
        assert {region.parts for region in in_slices("equal layers", most=most).regions} <= set(range(2, most + 1))


def test_gradients_made_in_the_forward_are_one_loop_and_others_two() -> None:
    inside, again = (in_slices("ignored", inside=inside) for inside in (True, False))
    assert [region.inside for region in inside.regions] == [True]
    assert [region.inside for region in again.regions] == [False]
    assert (len(loops(inside)), len(loops(again))) == (1, 2)
    assert not next(op for op in inside.joint.ops if op.kind is Kind.SLICED).backward


class Apart(nn.Module):
    """Two equal layers between which attention sees a whole sequence, of which there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(32) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_equal_layers_have_equal_loops() -> None:
    joint = joint_of(Example(make=Apart, inputs=features(1, 256, 32)))
    found = Slicing(target=largest_need(joint) // 3).of(joint)
    made = loops(found)
    equal = [(one, other) for one in made for other in made if one is not other and one == other]
    assert equal
    assert all(one.digest == other.digest and hash(one) == hash(other) for one, other in equal)
    assert len({loop.digest for loop in made}) == len(set(made)) < len(made)


def test_loops_of_other_sizes_or_code_are_not_equal() -> None:
    first = loops(in_slices("equal layers"))
    fewer = loops(in_slices("equal layers", most=2))
    other = loops(in_slices("ignored"))
    assert {one.digest for one in first}.isdisjoint({one.digest for one in (*fewer, *other)})


DIGESTS = """
import torch
from tests.slices.test_rewrite import in_slices, loops
print(*(loop.digest for name in ("ignored", "equal layers") for loop in loops(in_slices(name))))
"""


@pytest.mark.long
def test_a_digest_is_the_same_in_another_process() -> None:
    here = [loop.digest for name in ("ignored", "equal layers") for loop in loops(in_slices(name))]
    ran = subprocess.run([sys.executable, "-c", DIGESTS], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == here


def test_gradients_of_float16_are_never_made_in_the_forward() -> None:
    """They would be made for a loss of 1, which loss scaling is there to avoid."""
    example = EVERYDAY["bf16"]
    narrow = Example(make=example.make, inputs=example.inputs, dtype=torch.float16)
    for model, inside in ((example, True), (narrow, False)):
        joint = joint_of(model)
        found = Slicing(target=largest_need(joint) // 8, inside=True).of(joint)
        assert [region.inside for region in found.regions] == [inside]


def as_real(value: torch.Tensor) -> torch.Tensor:
    """Numbers of the size, layout and type of a fake tensor."""
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return made.normal_() if made.is_floating_point() else made.fill_(1)


@pytest.mark.parametrize("name", ["ignored", "dropout", "equal layers", "bf16"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_loop_takes_no_more_bytes_than_it_says_and_not_many_fewer(name: str, inside: bool) -> None:
    """Its outputs and its workspace, without what kernels take inside of themselves."""
    found = in_slices(name, inside=inside, wide=True)
    for node in found.joint.nodes:
        loop = node.target
        if not isinstance(loop, Sliced):
            continue
        given = [as_real(item.meta["val"]) for item in node.args]  # type: ignore[union-attr]
        outputs = sum(map(storage_bytes, tensors(node.meta["val"])))
        loop(*given)
        peak = storage_peak(lambda loop=loop, given=given: loop(*given))  # type: ignore[misc]
        said = outputs + loop.workspace
        assert peak == said


def test_sums_of_half_precision_are_wide_where_asked() -> None:
    for wide in (True, False):
        (region,) = in_slices("bf16", wide=wide).regions
        assert region.wide is wide
        assert region.sums


def test_ways_to_slice_are_each_another_one() -> None:
    joint = joint_of(EVERYDAY["dropout"])
    found = list(variants(joint, largest_need(joint) // 4, most=1 << 20, reduce=None))
    ops = [tuple(op.target for op in one.joint.ops) for one in found]
    assert len(set(ops)) == len(ops) >= 3
    assert found[0].regions[0].inside
    assert not found[-1].regions[0].inside
    parts = [one.regions[0].parts for one in found]
    assert parts[-1] == max(parts)
    assert parts[-1] == least_of_all(joint, most=1 << 20, reduce=None).regions[0].parts


# What is said.


def too_small(
    name_or_model: str | nn.Module, inputs: tuple[torch.Tensor, ...] = (), **options: Any
) -> BudgetTooSmall:
    model: Any = name_or_model
    if isinstance(name_or_model, str):
        model, inputs = EVERYDAY[name_or_model].made()
    with pytest.raises(BudgetTooSmall) as caught:
        fxremat.compile(model, example_inputs=inputs, **QUICK, **options)
    return caught.value


def test_a_batch_norm_that_blocks_a_region_is_named() -> None:
    error = too_small(BatchNormed(), (torch.randn(16, 3, 16, 16),), mem=1, slices=True)
    assert "reads statistics of the whole batch (BatchNorm)" in str(error)
    assert "not in slices: " in str(error)


def test_without_slices_the_error_tells_what_they_would_do_with_and_they_do() -> None:
    error = too_small("dropout", mem="40%")
    assert "with slices=True, " in error.note
    assert "equal up to rounding" in error.note
    told = int(error.note.split("with slices=True, ")[1].split(" bytes")[0])
    assert told < error.minimum
    model, inputs = EVERYDAY["dropout"].made()
    compiled = fxremat.compile(model, mem=told, slices=True, example_inputs=inputs, **QUICK)
    assert compiled.plan.slices
    assert compiled.plan.predicted_peak <= told


def test_keeping_everything_takes_the_same_time_with_slices_and_without() -> None:
    """Compare with the step as captured where that was timed, and not with the sliced one."""
    model, inputs = EVERYDAY["dropout"].made()
    whole = fxremat.plan(model, inputs, mem="100%", **QUICK)
    sliced = fxremat.plan(model, inputs, mem="40%", slices=True, **QUICK)
    assert sliced.slices
    assert sliced.keep_all_time == whole.keep_all_time


def test_what_is_told_of_slices_keeps_what_is_never_to_run_again() -> None:
    layers = (layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.GELU()))
    joint = capture(nn.Sequential(*layers), torch.ones(64, 8))
    costs = estimate(joint, Device.named("cpu"))
    least = estimated_least(joint, costs, options_of(mem="60%"))
    kept = estimated_least(joint, costs, options_of(mem="60%", never_again="*"))
    assert least < kept == keep_all_peak(joint, costs)


def test_the_least_budget_is_found_without_advice_on_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[object]()
    monkeypatch.setattr("fxremat.planning.what_slices_buy", lambda *given: asked.append(given) or "")
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    assert fxremat.plan(model, (x,), mem="min").budget
    assert not asked
    too_small(model, (x,), mem=1)
    assert len(asked) == 1


def test_the_error_says_nothing_of_slices_where_they_do_not_help() -> None:
    error = too_small(nn.Sequential(nn.Linear(4, 4)), (torch.randn(2, 4),), mem=1)
    assert "slices" not in str(error)


def test_the_least_budget_with_slices_works() -> None:
    error = too_small("dropout", mem=1, slices=True)
    model, inputs = EVERYDAY["dropout"].made()
    compiled = fxremat.compile(model, mem=error.minimum, slices=True, example_inputs=inputs, **QUICK)
    assert compiled.plan.predicted_peak <= error.minimum == compiled.plan.minimum


@pytest.mark.parametrize(
    ("slices", "said"),
    [
        (lambda: 2, "slices is 2; it is True, False, or a Slices, such as Slices(max_parts=8)"),
        (lambda: "yes", "slices is 'yes'; it is True, False, or a Slices, such as Slices(max_parts=8)"),
        (lambda: Slices(max_parts=1), "Slices: max_parts is 1; it is None, or 2 or more"),
        (lambda: Slices(max_parts=True), "Slices: max_parts is True; it is None, or 2 or more"),
        (lambda: Slices(reduce_dtype="x"), 'Slices: reduce_dtype is \'x\'; it is None, torch.float32 or "same"'),
        (lambda: Slices(drop_outputs=1), "Slices: drop_outputs is 1; it is True or False"),
    ],
)
def test_options_that_make_no_sense_are_refused(slices: Callable[[], Any], said: str) -> None:
    with pytest.raises(FxrematError) as caught:
        fxremat.compile(nn.Linear(2, 2), mem="50%", slices=slices())
    assert str(caught.value) == said


def test_a_plan_tells_of_its_regions() -> None:
    model, inputs = EVERYDAY["equal layers"].made()
    plan = fxremat.compile(model, mem="40%", slices=True, example_inputs=inputs, **QUICK).plan
    lines = [line.split() for line in str(plan).splitlines()]
    assert any(line[:2] == ["in", "slices"] for line in lines)
    text = " ".join(word for line in lines for word in line)
    assert "added up over the slices" in text
    region = plan.slices[0]
    assert f"{len(region.ops)} ops in {region.parts} slices of {region.rows} rows" in text
