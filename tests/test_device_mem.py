"""device_mem: all that a training process has on the device stays within it, the optimizer's update included."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat
from benchmarks import meter, models
from fxremat.cost import device_memory
from fxremat.settings import Offload, Search
from tests.fitting.small import SMALL, small, with_data
from tests.toys import Stack, rows

pytestmark = pytest.mark.usefixtures("torch_ready")
QUICK = Search(seconds=0.0, progress=False)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, betas=[0.9, 0.95], foreach=True),  # type: ignore[arg-type]
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


def held(*tensors: Iterable[Tensor], apart: Container[int] = ()) -> int:
    """Bytes of the storages of tensors, each once, without tensors at the addresses `apart`."""
    there = [t.untyped_storage() for each in tensors for t in each if t.data_ptr() not in apart]
    return sum({storage.data_ptr(): storage.nbytes() for storage in there}.values())


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's state that are as large as parameters."""
    return [v for of in optimizer.state.values() for v in of.values() if isinstance(v, Tensor) and v.dim()]


def most(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...], steps: int = 3, backwards: int = 1
) -> int:
    """The most bytes that a loop has at a time, in all of its steps: what is there at the start, and what comes."""
    found = 0
    parameters = list(model.parameters())

    def at_start() -> int:
        gradients = [p.grad for p in parameters if p.grad is not None]
        there = parameters, model.buffers(), batch, state_of(optimizer), gradients
        return held(*there, apart=on_the_host(model))

    def forward_and_backward() -> None:
        model(*batch).backward()

    for step in range(steps):
        for _ in range(backwards):
            if step == 0 and all(p.grad is None for p in parameters):
                forward_and_backward()  # plans, which takes what it takes
                model.zero_grad(set_to_none=True)
            found = max(found, at_start() + meter.peak_bytes(forward_and_backward))
        found = max(found, at_start() + meter.peak_bytes(optimizer.step))
        optimizer.zero_grad()
    return found


def on_the_host(model: Any) -> Container[int]:
    """The addresses of parameters, gradients and optimizer state that wait on the host."""
    training = getattr(model, "_fxremat", None)
    weights = training.backend.weights if training else None
    return {*weights._homes, *(home.data_ptr() for home in weights._gradients.values())} if weights else ()


