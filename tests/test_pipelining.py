"""Pipelines: cuts that keep the model's numbers, plans that PyTorch's engine runs inside the budget, clear errors.

What runs in several processes runs once for each configuration, and many things are asked of that one job.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat
from fxremat.graphs import accounting
from fxremat.heartbeat import lost_peer
from fxremat.options import options_of
from fxremat.pipelining.engine import Action, lowered
from fxremat.pipelining.memory import StageMemory, most_bytes
from fxremat.pipelining.profile import Spending, joined, profile
from fxremat.pipelining.stages import Ops, capture
from fxremat.runtime.module import budget_for_each_call, drop_in, plan_now
from fxremat.solvers.pipeline.model import Layer, Layers, Machines, PipelinePlan, PlannedStage, Way
from tests.pipes import (
    MODELS,
    ROOT,
    ROWS,
    Gpt,
    Job,
    by_hand,
    in_groups,
    next_token,
    reference,
    results,
    start,
)
from tests.training import same

pytestmark = pytest.mark.usefixtures("torch_ready")


def captured(model: nn.Module, inputs: Tensor, target: Tensor, loss_fn: Any = F.mse_loss) -> Ops:
    return capture(model, (inputs,), target, loss_fn)


# --- stages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "convolutions"])
def test_stages_in_a_row_are_the_model(name: str) -> None:
    model, inputs, target, loss_fn = MODELS[name]()
    expected = reference(Job(model=name, microbatches=1))
    ops = captured(model, inputs, target, loss_fn)
    places = (0, *ops.cuts, ops.end)
    assert len(places) > 8
    stages = [ops.module(first, last) for first, last in itertools.pairwise(places)]
    owners = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(owners) == sorted(dict(model.named_parameters()))  # each has one owner
    for _ in range(2):
        model.zero_grad()
        crossing: Any = inputs
        for stage in stages[:-1]:
            crossing = stage(crossing)
            assert crossing.is_contiguous()
        stages[-1](crossing, target).backward()
    assert all(same(p.grad, expected["grads"][n]) for n, p in model.named_parameters())
    assert all(same(value, expected["state"][n]) for n, value in model.state_dict().items())


def test_a_loss_that_waits_for_the_end_of_the_step_takes_no_room() -> None:
    model, inputs, target, loss_fn = MODELS["sections"]()
    ops = captured(model, inputs, target, loss_fn)
    assert loss_fn(model(inputs), target).untyped_storage().nbytes() == inputs.nbytes  # all terms of the sum
    assert ops.module(0, ops.end)(inputs, target).untyped_storage().nbytes() == 4


def test_dropout_draws_what_the_model_draws() -> None:
    torch.manual_seed(0)
    model, tokens = Gpt(blocks=1, dropout=0.5), torch.randint(64, (2, 16))
    ops = captured(model, tokens, tokens, next_token)
    (half, *_) = [place for place in ops.cuts if place > ops.end // 2]
    torch.manual_seed(7)
    expected = next_token(model(tokens), tokens)
    torch.manual_seed(7)
    assert same(ops.module(half, ops.end)(ops.module(0, half)(tokens), tokens), expected)


class Tied(nn.Module):
    """An output layer that shares its weight with the embedding, or only the memory of it."""

    def __init__(self, *, memory_only: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 8, bias=False)
        weight = self.embedding.weight
        self.head.weight = nn.Parameter(weight.detach()) if memory_only else weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)))


@pytest.mark.parametrize("memory_only", [False, True])
def test_a_tied_weight_stays_with_all_who_read_it(memory_only: bool) -> None:
    tokens = torch.randint(8, (4, 3))
    ops = captured(Tied(memory_only=memory_only), tokens, tokens, next_token)
    assert [str(value) for value in ops.cuts.values()] == ["linear_2"]  # behind the head


class ReadsItsInputAgain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[1](self.layers[0](x).tanh()) + x
        return self.layers[3](self.layers[2](first).tanh())


def test_no_cut_where_an_input_is_needed_later() -> None:
    ops = captured(ReadsItsInputAgain(), torch.randn(2, 4), torch.randn(2, 4))
    assert [str(value) for value in ops.cuts.values()] == ["add", "linear_2", "tanh_1", "linear_3"]


class WritesInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x).view(-1).relu_().view(2, 4))


def test_no_cut_before_what_crosses_is_written_in_place() -> None:
    ops = captured(WritesInPlace(), torch.randn(2, 4), torch.randn(2, 4))
    crossing = [str(value) for value in ops.cuts.values()]
    assert "linear" not in crossing
    assert "view" not in crossing
    assert crossing[-1] == "linear_1"


def test_short_neighbours_are_joined_and_equal_ones_stay_equal() -> None:
    assert joined((0, 1, 2, 3, 4), (5.0, 1.0, 1.0, 5.0), 3) == (0, 1, 3, 4)
    assert joined(tuple(range(9)), (1.0, 2.0) * 4, 4) == (0, 2, 4, 6, 8)
    assert joined((0, 1, 2), (1.0, 1.0), 2) == (0, 1, 2)


# --- memory -----------------------------------------------------------------------------------------------


def _plan(allocation: tuple[int, ...], microbatches: int, tick: float = 1.0) -> PipelinePlan:
    way = Way(forward_time=1.0, backward_time=2.0, kept_bytes=0, peak_bytes=0)
    layer = Layer(
        forward_time=1.0, backward_time=2.0, weight_bytes=0, saved_bytes=0, output_bytes=0, grad_bytes=0
    )
    layers = Layers(input_bytes=0, input_grad_bytes=0, layers=(layer,) * len(allocation))
    machines = Machines(devices=max(allocation) + 1, memory=0, bandwidth=None, copies=2.0)
    stages = tuple(PlannedStage(first=k, last=k, device=d, way=way) for k, d in enumerate(allocation))
    return in_groups(layers, machines, stages, microbatches, tick)


def _held(weights: int, entering: int, leaving: int, kept: int, forward: int, backward: int) -> StageMemory:
    return StageMemory(
        weights=weights, entering=entering, leaving=leaving,
        spending=Spending(
            forward_time=1.0, backward_time=2.0, budget=0, kept=kept, returned=1, forward_peak=forward,
            backward_peak=backward,
        ),
    )  # fmt: skip


def test_memory_of_two_devices_by_hand() -> None:
    plan = _plan((0, 1), 3)
    assert plan.in_flight == (2, 1)
    held = [_held(100, 0, 7, 30, 40, 50), _held(200, 7, 0, 20, 25, 60)]
    first, last = most_bytes(plan, held, lowered(plan, 3))
    # weights and gradients; one that waits; the backward of another, with the gradient that came
    assert first == 200 + 30 + 50
    # the second backward: its input and that of the next, the gradient of the first on its way, the first loss
    assert last == 400 + 7 + 7 + 7 + 1 + 60


def test_a_border_inside_a_device_copies_nothing() -> None:
    plan = _plan((0, 0), 1)
    held = [_held(0, 0, 7, 30, 30, 50), _held(0, 7, 0, 20, 20, 60)]
    assert lowered(plan, 1) == (
        tuple(Action(stage, kind, 0) for stage, kind in ((0, "F"), (1, "F"), (1, "B"), (0, "B"))),
    )
    assert most_bytes(plan, held, lowered(plan, 1)) == (30 + 60,)


def test_a_gradient_that_the_engine_hands_in_is_counted_once_where_autograd_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, inputs, target, loss_fn = MODELS["sections"]()
    kept = []
    for holds in (False, True):  # on some releases of PyTorch it does
        monkeypatch.setattr(accounting, "holds_gradients", lambda holds=holds: holds)
        ops = captured(model, inputs, target, loss_fn)
        measured = profile(ops, (inputs,), target, devices=2, effort=0.0).spendings(0, 0)
        kept.append([(one.kept, one.forward_peak, one.backward_peak) for one in measured])
    assert kept[0] == kept[1]


def test_equal_sections_with_and_without_a_gradient_of_their_input_are_planned_apart() -> None:
    model, inputs, target, loss_fn = MODELS["sections"]()
    profiled = profile(captured(model, inputs, target, loss_fn), (inputs,), target, devices=2, effort=0.0)
    assert profiled.count == 4  # three sections and the loss
    first, third = profiled.spendings(0, 0)[0], profiled.spendings(2, 2)[0]
    assert first.kept == third.kept
    assert first.budget < third.budget  # which makes a gradient of its input as well


def test_frozen_parameters_have_no_gradients() -> None:
    model, inputs, target, loss_fn = MODELS["sections"]()
    sizes = [parameter.nbytes for parameter in model.parameters()]
    frozen = next(iter(model.parameters()))
    frozen.requires_grad_(False)
    ops = captured(model, inputs, target, loss_fn)
    for copies in (2.0, 4.0):
        profiled = profile(ops, (inputs,), target, devices=2, effort=0.0, copies=copies)
        counted = copies * sum(profiled.weight_bytes(layer, layer) for layer in range(profiled.count))
        assert counted == copies * (sum(sizes) - frozen.nbytes) + frozen.nbytes


@pytest.mark.long
def test_the_planner_counts_what_leaves_a_device_once() -> None:
    model, inputs, target, loss_fn = MODELS["sections"]()
    pipe = fxremat.pipeline(
        model,
        inputs,
        mem="1GiB",
        devices=2,
        microbatches=4,
        loss_fn=loss_fn,
        example_target=target,
        effort=0.0,
    )
    first = pipe.plan.stages[0].device
    crossing = inputs.nbytes // 4
    assert pipe.plan.memory[first] < pipe.memory[first] + crossing


# --- errors -----------------------------------------------------------------------------------------------


class Strange(nn.Module):
    """Asks a tensor for its value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(tokens.float()) if tokens.sum() > 0 else tokens.float()


