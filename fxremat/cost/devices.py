"""Descriptions of devices for which costs can be estimated, with the source of each figure.

Rates are dense: a figure that a data sheet gives with sparsity is halved here. `flops` is the rate of matrix
products of float32 tensors without TF32, PyTorch's default; float32 convolutions on NVIDIA devices use TF32 by
default (`tf32_flops`). Products in half precision are those that accumulate in float32. `memory` is the total
that the driver reports (nvidia-smi, rocm-smi), not the data sheet's gigabytes: an "80 GB" H100 has 81,559 MiB,
which is 85.5 * 10^9 bytes.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fxremat.errors import FxrematError
from fxremat.units import format_bytes

if TYPE_CHECKING:
    import torch

PCIE_3, PCIE_4, PCIE_5 = 12e9, 24e9, 50e9
"""Bytes per second that copies of pinned memory reach in one direction over 16 lanes of PCIe 3, 4 and 5.

The nominal rates are 15.8, 31.5 and 63.0e9.
"""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A description of a device: the data sheet's rates, and the memory that its driver reports."""

    name: str
    flops: float  # fp32 matrix products: operations per second
    half_flops: float  # dense fp16 and bf16 matrix products: operations per second
    bandwidth: float  # device memory: bytes per second
    launch: float = 5e-6  # seconds of overhead of each op
    link: float = PCIE_3  # bytes per second of copies to the host, and at the same time of copies from the host
    # bytes per second to other devices, and at the same time from other devices; None: as `link`
    network: float | None = None
    latency: float = 20e-6  # seconds of overhead of each collective
    tf32_flops: float | None = None  # dense fp32 convolutions: operations per second; None: as `flops`
    bf16_flops: float | None = None  # bf16 matrix products: operations per second; None: as `half_flops`
    memory: int | None = None  # bytes; None: not stated
    # True if the device runs CUDA's kernels (or ROCm's of the same names) and PyTorch allocates in blocks as on
    # CUDA
    cuda: bool = True
    flash: bool = True  # True: half precision uses flash attention; False: memory-efficient attention
    # largest head dimension for which PyTorch before 2.14 prefers cuDNN's attention (later releases: any);
    # None: never
    cudnn_attention: int | None = None
    source: str = ""  # data sheet or web page that states these numbers

    def __post_init__(self) -> None:
        """Raise `FxrematError` for a rate that is no positive number."""
        for name in ("flops", "half_flops", "bandwidth", "link", "network", "tf32_flops", "bf16_flops", "memory"):
            rate = getattr(self, name)
            if rate is None and name not in ("flops", "half_flops", "bandwidth", "link"):
                continue
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0:
                raise FxrematError(f"{name} of the device {self.name} is {rate!r}; it is a positive number")

    def __str__(self) -> str:
        return self.name

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which it is found: its own, and with its memory as drivers report it ("H100 80GB HBM3")."""
        if self.memory is None:
            return (self.name,)
        return self.name, f"{self.name} {round(self.memory / 2**30)}GB"

    @property
    def torch_device(self) -> torch.device:
        """A PyTorch device of the same type, "cuda" or "cpu"."""
        import torch  # imported here so that `fxremat devices` works without torch

        return torch.device("cuda" if self.cuda else "cpu")

    @classmethod
    def like(cls, device: torch.device) -> Device:
        """Return the description that stands for a PyTorch device whose figures are not known."""
        return cls.named("cpu" if device.type == "cpu" else "cuda")

    @classmethod
    def named(cls, name: str | Device) -> Device:
        """Return a known device by name; a `Device` is returned unchanged.

        Case, spaces, dashes and the maker's name do not matter, and what a driver reports is a name too.
        Raises `FxrematError` for an unknown name.

        >>> [Device.named(name).name for name in ("RTX 4090", "rtx-4090", "4090", "NVIDIA GeForce RTX 4090")]
        ['RTX-4090', 'RTX-4090', 'RTX-4090', 'RTX-4090']
        >>> [Device.named(name).name for name in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "NVIDIA H200")]
        ['H100', 'A100-40GB', 'H200']
        >>> Device.named("H100").memory // 2**20  # MiB
        81559
        """
        if isinstance(name, Device):
            return name
        by_key = {_key(alias): known for known, device in DEVICES.items() for alias in device.names}
        key = _key(str(name))
        if key not in by_key:
            near = difflib.get_close_matches(key, by_key, n=1)
            perhaps = f", did you mean {by_key[near[0]]!r}?" if near else ""
            raise FxrematError(
                f"unknown device {name!r}{perhaps}; known are {', '.join(DEVICES)}, or give a Device(...)"
            )
        return DEVICES[by_key[key]]


def _key(name: str) -> str:
    """Return the letters and digits of a device's name, without maker, product line, socket and kind of memory."""
    return re.sub(r"[^a-z0-9]|nvidia|geforce|tesla|amd|instinct|rtx|sxm\d?|hbm\d?e?", "", name.lower())


