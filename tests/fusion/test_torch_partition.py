"""torch's own partition as a program: torch.compile's kernels, the captured numbers, and nothing random runs twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxremat
from benchmarks.capture import joint_graph
from benchmarks.traffic import compile_phases, moved
from fxremat.fusion import torch_partition
from fxremat.fusion.joint import fused_program
from fxremat.fusion.torch_partition import TorchPartition, TwoPhases
from fxremat.graphs.captured import Captured, read_joint
from fxremat.options import Options
from fxremat.passes.pipelines import PIPELINES, normalize
from fxremat.planning import compiled
from fxremat.planning.compiled import kernels_of
from fxremat.planning.whole_graphs import WholeGraphs
from fxremat.search.survey import survey
from fxremat.settings import Inductor
from fxremat.step.program import Role
from tests.dags import estimated
from tests.fusion.test_compiled import batch, gradients, largest_error, model_of
from tests.fusion.test_min_cut import Layers
from tests.toys import Words, tokens

pytestmark = pytest.mark.usefixtures("torch_ready")
WHOLE = Inductor(random="inductor", whole_graphs=True)


def captured(model: nn.Module, given: tuple[Tensor, ...]) -> Captured:
    module, outputs = joint_graph(model, *given)
    return read_joint(normalize(module, PIPELINES["inductor from seeds"]), outputs)


def partition_of(graph: Captured, once: frozenset[int] = frozenset()) -> TorchPartition:
    return TorchPartition(graph, survey(graph, estimated(graph), effort=0.0).keep_all.order(), once)


def phases_of(partition: TorchPartition, share: float) -> TwoPhases:
    phases = partition.phases(share)
    assert phases is not None
    return phases


@pytest.fixture
def others_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that are not compiled whole take ages."""
    monkeypatch.setattr(compiled, "CLEARLY", 1e9)
    monkeypatch.setattr(compiled._Search, "_seconds", lambda _, found, single: [1e9] * len([*found, *single]))


DROPOUT = "convolutions, normalizations, attention, dropout"
MODELS: dict[str, Any] = {
    DROPOUT: lambda: (model_of(dropout=0.5, layers=2), batch()),
    "words": lambda: (Words(), tokens()),
    "layers": lambda: (Layers(), (torch.randn(512, 32),)),
}


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("words", 0.0),
        pytest.param("layers", 0.0, marks=pytest.mark.long),
        pytest.param(DROPOUT, 0.01, marks=pytest.mark.long),  # statistics are computed by halves
    ],
)
def test_kernels_move_the_bytes_of_those_of_torch_compile(name: str, off: float) -> None:
    model, given = MODELS[name]()
    stock = torch.compile(model, dynamic=False)
    theirs = moved(lambda: stock(*given).backward())
    phases = phases_of(partition_of(captured(*MODELS[name]())), 1.0)
    ours = moved(lambda: compile_phases(phases.order.program(), phases.units, phases.emitted))
    assert ours == pytest.approx(theirs, rel=off, abs=0)


@pytest.mark.parametrize("share", [1.0, 0.1])
@pytest.mark.parametrize("name", MODELS)
def test_the_emitted_graph_computes_what_was_captured(name: str, share: float) -> None:
    graph = captured(*MODELS[name]())
    before = graph.module.print_readable(print_output=False)
    phases = phases_of(partition_of(graph), share)
    assert graph.module.print_readable(print_output=False) == before
    wanted, found = (outputs_of(module, graph) for module in (graph.module, phases.emitted))
    assert len(found) == len(wanted) > 0
    for mine, its in zip(found, wanted, strict=True):
        assert (mine.double() - its.double()).norm() <= 1e-4 * its.double().norm() + 1e-3


def outputs_of(module: fx.GraphModule, graph: Captured) -> list[Tensor]:
    """The tensors that a joint graph returns, of inputs from a seed."""
    torch.manual_seed(1)
    bounds = {torch.float32: lambda shape: torch.randn(shape), torch.int64: lambda shape: torch.randint(0, 4, shape)}
    shown = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    given = [bounds[x.dtype](tuple(x.shape)).abs().as_strided(x.shape, x.stride()) for x in shown]
    found = fx.Interpreter(module).run(*given, enable_io_processing=False)
    return [one for one in found if isinstance(one, Tensor)]


def test_less_is_saved_of_a_smaller_share_and_the_order_recomputes_more() -> None:
    graph = captured(*MODELS["words"]())
    partition = partition_of(graph)
    ways = [phases_of(partition, share) for share in (1.0, 0.5, 0.1)]
    saved = [way.saved for way in ways]
    assert saved == sorted(saved, reverse=True)
    assert saved[-1] < saved[0]
    ran = [len(way.order.ops) for way in ways]
    assert ran == sorted(ran)


