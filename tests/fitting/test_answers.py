"""Answers whether a model trains on a device: what adds up, what is refused, and what the command prints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.__main__ import main
from fxremat.budget import AUTO_MARGIN
from fxremat.cost.device_memory import CONTEXT
from fxremat.cost.devices import DEVICES, Device
from fxremat.cost.metering import peak_of
from fxremat.errors import FxrematError
from fxremat.fitting.answer import Answer
from fxremat.fitting.optimizers import memory_of
from fxremat.fitting.settings import Training
from fxremat.fitting.sharding import shares_of

pytestmark = [pytest.mark.usefixtures("torch_ready"), pytest.mark.filterwarnings("ignore")]  # of the libraries

WIDTH, MIB = 256, 2**20


class Net(nn.Module):
    """Wide layers one after the other, and a loss."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.pow(2).mean()


def factory(batch: int = 1) -> tuple[nn.Module, Tensor]:
    """A model with many examples."""
    return Net(), torch.zeros(1024 * batch, WIDTH)


def card(mib: int) -> Device:
    return replace(DEVICES["A100"], name="card", memory=mib * MIB)


def ask(mib: int, **settings: Any) -> Answer:
    model, x = Net(), torch.zeros(4096, WIDTH)
    return fxremat.fits(model, inputs=x, on=card(mib), **({"dtype": "fp32"} | settings))


