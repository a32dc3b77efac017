"""Plans for devices that are not here, of models that have no data: as of a real model, and of the target's kernels."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import fxremat
from examples import what_if
from fxremat.__main__ import main
from fxremat.cost.devices import DEVICES, Device
from fxremat.errors import BudgetTooSmall, CaptureError, FxrematError
from fxremat.graphs.nodes import tensors_of
from fxremat.plans import Plan
from fxremat.runtime import shapes_alone
from fxremat.settings import Offload, Search
from fxremat.torch_private import torch_release
from fxremat.units import format_bytes
from fxremat.what_if import Largest, largest

pytestmark = pytest.mark.usefixtures("torch_ready")

ROOT = Path(__file__).parents[1]
aten = torch.ops.aten
WIDTH, HEADS, WORDS = 32, 4, 64


class Layer(nn.Module):
    """Attention and a gated product, as Llama's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Llama(nn.Module):
    """A decoder with tied embeddings and a buffer, which returns its loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.ones(WIDTH))
        self.shift = torch.zeros(WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.words(x) * self.scale + self.shift
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def on_meta(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


def fake(make: Callable[[], Any]) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return make()


def tokens() -> tuple[Tensor, Tensor]:
    return torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16, dtype=torch.long)


def planned(model: nn.Module, inputs: Any, **options: Any) -> Any:
    settings = {"mem": "100%", "search": Search(seconds=0, slots=100), "costs": "estimate"}
    return fxremat.plan(model, inputs, **(settings | options))


def compared_on(devices: Any, model: nn.Module, mem: str = "100%", **options: Any) -> fxremat.what_if.Comparison:
    return fxremat.compare(model, tokens(), devices, mem=mem, search=Search(seconds=0, slots=100), **options)


def small(memory: int, name: str = "small") -> Device:
    return replace(DEVICES["A100"], name=name, memory=memory)


def shown(plan: Plan) -> tuple[object, ...]:
    return plan.describe(full=True), plan.frontier, plan.costs


@pytest.mark.parametrize("without", [on_meta, pytest.param(fake, marks=pytest.mark.long)])
def test_a_model_without_data_has_the_plan_of_the_same_model_on_a_cpu(without: Any) -> None:
    plans = [planned(without(lambda: Llama(2)), make()) for make in (lambda: without(tokens), tokens)]
    real = planned(Llama(2), tokens())
    assert [shown(plan) for plan in plans] == [shown(real)] * 2
    assert real.device == "cpu"
    assert len(real.graph.backward_ops) > 20


def test_inputs_without_data_are_enough() -> None:
    model = Llama(1)
    assert shown(planned(model, on_meta(tokens))) == shown(planned(model, tokens()))


def state_of(model: nn.Module) -> list[object]:
    """Every object that the model consists of, by identity and order."""
    found: list[object] = []
    for module in model.modules():
        found.append(id(module))
        for holder in (vars(module), module._parameters, module._buffers, module._modules):
            found.append([(name, id(value)) for name, value in holder.items()])
    return found


class Fails(Llama):
    """A model whose forward raises."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.words(x).no_such_method()


@pytest.mark.parametrize("kind", [Llama, Fails])
def test_the_model_is_as_it_was(kind: type[Llama]) -> None:
    model = on_meta(lambda: kind(1))
    before = state_of(model)
    try:
        planned(model, tokens(), costs="H200")
    except FxrematError:
        assert kind is Fails
    assert state_of(model) == before
    assert all(parameter.is_meta and parameter.grad is None for parameter in model.parameters())


def test_a_model_with_data_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes_alone, "Fakes", None)
    assert planned(Llama(1), tokens(), costs="A100").device == "A100"