def test_what_must_not_run_again_does_not() -> None:
    graph = captured(*MODELS[DROPOUT]())
    phases = phases_of(partition_of(graph), 0.05)
    again = {step.op for step in phases.order.program().executions if step.role is Role.RECOMPUTE}
    assert again
    assert not any(graph.ops[op].random for op in again if op is not None)
    once = frozenset(op for op in again if op is not None and not graph.ops[op].target.startswith("fxremat"))
    kept = phases_of(partition_of(graph, once), 0.05)
    assert once.isdisjoint(step.op for step in kept.order.program().executions if step.role is Role.RECOMPUTE)


def test_a_graph_that_does_not_tell_what_is_random_is_not_partitioned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch_partition, "_origin", lambda _: "")
    assert partition_of(captured(*MODELS[DROPOUT]())).phases() is None
    assert "seeds_default must not run twice" in caplog.text


def test_only_two_regions_are_torchs() -> None:
    graph = captured(*MODELS["words"]())
    partition = partition_of(graph)
    units = phases_of(partition, 1.0).units
    assert [unit.compiled for unit in units].count(True) == 2
    fused = fused_program(phases_of(partition, 1.0).order.program(), units, kernels_of(Options(mem=1)))
    assert len(fused.steps) == len(units)


@pytest.mark.usefixtures("others_are_slow")
@pytest.mark.long
@pytest.mark.parametrize("percent", [100, 90])
def test_the_plan_takes_what_torch_compile_runs_where_it_fits(percent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WholeGraphs, "_faster", lambda *_: None)  # those of torch's partitioner only
    given = (torch.randn(512, 32),)
    first: Any = fxremat.compile(Layers(), mem="200%", backend=WHOLE, example_inputs=given)
    budget = first.plan.predicted_peak * percent // 100
    plain, ours = Layers(), Layers()
    call: Any = fxremat.compile(ours, mem=budget, backend=WHOLE, example_inputs=given)
    assert call.plan.compiled.by_torch
    assert call.plan.predicted_peak <= budget
    assert "as torch.compile cuts the step" in " ".join(str(call.plan).split())
    theirs = torch.compile(plain, dynamic=False)
    plain.load_state_dict(ours.state_dict())
    assert largest_error(gradients(ours, call, given), gradients(plain, theirs, given)) < 2e-5
    again: Any = fxremat.compile(Layers(), mem=budget, backend=WHOLE, example_inputs=given)
    assert again.plan.compiled.by_torch
    assert again.plan.predicted_peak == call.plan.predicted_peak


@pytest.mark.usefixtures("others_are_slow")
@pytest.mark.parametrize("pays", [True, False])
def test_unless_told_otherwise_phases_are_compiled_whole_on_a_cpu_where_that_may_pay(
    pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "STEPS", 1e9 if pays else 0)
    monkeypatch.setattr(compiled, "PROMISING", 0.0)
    monkeypatch.setattr(compiled, "CUTS", ())  # regions are not what is tested
    for whole_graphs in (None, False):
        backend = Inductor(random="inductor", whole_graphs=whole_graphs)
        call: Any = fxremat.compile(Words(), mem="150%", backend=backend, example_inputs=tokens())
        by_torch = call.plan.compiled is not None and call.plan.compiled.by_torch
        assert by_torch == (pays and whole_graphs is None)


@pytest.mark.usefixtures("others_are_slow")
@pytest.mark.long
def test_a_share_that_cannot_fit_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []
    as_it_is = WholeGraphs.by_torch
    monkeypatch.setattr(WholeGraphs, "by_torch", lambda self, share: tried.append(share) or as_it_is(self, share))
    monkeypatch.setattr(WholeGraphs, "_faster", lambda *_: None)
    model, given = MODELS["layers"]()
    budget = phases_of(partition_of(captured(model, given)), 1.0).saved * 9 // 10
    call: Any = fxremat.compile(model, mem=budget, backend=WHOLE, example_inputs=given)
    assert 0 < max(tried) < 1
    assert call.plan.compiled.by_torch
    assert call.plan.predicted_peak <= budget


@pytest.mark.usefixtures("others_are_slow")
def test_where_torch_cannot_partition_the_least_traffic_is_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("no such op")

    monkeypatch.setattr(torch_partition, "partitioned", failing)
    call: Any = fxremat.compile(Words(), mem="150%", backend=WHOLE, example_inputs=tokens())
    assert call.plan.compiled.regions == 2
    assert not call.plan.compiled.by_torch
    assert "torch cannot partition the graph (RuntimeError: no such op)" in caplog.text
