"""Steps are found in any program, their peaks are those of the meter, and each byte at the peak has its module."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxremat
from benchmarks import meter, models
from fxremat.integrations.training_steps import (
    ELSEWHERE,
    OUTSIDE,
    UNLIKE,
    StepPeak,
    TrainingSteps,
    _divide_as_planned,
    _Step,
)
from fxremat.show.profile_figures import bytes_at_peak
from fxremat.torch_private import RecordedEvent, watch_compilation
from tests.toys import QUICK

pytestmark = pytest.mark.usefixtures("torch_ready")
PLAIN_CALL = nn.Module.__call__


class Net(nn.Module):
    """Layers that save their input and output each, and a loss."""

    def __init__(self, depth: int = 3, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, width), nn.Linear(width, 64)) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.mean()


def rows(count: int = 256) -> Tensor:
    return torch.ones(count, 64)


def long(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.long)


def measured(*calls: Callable[[], object]) -> TrainingSteps:
    gc.collect()
    with TrainingSteps() as steps:
        for call in calls:
            call()
    assert nn.Module.__call__ is PLAIN_CALL
    return steps


def highest(*calls: Callable[[], object]) -> StepPeak:
    found = measured(*calls).highest
    assert found is not None
    assert sum(found.modules.values()) == found.peak
    return found


def step_of(model: nn.Module, *inputs: Any) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        out: Any = model(*inputs)
        out.sum().backward()

    return step


@pytest.mark.parametrize("name", ["gpt", long("resnet"), long("unet")])
def test_peaks_of_plain_models_are_those_of_the_meter(name: str) -> None:
    case = models.get(name, "small")
    model, batch = case.model(), case.batch()
    expected = meter.model_peak(model, batch)
    found = highest(*[step_of(model, *batch)] * 2)
    assert found.peak == pytest.approx(expected, rel=1e-3)  # the step here sums the loss, some bytes more
    assert {name.partition(".")[0] for name in found.modules} <= {type(model).__name__, OUTSIDE}


COMPILED: dict[str, Callable[[nn.Module], Any]] = {
    "fxremat": lambda model: fxremat.compile(model, mem="80%", **QUICK),
    "torch.compile": lambda model: torch.compile(model, backend="aot_eager"),
    "model.compile": lambda model: (model.compile(backend="aot_eager"), model)[1],
    "dynamo": lambda model: torch.compile(model, backend="fxremat", options={"mem": "100%"}),
}


@pytest.mark.parametrize("how", ["fxremat", "torch.compile", *(long(how) for how in ("model.compile", "dynamo"))])
def test_peaks_of_compiled_models_are_those_of_the_meter_from_the_first_step_on(how: str) -> None:
    model = COMPILED[how](Net())
    found = measured(*[step_of(model, rows())] * 3)
    compilations: list[object] = []
    stop = watch_compilation(compilations.append, lambda _: None)
    expected = meter.model_peak(model, (rows(),))
    stop()
    assert compilations == [], "measuring changes what is compiled"
    assert found.count == 3
    assert found.highest is not None
    assert 0 <= found.highest.peak - expected <= 64  # `sum` of a loss takes some bytes
    assert {name.partition(".")[0] for name in found.highest.modules} <= {"Net", OUTSIDE, UNLIKE}


@pytest.mark.parametrize("unlike", [0, -10, 10])
def test_what_is_unlike_the_plan_is_told_of(unlike: int) -> None:
    plan = fxremat.plan(Net(), rows(), mem="100%", costs="estimate", **QUICK)
    sides: tuple[dict[str, int], dict[str, int]] = {"Net": plan.predicted_peak + unlike, OUTSIDE: 1}, {}
    _divide_as_planned(sides, "Net", plan)
    assert sum(map(sum, (side.values() for side in sides))) == plan.predicted_peak + unlike + 1
    assert sides[0].get(UNLIKE, 0) == unlike
    other = {"Net": 2 * plan.predicted_peak}, {"Net": 1}
    _divide_as_planned(other, "Net", plan)
    assert other == ({"Net": 2 * plan.predicted_peak}, {"Net": 1})  # this is the plan of another step


def test_modules_of_fxremat_have_what_the_plan_says() -> None:
    net = Net(width=256)
    net.fxremat = "an attribute of the model's own"
    model = fxremat.compile(net, mem="80%", **QUICK)
    found = highest(*[step_of(model, rows())] * 2)
    planned: dict[str, int] = {}
    for (path, _), size in bytes_at_peak(model.plan).items():
        planned[f"Net.{path}"] = planned.get(f"Net.{path}", 0) + size
    layers = {name: size for name, size in found.modules.items() if name.startswith("Net.layers.")}
    assert layers
    assert layers == {name: size for name, size in planned.items() if name.startswith("Net.layers.") and size}


def test_a_module_has_what_its_ops_save_and_what_their_backward_allocates() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.wide, self.last = nn.Linear(64, 8), nn.Linear(8, 4096), nn.Linear(4096, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.sigmoid(self.wide(self.first(x)))).mean()

    found = highest(step_of(Wide(), rows()))
    values = 256 * 4096 * 4
    assert found.forward["Wide"] == values + 4  # sigmoid saves its result; the other value is the loss
    assert found.backward["Wide.last"] >= values  # the gradient of that result
    assert found.backward["Wide"] == values  # the gradient of its input
    assert found.where == "in SigmoidBackward0 of the backward of Wide"
    assert found.peak <= 3 * values + 500_000


def test_recomputed_values_belong_to_the_modules_that_make_them_again() -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x.mean()

    found = highest(step_of(Checkpointed(width=2048), rows()))
    again = [name for name, size in found.backward.items() if size >= 256 * 2048 * 4]
    assert again
    assert {name.rpartition(".")[0] for name in again} == {"Checkpointed.layers.0"}  # the last, beside gradients


def test_what_a_step_does_not_allocate_does_not_count() -> None:
    def train() -> None:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            kept = torch.ones(10_000_000)  # between two steps
            optimizer.zero_grad()
            model(rows()).backward()
            del kept
            optimizer.step()

    expected = meter.model_peak(Net(), (rows(),))
    assert abs(highest(train).peak - expected) <= 16


def test_micro_batches_are_steps() -> None:
    model = Net(width=1024)
    gradients = sum(p.numel() * 4 for p in model.parameters())

    def accumulate() -> None:
        for _ in range(3):
            model(rows(16)).backward()

    steps = measured(accumulate)
    assert steps.count == 3
    assert steps.highest is not None
    assert gradients <= steps.highest.peak <= 2 * gradients


def test_two_forwards_and_a_backward_are_one_step() -> None:
    one, other = Net(), Net()
    alone = highest(step_of(one, rows())).peak
    one.zero_grad(set_to_none=True)

    def both() -> None:
        (one(rows()) + other(rows())).backward()

    steps = measured(both)
    assert (steps.count, steps.highest is not None and steps.highest.peak > 1.5 * alone) == (1, True)


def test_two_backwards_of_a_graph_are_one_step_whose_optimizer_in_between_does_not_count() -> None:
    model = Net(width=512)
    optimizer = torch.optim.AdamW(model.parameters())

    def twice() -> None:
        x = rows().requires_grad_()
        loss = model(x)
        loss.backward(retain_graph=True)
        optimizer.step()
        F.linear(x, torch.ones(64, 64)).sum().backward()

    expected = meter.peak_bytes(lambda: [loss := model(rows()), loss.backward(retain_graph=True)])
    model.zero_grad(set_to_none=True)
    steps = measured(twice)
    assert steps.count == 1
    assert steps.highest is not None
    assert steps.highest.peak <= 1.3 * expected


def test_two_losses_with_a_backward_each_are_one_step() -> None:
    first, second = Net(), Net(width=1024)

    def train() -> None:
        one, two = first(rows()), second(rows())
        one.backward()
        two.backward()

    steps = measured(train)
    assert steps.count == 1
    assert steps.highest is not None
    assert steps.highest.peak > 256 * 1024 * 4 * 3  # what the second network saves


def test_a_gradient_inside_of_a_step_does_not_end_it() -> None:
    model = Net(width=512)
    x = rows().requires_grad_()

    def penalized() -> None:
        loss = model(x)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (model(x) + gradient.square().sum()).backward()

    assert measured(penalized).count == 1


def test_a_call_without_a_backward_is_no_step_and_the_next_one_begins_anew() -> None:
    model = Net()

    def looks_and_trains() -> None:
        assert model(rows(8)).shape == ()
        with torch.no_grad():
            model(rows(4096))
        kept = torch.ones(10_000_000)
        model(rows()).backward()
        assert kept is not None

    steps = measured(looks_and_trains)
    expected = meter.model_peak(model, (rows(),))
    assert steps.count == 1
    assert steps.highest is not None
    assert abs(steps.highest.peak - expected) <= 16


class Attributes:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Slots:
    __slots__ = ("loss",)

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


@pytest.mark.parametrize("kind", [Attributes, Slots])
def test_outputs_of_a_users_own_class_have_a_graph(kind: type[Attributes | Slots]) -> None:
    class Wrapped(Net):
        def forward(self, x: Tensor) -> Any:
            return kind(super().forward(x))

    model, other = Wrapped(), Wrapped()

    def both() -> None:
        (model(rows()).loss + other(rows()).loss).backward()

    alone = meter.model_peak(Net(), (rows(),))
    assert highest(both).peak > 1.5 * alone


def test_an_exception_leaves_everything_as_it_was() -> None:
    model = Net()

    def fails() -> None:
        with pytest.raises(RuntimeError):
            model(torch.ones(3, 5))
        model(rows()).backward()

    assert measured(fails).count == 1
    with pytest.raises(ZeroDivisionError), TrainingSteps():
        model(rows())
        1 / 0  # noqa: B018
    assert nn.Module.__call__ is PLAIN_CALL
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


def test_what_a_compiler_allocates_does_not_count() -> None:
    kept: list[Tensor] = []

    def backend(graph: Any, _: Any) -> Any:
        kept.append(torch.ones(25_000_000))
        return graph

    model = Net()
    compiled: Any = torch.compile(model, backend=backend)
    found = highest(step_of(compiled, rows()), kept.clear, step_of(compiled, rows()))
    assert found.peak <= 2 * meter.model_peak(model, (rows(),))


def test_compilers_are_still_known_after_a_reset_of_dynamo() -> None:
    def reset_and_train() -> None:
        torch._dynamo.reset()
        step_of(COMPILED["fxremat"](Net()), rows())()

    assert highest(reset_and_train).peak <= meter.model_peak(Net(), (rows(),))


class Broken(Net):
    """The same in several graphs."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            torch._dynamo.graph_break()
        return x.mean()


