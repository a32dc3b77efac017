"""The memory of a training process on its device, part by part: every part adds up to the total.

    resident     weights, buffers, inputs, optimizer state, gradients that wait for the next backward
    the larger   forward and backward: the peak of the planned step, split by the purpose of its bytes
    of           the update: all gradients, the outputs that the loop still holds, what the optimizer allocates
    estimated    the CUDA context, and what the allocator reserves beyond what is allocated
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxremat.budget import AUTO_MARGIN
from fxremat.cost.device_memory import CONTEXT
from fxremat.cost.devices import Device
from fxremat.search.candidate import Candidate
from fxremat.step.kinds import MemoryKind, lives_of
from fxremat.step.liveness import Sizes, live_bytes
from fxremat.step.program import Program

NAMES = {
    MemoryKind.KEPT: "activations kept",
    MemoryKind.RECOMPUTED: "activations recomputed",
    MemoryKind.OFFLOADED: "activations offloaded",
    MemoryKind.TEMPORARY: "activations of the forward alone",
    MemoryKind.GRADIENTS: "gradients of activations",
    MemoryKind.RESULTS: "gradients of weights",
    MemoryKind.WORKSPACE: "workspaces",
    MemoryKind.OUTSIDE: "loss outside the model",
    MemoryKind.WEIGHTS: "weights and optimizer state in the step",
}
"""The parts of the peak of forward and backward, in the order of the table."""


@dataclass(frozen=True, kw_only=True)
class Resident:
    """Bytes that are on the device during the entire step, and those of its update."""

    parts: Mapping[str, int]  # by name
    gradients: int  # of all trained parameters
    update: int  # what the optimizer allocates while it steps
    outputs: int  # what the model returns, and the loop still holds while the optimizer steps

    @property
    def bytes(self) -> int:
        """The sum of the parts."""
        return sum(self.parts.values())

    @property
    def stepping(self) -> int:
        """The bytes that come on top while the optimizer steps."""
        held = self.parts.get(WAITING, 0)
        return max(0, self.gradients - held) + self.update + self.outputs


WAITING = "gradients that wait for the update"


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The memory of a training process on its device, in bytes, at the moment when it needs most."""

    moment: str  # "forward and backward" or "update"
    parts: Mapping[str, int]  # what is allocated, by name
    context: int  # estimated
    reserve: int  # estimated

    @property
    def allocated(self) -> int:
        """The bytes of tensors and workspaces."""
        return sum(self.parts.values())

    @property
    def total(self) -> int:
        """The bytes of the device's memory that the process takes."""
        return self.allocated + self.context + self.reserve

    @property
    def rows(self) -> tuple[tuple[str, int], ...]:
        """All parts, by name; they add up to the total."""
        return (
            *self.parts.items(),
            ("CUDA context (estimated)", self.context),
            ("allocator's reserve (estimated)", self.reserve),
        )


def budget_for_step(device: Device, resident: Resident) -> int:
    """Return the bytes that a device leaves for the peak of forward and backward; 0 or less: there is no room."""
    assert device.memory is not None
    return int((device.memory - CONTEXT) / (1 + AUTO_MARGIN)) - resident.bytes


def ledger_of(candidate: Candidate, sizes: Sizes, resident: Resident) -> Ledger:
    """Return the memory of a process that runs a candidate's program. O(steps)."""
    step = peak_by_kind(candidate.program(), sizes)
    if resident.stepping > sum(step.values()):
        moment = "update"
        step = {
            NAMES[MemoryKind.RESULTS]: max(0, resident.gradients - resident.parts.get(WAITING, 0)),
            "outputs of the model": resident.outputs,
            "temporaries of the optimizer": resident.update,
        }
    else:
        moment = "forward and backward"
    parts = {name: size for name, size in (*resident.parts.items(), *step.items()) if size}
    return Ledger(
        moment=moment, parts=parts, context=CONTEXT, reserve=int(AUTO_MARGIN * sum(parts.values()))
    )


def total_of(peak: int, resident: Resident) -> int:
    """Return the total that the ledger of a step with this peak has, in bytes."""
    allocated = resident.bytes + max(peak, resident.stepping)
    return allocated + int(AUTO_MARGIN * allocated) + CONTEXT


def peak_by_kind(program: Program, sizes: Sizes) -> dict[str, int]:
    """Return the bytes of a program at its peak by purpose; they add up to its peak. O(steps)."""
    memory, lives = live_bytes(program, sizes), lives_of(program, sizes)
    if memory.peak in memory.during:
        at = memory.during.index(memory.peak)
        alive = [life for life in lives if life.first <= at <= life.last]
    else:
        at = program.split if memory.peak == memory.at_split else len(program.steps)
        alive = [life for life in lives if life.first < at <= life.last]
    found = {name: sum(life.bytes for life in alive if life.kind is kind) for kind, name in NAMES.items()}
    missing = memory.peak - sum(found.values())  # what the loss and its gradients take before the backward begins
    outside = NAMES[MemoryKind.OUTSIDE]
    return {name: size + (missing if name == outside else 0) for name, size in found.items()}
