"""Check that a training step runs on one device: an accelerator, or the CPU."""

from __future__ import annotations

import torch

from fxremat.device import KINDS, Ability, accelerates, kind_of
from fxremat.errors import FxrematError
from fxremat.graphs.captured import Captured, inputs_of
from fxremat.graphs.nodes import is_random, tensors_of


def check_devices(joint: Captured) -> None:
    """Raise `FxrematError` unless the step runs on one device that fxremat can measure and replay.

    CPU tensors (scalars, small masks) in a step on an accelerator do not count as a second device, but trained
    parameters do.
    """
    found: dict[torch.device, str] = {}
    for node in joint.module.graph.nodes:
        for tensor in tensors_of(node):
            if tensor is not None:
                found.setdefault(tensor.device, node.name)
    for device, name in found.items():
        if device.type == "meta":
            raise FxrematError(
                f"{name} is on the meta device, without data, so that the step cannot run, and many ops have no "
                'gradient there: look at a plan with fxremat.plan(..., costs="estimate"), or give the model data with '
                "model.to_empty(...)"
            )
        if device.type not in KINDS:
            names = ", ".join(kind.name for kind in KINDS.values())
            raise FxrematError(
                f"the model computes on {device}, a kind of device that fxremat knows nothing of; it plans for {names}"
            )
    _check_random(joint)
    accelerators = sorted({str(device) for device in found if accelerates(device)})
    if len(accelerators) > 1:
        raise FxrematError(
            f"the model computes on {len(accelerators)} devices ({', '.join(accelerators)}), and a budget is for one: "
            "move it to one of them, or compile the parts of each device apart"
        )
    if accelerators and (parameters := _on_the_host(joint)):
        raise FxrematError(
            f"{len(parameters)} trained inputs of the step are on the CPU ({parameters[0]}, ...) and others on "
            f"{accelerators[0]}, and a budget is for one device: move the model there, or let fxremat keep parameters "
            "on the host with offload=Offload(weights=True)"
        )


def _check_random(joint: Captured) -> None:
    """Raise `FxrematError` if an op draws random numbers on a device whose generator state cannot be restored."""
    for node in joint.module.graph.nodes:
        if is_random(node):
            for tensor in tensors_of(node):
                if tensor is not None:
                    remedy = f"fxremat cannot draw again what {node.name} draws, so train without it there"
                    kind_of(tensor.device).require(Ability.GENERATORS, remedy)


def _on_the_host(joint: Captured) -> list[str]:
    pairs = zip(inputs_of(joint), joint.backward_outputs, strict=False)
    trained = (primal for primal, gradient in pairs if gradient is not None)
    return [node.name for node in trained if node.meta["val"].device.type == "cpu" and node.meta["val"].dim()]