def test_compilers_see_the_same_functions() -> None:
    def frames() -> int:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        step_of(torch.compile(Broken(), backend="eager"), rows())()  # type: ignore[arg-type]
        return int(torch._dynamo.utils.counters["frames"]["total"])

    seen: list[int] = []
    measured(lambda: seen.append(frames()))
    assert seen == [frames()], "dynamo sees the function that is in the place of `Module.__call__`"


def test_models_of_several_graphs_are_within_their_budget() -> None:
    plain = meter.model_peak(Broken(), (rows(),))
    model = fxremat.compile(Broken(), mem=2 * plain, **QUICK)
    steps = measured(*[step_of(model, rows())] * 4)
    assert steps.count == 4
    assert steps.highest is not None
    assert steps.highest.peak <= 2 * plain


def test_other_threads_are_left_alone() -> None:
    model, kept = Net(), []

    def elsewhere() -> None:
        thread = threading.Thread(target=lambda: kept.append(model(rows(1024))))
        thread.start()
        thread.join()

    assert measured(elsewhere).count == 0
    found = measured(elsewhere, step_of(model, rows()))
    assert len(kept) == 2
    assert found.highest is not None
    assert abs(found.highest.peak - meter.model_peak(model, (rows(),))) <= 64


def test_steps_that_a_profiler_records_are_left_out() -> None:
    def profiled() -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            step_of(Net(), rows())()

    steps = measured(profiled)
    assert (steps.count, steps.profiled) == (0, True)


