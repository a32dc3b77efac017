"""Costs come from the step's real values: budgets hold where workspaces depend on data, and no op refuses a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat
from benchmarks.meter import peak_bytes, storage_peak
from fxremat.cost import measure as measuring
from fxremat.cost import metering
from fxremat.cost.measure import measure
from fxremat.cost.walk import Walk, given_inputs
from fxremat.graphs.captured import Captured
from fxremat.graphs.op_key import op_key
from fxremat.graphs.overwriting import PLACE
from fxremat.settings import Search
from tests.dags import capture
from tests.toys import WIDTH, Loss, Stack, assert_as_plain, record, rows, scalar
from tests.training import same

pytestmark = pytest.mark.usefixtures("torch_ready")
FAST: Any = {"search": Search(seconds=0.0)}


class Layers(nn.Module):
    """A function of the model's layers and inputs."""

    def __init__(self, function: Callable[..., Tensor], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def square(n: int = WIDTH) -> Tensor:
    return rows(n)[:, :n] @ rows(n)[:, :n].T + torch.eye(n)


# --- budgets ----------------------------------------------------------------------------------------------


def slice_assigned(m: Any, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[0] = x[0] * 2
    return y.pow(2).mean() * m.p


PEAKS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "bags of the largest": (
        lambda: Layers(lambda m, i: m.bag(i).pow(2).mean(), bag=nn.EmbeddingBag(50, 32, mode="max")),
        (torch.arange(400).view(40, 10) % 50,),
    ),
    "a slice assigned to": (
        lambda: Layers(slice_assigned, p=nn.Parameter(torch.ones(()))),
        (rows(256),),
    ),
    "solve": (
        lambda: Layers(lambda m, x: torch.linalg.solve(m.p, m.l(x).T).sum(), l=linear(), p=nn.Parameter(square())),
        (rows(),),
    ),
    "fft": (lambda: Layers(lambda m, x: torch.fft.rfft(m.l(x)).abs().mean(), l=linear()), (rows(),)),
    "stft": (
        lambda: Layers(
            lambda m, x: torch.stft(m.l(x), 16, window=torch.ones(16), return_complex=True).abs().mean(), l=linear()
        ),
        (rows(),),
    ),
}


@pytest.mark.parametrize("cost", ["measure", pytest.param("estimate", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", PEAKS)
def test_the_budget_holds(name: str, cost: str) -> None:
    make, given = PEAKS[name]
    for mem in ("min", "100%"):
        torch._dynamo.reset()
        module: Any = fxremat.compile(make(), mem, costs=cost, **FAST)
        module(*given).backward()
        module.zero_grad()
        assert peak_bytes(lambda: module(*given).backward()) <= module.plan.budget  # noqa: B023


def test_the_budget_holds_for_bags_that_were_empty_when_it_was_planned() -> None:
    def bags(m: Any, i: Tensor, offsets: Tensor) -> Tensor:
        return m.bag(i, offsets).pow(2).mean()

    model = Layers(bags, bag=nn.EmbeddingBag(50, 32, mode="max"))
    empty, full = torch.zeros(40, dtype=torch.long), torch.arange(40) * 10
    indices = torch.arange(400) % 50
    module = fxremat.compile(model, "100%", example_inputs=(indices, empty), **FAST)
    module(indices, full).backward()
    module.zero_grad()
    assert peak_bytes(lambda: module(indices, full).backward()) <= module.plan.budget
    assert len(module.fxremat.plans) == 1


def test_the_budget_holds_for_convolutions_of_values_in_two_layouts_at_once() -> None:
    """Equal convolutions of a height and width of 1 take other kernels where other kernels have come before."""

    def both(m: Any, x: Tensor) -> Tensor:
        x = m.last(m.wide(m.first(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return m.again(F.gelu(x) * 2).square().mean()

    wide, again = (nn.Conv2d(64, 64, 7, padding=3, groups=64) for _ in range(2))
    model = Layers(both, first=nn.Linear(64, 64), wide=wide, last=nn.Linear(64, 64), again=again)
    x = torch.randn(2, 1, 1, 64)
    module = fxremat.compile(model, "min", example_inputs=x, **FAST)
    module(x).backward()
    module.zero_grad()
    assert peak_bytes(lambda: module(x).backward()) <= module.plan.budget


def test_convolutions_of_single_pixels_are_measured_in_the_layouts_that_they_have() -> None:
    """In some mix of layouts, which no kernel makes here, a depthwise convolution works as a dense one."""
    layers = nn.Conv2d(3, 120, 1), nn.SiLU(), nn.Conv2d(120, 120, 5, padding=2, groups=120), nn.SiLU()
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(120, 1))
    x = torch.randn(2, 3, 1, 1)
    module = fxremat.compile(model, "100%", example_inputs=x, **FAST)
    for _ in range(2):
        module.zero_grad()
        measured = peak_bytes(lambda: module(x).sum().backward())
    assert measured <= module.plan.predicted_peak <= 1.1 * measured


# --- no refusals ------------------------------------------------------------------------------------------


def in_halves(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(m: Any, *inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return function(m, *inputs)

    return run


TRAINED: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "an expanded input": (
        lambda: Layers(lambda m, x, y: m.l(x * y), l=linear()),
        (rows(), torch.ones(1, WIDTH).expand(128, WIDTH)),
    ),
    "a dropout of everything": (
        lambda: nn.Sequential(linear(), nn.Dropout(1.0), linear()),
        (rows(),),
    ),
    "a batch without rows": (lambda: Stack(depth=2), (torch.zeros(0, WIDTH),)),
    "a parameter without elements": (
        lambda: Layers(lambda m, x: m.l(x).sum() + m.none(x).sum(), l=linear(), none=nn.Linear(WIDTH, 0)),
        (rows(),),
    ),
    "an integer divisor": (
        lambda: Layers(lambda m, x, i: m.l(x) * (100 // i), l=linear()),
        (rows(), torch.arange(1, WIDTH + 1)),
    ),
    "solve": (
        lambda: Layers(lambda m, x: torch.linalg.solve(m.p, m.l(x).T), l=linear(), p=nn.Parameter(square())),
        (rows(),),
    ),
    "slogdet": (
        lambda: Layers(lambda m, x: torch.linalg.slogdet(m.p)[1] * m.l(x), l=linear(), p=nn.Parameter(square())),
        (rows(),),
    ),
    "cholesky of an input": (
        lambda: Layers(lambda m, x: (torch.linalg.cholesky(x) * m.p).sum(), p=nn.Parameter(torch.ones(WIDTH))),
        (square(),),
    ),
    "repeats of a known sum": (
        lambda: Layers(lambda m, x, r: torch.repeat_interleave(m.l(x), r, 0, output_size=16), l=linear()),
        (rows(8), torch.tensor([1, 2, 3, 1, 2, 3, 2, 2])),
    ),
    "masked_scatter": (
        lambda: Layers(lambda m, x, y: m.l(x).masked_scatter(y > 0, m.l(y)), l=linear()),
        (rows(), rows(seed=1)),
    ),
    "convolution and BatchNorm under autocast": (
        lambda: Layers(
            in_halves(lambda m, x: m.norm(m.conv(x.view(8, 4, 16, 8))).float()),
            conv=nn.Conv2d(4, 8, 3),
            norm=nn.BatchNorm2d(8),
        ),
        (rows(),),
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_what_plain_pytorch_trains_is_trained_with_its_bits(name: str) -> None:
    make, given = TRAINED[name]
    assert_as_plain(make, *given, mem="100%")


def test_sparse_gradients() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Layers(
            lambda m, i: m.l(m.e(i)).square().mean(), e=nn.Embedding(50, WIDTH, sparse=True), l=linear()
        )

    words = torch.arange(60) % 50
    plain, module = make(), fxremat.compile(make(), "100%", **FAST)
    for model in (plain, module):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(words).backward()
            optimizer.step()
    assert module.e.weight.grad.is_sparse  # type: ignore[union-attr]
    assert all(same(p, q) for p, q in zip(module.parameters(), plain.parameters(), strict=True))
    module.zero_grad()
    assert peak_bytes(lambda: module(words).backward()) <= module.plan.budget


def test_gradients_taken_inside_of_forward() -> None:
    """A network that a differential equation trains."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

        def forward(self, x: Tensor) -> Tensor:
            u = self.net(x)
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            return (slope[:, 1] - slope[:, 0] * u[:, 0]).square().mean()

    assert_as_plain(Residual, rows()[:, :2].clone().requires_grad_(), mem="100%")


class Swish(torch.autograd.Function):
    """Computes its gradient from what it saved alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * (s * (1 + x * (1 - s)))


def test_a_custom_functions_backward_belongs_to_the_backward() -> None:
    def make() -> nn.Module:
        return Layers(
            lambda m, x: scalar([x := Swish.apply(layer(x)) for layer in m.layers][-1]),
            layers=nn.ModuleList(linear() for _ in range(8)),
        )

    module = assert_as_plain(make, rows())
    joint = module.plan.graph
    assert [op.name for op in joint.forward_ops if joint.nodes[op.index].target is torch.ops.aten.rsub.Scalar] == []
    assert len(module.plan.chain.blocks) > 8
    assert module.plan.minimum < 0.5 * module.plan.keep_all_peak


# --- the walk itself --------------------------------------------------------------------------------------


def walked(joint: Captured, given: tuple[Tensor, ...], order: list[int] | None = None) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}

    def visit(op: Any, call: Any) -> Any:
        result = call()
        items = result if isinstance(result, tuple | list) else [result]
        found.setdefault(op.index, []).append([t.clone() if isinstance(t, Tensor) else t for t in items])
        return result

    with measuring.quiet_world(torch.device("cpu")):
        Walk(joint, given_inputs(joint, given), order or range(len(joint.ops))).run(visit)
    return found


def test_a_walk_computes_what_the_model_does_in_any_order_and_frees_what_is_not_read_again() -> None:
    model = Loss(Stack(dropout=0.0))
    joint = capture(model, rows())
    parameters = list(model.parameters())
    given = tuple(_in_the_graphs_order(joint, [rows(), *parameters]))
    found = walked(joint, given)
    loss = next(op.index for op in reversed(joint.forward_ops) if joint.output_values.intersection(op.writes))
    assert same(found[loss][0][0], model(rows()).detach())
    again = [*range(joint.forward_count), *range(4), *range(joint.forward_count, len(joint.ops))]
    repeated = walked(joint, given, again)
    for index, results in found.items():
        for result in repeated[index]:
            assert all(same(a, b) for a, b in zip(result, results[0], strict=True) if isinstance(a, Tensor))


def _in_the_graphs_order(joint: Captured, tensors: list[Tensor]) -> list[Tensor]:
    """The tensors by shape; those of equal shapes keep their order, as dynamo lifts them."""
    left = list(tensors)
    ordered = []
    for primal in joint.primals:
        found = next(t for t in left if t.shape == primal.meta["val"].shape)
        left = [t for t in left if t is not found]
        ordered.append(found)
    return ordered


def test_measuring_leaves_parameters_inputs_and_buffers_alone() -> None:
    model = Layers(lambda m, x: m.norm(m.l(x)).square().mean(), l=linear(), norm=nn.BatchNorm1d(WIDTH))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = rows()
    fxremat.compile(model, "100%", example_inputs=(x,), **FAST)
    assert all(same(value, before[name]) for name, value in model.state_dict().items())
    assert same(x, rows())
    assert all(p.grad is None for p in model.parameters())


def test_an_op_that_overwrites_is_put_back_where_real_layouts_differ(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Fake tensors agree; the walk sees that the real ones do not."""
    x = torch.randn(1, 49, WIDTH)

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = linear(), linear()

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return (self.second(y.transpose(0, 1)).transpose(0, 1) + y * 2).square().mean()

    joint = capture(Transposed(), x)
    alone = [op.index for op in joint.ops if op.overwrites is not None and _shape(joint, op)[0] == 1]
    assert alone

    class Strided(measuring._Visitor):
        """Sees operands whose dimension of size 1 has another stride than a new result's would have."""

        def _bears_it(self, op: Any, call: Any) -> bool:
            place = joint.nodes[op.index].meta[PLACE]
            operand = call.args[place]
            strides = [1 if size == 1 else step for size, step in zip(operand.shape, operand.stride(), strict=True)]
            args = [*call.args]
            args[place] = operand.as_strided(operand.shape, strides)
            return super()._bears_it(op, measuring.Call(call.target, tuple(args), call.kwargs))

    monkeypatch.setattr(measuring, "_Visitor", Strided)
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path))
    before = str(joint.module.graph)
    found = measure(joint, tuple(torch.randn(p.meta["val"].shape) for p in joint.primals))
    assert set(alone) <= found.fresh
    assert str(joint.module.graph) == before
    assert alone == [op.index for op in joint.ops if op.overwrites is not None and _shape(joint, op)[0] == 1]


def _shape(joint: Captured, op: Any) -> torch.Size:
    shape: torch.Size = joint.nodes[op.index].meta["val"].shape
    return shape


def test_what_makes_a_new_result_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path))

    def joint() -> Captured:
        torch._dynamo.reset()
        return capture(Loss(Stack(dropout=0.0)), rows())

    first = joint()
    candidate = next(op.index for op in first.ops if op.overwrites is not None)
    original = measuring._Visitor._bears_it

    def differs(self: Any, op: Any, call: Any) -> bool:
        return op.index != candidate and original(self, op, call)

    given = tuple(torch.randn(p.meta["val"].shape) for p in first.primals)
    monkeypatch.setattr(measuring._Visitor, "_bears_it", differs)
    found = measure(first, given)
    monkeypatch.setattr(measuring, "_walked", None)
    again = measure(joint(), given)
    assert again.fresh == found.fresh == {candidate}


def test_planning_inside_of_a_profiler_leaves_the_session_alone() -> None:
    from torch.profiler import ProfilerActivity, profile

    module = fxremat.compile(Loss(Stack(depth=2)), "80%", **FAST)
    outside = fxremat.compile(Loss(Stack(depth=2)), "80%", **FAST)
    outside(rows()).backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as session:
        module(rows()).backward()
        with torch.profiler.record_function("mine"):
            rows() @ rows().T
    assert "mine" in {event.key for event in session.key_averages()}
    assert module.plan.predicted_peak == outside.plan.predicted_peak


def test_keys_tell_subgraphs_devices_and_parts_of_storages_apart() -> None:
    whole, part = torch.zeros(4, 8), torch.zeros(16, 8)[:4]

    def key(x: Tensor) -> str:
        graph = torch.fx.Graph()
        node = graph.placeholder("x")
        node.meta["val"] = x
        return op_key(graph.call_function(torch.ops.aten.exp.default, (node,)))

    keys = [whole, part, torch.zeros(8, 4).T, whole.to("meta"), torch.zeros(4, 8, dtype=torch.cfloat).conj()]
    assert len({key(x) for x in keys}) == len(keys)
    assert key(whole) == key(torch.ones(4, 8))


def test_small_budgets_are_measured_in_an_order_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[list[int]] = []
    original = Walk.run

    def spied(self: Walk, *given: Any, **options: Any) -> Any:
        orders.append(list(self.order))
        return original(self, *given, **options)

    monkeypatch.setattr(Walk, "run", spied)
    monkeypatch.setattr(measuring, "_missing", lambda joint, cache, fresh: [0])
    model = Loss(Stack(depth=12))
    fxremat.plan(model, (rows(1024),), mem="100%", **FAST)
    fxremat.plan(model, (rows(1024),), mem="30%", compress=False, **FAST)
    everything, _, least, _ = orders  # while the step is captured, and while it is planned
    assert everything == sorted(set(everything))
    assert sorted(set(least)) == everything
    assert len(least) > len(everything)


def test_collectives_are_measured_equally_often_and_never_from_the_cache() -> None:
    counts = []
    for _ in range(2):
        calls: list[int] = []
        metering.seconds_of(lambda: calls.append(1), torch.device("cpu"), fixed=True)  # noqa: B023
        counts.append(len(calls))
    assert counts == [1 + metering.LEAST_RUNS] * 2


def test_what_a_walk_has_allocated_is_all_but_the_inputs_of_the_step() -> None:
    model = nn.Sequential(linear(), nn.GELU(), linear())
    joint = capture(model, rows(2))
    given = {joint.value_of[node]: torch.rand(node.meta["val"].shape) for node in joint.primals}
    walk, found = Walk(joint, given, range(len(joint.ops))), list[int]()

    def run(_: Any, call: Any) -> Any:
        found.append(walk.allocated(call.args))
        return call()

    peak = storage_peak(lambda: walk.run(run))
    assert found[0] == 0  # the first op reads inputs alone
    assert 0 < max(found) <= peak


def test_the_first_step_has_the_bits_of_the_second_model() -> None:
    """Measuring on real values comes between the capture and the first step, and must not show."""
    torch.manual_seed(0)
    plain = Stack()
    torch.manual_seed(0)
    module = fxremat.compile(Stack(), "60%", **FAST)
    first, theirs = record(module, (rows(),), {}), record(plain, (rows(),), {})
    assert same(first.output, theirs.output)
    assert torch.equal(first.rng, theirs.rng)


def test_no_warning_for_ordinary_models() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxremat.plan(Loss(Stack()), (rows(),), mem="60%", **FAST)
        assert F.relu(torch.ones(1)).item() == 1
