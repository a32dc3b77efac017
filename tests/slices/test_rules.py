"""Every rule for slices against the whole op on real tensors, and against what DTensor says of the same placements."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from fxremat.slices import rules
from fxremat.slices.body import Region, Sliced
from fxremat.slices.labels import SUM, WHOLE, Mark, Part, place
from fxremat.slices.rules import Way, name_of, outputs_of, tensor_inputs, ways, why_not
from fxremat.torch_private import torch_release
from tests.draws import everyday
from tests.slices.cases import CASES, FOR_A_GPU, HALF, NEVER, Case, aten, mask, real, whole

pytestmark = pytest.mark.usefixtures("torch_ready")

PARTS = {2: (2,), 3: (2,), 5: (2, 3)}  # slices for so many rows, three for others; uneven ones for most
LARGEST = everyday(15, least=6)  # rows of an axis, where a case does not say which to try
UNSET = {"empty", "empty_like"}  # ops whose result may be any numbers


@dataclass(frozen=True)
class OneOp:
    """A graph of one op: as `make_fx` would trace it, but composite ops stay as they are."""

    node: fx.Node
    inputs: list[fx.Node]
    items: list[fx.Node]  # its results, one by one
    real: list[torch.Tensor]  # inputs
    results: list[Any]


def one_op(case: Case) -> OneOp:
    mode, graph = FakeTensorMode(), fx.Graph()
    given: dict[int, tuple[torch.Tensor, fx.Node]] = {}

    def placeholder(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in given:
            given[id(leaf)] = leaf, graph.placeholder(f"x{len(given)}")
            given[id(leaf)][1].meta["val"] = mode.from_tensor(leaf)
        return given[id(leaf)][1]

    args, kwargs = tree_map(placeholder, (case.args, dict(case.kwargs)))
    node = graph.call_function(case.op, args, kwargs)
    with mode:
        shown, options = fx.node.map_arg((args, kwargs), lambda parent: parent.meta["val"])
        node.meta["val"] = case.op(*shown, **options)
    result, items = case.op(*case.args, **case.kwargs), [node]
    if not isinstance(result, torch.Tensor):
        items = [graph.call_function(operator.getitem, (node, number)) for number in range(len(result))]
        for item, tensor in zip(items, outputs_of(node), strict=True):
            item.meta["val"] = tensor
    results = [result] if isinstance(result, torch.Tensor) else list(result)
    return OneOp(node, [n for _, n in given.values()], items, [t for t, _ in given.values()], results)


def in_slices(one: OneOp, way: Way, count: int, parts: int, *, wide: bool = False) -> list[Any]:
    """The results of an op that runs in slices; None where the op has none."""
    made = [item for item in one.items if isinstance(item.meta["val"], torch.Tensor)]
    labels: dict[fx.Node, Any] = {**way.reads, **dict(zip(one.items, way.writes, strict=True))}
    inputs, values = [*one.inputs], [*one.real]
    if made != [one.node]:
        labels[one.node] = way.writes
    if not inputs:  # an op that reads nothing stands beside others that do
        inputs, values = [one.node.graph.placeholder("other")], [real(1)]
        with one.items[0].meta["val"].fake_mode:
            inputs[0].meta["val"] = torch.empty(1)
    steps = tuple(dict.fromkeys([one.node, *made]))
    region = Region(
        inputs=tuple(inputs),
        steps=steps,
        outputs=tuple(made),
        labels=labels,
        count=count,
        parts=parts,
        wide=wide,
    )
    results = iter(Sliced(region)(*values))
    return [next(results) if item in made else None for item in one.items]


def counts_of(case: Case, one: OneOp) -> list[int]:
    """Every number of rows in which a group of dimensions of an input or a result can be cut."""
    shapes = [t.shape for t in [*one.real, *one.results] if isinstance(t, torch.Tensor)]
    groups = {
        math.prod(s[dim:end]) for s in shapes for dim in range(len(s)) for end in range(dim + 1, len(s) + 1)
    }
    found = {rows for size in groups for rows in range(2, min(size, LARGEST) + 1) if size % rows == 0}
    return sorted({*(case.counts or found), *case.ways})


def text(way: Way, one: OneOp) -> str:
    def shown(part: Part) -> str:
        return part.value if isinstance(part, Mark) else str(part)

    reads = " ".join(shown(way.reads[node]) for node in one.inputs)
    return f"{reads} -> {' '.join(map(shown, way.writes))}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way_makes_what_the_whole_op_makes(case: Case) -> None:
    if torch_release() < (2, 13) and case.op is aten._scaled_dot_product_flash_attention_for_cpu.default:
        pytest.skip("fake tensors of torch 2.11 show sums of exponentials of doubles in single precision")
    one = one_op(case)
    before = [tensor.clone() for tensor in one.real]
    tried = 0
    for count in counts_of(case, one):
        found = ways(one.node, count)
        if count in case.ways:
            assert {text(way, one) for way in found} == case.ways[count], count
        for way in found:
            assert len(way.writes) == len(one.items)
            for parts in PARTS.get(count, (3,)):
                tried += 1
                check(case, one, in_slices(one, way, count, parts))
    assert tried or set().union(*case.ways.values()) == set()
    for tensor, old in zip(one.real, before, strict=True):
        assert torch.equal(tensor, old)


def check(case: Case, one: OneOp, made: list[Any]) -> None:
    for mine, right in zip(made, one.results, strict=True):
        if mine is None:
            continue
        assert (mine.shape, mine.dtype) == (right.shape, right.dtype)
        if name_of(one.node) not in UNSET:
            exact = mine.dtype == torch.float64
            tolerances = {"rtol": 1e-11, "atol": 1e-12} if exact else {}
            torch.testing.assert_close(mine, right, **tolerances)


@pytest.mark.parametrize(("case", "reason"), NEVER, ids=str)
def test_ops_that_need_all_are_never_cut_and_say_why(case: Case, reason: str) -> None:
    one = one_op(case)
    assert all(ways(one.node, count) == [] for count in (2, 3, 4, 12))
    assert why_not(one.node).endswith(reason) or reason in why_not(one.node)
    assert one.node.name in why_not(one.node)


def test_every_rule_has_a_case() -> None:
    known, for_a_gpu = {*rules._RULES, *rules.POINTWISE}, {case.op._schema.name[6:] for case in FOR_A_GPU}
    tried = {case.op._schema.name.removeprefix("aten::") for case in CASES}
    assert known - tried == for_a_gpu


def shown_alone(case: Case) -> OneOp:
    """A graph of one op for which nothing is run: its inputs are fakes on a GPU, made from tensors on the CPU."""
    mode, graph, inputs = FakeTensorMode(), fx.Graph(), list[fx.Node]()

    def placeholder(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        inputs.append(graph.placeholder("x"))
        with mode:
            inputs[-1].meta["val"] = torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="cuda")
        return inputs[-1]

    node = graph.call_function(case.op, *tree_map(placeholder, (case.args, dict(case.kwargs))))
    with mode:
        shown, options = fx.node.map_arg((node.args, node.kwargs), lambda parent: parent.meta["val"])
        node.meta["val"] = case.op(*shown, **options)
    return OneOp(node, inputs, [], [], [])


@pytest.mark.parametrize("case", FOR_A_GPU, ids=str)
def test_ops_without_a_kernel_for_the_cpu_are_cut_as_stated(case: Case) -> None:
    """And as DTensor says where it can: what they compute is not compared."""
    one = shown_alone(case)
    for count, expected in case.ways.items():
        found = ways(one.node, count)
        assert {text(way, one) for way in found} == expected
        for way in found:
            assert all(ours == theirs for ours, theirs in asked(one, way, count))


@torch.library.custom_op("fxremat_tests::mm", mutates_args=())
def mm_of_others(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.flip(0) @ b


@mm_of_others.register_fake
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def test_an_op_of_another_library_is_not_taken_for_the_one_of_its_name() -> None:
    one = one_op(Case(torch.ops.fxremat_tests.mm.default, (real(4, 3), real(3, 2))))
    assert ways(one.node, 4) == []
    assert why_not(one.node).endswith("mm has no rule for slices")


def pointwise() -> Iterator[torch._ops.OpOverload]:
    """The ops that torch calls pointwise, and of which all that must be given is tensors."""
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            op = getattr(packet, overload)
            arguments = [a for a in op._schema.arguments if not a.has_default_value()]
            tensors = bool(arguments) and all(str(a.type) == "Tensor" for a in arguments)
            if torch.Tag.pointwise in op.tags and not op._schema.is_mutable and tensors:
                yield op


def on_some_type(op: torch._ops.OpOverload) -> Case | None:
    """The op on tensors of the first type that it takes, which are broadcast; None where there is none."""
    many = sum(not a.has_default_value() for a in op._schema.arguments)
    for draw in (lambda *shape: real(*shape).abs(), lambda *shape: whole(4, *shape), mask):
        args = (draw(2, 3, 4), *(draw(3, 1) for _ in range(many - 1)))
        try:
            if isinstance(op(*args), torch.Tensor):
                return Case(op, args)
        except (RuntimeError, NotImplementedError):
            continue
    return None


def test_ops_that_torch_calls_pointwise_are() -> None:
    tried = set()
    for op in pointwise():
        case = on_some_type(op)
        if case is None:
            continue
        one = one_op(case)
        for way in ways(one.node, 3):
            (mine,) = in_slices(one, way, 3, 2)
            torch.testing.assert_close(mine, one.results[0], equal_nan=True, rtol=1e-9, atol=0)
            tried.add(name_of(one.node))
    assert len(tried) > 100


@pytest.mark.parametrize(
    "case",
    [
        Case(aten.mm.default, (real(3, 64, dtype=HALF), real(64, 5, dtype=HALF))),
        Case(aten.sum.dim_IntList, (real(64, 99, dtype=HALF), [0])),
    ],
    ids=str,
)
def test_sums_of_half_precision_are_added_up_in_float32_where_asked(case: Case) -> None:
    one = one_op(case)
    exact = case.op(*(x.double() if isinstance(x, torch.Tensor) else x for x in case.args))
    (way,) = (way for way in ways(one.node, 64) if way.writes == (SUM,))
    wide, narrow = (in_slices(one, way, 64, 64, wide=wide)[0] for wide in (True, False))
    assert wide.dtype == narrow.dtype == HALF
    assert (wide - exact).abs().mean() < (narrow - exact).abs().mean()
    torch.testing.assert_close(wide.double(), exact, rtol=1e-2, atol=0.1)


# DTensor as an oracle.


def propagated(node: fx.Node, rows: int, placements: dict[fx.Node, Any]) -> list[Any]:
    """The placements that DTensor gives the outputs of an op for these of its inputs; None where it gives none.

    The only place that uses private names of DTensor, which need no process group: as torch 2.13 has them.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._op_schema import OpSchema, RuntimeSchemaInfo

    nothing = [None for _ in outputs_of(node)]
    mesh = DeviceMesh("cpu", torch.arange(rows), _init_backend=False, _rank=0)
    propagator = DTensor._op_dispatcher.sharding_propagator

    def spec(parent: fx.Node) -> DTensorSpec:
        value = parent.meta["val"]
        return DTensorSpec(mesh, (placements[parent],), TensorMeta(value.shape, value.stride(), value.dtype))

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), spec)
    info = propagator.op_to_schema_info.get(node.target, RuntimeSchemaInfo(needs_pytree=True))
    schema = OpSchema(node.target, tuple(args), dict(kwargs), info)
    try:
        found = propagator.propagate_op_sharding_non_cached(schema)
    except Exception:  # of many kinds, none of which says more than that this cannot be asked
        return nothing
    other = found.redistribute_schema  # that of a view has the inputs as they are, and the size of a shard
    if found.output_spec is None or (other is not None and other.args_spec != schema.args_spec):
        return nothing
    specs = found.output_spec if isinstance(found.output_spec, tuple | list) else [found.output_spec]
    return [None if each is None else each.placements[0] for each in specs]