class WithLoss(nn.Module):
    """A stack of layers, some of them frozen, and the mean of its squares."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stack = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(6)))
        self.unread = nn.Linear(width, width)
        self.register_buffer("table", torch.zeros(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        return F.mse_loss(self.stack(x), x)


def plain_peak(model: nn.Module, optimizer: Any, batch: tuple[Tensor, ...]) -> int:
    """Measure what the same loop takes without fxremat."""
    alone = copy.deepcopy(model)
    return most(alone, optimizer(alone.parameters()), batch)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_whole_loop_stays_within_it(name: str) -> None:
    torch.manual_seed(0)
    model, batch = WithLoss(), (torch.randn(512, 64),)
    plain = plain_peak(model, OPTIMIZERS[name], batch)
    device_mem = int(0.75 * plain)
    optimizer = OPTIMIZERS[name](model.parameters())
    compiled = fxremat.compile(model, device_mem=device_mem, optimizer=optimizer, search=QUICK)
    assert most(compiled, optimizer, batch) <= device_mem
    assert compiled.plan.predicted_time > 0
    assert compiled.plan.on_device is not None
    assert compiled.plan.on_device.total == device_mem


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("name", models.MAIN)
@pytest.mark.parametrize(
    ("share", "exact"), [(0.3, True), (0.5, True), (0.6, None), (0.8, True), (0.8, None), (1.0, None)]
)
def test_models_train_within_it_with_the_bits_of_plain_pytorch(
    name: str, optimizer: str, share: float, exact: bool | None
) -> None:
    case = models.get(name, "small")
    batch = case.batch()
    device_mem = int(share * plain_peak(case.model(), OPTIMIZERS[optimizer], batch))
    ours, plain = case.model(), case.model()
    mine, theirs = OPTIMIZERS[optimizer](ours.parameters()), OPTIMIZERS[optimizer](plain.parameters())
    compiled = fxremat.compile(ours, device_mem=device_mem, optimizer=mine, search=QUICK, exact=exact)
    try:
        torch.manual_seed(1)
        assert most(compiled, mine, batch) <= device_mem
    except fxremat.BudgetTooSmall as error:
        pytest.skip(f"{error.minimum} bytes are the least, and device_mem is {device_mem}")
    torch.manual_seed(1)
    most(plain, theirs, batch)
    assert all(map(torch.equal, ours.parameters(), plain.parameters()))


class LossOf(nn.Module):
    """A model of a library, called with tensors by position; returns its loss."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the loss."""
        found: Any = self.model(**dict(zip(self.names, inputs, strict=True)))
        loss: Tensor = found if isinstance(found, Tensor) else found.loss
        return loss


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_models_of_libraries_train_within_it(name: str) -> None:
    pytest.importorskip("diffusers" if name in ("flux", "sdxl-unet") else "transformers")
    model, inputs = with_data(small(name))
    ours, batch = LossOf(model, inputs), tuple(inputs.values())
    plain = copy.deepcopy(ours)
    theirs, mine = (torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (plain, ours))
    torch.manual_seed(1)
    device_mem = int(0.85 * most(plain, theirs, batch))
    options: dict[str, Any] = {"optimizer": mine, "search": QUICK}
    try:
        fxremat.plan(ours, batch, device_mem=device_mem, **options)
    except fxremat.BudgetTooSmall as error:  # of a narrow model, since the update takes as much as the step
        device_mem = error.minimum
    torch.manual_seed(1)
    compiled = fxremat.compile(ours, device_mem=device_mem, **options)
    assert most(compiled, mine, batch) <= device_mem
    assert all(map(torch.equal, ours.parameters(), plain.parameters()))


def test_gradients_that_wait_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = WithLoss(128), (torch.randn(512, 128),)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    device_mem = int(1.3 * plain_peak(model, OPTIMIZERS["sgd"], batch))  # of a loop that keeps no gradients
    compiled = fxremat.compile(model, device_mem=device_mem, optimizer=optimizer, search=QUICK)
    with caplog.at_level(logging.INFO, "fxremat"):
        assert most(compiled, optimizer, batch, backwards=3) <= device_mem
    assert "device_mem leaves" in caplog.text
    assert compiled.plan.on_device.waiting == held(model.stack.parameters())


def test_a_plan_says_what_is_on_the_device() -> None:
    model, x = WithLoss(), torch.randn(512, 64)
    plan = fxremat.plan(model, (x,), device_mem="2MiB", optimizer="adamw", search=QUICK)
    memory = plan.on_device
    assert memory is not None
    assert memory.given == held(model.parameters(), model.buffers(), [x])
    trained = list(model.stack.parameters())  # what is not read gets no gradient, and has no state
    assert 0 <= memory.state - 2 * held(trained) <= 32 * len(trained)  # with a count of steps for each, on the host
    assert 0.99 * (2**21 - memory.given - memory.state) < plan.budget <= 2**21 - memory.given - memory.state
    assert plan.predicted_peak <= plan.budget
    assert "\ndevice_mem\n  memory          2.0 MiB\n  held " in str(plan)