def test_evaluation_is_no_step_and_may_be_profiled() -> None:
    class Wrapped(Net):
        def forward(self, x: Tensor) -> Any:
            return Slots(super().forward(x))

    model = Net()

    def evaluates_and_trains() -> None:
        model(rows(8))
        with torch.no_grad():
            Wrapped()(rows())
        kept = torch.ones(10_000_000)
        step_of(model, rows())()
        assert kept is not None

    def profiles() -> None:
        with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            model(rows())

    steps = measured(profiles, evaluates_and_trains)
    assert (steps.count, steps.profiled) == (1, False)
    assert steps.highest is not None
    assert steps.highest.peak < 4 * 10_000_000


def test_a_step_may_be_said() -> None:
    weight = torch.ones(64, 64, requires_grad=True)
    with TrainingSteps() as steps:
        F.linear(rows(), weight).sum().backward()
        with steps.step():
            F.linear(rows(), weight).exp().sum().backward()
        with steps.step():
            F.linear(rows(2), weight).sum().backward()
    assert steps.count == 2
    assert steps.highest is not None
    assert steps.highest.number == 1
    assert steps.highest.modules.keys() == {OUTSIDE}


def test_a_step_that_is_said_goes_on_after_a_backward() -> None:
    weight = torch.ones(64, 64, requires_grad=True)
    with TrainingSteps() as steps, steps.step():
        F.linear(rows(2), weight).sum().backward()
        large = torch.ones(1_000_000)
    assert steps.highest is not None
    assert steps.highest.peak >= large.nbytes