def placement(shape: torch.Size, part: Part, count: int) -> Any:
    """The same as a placement of DTensor; None where that has none: rows of several dimensions or elements."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if isinstance(part, Mark):
        return Partial("sum") if part is SUM else Replicate()
    at = place(shape, part, count)
    assert at is not None
    return Shard(at.dim) if (at.dims, at.each) == (1, 1) else None


def asked(one: OneOp, way: Way, count: int) -> list[tuple[Any, Any]]:
    """Our placement of each output and DTensor's; empty where one of the two cannot say.

    An input that is whole, as the size of an `expand` is, gives DTensor no reason to cut an output.
    """
    reads = {n: placement(n.meta["val"].shape, way.reads[n], count) for n in tensor_inputs(one.node)}
    outputs = outputs_of(one.node)
    writes = [
        None if t is None else placement(t.shape, p, count) for t, p in zip(outputs, way.writes, strict=True)
    ]
    cannot = any(p is None and t is not None for p, t in zip(writes, outputs, strict=True))
    if cannot or None in reads.values() or all(part is WHOLE for part in way.reads.values()):
        return []
    theirs = propagated(one.node, count, reads)
    return [pair for pair in zip(writes, theirs, strict=True) if None not in pair]


# Ops of which DTensor must say the same for some way at least.
COMPARED = """
    mm addmm bmm baddbmm convolution convolution_backward embedding embedding_dense_backward sum add where mean
    _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm native_layer_norm_backward
    native_group_norm nll_loss_forward nll_loss_backward gather scatter_add cat stack view _unsafe_view squeeze
    unsqueeze expand permute transpose t slice slice_backward split select select_backward index_select topk sort
    amax cumsum
"""


def dtensor_errs(case: Case) -> bool:
    """Tell whether DTensor reads an argument unlike torch (2.13): `[]` as no dimension, or a negative one."""
    if case.op is aten.stack.default and torch_release() < (2, 13):
        return case.args[1:] == (-1,)
    if case.op is aten.sum.dim_IntList:
        return case.args[1] == []
    return case.op is aten.select_backward.default and case.args[2] < 0


@pytest.mark.long
def test_dtensor_says_the_same() -> None:
    agreed, others = set[str](), list[str]()
    for case in CASES:
        if dtensor_errs(case):
            continue
        one = one_op(case)
        for count in counts_of(case, one):
            for way in ways(one.node, count):
                pairs = asked(one, way, count)
                theirs = [their for _, their in pairs]
                if any(mine != their for mine, their in pairs):
                    others.append(f"{case} in {count}: {text(way, one)}, DTensor: {theirs}")
                elif pairs:
                    agreed.add(name_of(one.node))
    assert others == []
    unknown = {"native_group_norm"} if torch_release() < (2, 13) else set()
    assert agreed >= set(COMPARED.split()) - unknown
