"""All that knows kinds of devices: what each can do, and how PyTorch is asked to do it.

    kind_of(torch.device("cuda", 0)).synchronize(device)      waits for the device; a CPU is never behind
    kind_of(torch.device("mps")).require(Ability.PINNED)      raises: PyTorch has no pinned host memory for MPS devices

A kind is an entry of `KINDS`, by the type that PyTorch gives it. What it cannot do it lacks in `abilities`: `require`
refuses that by its name, and the rest works. The calls go through `torch.accelerator` where that has the word (torch
2.11 and later), else through the device's module (`torch.cuda`, `torch.xpu`). ROCm calls itself "cuda".

CPUs are tested, and CUDA on a pretended device; ROCm, XPU and MPS are entries that nobody has run.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from fxremat.errors import FxrematError
from fxremat.torch_private import cpu_name


class Ability(Enum):
    """What a kind of device may lack; the value completes "PyTorch has no ... for MPS devices"."""

    STATISTICS = "statistics of allocated memory"
    FREE = "count of free bytes"
    STREAMS = "streams beside the current one"
    TIMING = "events that time a stream"
    PINNED = "pinned host memory"
    GENERATORS = "random generators whose state can be kept"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of device."""

    type: str  # of torch.device
    name: str  # for messages
    abilities: frozenset[Ability] = frozenset()
    accelerator: bool = True  # runs behind the host, which has to wait for it
    of_cuda: bool = False  # runs what `torch.backends.cuda` and `.cudnn` switch, and has CUDA's caching allocator
    recorded: bool = False  # autograd's profiler records each of its allocations
    block: int = 1  # bytes in multiples of which the allocator counts a tensor
    unsplit: int = 0  # bytes that it leaves in a block, rather than split them off, beyond a tensor of more than this
    doubles: bool = True  # computes in float64
    in_triton: bool = False  # Inductor writes kernels for it that draw random numbers as they go

    def can(self, *abilities: Ability) -> bool:
        """Tell whether the devices of this kind can do all of this."""
        return self.abilities.issuperset(abilities)

    def require(self, ability: Ability, remedy: str = "") -> None:
        """Raise `FxrematError` where the devices of this kind lack an ability.

        Args:
            remedy: what would work.
        """
        if ability not in self.abilities:
            remedy = f": {remedy}" if remedy else ""
            raise FxrematError(f"PyTorch has no {ability.value} for {self.name} devices{remedy}")

    @property
    def metered(self) -> bool:
        """Whether the memory that a call takes can be measured."""
        return self.recorded or self.can(Ability.STATISTICS)

    def is_available(self) -> bool:
        """Tell whether this process has a device of this kind."""
        return not self.accelerator or bool(self._module.is_available())

    def current(self, device: torch.device) -> AbstractContextManager[Any]:
        """Make a device the current one for a while; a CPU needs nothing, nor does the one that is current."""
        if not self.accelerator or device.index in (None, torch.accelerator.current_device_index()):
            return contextlib.nullcontext()
        return torch.accelerator.device_index(device.index)

    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has done all that it was given."""
        if self.accelerator:
            torch.accelerator.synchronize(device)

    # --- memory ---

    def allocated(self, device: torch.device) -> int:
        """Return the bytes of tensors on the device now."""
        self.require(Ability.STATISTICS)
        return int(torch.accelerator.memory_allocated(device))

    def most_allocated(self, device: torch.device) -> int:
        """Return the most bytes of tensors on the device at a time, since `forget_most` or the user asked to forget."""
        self.require(Ability.STATISTICS)
        return int(torch.accelerator.max_memory_allocated(device))

    def forget_most(self, device: torch.device) -> None:
        """Let `most_allocated` begin anew."""
        self.require(Ability.STATISTICS)
        torch.accelerator.reset_peak_memory_stats(device)

    def free(self, device: torch.device) -> int:
        """Return the bytes that the device has free now, those that PyTorch's allocator keeps for reuse among them."""
        self.require(Ability.FREE)
        free, _ = torch.accelerator.get_memory_info(device)
        return int(free + torch.accelerator.memory_reserved(device) - self.allocated(device))

    # --- streams and events ---

    def stream(self, device: torch.device) -> torch.Stream:
        """Return a stream of the device that runs beside the current one."""
        self.require(Ability.STREAMS)
        return torch.Stream(device)

    def current_stream(self, device: torch.device) -> torch.Stream:
        """Return the stream of the device that ops go to now."""
        self.require(Ability.STREAMS)
        return torch.accelerator.current_stream(device)

    def event(self, device: torch.device, *, timed: bool = False) -> torch.Event:
        """Return an event of the device; one that is timed tells the time from another."""
        self.require(Ability.TIMING if timed else Ability.STREAMS)
        return torch.Event(device, enable_timing=timed)

    def pinned(self, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return host memory for so many elements that a device copies from and to while it computes.

        Of a tensor on the host, that device is the process's accelerator, if it has one.
        """
        found = None if self.accelerator else torch.accelerator.current_accelerator(check_available=True)
        copying = self if found is None else kind_of(found)
        copying.require(Ability.PINNED, "offload to files, with offload=fxremat.FileTier()")
        with self.current(device):
            return torch.empty(elements, dtype=dtype, pin_memory=True)

    # --- random numbers ---

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator that ops on the device draw from."""
        self.require(Ability.GENERATORS)
        if not self.accelerator:
            return torch.default_generator
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        generator: torch.Generator = self._module.default_generators[index]
        return generator

    def kept_random_state(self, device: torch.device) -> AbstractContextManager[Any]:
        """Let the generators of the host and of the device be afterwards as they were before."""
        if not (self.accelerator and self.can(Ability.GENERATORS)):
            return torch.random.fork_rng(devices=[])
        return torch.random.fork_rng(devices=[device], device_type=self.type)

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.type)


CPU = Kind(
    type="cpu", name="CPU", accelerator=False, recorded=True, abilities=frozenset({Ability.GENERATORS})
)
CUDA = Kind(
    type="cuda",
    name="CUDA",
    abilities=frozenset(Ability),
    of_cuda=True,
    recorded=True,
    block=512,
    unsplit=2**20,
    in_triton=True,
)
ROCM = replace(CUDA, name="ROCm")  # hipBLAS and MIOpen answer to the names of cuBLAS and cuDNN
XPU = Kind(
    type="xpu",
    name="XPU",
    abilities=frozenset(Ability),
    block=512,  # as in c10/xpu/XPUCachingAllocator.cpp, which has the sizes of CUDA's
    unsplit=2**20,
    doubles=False,  # some have it
    in_triton=True,
)
MPS = Kind(type="mps", name="MPS", doubles=False)

KINDS = {kind.type: kind for kind in (CPU, ROCM if torch.version.hip else CUDA, XPU, MPS)}
"""The kinds of devices that a step can be planned for, by the type of their `torch.device`."""


def kind_of(device: torch.device) -> Kind:
    """Return the kind of a device; of one that no step is planned for, such as meta, a kind that can do nothing."""
    return KINDS.get(device.type) or Kind(type=device.type, name=device.type, accelerator=False)


def device_name(device: torch.device) -> str:
    """Return the name of a device's hardware: what a cost was measured on."""
    kind = kind_of(device)
    if not kind.accelerator:
        return cpu_name()
    named = getattr(torch.get_device_module(device), "get_device_name", None)  # MPS has none
    return str(named(device)) if named else kind.name


def accelerates(device: torch.device) -> bool:
    """Tell whether a device runs behind the host: an accelerator, and no CPU."""
    return kind_of(device).accelerator