def test_parts_add_up_to_the_total_and_the_total_fits() -> None:
    roomy = ask(2048)
    assert roomy.line.startswith("yes: ")
    assert roomy.way is not None
    assert roomy.way.slowdown == 1.0
    tight = ask(CONTEXT // MIB + 40)
    assert tight.way is not None
    assert (tight.way.how, tight.way.slowdown > 1.0) == ("", True)
    assert tight.ledger.parts["activations kept"] < roomy.ledger.parts["activations kept"]
    for answer in (roomy, tight):
        ledger, memory = answer.ledger, answer.device.memory
        assert memory is not None
        assert sum(size for _, size in ledger.rows) == ledger.total <= memory
        assert ledger.reserve == int(AUTO_MARGIN * sum(ledger.parts.values()))
        assert answer.room.least <= ledger.total <= answer.room.everything
        assert ledger.parts["weights"] == 6 * (WIDTH * WIDTH + WIDTH) * 4


def test_values_and_weights_wait_on_the_host_where_the_device_is_too_small() -> None:
    hosted = ask(CONTEXT // MIB + 22)
    assert hosted.way is not None
    assert (hosted.way.how, hosted.way.on_host > 0) == ("weights", True)
    assert sum(size for _, size in hosted.ledger.rows) == hosted.ledger.total <= (CONTEXT // MIB + 22) * MIB
    assert hosted.line.startswith("no: ")
    assert hosted.line.endswith(": yes")
    assert "Offload(weights=True)" in hosted.calls["PyTorch"]
    none = ask(CONTEXT // MIB + 4)
    assert not none.fits
    assert "with weights on the host" in none.line
    assert none.calls == {}
    summed = ask(CONTEXT // MIB + 22, accumulate=2)
    assert summed.way is not None
    assert (summed.way.how, summed.way.on_host > hosted.way.on_host) == ("weights", True)
    assert sum(size for _, size in summed.ledger.rows) == summed.ledger.total <= (CONTEXT // MIB + 22) * MIB
    assert 'Offload(weights=True, updates="step")' in summed.calls["PyTorch"]


def test_several_devices_are_answered_from_one_capture(captures: list[object]) -> None:
    cards = [replace(card(mib), name=f"card {mib}") for mib in (2048, CONTEXT // MIB + 22, CONTEXT // MIB + 4)]
    model, x = Net(), torch.zeros(4096, WIDTH)
    several = fxremat.fits(model, inputs=x, on=cards, dtype="fp32")
    assert len(captures) == 1
    assert len(several) == len(several.to_json()) == 3
    alone = [fxremat.fits(model, inputs=x, on=each, dtype="fp32") for each in cards]
    assert [each.to_json() for each in several] == [each.to_json() for each in alone]
    heads, *rows = [[*map(str.strip, line.split("  "))] for line in str(several).splitlines()[1:5]]
    cells = [[cell for cell in row if cell] for row in rows]
    assert "fits" in heads
    assert [(row[0], row[2]) for row in cells] == [
        ("card 2048", "yes"), (cards[1].name, "yes, weights on the host"), (cards[2].name, "no")
    ]  # fmt: skip
    assert several.table.html() in several.to_html()
    with pytest.raises(FxrematError, match="run different kernels"):
        fxremat.fits(model, inputs=x, on=[card(2048), replace(Device.named("cpu"), memory=2**40)])
    with pytest.raises(FxrematError, match="is an empty list"):
        fxremat.fits(model, inputs=x, on=[])


def test_the_command_takes_several_devices(capsys: pytest.CaptureFixture[str]) -> None:
    name = "tests.fitting.test_answers:factory"
    assert main(["fits", name, "--on", "T4, L4", "--json", "--dtype", "fp32"]) == 0
    assert [each["device"] for each in json.loads(capsys.readouterr().out)] == ["T4", "L4"]


def test_the_update_counts_where_it_needs_more_than_the_step() -> None:
    answer = fxremat.fits(Net(), inputs=torch.zeros(1, WIDTH), on=card(2048), dtype="fp32", optimizer="adafactor")
    parts = answer.ledger.parts
    assert answer.ledger.moment == "update"
    assert parts["gradients of weights"] == parts["weights"]
    assert parts["temporaries of the optimizer"] > 0
    assert answer.ledger.total == answer.room.everything


def test_accumulated_gradients_wait_besides_the_new_ones() -> None:
    once, more = ask(4096), ask(4096, accumulate=4)
    gradients = 6 * (WIDTH * WIDTH + WIDTH) * 4
    assert more.room.resident.bytes - once.room.resident.bytes == gradients
    assert "gradients that wait for the update" in more.ledger.parts


def test_shards_split_what_fsdp_splits_and_ddp_adds_buckets() -> None:
    alone, both, all_ = ask(4096), ask(4096, devices=4, shard="fsdp"), ask(4096, devices=4, shard="ddp")
    weights = alone.ledger.parts["weights"]
    assert both.ledger.parts["weights"] == 6 * (WIDTH // 4 * WIDTH * 4 + 512)  # a bias of 256 bytes takes 512
    assert both.ledger.parts["gathered layers (by formula)"] == 2 * (weights // 6)
    assert all_.ledger.parts["buckets of gradients (by formula)"] == weights
    assert "by formula" in str(both)
    parts = shares_of({"a.w": torch.zeros(10, 3), "b": torch.zeros(2)}, ["b"], ["a"], 4, lambda size: size)
    assert [tuple(tensor.shape) for tensor in parts.parameters.values()] == [(3, 3), (1,)]
    assert (parts.gathered, parts.reducing) == (2 * 120 + 8, 0)


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "muon"])
def test_the_memory_of_an_optimizer_is_that_of_its_real_steps(name: str) -> None:
    made = {
        "adamw": lambda p: torch.optim.AdamW(p, fused=True),
        "sgd": lambda p: torch.optim.SGD(p, fused=True),
        "adafactor": torch.optim.Adafactor,
        "muon": torch.optim.Muon,
    }
    parameter = nn.Parameter(torch.randn(300, 200))
    parameter.grad = torch.randn(300, 200)
    optimizer: Any = made[name]([parameter])
    optimizer.step()
    found = memory_of(name, {"w": parameter}, lambda size: size)
    on_device = name in ("adamw", "sgd")
    state = [v for k, v in optimizer.state[parameter].items() if isinstance(v, Tensor) and (on_device or k != "step")]
    assert found.state == sum(tensor.nbytes for tensor in state)
    peak, _ = peak_of(optimizer.step, torch.device("cpu"))
    # Kernels of a CPU have workspaces: with instructions for bfloat16, a product copies its operands.
    factor = torch.randn(200, 300, dtype=torch.bfloat16)
    product, _ = peak_of(lambda: factor @ factor.T, torch.device("cpu"))
    copies = product - 200 * 200 * factor.element_size() if name == "muon" else 0
    assert found.update <= peak <= 1.02 * found.update + copies + 64


def test_a_missing_library_and_what_is_not_answered_are_said_by_name() -> None:
    with pytest.raises(FxrematError, match="devices and shard go together"):
        Training(devices=2)
    with pytest.raises(FxrematError, match="batch is 0; it is a number, 1 or more"):
        Training(batch=0)
    with pytest.raises(FxrematError, match="optimizer is 'lion'; it is one of adamw"):
        Training(optimizer="lion")
    with pytest.raises(FxrematError, match="train is 'lora:0'"):
        Training(train="lora:0")
    with pytest.raises(FxrematError, match="the memory of cpu is not stated"):
        fxremat.fits("llama-3-8b", on="cpu")
    with pytest.raises(FxrematError, match="no model 'nothing'"):
        fxremat.fits("nothing", on="A100")
    with pytest.raises(FxrematError, match="Net goes with inputs"):
        fxremat.fits(Net(), on="A100")


def test_the_command_answers_in_text_json_and_html(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, name = tmp_path / "answer.html", "tests.fitting.test_answers:factory"
    assert main(["fits", name, "--on", "RTX-4090", "--dtype", "fp32", "--json", "--html", str(page)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["fits"] is True
    assert sum(shown["parts"].values()) == shown["total"]
    assert shown["larger_batch"] == 2
    assert shown["answer"] in page.read_text()
    assert main(["fits", name, "--on", "RTX-4090", "--device-mem", "30GiB"]) == 2
    assert "--device-mem is 30.0 GiB, and RTX-4090 has 24.0 GiB" in capsys.readouterr().err
    assert main(["fits", name, "--on", "RTX-4090", "--config", "layers=3"]) == 2
    assert "config changes a configuration" in capsys.readouterr().err
    assert main(["fits", name, "--on", "RTX-4090", "--config", "layers"]) == 2
    assert "--config 'layers' is not key=value" in capsys.readouterr().err


def test_a_process_may_have_less_than_the_device() -> None:
    whole = ask(2048)
    assert ask(4096, device_mem="2048MiB").to_json() == whole.to_json()
    less = ask(2048, device_mem=f"{CONTEXT // MIB + 40}MiB")
    assert less.way is not None
    assert less.ledger.total <= CONTEXT + 40 * MIB < whole.ledger.total
    assert less.line.startswith(f"yes: {less.ledger.total / 2**30:.1f} of {(CONTEXT + 40 * MIB) / 2**30:.1f} GiB")
    never = ask(2048, device_mem="100MiB")
    assert f"GiB at least, and device_mem is 0.1 on {never.device}" in never.line
    with pytest.raises(FxrematError, match=r"device_mem is 3.0 GiB, and .* has 2.0 GiB: give that, or less"):
        ask(2048, device_mem="3GiB")
    assert fxremat.fits(Net(), inputs=torch.ones(2, WIDTH), on="cuda", device_mem="2GiB", dtype="fp32").fits


@pytest.mark.long
def test_the_largest_batch_is_one_that_the_next_one_exceeds(capsys: pytest.CaptureFixture[str]) -> None:
    name = "tests.fitting.test_answers:factory"
    assert main(["fits", name, "--on", "T4", "--largest", "batch", "--json", "--dtype", "fp32"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["total"] <= found["device_memory"] < found["next_total"]
    assert main(["fits", name, "--on", "T4", "--largest", "width"]) == 2
    assert "--largest is 'width'; it is one of batch, length" in capsys.readouterr().err
    assert main(["fits", name, "--on", "T4,L4", "--largest", "batch"]) == 2
    assert "--largest is for one device, and --on names 2" in capsys.readouterr().err