def _mib(amount: int) -> int:
    return amount * 2**20


_A100 = Device(
    name="A100-80GB",
    flops=19.5e12,
    tf32_flops=156e12,
    half_flops=312e12,
    bandwidth=2.039e12,
    link=PCIE_4,
    network=300e9,  # NVLink in one direction: half of the stated figure, as for all devices below
    memory=_mib(81920),
    source="NVIDIA A100 Tensor Core GPU data sheet, A100 80GB SXM",
)
_H100 = Device(
    name="H100",
    cudnn_attention=256,
    flops=66.9e12,
    tf32_flops=494.7e12,
    half_flops=989.4e12,
    bandwidth=3.35e12,
    link=PCIE_5,
    network=450e9,
    memory=_mib(81559),
    source="NVIDIA H100 Tensor Core GPU Architecture white paper and data sheet, H100 SXM5 80GB",
)
_MI300X = Device(
    name="MI300X",
    flops=163.4e12,
    half_flops=1307.4e12,
    bandwidth=5.3e12,
    link=PCIE_5,
    network=448e9,
    memory=_mib(196592),
    source="AMD Instinct MI300X Accelerator data sheet",
)
_ROWS = (
    Device(
        name="cpu",
        flops=5e10,
        half_flops=5e10,
        bandwidth=1e10,
        launch=3e-6,
        link=4e9,
        network=1e9,
        latency=100e-6,
        cuda=False,
        source="no data sheet: about one core of a server",
    ),
    Device(
        name="cuda",
        flops=156e12,
        half_flops=312e12,
        bandwidth=1.555e12,
        source="an A100 that uses TF32, in the place of a CUDA device that is not named",
    ),
    Device(
        name="V100",
        flops=15.7e12,
        half_flops=125e12,
        bf16_flops=15.7e12,
        bandwidth=0.9e12,
        network=150e9,
        memory=_mib(32768),
        flash=False,
        source="NVIDIA V100 Tensor Core GPU data sheet, V100 SXM2 32GB",
    ),
    Device(
        name="T4",
        flops=8.1e12,
        half_flops=65e12,
        bf16_flops=8.1e12,
        bandwidth=0.32e12,
        memory=_mib(15360),
        flash=False,
        source="NVIDIA T4 data sheet and product brief",
    ),
    replace(_A100, name="A100"),
    replace(
        _A100,
        name="A100-40GB",
        bandwidth=1.555e12,
        memory=_mib(40960),
        source="NVIDIA A100 Tensor Core GPU data sheet, A100 40GB SXM",
    ),
    _A100,
    Device(
        name="A10G",
        flops=35e12,
        half_flops=70e12,
        bandwidth=0.6e12,
        link=PCIE_4,
        memory=_mib(23028),
        source="NVIDIA A10G data sheet",
    ),
    Device(
        name="A6000",
        flops=38.7e12,
        tf32_flops=77.4e12,
        half_flops=154.8e12,
        bandwidth=0.768e12,
        link=PCIE_4,
        memory=_mib(49140),
        source="NVIDIA Ampere GA102 GPU Architecture white paper, RTX A6000",
    ),
    Device(
        name="L4",
        flops=30.3e12,
        tf32_flops=60e12,
        half_flops=121e12,
        bandwidth=0.3e12,
        link=PCIE_4,
        memory=_mib(23034),
        source="NVIDIA L4 Tensor Core GPU data sheet",
    ),
    Device(
        name="L40S",
        flops=91.6e12,
        tf32_flops=183e12,
        half_flops=362e12,
        bandwidth=0.864e12,
        link=PCIE_4,
        memory=_mib(46068),
        source="NVIDIA L40S GPU data sheet",
    ),
    _H100,
    replace(
        _H100,
        name="H200",
        bandwidth=4.8e12,
        memory=_mib(143771),
        source="NVIDIA H200 Tensor Core GPU data sheet, H200 SXM; rates of the H100 SXM, which has the same processor",
    ),
    Device(
        name="B200",
        cudnn_attention=128,
        flops=75e12,
        tf32_flops=1.1e15,
        half_flops=2.25e15,
        bandwidth=7.7e12,
        link=PCIE_5,
        network=900e9,
        memory=_mib(183359),
        source="NVIDIA HGX B200 data sheet, an eighth of the platform",
    ),
    Device(
        name="RTX-3090",
        flops=35.6e12,
        half_flops=71e12,
        bandwidth=0.936e12,
        link=PCIE_4,
        memory=_mib(24576),
        source="NVIDIA Ampere GA102 GPU Architecture white paper",
    ),
    Device(
        name="RTX-4080",
        flops=48.7e12,
        half_flops=97.5e12,
        bandwidth=0.7168e12,
        link=PCIE_4,
        memory=_mib(16376),
        source="NVIDIA Ada GPU Architecture white paper, RTX 4080 16GB",
    ),
    Device(
        name="RTX-4090",
        flops=82.6e12,
        half_flops=165.2e12,
        bandwidth=1.008e12,
        link=PCIE_4,
        memory=_mib(24564),
        source="NVIDIA Ada GPU Architecture white paper",
    ),
    Device(
        name="RTX-5090",
        flops=104.8e12,
        half_flops=209.5e12,
        bandwidth=1.792e12,
        link=PCIE_5,
        memory=_mib(32607),
        source="NVIDIA RTX Blackwell GPU Architecture white paper",
    ),
    Device(
        name="RTX-PRO-6000",
        flops=125e12,
        tf32_flops=251.9e12,
        half_flops=503.8e12,
        bandwidth=1.792e12,
        link=PCIE_5,
        memory=_mib(97887),
        source="NVIDIA RTX Blackwell PRO GPU Architecture white paper, Workstation Edition",
    ),
    _MI300X,
    replace(
        _MI300X,
        name="MI325X",
        bandwidth=6e12,
        memory=_mib(262128),
        source="AMD Instinct MI325X Accelerator data sheet; memory: its 256 GB, less the 16 MiB that an MI300X lacks",
    ),
)

DEVICES = {device.name: device for device in _ROWS}
"""The known devices by name. "A100" is the 80 GB model; "H100" and "H200" are the SXM modules."""


def listed() -> str:
    """Return a table of the known devices."""
    heads = ("device", "memory", "fp32", "half", "GB/s", "source")
    rows = [heads, *(_row(device) for device in DEVICES.values())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = ("<", ">", ">", ">", ">", "<")
    lines = ["  ".join(f"{c:{a}{w}}" for c, a, w in zip(r, aligned, widths, strict=True)).rstrip() for r in rows]
    return "\n".join((*lines, "", "fp32 and half: dense matrix products, in 10^12 a second; docs/what-if.md has more."))


def _row(device: Device) -> tuple[str, ...]:
    memory = "" if device.memory is None else format_bytes(device.memory)
    rates = (f"{rate / 1e12:.4g}" for rate in (device.flops, device.half_flops))
    return device.name, memory, *rates, f"{device.bandwidth / 1e9:.4g}", device.source
