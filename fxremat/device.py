"""Describes the kinds of devices (CPU, CUDA, ROCm, XPU, MPS): their abilities, and how PyTorch is called for each.

    kind_of(torch.device("cuda", 0)).synchronize(device)      waits for the device; a CPU needs no waiting
    kind_of(torch.device("mps")).require(Ability.PINNED)      raises: PyTorch has no pinned host memory for MPS devices

A kind is an entry of `KINDS`, under the type that PyTorch gives its devices. `require` raises an error that names an
ability which `abilities` lacks; all else works. The calls go through `torch.accelerator` if that has the function
(torch 2.11 and later), else through the device's module (`torch.cuda`, `torch.xpu`). ROCm calls itself "cuda".

CPUs are tested, and CUDA on a pretended device; the entries of ROCm, XPU and MPS were never run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from fxremat.errors import FxrematError
from fxremat.torch_private import cpu_name


class Ability(Enum):
    """An ability that a kind of device may lack; the value completes "PyTorch has no ... for MPS devices"."""

    STATISTICS = "statistics of allocated memory"
    FREE = "count of free bytes"
    STREAMS = "streams beside the current one"
    TIMING = "events that time a stream"
    PINNED = "pinned host memory"
    GENERATORS = "random generators whose state can be kept"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of device, such as CUDA: what its devices can do, and the calls of PyTorch that do it."""

    type: str  # `torch.device.type`, such as "cuda"
    name: str  # name of the kind of device in messages, such as "CUDA"
    abilities: frozenset[Ability] = frozenset()
    accelerator: bool = True  # its devices run asynchronously to the host, which has to synchronize with them
    # `torch.backends.cuda` and `.cudnn` configure its kernels, and CUDA's caching allocator allocates its
    # memory
    of_cuda: bool = False
    recorded: bool = False  # autograd's profiler records each allocation on it
    block: int = 1  # the allocator rounds sizes up to a multiple of this many bytes
    unsplit: int = 0  # the allocator does not split off the rest of a block if the rest has at most this many bytes
    doubles: bool = True  # supports float64
    in_triton: bool = False  # Inductor's Triton kernels on it generate their own random numbers

    def can(self, *abilities: Ability) -> bool:
        """Tell whether the devices of this kind have all of these abilities."""
        return self.abilities.issuperset(abilities)

    def require(self, ability: Ability, remedy: str = "") -> None:
        """Raise `FxrematError` if the devices of this kind lack an ability.

        Args:
            remedy: what would work instead, which ends the message.
        """
        if ability not in self.abilities:
            remedy = f": {remedy}" if remedy else ""
            raise FxrematError(f"PyTorch has no {ability.value} for {self.name} devices{remedy}")

    @property
    def metered(self) -> bool:
        """True if PyTorch can tell how many bytes are allocated during a call on such a device."""
        return self.recorded or self.can(Ability.STATISTICS)

    def is_available(self) -> bool:
        """Tell whether this process has a device of this kind."""
        return not self.accelerator or bool(self._module.is_available())

    def current(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context in which `device` is the current device of PyTorch.

        The context does nothing for a CPU, or for a device without an index.
        """
        if not self.accelerator or device.index in (None, torch.accelerator.current_device_index()):
            return contextlib.nullcontext()
        return torch.accelerator.device_index(device.index)

    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has finished all its pending work."""
        if self.accelerator:
            torch.accelerator.synchronize(device)


    def allocated(self, device: torch.device) -> int:
        """Return the bytes of tensors on the device now."""
        self.require(Ability.STATISTICS)
        return int(torch.accelerator.memory_allocated(device))

    def most_allocated(self, device: torch.device) -> int:
        """Return the peak of allocated bytes on the device since `forget_most`, or the user, reset it."""
        self.require(Ability.STATISTICS)
        return int(torch.accelerator.max_memory_allocated(device))

    def forget_most(self, device: torch.device) -> None:
        """Reset the peak that `most_allocated` returns."""
        self.require(Ability.STATISTICS)
        torch.accelerator.reset_peak_memory_stats(device)

    def free(self, device: torch.device) -> int:
        """Return the bytes that the device has free now, including those that PyTorch's allocator keeps for reuse."""
        self.require(Ability.FREE)
        free, _ = torch.accelerator.get_memory_info(device)
        return int(free + self.cached(device))

    def cached(self, device: torch.device) -> int:
        """Return the bytes that PyTorch's allocator keeps for reuse."""
        return int(torch.accelerator.memory_reserved(device) - self.allocated(device))

    def empty_cache(self) -> None:
        """Give memory that PyTorch's allocator keeps for reuse back to the device."""
        if self.accelerator:
            self._module.empty_cache()


    def stream(self, device: torch.device) -> torch.Stream:
        """Return a stream of the device that runs concurrently with the current one."""
        self.require(Ability.STREAMS)
        return torch.Stream(device)

    def current_stream(self, device: torch.device) -> torch.Stream:
        """Return the stream of the device on which ops run now."""
        self.require(Ability.STREAMS)
        return torch.accelerator.current_stream(device)

    def event(self, device: torch.device, *, timed: bool = False) -> torch.Event:
        """Return an event of the device; the elapsed time can be read between two events made with `timed`."""
        self.require(Ability.TIMING if timed else Ability.STREAMS)
        return torch.Event(device, enable_timing=timed)

    def pinned(self, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a pinned tensor of `elements` on the host, which a device copies from and to while it computes.

        If `device` is the CPU, the memory is pinned for the process's accelerator, if it has one.
        """
        found = None if self.accelerator else torch.accelerator.current_accelerator(check_available=True)
        copying = self if found is None else kind_of(found)
        copying.require(Ability.PINNED, "offload to files, with offload=fxremat.FileTier()")
        with self.current(device):
            return torch.empty(elements, dtype=dtype, pin_memory=True)


    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator that ops on the device draw from."""
        self.require(Ability.GENERATORS)
        if not self.accelerator:
            return torch.default_generator
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        generator: torch.Generator = self._module.default_generators[index]
        return generator

    @contextlib.contextmanager
    def drawing_from(self, generator: torch.Generator, state: torch.Tensor) -> Iterator[None]:
        """Return a context in which a generator of such a device has this state; it is as before afterwards.

        On CUDA another generator lends its state: `set_state` would also let cuDNN's dropout, which has a state of its
        own, begin anew with a seed that it draws from the generator, as plain PyTorch does not at that point.
        """
        if self.of_cuda:
            now, other = generator.graphsafe_get_state(), generator.clone_state()
            other.set_state(state)
            generator.graphsafe_set_state(other)
            try:
                yield
            finally:
                generator.graphsafe_set_state(now)
            return
        # a bytearray, so that no memory of torch's allocator is used while the op runs
        before = bytearray(generator.get_state().numpy())
        generator.set_state(state)
        try:
            yield
        finally:
            generator.set_state(torch.frombuffer(before, dtype=torch.uint8))

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
ROCM = replace(CUDA, name="ROCm")  # PyTorch's settings for cuBLAS and cuDNN configure hipBLAS and MIOpen
XPU = Kind(
    type="xpu",
    name="XPU",
    abilities=frozenset(Ability),
    block=512,  # as in c10/xpu/XPUCachingAllocator.cpp, which uses the sizes of CUDA's allocator
    unsplit=2**20,
    doubles=False,  # only some XPU devices support float64
    in_triton=True,
)
MPS = Kind(type="mps", name="MPS", doubles=False)

KINDS = {kind.type: kind for kind in (CPU, ROCM if torch.version.hip else CUDA, XPU, MPS)}
"""Kinds of devices that steps can be planned for: `torch.device.type` -> `Kind`."""


def kind_of(device: torch.device) -> Kind:
    """Return the kind of a device; for an unsupported one, such as meta, a kind without any abilities."""
    return KINDS.get(device.type) or Kind(type=device.type, name=device.type, accelerator=False)


def device_name(device: torch.device) -> str:
    """Return the name of a device's hardware, such as the GPU model. Measured costs are stored under this name."""
    kind = kind_of(device)
    if not kind.accelerator:
        return cpu_name()
    named = getattr(torch.get_device_module(device), "get_device_name", None)  # torch.mps has no `get_device_name`
    return str(named(device)) if named else kind.name


def device_in_use() -> torch.device | None:
    """Return the current device of the accelerator that this process has started to use; None if it uses none."""
    found = torch.accelerator.current_accelerator()
    if found is None:
        return None
    module: Any = torch.get_device_module(found)
    if not getattr(module, "is_initialized", module.is_available)():  # torch.mps has no `is_initialized`
        return None
    return torch.device(found.type, torch.accelerator.current_device_index())


def accelerates(device: torch.device) -> bool:
    """Tell whether a device is an accelerator, which runs asynchronously to the host."""
    return kind_of(device).accelerator