def _pipeline(model: nn.Module | None = None, **options: Any) -> fxremat.Pipeline:
    plain, inputs, target, loss_fn = MODELS["gpt"]()
    settings: dict[str, Any] = {
        "mem": "1GiB", "devices": 2, "microbatches": 4, "loss_fn": loss_fn, "example_target": target,
        "planner": by_hand(Job()), "effort": 0.0,
    }  # fmt: skip
    return fxremat.pipeline(model or plain, inputs, **settings | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 1}, "for one use fxremat.compile"),
        ({"microbatches": 3}, f"microbatches=3 does not divide the batch, which has {ROWS} rows"),
        ({"microbatches": 0}, "1 or more"),
        ({"microbatches": 2.0}, r"microbatches=2\.0: it is a whole number"),
        ({"devices": "2"}, "devices='2': it is a whole number"),
        ({"copies": -1}, "copies=-1: it is a number from 0 on"),
        ({"bandwidth": "1GB"}, "bandwidth='1GB': it is a number above 0, bytes per second, or None"),
        ({"effort": float("nan")}, "effort=nan: it is a number from 0 on"),
        ({"refine": None}, "refine=None: it is a number from 0 on"),
        ({"scale_grads": "no"}, "scale_grads='no': it is True or False"),
        ({"planner": "pofo"}, "planner='pofo': it is a function, such as fxremat.solvers.pipeline.best_plan"),
        ({"example_target": None}, "example_target is a tensor, and this is None"),
        ({"model": lambda x: x}, "a pipeline trains a torch.nn.Module, and this is a function"),
        ({"model": Gpt().requires_grad_(False)}, "nothing to train: no parameter requires grad"),
        ({"example_target": torch.zeros(2, 16, dtype=torch.long)}, r"different sizes: \[2, 8\]"),
        ({"loss_fn": None}, "loss_fn=None: give a function of the model's outputs and the target"),
        ({"loss_fn": lambda outputs, _: outputs}, "not one number"),
        ({"loss_fn": lambda outputs, _: outputs.sum().item()}, "not one number"),
        ({"model": Strange()}, "torch.export cannot write this model and its loss down"),
        ({"model": Gpt().eval()}, "eval mode"),
        ({"mem": "0.5"}, "0.5"),
    ],
)
def test_what_does_not_go_together_is_said_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fxremat.FxrematError, match=message) as raised:
        _pipeline(**options)
    assert "\n" not in str(raised.value)


