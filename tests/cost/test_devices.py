"""The table of devices: every row has a source and numbers that a device can have; estimates count by them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fxremat.cost.devices import DEVICES, PCIE_3, PCIE_4, PCIE_5, Device
from fxremat.cost.estimate import assumptions, estimate
from fxremat.errors import FxrematError
from fxremat.graphs.captured import Captured
from tests.dags import capture

pytestmark = pytest.mark.usefixtures("torch_ready")


@pytest.mark.parametrize("device", DEVICES.values(), ids=str)
def test_rows_are_possible(device: Device) -> None:
    assert DEVICES[str(device)] is device
    assert len(device.source) > 20
    assert 3e10 < device.flops <= device.half_flops < 5e15
    assert device.flops <= (device.tf32_flops or device.flops) <= device.half_flops
    assert device.flops <= (device.bf16_flops or device.half_flops) <= device.half_flops
    if device.name in ("cpu", "cuda"):
        return
    assert device.cuda
    assert device.memory is not None
    assert 15 * 2**30 <= device.memory <= 256 * 2**30
    assert 0.2e12 < device.bandwidth < 10e12
    assert device.link in (PCIE_3, PCIE_4, PCIE_5)
    assert device.link < device.bandwidth
    assert 5e-3 < device.memory / device.bandwidth < 0.1  # seconds to read all of it


def test_the_devices_that_are_asked_for_are_there() -> None:
    asked = ("A100", "A100-40GB", "A100-80GB", "H100", "H200", "B200", "RTX 4090", "RTX 5090", "L4", "T4", "MI300X")
    assert [Device.named(name).name for name in asked] == [name.replace(" ", "-") for name in asked]
    assert not Device.named("T4").flash


REPORTED = {  # MiB, as nvidia-smi and rocm-smi show them
    "V100": 32768, "T4": 15360, "A100": 81920, "A100-40GB": 40960, "A100-80GB": 81920, "A10G": 23028,
    "A6000": 49140, "L4": 23034, "L40S": 46068, "H100": 81559, "H200": 143771, "B200": 183359,
    "RTX-3090": 24576, "RTX-4080": 16376, "RTX-4090": 24564, "RTX-5090": 32607, "RTX-PRO-6000": 97887,
    "MI300X": 196592, "MI325X": 262128,
}


def test_memory_is_what_the_driver_reports() -> None:
    assert {name: device.memory for name, device in DEVICES.items() if device.memory} == {
        name: amount * 2**20 for name, amount in REPORTED.items()
    }


@pytest.mark.parametrize(
    ("given", "name"),
    [
        *((name, name) for name in DEVICES),
        *((name.lower(), name) for name in DEVICES),
        *((name.replace("-", " "), name) for name in DEVICES),
        *(("rtx4090", "RTX-4090"), ("4090", "RTX-4090"), (" h100 ", "H100"), ("a100_40gb", "A100-40GB")),
        *(("NVIDIA GeForce RTX 4090", "RTX-4090"), ("AMD Instinct MI300X", "MI300X"), ("rtx a6000", "A6000")),
    ],
)
def test_names_are_read_with_tolerance(given: str, name: str) -> None:
    assert Device.named(given) is DEVICES[name]


@pytest.mark.parametrize(
    ("given", "near"), [("RTX 4900", "RTX-4090"), ("h10", "H100"), ("MI300", "MI300X"), ("A100-80", "A100-80GB")]
)
def test_a_near_miss_is_named(given: str, near: str) -> None:
    with pytest.raises(FxrematError, match=f"unknown device '{given}', did you mean '{near}'?"):
        Device.named(given)
    with pytest.raises(FxrematError, match=r"unknown device 'abacus'; known are cpu, .*MI325X"):
        Device.named("abacus")


class Layers(nn.Module):
    """A convolution and a matrix product, in a type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv1d(3, 3, 1, dtype=dtype), nn.Linear(5, 5, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.conv(x)).sum()


def joint_of(dtype: torch.dtype) -> Captured:
    return capture(Layers(dtype), torch.ones(2, 3, 5, dtype=dtype))


def seconds(joint: Captured, device: Device, op: str) -> float:
    bound = replace(device, bandwidth=1e30, launch=0.0)
    return next(s for o, s in zip(joint.ops, estimate(joint, bound).seconds, strict=True) if op in o.target)


def test_each_type_has_its_rate() -> None:
    device = Device(
        name="x", flops=1.0, tf32_flops=2.0, half_flops=4.0, bf16_flops=8.0, bandwidth=1.0, memory=1, source="made up"
    )
    conv, product = (2 * 2 * 3 * 5 * 3, 2 * 6 * 5 * 5)
    for dtype, rates in ((torch.float32, (2, 1)), (torch.float16, (4, 4)), (torch.bfloat16, (8, 8))):
        joint = joint_of(dtype)
        assert seconds(joint, device, "convolution.default") == pytest.approx(conv / (0.6 * rates[0]))
        assert seconds(joint, device, "addmm") == pytest.approx(product / (0.6 * rates[1]))
    plain = replace(device, tf32_flops=None, bf16_flops=None)
    assert seconds(joint_of(torch.float32), plain, "convolution.default") == pytest.approx(conv / 0.6)
    assert seconds(joint_of(torch.bfloat16), plain, "addmm") == pytest.approx(product / (0.6 * 4))


def test_sizes_are_rounded_as_the_devices_allocator_does() -> None:
    joint = joint_of(torch.float32)
    here, there = (estimate(joint, DEVICES[name]).sizes for name in ("cpu", "H200"))
    assert {size % 512 for size in there.values} == {0}
    assert here.values != there.values
    assert all(0 <= big - small < 512 for small, big in zip(here.values, there.values, strict=True))
    assert not any(there.workspace)
    assert (here.seed > 0, there.seed) == (True, 0)
    assert assumptions(joint, DEVICES["cpu"]) == ""
    assert assumptions(joint, DEVICES["H200"]) == "CUDA's, assumed: 512-byte blocks; unknown workspaces count as 0"


PAGE = Path(__file__).parents[2] / "docs" / "what-if.md"


def row_of(device: Device) -> str:
    rates = (device.flops, device.tf32_flops or device.flops, device.half_flops, device.bf16_flops or device.half_flops)
    columns = [f"{rate / 1e12:g}" for rate in rates]
    memory = f"{device.memory // 2**20:,} MiB" if device.memory else ""
    return f"| {device.name} | {memory} | {' | '.join(columns)} | {device.bandwidth / 1e9:g} | {device.source} |"


def test_the_page_has_every_device() -> None:
    """To write it anew: `python -c "from tests.cost.test_devices import write_page; write_page()"`."""
    assert table() in PAGE.read_text()


def table() -> str:
    heads = "| device | memory | fp32 | conv | fp16 | bf16 | GB/s | source |\n|---|---|---|---|---|---|---|---|"
    rows = "\n".join(row_of(device) for device in DEVICES.values())
    return f"<!-- devices -->\n{heads}\n{rows}\n<!-- /devices -->"


def write_page() -> None:
    before, _, rest = PAGE.read_text().partition("<!-- devices -->")
    PAGE.write_text(before + table() + rest.partition("<!-- /devices -->")[2])