# --- the accounting, by hand: changes of an accelerator's memory as its allocator reports them ------------------

CUDA = torch.device("cuda", 0)


def change(size: int, address: int, total: int, device: torch.device = CUDA) -> RecordedEvent:
    return RecordedEvent(name="", sequence=-1, start=0, device=device, size=size, address=address, total=total)


def within(name: str, *events: RecordedEvent, sequence: int = -1) -> RecordedEvent:
    return RecordedEvent(name=name, sequence=sequence, start=0, inside=events)


def peak_of(*events: RecordedEvent) -> StepPeak:
    step = _Step(1)
    step.add(events)
    found = step.peak()
    assert found is not None
    assert sum(found.modules.values()) == found.peak
    return found


MODULE, NODE = "fxremat, in module ", "autograd::engine::evaluate_function: "


def test_an_accelerator_counts_from_its_level_at_the_beginning() -> None:
    found = peak_of(
        within(MODULE + "Net.a", within("aten::mm", change(100, 1, 1100), sequence=7)),
        within(NODE + "MmBackward0", change(50, 2, 1150), change(-100, 1, 1050), sequence=7),
        within(NODE + "AccumulateGrad", change(20, 3, 1070)),
    )
    assert (found.peak, found.device, found.where) == (150, "cuda:0", "in MmBackward0 of the backward of Net.a")
    assert (found.forward, found.backward) == ({"Net.a": 100}, {"Net.a": 50})


def test_what_was_there_before_makes_room_on_an_accelerator_alone() -> None:
    events = [change(100, 1, 1100), change(-300, 9, 800), change(250, 2, 1050)]
    assert peak_of(*events).peak == 100
    on_cpu = [change(e.size, e.address, 0, torch.device("cpu")) for e in events]
    assert peak_of(*on_cpu).peak == 350


def test_memory_of_compilers_and_optimizers_does_not_count_and_nor_does_freeing_it() -> None:
    found = peak_of(
        change(10, 1, 1010),
        within("fxremat, while torch compiles", change(500, 2, 1510), change(700, 3, 2210), change(-500, 2, 1710)),
        within("Optimizer.step#AdamW.step", change(40, 4, 1750)),
        change(60, 5, 1810),
        change(-700, 3, 1110),
        change(5, 6, 1115),
    )
    assert found.peak == 75


def test_bytes_that_no_event_tells_of_are_elsewhere() -> None:
    found = peak_of(change(100, 1, 1100), change(10, 2, 1400))
    assert (found.peak, found.modules) == (400, {OUTSIDE: 110, ELSEWHERE: 290})


def test_the_highest_accelerator_counts() -> None:
    other = torch.device("cuda", 1)
    found = peak_of(change(900, 7, 0, torch.device("cpu")), change(100, 1, 1100), change(200, 2, 200, other))
    assert (found.peak, found.device) == (200, "cuda:1")


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 100)), max_size=30), st.integers(0, 30))
def test_a_step_in_two_parts_has_the_peak_of_both(moves: list[tuple[int, int]], cut: int) -> None:
    """Each move frees what is at an address, or allocates there if nothing is."""
    alive: dict[int, int] = {}
    changes, level, peak = [], 0, 0
    for address, size in moves:
        delta = -alive.pop(address) if address in alive else size
        if delta > 0:
            alive[address] = delta
        level += delta
        peak = max(peak, level)
        changes.append(change(delta, address, 0, torch.device("cpu")))
    step = _Step(1)
    step.add(changes[:cut])
    step.add(changes[cut:])
    found = step.peak()
    assert (found.peak if found else 0) == peak
    if found:
        assert sum(found.modules.values()) == peak