def test_a_model_without_cuts_is_named() -> None:
    tokens = torch.randint(8, (8, 3))
    with pytest.raises(
        fxremat.CaptureError, match=r"3 devices need .* 3 layers, and this one has 2: .*tied weights"
    ):
        fxremat.pipeline(
            Tied(), tokens, mem="1GiB", devices=3, microbatches=2, loss_fn=next_token, example_target=tokens
        )


def test_a_device_without_a_stage_is_named() -> None:
    text = str(_pipeline(planner=by_hand(Job(allocation=(1,)))))
    assert text.startswith("fxremat plan for 2 devices: 1 stage, ")
    assert [line.split(",")[0] for line in text.splitlines() if "without a stage" in line] == [
        "  device 0: 0 B of 1.0 GiB"
    ]


def test_alone_it_plans_and_says_how_to_run() -> None:
    pipe = _pipeline()
    assert str(pipe).startswith("fxremat plan for 2 devices: 2 stages")
    assert list(pipe.state_dict()) == list(MODELS["gpt"]()[0].state_dict())
    with pytest.raises(fxremat.FxrematError, match="torchrun --nproc-per-node 2"):
        pipe.step(*MODELS["gpt"]()[1:3])


@pytest.mark.long
def test_a_budget_that_no_plan_keeps_names_one_that_works() -> None:
    least = max(_pipeline(planner=by_hand(Job(smallest=True))).memory)
    assert least < 0.9 * max(_pipeline().memory)
    with pytest.raises(fxremat.BudgetTooSmall) as raised:
        _pipeline(mem=least - 1, planner=by_hand(Job(smallest=True)))
    assert raised.value.minimum == least
    assert max(_pipeline(mem=least, planner=by_hand(Job(smallest=True))).memory) == least