def test_a_model_without_data_is_neither_measured_nor_compiled_nor_moved() -> None:
    model = on_meta(lambda: Llama(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for attempt in (
        lambda: planned(model, tokens(), costs="measure"),
        lambda: fxremat.compile(model, "1GiB", example_inputs=tokens()),
        lambda: fxremat.compile(model, "1GiB", search=Search(seconds=0), costs="estimate")(*on_meta(tokens)),
        lambda: planned(fake(lambda: Llama(1)), tokens(), costs="measure"),
    ):
        with pytest.raises(FxrematError, match=r'costs="(H100|estimate)"') as error:
            attempt()
        assert "\n" not in str(error.value)
    with pytest.raises(FxrematError, match="an estimate too: leave weights=True out, or give") as error:
        planned(model, tokens(), offload=Offload(weights=True, activations=False), costs="H100", optimizer=optimizer)
    assert "cost=" not in str(error.value)  # which was said already


class NoWayBack(torch.autograd.Function):
    """Multiplication by two, whose backward gives nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:  # type: ignore[override]
        return None


class Lost(nn.Module):
    """A layer whose gradient is lost, beside a gain whose gradient is not, unless it is frozen."""

    def __init__(self, *, gain: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(8), requires_grad=gain)

    def forward(self, x: Tensor) -> Tensor:
        return NoWayBack.apply(self.layer(self.frozen(x))) + self.gain


def test_a_step_that_gives_no_gradient_at_all_is_refused() -> None:
    x = torch.ones(4, 8)
    with pytest.raises(CaptureError, match="has no backward: none of the model's parameters") as error:
        planned(Lost(gain=False), x, fullgraph=True)
    assert "\n" not in str(error.value)
    with pytest.raises(CaptureError, match="has no backward"):
        fxremat.compile(Lost(gain=False), "1GiB", search=Search(seconds=0), costs="estimate", fullgraph=True)(x)
    with pytest.raises(CaptureError, match="has no backward"):
        planned(on_meta(lambda: Lost(gain=False)), x)
    assert planned(Lost(gain=True), x).captured.backward_outputs.count(None) == 5


class Attention(nn.Module):
    """Attention with an op before it, so that queries, keys and values are the graph's own."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = ((t * self.gain).to(q.dtype) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options).float().mean()


FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
CUDNN = "_scaled_dot_product_cudnn_attention"
MATH, CPU = "bmm", "_scaled_dot_product_flash_attention_for_cpu"


def heads(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.ones(shape, dtype=dtype) for shape in shapes or [(2, 4, 48, 16)] * 3]


HALF, WHOLE = torch.bfloat16, torch.float32
MASK = torch.ones(2, 1, 48, 48, dtype=torch.bool)
SHARED = (2, 4, 48, 16), (2, 2, 48, 16), (2, 2, 48, 16)  # keys and values that two heads share
NEW = torch_release() >= (2, 14)  # PyTorch chooses otherwise


LATER = [  # like others that are tried every day
    ("A100", heads(torch.float16), {"dropout_p": 0.1}, FLASH),
    ("A100", heads(HALF, *[(2, 4, 48, 20)] * 3), {}, FLASH),
    ("A100", heads(HALF, *[(2, 4, 48, 264)] * 3), {}, EFFICIENT),
    ("A100", heads(WHOLE), {}, EFFICIENT),
    ("A100", heads(HALF, *[(4, 48, 16)] * 3), {}, MATH),
    ("H200", [*heads(HALF), MASK], {}, CUDNN),
    ("H200", heads(HALF, *SHARED), {"enable_gqa": True}, CUDNN),
    ("H200", heads(HALF, (2, 4, 48, 16), (2, 4, 48, 16), (2, 4, 48, 8)), {}, CUDNN),
    ("H200", heads(HALF, *[(2, 4, 48, 136)] * 3), {}, FLASH if NEW else CUDNN),
    ("H200", heads(HALF, (2, 4, 48, 16), (2, 4, 1, 16), (2, 4, 1, 16)), {}, FLASH),
    ("H200", heads(HALF, *[(2, 4, 48, 264)] * 3), {}, EFFICIENT),
    ("H200", heads(WHOLE), {}, EFFICIENT),
]


@pytest.mark.parametrize(
    ("device", "inputs", "options", "kernel"),
    [
        ("cpu", heads(HALF), {}, CPU),
        ("A100", heads(HALF), {"is_causal": True}, FLASH),
        ("A100", heads(HALF, *SHARED), {"enable_gqa": True}, FLASH),
        ("A100", heads(HALF, (2, 4, 8, 16), (2, 4, 48, 16), (2, 4, 48, 16)), {"is_causal": True}, EFFICIENT),
        ("A100", [*heads(HALF), MASK], {}, EFFICIENT),
        ("A100", heads(WHOLE, *[(2, 4, 48, 18)] * 3), {}, MATH),
        ("A100", heads(WHOLE, *SHARED), {"enable_gqa": True}, EFFICIENT if NEW else MATH),
        ("H200", heads(HALF), {"is_causal": True}, CUDNN),
        ("H200", heads(torch.float16), {"dropout_p": 0.1}, FLASH if NEW else CUDNN),
        ("B200", heads(HALF, *[(2, 4, 48, 136)] * 3), {}, FLASH),
        ("H200", heads(HALF, *[(2, 4, 48, 20)] * 3), {}, FLASH),
        ("B200", heads(HALF, (2, 4, 1, 16), (2, 4, 48, 16), (2, 4, 48, 16)), {}, FLASH if NEW else CUDNN),
        ("T4", heads(torch.float16), {}, EFFICIENT),
        ("T4", heads(HALF), {}, MATH),
        *(pytest.param(*case, marks=pytest.mark.long) for case in LATER),
    ],
)
def test_attention_is_the_kernel_that_the_device_would_take(
    device: str, inputs: list[Tensor], options: dict[str, Any], kernel: str
) -> None:
    plan = planned(Attention(**options), tuple(inputs), costs=device)
    ops = [op.name for op in plan.graph.ops]
    kernels = {re.sub(r"(_backward)?(_default)?(_\d+)?$", "", name) for name in ops if "dot_product" in name}
    assert kernels == ({kernel} if kernel != MATH else set()), ops
    assert kernel != MATH or any(name.startswith("bmm") for name in ops)
    names = {FLASH: "flash attention", EFFICIENT: "memory-efficient attention", CUDNN: "cuDNN's attention"}
    said = names.get(kernel, "")
    assert (f"CUDA's, assumed: {said + ', ' if said else ''}512-byte blocks" in str(plan)) == (
        device != "cpu"
    )


class Heads(nn.Module):
    """The attention itself, without a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, dtype=HALF))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q * self.gain, k, v, attn_mask=mask)


def test_heads_are_padded_for_flash_attention_and_come_back_as_they_were() -> None:
    plan = planned(Heads(), tuple(heads(HALF, *[(2, 4, 48, 20)] * 3)), loss=8, costs="H200")
    flash = next(node for node in plan.captured.nodes if "flash" in node.name)
    assert [tuple(node.meta["val"].shape) for node in flash.args[:3]] == [(2, 4, 48, 24)] * 3
    (output,) = plan.captured.forward_outputs
    assert tuple(output.meta["val"].shape) == (2, 4, 48, 20)


def test_a_mask_is_added_to_the_scores() -> None:
    plan = planned(Heads(), (*heads(HALF), MASK), loss=8, costs="A100")
    kernel = next(node for node in plan.captured.nodes if "efficient" in node.name)
    bias = kernel.args[3].meta["val"]
    assert (tuple(bias.shape), bias.dtype) == ((2, 4, 48, 48), HALF)
    plan = planned(Heads(), (*heads(HALF), MASK), loss=8, costs="H200")
    kernel = next(node for node in plan.captured.nodes if "cudnn" in node.name)
    assert tuple(kernel.args[3].meta["val"].shape) == (2, 1, 48, 48)


def test_what_is_frozen_or_wants_a_gradient_stays_so_without_data() -> None:
    def made() -> tuple[nn.Module, Tensor]:
        model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8), nn.Linear(8, 1))
        return model, torch.ones(4, 8, requires_grad=True)

    real, without = made(), on_meta(made)
    assert shown(planned(*without)) == shown(planned(*real))
    assert planned(*without).captured.backward_outputs.count(None) == 2


def test_flash_attention_saves_what_cuda_saves() -> None:
    plan = planned(Attention(), tuple(heads(HALF)), costs="A100")
    forward, backward = (op for op in plan.graph.ops if "flash" in op.name)
    shapes = [(tuple(t.shape), t.dtype) for t in tensors_of(plan.captured.nodes[forward.index]) if t is not None]
    seeds = [((2,), torch.uint64), ((), torch.uint64)]
    assert shapes == [((2, 4, 48, 16), HALF), ((2, 4, 48), WHOLE), *seeds, ((0,), HALF)]
    made = set(forward.writes) | set(forward.reads)
    read = [plan.costs.sizes.values[value] for value in backward.reads if value in made]
    assert sorted(read) == [
        512,
        512,
        1536,
        12288,
        12288,
        12288,
        12288,
    ]  # seeds, log-sums, output, query, key, value
    assert all(size % 512 == 0 for size in plan.costs.sizes.values)
    assert plan.costs.sizes.workspace[backward.index] == 2 * 4 * 128 * (32 + 1) * 4


def test_cudnns_attention_saves_as_much() -> None:
    plans = [planned(Attention(), tuple(heads(HALF)), costs=device) for device in ("A100", "H200")]
    pairs = [[op for op in plan.graph.ops if "attention" in op.name] for plan in plans]
    read = [[plan.costs.sizes.values[v] for v in pair[1].reads] for plan, pair in zip(plans, pairs, strict=True)]
    assert sorted(read[0]) == sorted(read[1])
    working = [plan.costs.sizes.workspace[pair[1].index] for plan, pair in zip(plans, pairs, strict=True)]
    assert working[0] == working[1] > 0


def test_flash_attention_with_shared_keys_adds_up_the_gradients_of_all_heads() -> None:
    inputs = heads(HALF, (2, 4, 130, 40), (2, 2, 48, 40), (2, 2, 48, 40))
    plan = planned(Attention(enable_gqa=True), tuple(inputs), costs="A100")
    backward = next(op for op in plan.graph.backward_ops if "flash" in op.name)
    assert (
        plan.costs.sizes.workspace[backward.index] == 2 * 4 * 256 * (64 + 1) * 4 + 2 * (2 * 4 * 48 * 40) * 2
    )


def test_the_kernels_of_the_cpu_are_back_afterwards() -> None:
    inputs = tuple(heads(HALF))
    before = shown(planned(Attention(), inputs))
    planned(Attention(), inputs, costs="H200")
    assert shown(planned(Attention(), inputs)) == before
    assert "kernels" not in str(before[0])


def test_a_batch_norm_is_halved_for_kernels_of_a_cpu_alone() -> None:
    def second_halves(**options: Any) -> int:
        plan = planned(nn.Sequential(nn.BatchNorm1d(4)), torch.ones(2, 4), **options)
        return [op.target for op in plan.graph.ops].count("fxremat.batch_normalized.default")

    assert [second_halves(), second_halves(costs="A100")] == [1, 0]


def test_several_devices_are_compared() -> None:
    model = on_meta(lambda: Llama(2))
    compared = compared_on(["A100", DEVICES["H200"], "A100", "cpu"], model, mem="80%")
    assert list(compared.plans) == ["A100", "H200", "cpu"]
    assert shown(compared.plans["H200"]) == shown(planned(model, tokens(), costs="H200", mem="80%"))
    first, _, cpu = compared.estimates
    held = sum(  # all that the step reads, in blocks
        -(-p.nbytes // 512) * 512 for p in (*model.parameters(), model.scale, model.shift, *tokens())
    )
    assert first.held == held
    weights = sum(-(-p.nbytes // 512) * 512 for p in model.parameters())
    step = max(first.plan.predicted_peak, 2 * weights)  # AdamW's update takes gradients and a copy of the weights
    assert first.left == 81920 * 2**20 - held - 2 * weights - step
    assert cpu.left is None
    assert first.seconds_at(100) == first.plan.keep_all_time
    assert first.seconds_at(1) is None
    tight = 100 * first.plan.minimum / first.plan.keep_all_peak
    assert first.seconds_at(tight + 0.01) == max(time for _, time in first.plan.frontier)
    assert first.left_at_least == first.on_device.left(first.plan.minimum)
    heads, *rows = str(compared).splitlines()[:4]
    assert heads.split()[:2] == ["device", "memory"]
    assert [row.split()[0] for row in rows] == ["A100", "H200", "cpu"]
    assert rows[0].endswith("GiB left")
    assert rows[2].endswith("?")
    assert max(map(len, str(compared).splitlines())) <= 130


def test_a_device_that_is_too_small_is_told_of() -> None:
    compared = compared_on([small(1000)], Llama(1))
    assert str(compared).count("no: ") == 2
    (found,) = compared.estimates
    assert found.left == 1000 - found.held - found.on_device.state - compared.plans["small"].predicted_peak


@pytest.mark.parametrize("mem", [pytest.param("80%", marks=pytest.mark.long), "auto"])
def test_devices_that_run_the_same_kernels_share_one_capture(captures: list[object], mem: str) -> None:
    made = on_meta(lambda: Llama(1))
    compared = compared_on(["A100", "H200", "RTX-4090", "T4", "V100"], made, mem=mem)
    assert len(captures) == 3  # with flash attention, with cuDNN's before it, and with neither
    for name in ("H200", "V100"):
        alone = planned(made, tokens(), costs=name, mem=mem)
        assert shown(compared.plans[name]) == shown(alone)


def test_what_fits_is_asked_of_the_least_budget_and_of_the_planned_one() -> None:
    """A budget that was meant for the whole card must not make a step that fits look as if it did not."""
    model = on_meta(lambda: Llama(1))
    whole = planned(model, tokens(), costs="A100", optimizer="sgd")
    held, least, most = whole.on_device.total - whole.on_device.free, whole.minimum, whole.predicted_peak
    tight = small(held + (least + most) // 2)
    compared = compared_on([tight], model, optimizer="sgd", mem="100%")
    row, advice = str(compared).splitlines()[1], str(compared).splitlines()[-1]
    assert re.search(r"[\d.]+ KiB left .* no: [\d.]+ KiB over$", row)
    assert advice.startswith("small: a budget of up to ")
    answer = str(planned(model, tokens(), costs=tight, optimizer="sgd")).splitlines()[-3:]
    assert "not the planned " in " ".join(answer)
    assert f"the least is {format_bytes(least)}" in " ".join(" ".join(answer).split())
    fitting = planned(model, tokens(), costs=tight, optimizer="sgd", mem=(least + most) // 2)
    assert "fits            hardly: " in str(fitting)


def test_a_comparison_for_what_is_left_shows_devices_that_are_too_small() -> None:
    model = on_meta(lambda: Llama(1))
    whole = planned(model, tokens(), costs="A100")
    held = whole.on_device.total - whole.on_device.free
    names = [small(held // 2, "none"), small(2 * (held + whole.predicted_peak), "enough")]
    compared = compared_on(names, model, mem="auto")
    none, enough = compared.estimates
    assert none.plan.predicted_peak == none.plan.minimum == whole.minimum
    assert none.left is not None
    assert none.left < 0
    assert enough.plan.budget == enough.on_device.auto
    assert enough.plan.predicted_peak == whole.predicted_peak
    lines = str(compared).splitlines()
    assert lines[1].count("no: ") == 2
    assert lines[2].count(" left") == 2


def test_wrong_devices_to_compare_are_refused() -> None:
    for devices, says in (
        ([], "devices is empty"),
        (["A100", "abacus"], "unknown device 'abacus'"),
        ([3], "unknown device 3"),
    ):
        with pytest.raises(FxrematError, match=says):
            compared_on(devices, Llama(1))


@pytest.mark.parametrize("edge", [*range(1, 40), 100, 4095])
def test_the_largest_size_is_found_with_few_trials(edge: int) -> None:
    tried: list[int] = []

    def least(size: int) -> int:
        tried.append(size)
        return 10 * size

    found = largest(least, 10 * edge + 3, 4096)
    assert found == Largest(size=edge, least=10 * edge, next_least=10 * (edge + 1))
    assert len(tried) <= 2 * edge.bit_length() + 2
    assert len(set(tried)) == len(tried)


def test_a_search_ends_at_its_limit_and_needs_one_that_fits() -> None:
    for limit in range(1, 70):
        assert largest(lambda size: size, 10**9, limit) == Largest(size=limit, least=limit, next_least=None)
    with pytest.raises(BudgetTooSmall) as error:
        largest(lambda size: 7 * size, 6, 100)
    assert error.value.minimum == 7


def llama(batch: int = 2) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    tokens = torch.zeros(batch, 16, dtype=torch.long, device="meta")
    return on_meta(lambda: Llama(1)), (tokens, tokens)


NAME = "tests.test_what_if:llama"
QUICK = ["--estimate", "--effort", "0", "--slots", "50"]


def test_the_command_line_compares_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", NAME, "--mem", "100%", "--device", "A100, H200", *QUICK]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[1:3]] == ["A100", "H200"]


def test_the_command_line_says_whether_a_step_fits_on_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    def last(*arguments: str) -> dict[str, str]:
        assert main(["plan", NAME, *QUICK, *arguments]) == 0
        *_, text = capsys.readouterr().out.partition("\nRTX-4090\n")
        return {line[:16].strip(): line[16:].strip() for line in text.splitlines() if line.strip()}

    first = last("--mem", "100GiB", "--device", "rtx 4090")
    assert first["memory"] == "24.0 GiB"
    assert first["budget"] == "100.0 GiB is 76.0 GiB more than the device has"
    assert first["held"].endswith("of optimizer state")
    assert first["fits"].startswith("yes: 22.8 GiB left beside the planned ")
    assert " and 1.2 GiB for driver, context and" in first["fits"]
    second = last("--mem", "auto", "--device", "4090", "--optimizer", "sgd")
    assert second["held"].endswith("0 B of optimizer state (SGD)")
    assert "budget" not in second


@pytest.mark.long
def test_the_command_line_finds_the_largest_batch(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"search": Search(seconds=0, slots=50), "costs": "H200"}
    least = [planned(*llama(batch), **options).minimum for batch in (2, 3)]
    mem = sum(least) // 2
    assert main(["plan", NAME, "--mem", str(mem), "--device", "H200,T4", "--largest", "batch", *QUICK]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert re.match(
        r"H200: the largest batch within [\d.]+ KiB is 2 \(the least budget is .*; of 3 it is ", first
    )
    assert second.startswith("T4: the largest batch within ")
    assert main(["plan", NAME, "--mem", str(mem), "--largest", "batch", "--up-to", "1", *QUICK]) == 0
    assert re.fullmatch(
        r"the largest batch within .* is 1 \(.*\); larger ones were not tried\n", capsys.readouterr().out
    )


def test_the_command_line_lets_the_planner_choose(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", NAME, *QUICK, "--mem", "100%", "--exact", "yes", "--device", "A100,H200"]) == 0
    assert main(["plan", NAME, *QUICK, "--mem", "100%", "--exact", "no"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "means recomputing: 1.00x in" in shown
    assert "slices: not tried, as it could save 0.0%" in shown


def test_the_command_line_plans_for_all_that_a_process_has(capsys: pytest.CaptureFixture[str]) -> None:
    for name, device in (("sgd", []), ("adamw", ["--device", "H200"])):
        assert main(["plan", NAME, *QUICK, "--device-mem", "2GiB", "--optimizer", name, *device]) == 0
        shown = capsys.readouterr().out
        expected = fxremat.plan(
            *llama(),
            device_mem="2GiB",
            optimizer=name,
            costs=device[-1] if device else "estimate",
            search=Search(seconds=0, slots=50),
        )
        assert expected.on_device is not None
        assert expected.on_device.optimizer.lower() == name
        assert shown == f"{expected}\n"
        assert "\ndevice_mem\n  memory          2.0 GiB\n  held " in shown
    assert main(["plan", NAME, *QUICK, "--device-mem", "100KiB"]) == 2
    assert "--device-mem has 100.0 KiB: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "context and the allocator's reserve" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--mem", "1GiB", "--device-mem", "1GiB"], "argument --device-mem: not allowed with argument --mem"),
        ([], "one of the arguments --mem --device-mem is required"),
        (["--device-mem", "60%"], "'60%' is not a number of bytes"),
        (["--device-mem", "1GiB", "--optimizer", "lion"], "--optimizer is 'lion'; it is one of"),
        (["--device-mem", "1GiB", "--device", "A100,H200"], "does not go with --device with 2 devices: give --mem"),
        (["--device-mem", "1GiB", "--largest", "batch"], "does not go with --largest: give --mem"),
        (["--exact", "yes", "--mem", "1GiB", "--largest", "batch"], "it does not go with --largest"),
        (["--exact", "yes", "--mem", "10"], "--exact no allows slices, with which gradients round"),
        (["--largest", "length", "--mem", "1GiB"], "has no parameter 'length'"),
        (["--largest", "batch", "--mem", "50%"], "--largest needs --mem in bytes"),
        (["--largest", "batch", "--mem", "1GiB", "--up-to", "0"], "--up-to is 0"),
        (["--largest", "batch", "--mem", "10"], "no schedule fits in 10 bytes"),
        (["--device", "A100,H200", "--mem", "1GiB", "--report", "out.html"], "names 2 devices"),
        (["--device", "A100", "--mem", "1GiB", "--save", "plan.json"], "--save writes a plan for the device that"),
        (["--device", "A100,abacus", "--mem", "1GiB"], "unknown device 'abacus'"),
        (["--device", "rtx 4900", "--mem", "1GiB"], "did you mean 'RTX-4090'?"),
        (["--device", "4900", "--mem", "1GiB"], "`fxremat devices` says more of them"),
        (["--optimizer", "adamw", "--mem", "1GiB"], "--optimizer goes with --device H100, where"),
        (["--mem", "auto"], "for what another device would have left, add --device H100"),
        (["--mem", "1GiB", "--solver", "pofo"], "--solver pofo moves values to the host; it goes with --offload"),
        (["--mem", "1GiB", "--host-mem", "1GiB"], "--host-mem limits what is offloaded; it goes with --offload"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", NAME, *QUICK, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = [line for line in printed.err.splitlines() if not line.endswith("s so far")]  # of a slow machine
    assert len(lines) == 1
    assert says in lines[0]


def test_a_fake_mode_around_the_call_is_left() -> None:
    """In a process of its own: where autograd meets real tensors in a strict fake mode, C++ ends the process."""
    code = (
        "import torch; from tests.test_what_if import FakeTensorMode, Llama, planned, tokens\n"
        "with FakeTensorMode(): print(planned(Llama(1), tokens()).keep_all_peak)\n"
        "print(planned(Llama(1), tokens()).keep_all_peak)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    inside, outside = done.stdout.split()
    assert inside == outside


def test_the_example_has_the_sizes_that_it_says() -> None:
    models = [what_if.llama_8b(), what_if.llama_1b(batch=3, length=5)]
    assert [sum(p.numel() for p in model.parameters()) for model, _ in models] == [8_030_261_248, 1_235_814_400]
    assert [tuple(tokens.shape) for _, tokens in models] == [(1, 4096), (3, 5)]
    model = on_meta(lambda: what_if.Llama(layers=2, width=64, hidden=128, heads=8, tied=True).to(HALF))
    plan = planned(model, torch.zeros(2, 16, dtype=torch.long), costs="B200")
    assert plan.assumed == "CUDA's, assumed: cuDNN's attention, 512-byte blocks; unknown workspaces count as 0"