def test_too_little_is_said_with_the_numbers_of_the_device() -> None:
    model, x = WithLoss(), torch.randn(512, 64)
    with pytest.raises(fxremat.BudgetTooSmall, match=r"device_mem has .* of parameters, buffers and inputs") as error:
        fxremat.plan(model, (x,), device_mem="800KiB", optimizer="sgd", search=QUICK)
    assert error.value.budget == 800 * 1024
    least = error.value.minimum
    plan = fxremat.plan(model, (x,), device_mem=least + least // 100, optimizer="sgd", search=QUICK)
    assert plan.predicted_peak <= plan.budget


def test_an_update_that_needs_more_than_the_step_is_refused() -> None:
    model, x = WithLoss(256), torch.randn(2, 256)
    trained = held(model.stack.parameters())
    device_mem = held(model.parameters(), model.buffers(), [x]) + 3 * trained  # nothing is left for temporaries
    with pytest.raises(fxremat.BudgetTooSmall, match="while the optimizer steps") as error:
        fxremat.plan(model, (x,), device_mem=device_mem, optimizer="adamw", search=QUICK)
    fxremat.plan(model, (x,), device_mem=error.value.minimum, optimizer="adamw", search=QUICK)


def test_later_steps_count_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = WithLoss(), (torch.randn(64, 64),)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = fxremat.compile(model, device_mem="8MiB", optimizer=optimizer, search=QUICK)
    counted = mock.Mock(side_effect=device_memory.memory_of_optimizer)
    monkeypatch.setattr(device_memory, "memory_of_optimizer", counted)
    most(compiled, optimizer, batch, steps=1)
    assert counted.call_count > 0
    counted.reset_mock()
    most(compiled, optimizer, batch, steps=3)
    assert counted.call_count == 0


def test_a_plan_of_it_is_saved(tmp_path: Path) -> None:
    model, batch = WithLoss(), (torch.randn(512, 64),)
    plan = fxremat.plan(model, batch, device_mem="2MiB", optimizer="sgd", search=QUICK)
    plan.save(tmp_path / "plan")
    compiled = fxremat.compile(model, plan=tmp_path / "plan", example_inputs=batch)
    assert compiled.plan.predicted_peak == plan.predicted_peak


def test_the_model_is_not_kept_alive() -> None:
    model, batch = WithLoss(), (torch.randn(64, 64),)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = fxremat.compile(model, device_mem="8MiB", optimizer=optimizer, search=QUICK)
    compiled(*batch).backward()
    there = weakref.ref(model)
    del model, compiled, optimizer
    torch._dynamo.reset()
    gc.collect()
    assert there() is None


def test_weights_on_the_host_are_part_of_the_step() -> None:
    model, batch = WithLoss(), (torch.randn(512, 64),)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options: dict[str, Any] = {"offload": Offload(weights=True), "optimizer": optimizer, "search": QUICK}
    plan = fxremat.plan(model, batch, device_mem="1MiB", **options)
    assert plan.on_device is not None
    assert plan.on_device.given == held(model.buffers(), batch)
    assert plan.on_device.state == 0


def test_several_graphs_are_within_it_too() -> None:
    class Broken(WithLoss):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.stack:
                x = layer(x)
                torch._dynamo.graph_break()
            return x.square().mean()

    model, batch = Broken(), (torch.randn(512, 64),)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    device_mem = int(1.3 * plain_peak(model, OPTIMIZERS["adamw"], batch))
    compiled = fxremat.compile(model, device_mem=device_mem, optimizer=optimizer, search=QUICK)
    assert most(compiled, optimizer, batch, steps=5) <= device_mem


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_mem": "1GiB", "mem": "60%"}, "give device_mem, .* or mem, which is for a step, not both"),
        ({"device_mem": "60%"}, "is not a number of bytes"),
        ({}, 'the budget is missing: give mem, .* or device_mem="24GiB"'),
    ],
)
def test_what_is_no_device_mem_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fxremat.FxrematError, match=message):
        fxremat.compile(Stack(), **options)


def test_a_graph_of_others_has_no_device_mem() -> None:
    step = fxremat.capture(Stack(), (rows(4),), search=QUICK)
    graph = step.plan("100%").step
    assert graph is not None
    with pytest.raises(fxremat.FxrematError, match="device_mem counts the tensors of a model"):
        fxremat.capture(fxremat.StepGraph.from_json(step.graph.to_json()), device_mem="1GiB")