def test_what_runs_between_forward_and_backward_of_a_stage_is_not_its_loss() -> None:
    """Allocate beside a stage what other stages and micro-batches allocate, which the pipeline's plan has counted."""
    rows = torch.randn(64, 32)
    layers = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)]
    least = fxremat.plan(nn.Sequential(*layers), mem="min", example_inputs=(rows,), loss=1).budget
    stage: Any = drop_in(nn.Sequential(*layers), options_of(mem=least, loss=1))
    budget_for_each_call(stage)
    plan_now(stage, (rows,), {})
    for _ in range(5):  # a loss is measured in the calls 1, 2 and 4
        output = stage(rows)
        others = [torch.empty(1 << 20) for _ in range(2)]
        output.backward(torch.ones_like(output))
        del others
    assert stage.plan.costs.sizes.outside == 1


def test_other_errors_are_not_taken_for_lost_peers() -> None:
    gone = RuntimeError("[/pytorch/pair.cc:5] Connection closed by peer [127.0.0.1]:1. This is typical. More")
    assert lost_peer(gone) == "Connection closed by peer [127.0.0.1]:1"
    assert lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert lost_peer(ValueError("timeout")) is None


# --- several processes ------------------------------------------------------------------------------------


def check(job: Job, folder: Path) -> list[dict[str, Any]]:
    """Run a job; every promise of it. Returns what its processes saw."""
    seen, expected = results(job, folder), reference(job)
    last = seen[seen[0]["devices"][-1]]
    assert all(same(one, other) for one, other in zip(last["losses"], expected["losses"], strict=True))
    gradients = {name: gradient for rank in seen for name, gradient in rank["grads"].items()}
    assert sorted(gradients) == sorted(expected["grads"])
    assert sum(len(rank["grads"]) for rank in seen) == len(gradients)
    assert [name for name in gradients if not same(gradients[name], expected["grads"][name])] == []
    state = {name: value for rank in seen for name, value in rank["state"].items()}
    assert sorted(state) == sorted(expected["state"])
    assert [name for name in state if not same(state[name], expected["state"][name])] == []
    for rank in seen:
        assert all(rank["allowed"][stage] >= most > 0 for stage, most in rank["in_flight"].items())
        assert rank["not ours"] == []  # what other ranks own is freed
        assert 0.9 * rank["predicted"] <= rank["peak"] <= rank["predicted"], rank["text"]
    return seen


@pytest.mark.long
def test_two_processes_of_which_one_has_two_stages(tmp_path: Path) -> None:
    check(Job(model="convolutions", allocation=(0, 1, 0), smallest=True), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    "job",
    [
        Job(allocation=(0, 1)),
        Job(allocation=(0, 1), smallest=True, tick=3.0),
        Job(allocation=(0, 1, 2), smallest=True),
        Job(allocation=(2, 0)),  # rank 1 has nothing to do
        Job(allocation=(0, 1, 0), microbatches=8),
        Job(allocation=(0, 1, 2, 3), microbatches=8),
        Job(model="convolutions", allocation=(0, 1, 2)),
        Job(allocation=(1, 0, 1, 2), smallest=True, tick=1.5),
    ],
    ids=str,
)
def test_more_processes_and_other_plans(job: Job, tmp_path: Path) -> None:
    check(job, tmp_path)


@pytest.mark.long
def test_a_plan_that_gives_one_device_two_stages_is_found_and_run(tmp_path: Path) -> None:
    seen = check(Job(model="uneven", allocation=(0, 1), microbatches=8, by_hand=False), tmp_path)
    assert seen[0]["devices"] in ([0, 1, 0], [1, 0, 1])
    assert "MiB/s" in seen[0]["text"] or "GiB/s" in seen[0]["text"]  # the measured speed of copies


@pytest.mark.long
def test_an_error_of_planning_is_raised_in_every_process(tmp_path: Path) -> None:
    for process in start(Job(allocation=(0, 1, 2), mem=1000), tmp_path):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 1
        assert "BudgetTooSmall: no schedule fits in 1000 bytes per device; the least that does is" in errors


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1, 2])
def test_when_one_process_is_killed_the_others_end_and_say_so(killed: int, tmp_path: Path) -> None:
    running = start(Job(allocation=(0, 1, 2), kill=killed), tmp_path)
    assert running[killed].wait(timeout=120) == -signal.SIGKILL
    since = time.monotonic()
    for rank, process in enumerate(running):
        _, errors = process.communicate(timeout=60)
        if rank != killed:
            assert process.returncode not in (0, None)
            lines = [
                line for line in errors.splitlines() if "another process of the pipeline has ended" in line
            ]
            assert len(lines) == 1
            assert f"rank {rank} cannot finish this step" in lines[0]
    assert time.monotonic() - since < 30


@pytest.mark.long
def test_torchrun_ends_when_one_process_is_killed(tmp_path: Path) -> None:
    job = Job(allocation=(0, 1), kill=1)
    (tmp_path / "job.json").write_text(json.dumps(asdict(job)))
    start = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "tests.pipes",
        str(tmp_path),
    ]
    ran = subprocess.run(
        [sys.executable, *start], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 1
    assert "exitcode  : -9" in ran.stderr
