"""Memory that training holds on its device besides the planned step: weights, state, inputs, waiting gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor
from torch.utils import _pytree as pytree

from fxremat.cost.devices import Device
from fxremat.cost.optimizer_memory import Rounding
from fxremat.fitting.ledger import WAITING, Resident
from fxremat.fitting.loaded import Loaded
from fxremat.fitting.optimizers import bytes_of, memory_of
from fxremat.fitting.settings import Training
from fxremat.fitting.sharding import shares_of
from fxremat.fitting.stacks import stacks
from fxremat.fitting.steps import EstimatedStep
from fxremat.graphs.accounting import rounded


def rounding_of(device: Device) -> Rounding:
    """Return the function that rounds the bytes of a tensor up as the device's allocator does."""
    block = device.torch_device
    return lambda size: rounded(size, block)


def resident_of(loaded: Loaded, step: EstimatedStep, training: Training, device: Device) -> Resident:
    """Return the memory besides the step of a model that a device trains, alone or with others."""
    rounding = rounding_of(device)
    parameters: dict[str, Tensor] = dict(loaded.model.named_parameters())
    trained = {name: tensor for name, tensor in parameters.items() if name in step.trained}
    others: dict[str, int] = {}
    if training.shard == "fsdp":
        layers = [layer for stack in stacks(loaded.model) for layer in _names(loaded, stack.path)]
        shares = shares_of(parameters, trained, layers, training.devices, rounding)
        parameters = dict(shares.parameters)
        trained = {name: parameters[name] for name in trained}
        others = {
            "gathered layers (by formula)": shares.gathered,
            "gradients being reduced (by formula)": shares.reducing,
        }
    optimizer = memory_of(training.optimizer, trained, rounding)
    gradients = bytes_of(trained.values(), rounding)
    if training.shard == "ddp":
        others = {"buckets of gradients (by formula)": gradients}
    inputs = (leaf for leaf in pytree.tree_leaves(loaded.inputs) if isinstance(leaf, Tensor))
    waiting = training.shard == "fsdp" or (training.accumulate > 1 and training.shard != "ddp")
    return Resident(
        parts={
            "weights": bytes_of(parameters.values(), rounding),
            "buffers": bytes_of(loaded.model.buffers(), rounding),
            "inputs": bytes_of(inputs, rounding),
            "optimizer state": optimizer.state,
            **({WAITING: gradients} if waiting else {}),
            **others,
        },
        gradients=gradients,
        update=optimizer.update,
        outputs=sum(step.costs.sizes.values[value] for value in step.graph.kept_outputs - step.graph.returned),
    )


def _names(loaded: Loaded, path: str) -> list[str]:
    return [f"{path}.{name}" for name, _ in loaded.model.get_submodule(path).named_children()]


def planned_step(step: EstimatedStep, training: Training) -> EstimatedStep:
    """Return the step that is planned: sharded gradients are reduced as soon as they are made, and do not add up."""
    if training.shard != "fsdp":
        return step
    return replace(step, graph=replace(step.graph, returned=frozenset()))


def by_name(step: EstimatedStep) -> Mapping[str, tuple[int, int]]:
    """Return, for each trained parameter, the numbers of its value and of its gradient's value in the graph."""
    graph = step.graph
    values = {name: value for value, name in graph.parameters.items() if value not in graph.returned}
    return {
        name: (values[name], value)
        for value, name in graph.parameters.items()
        if value in graph.returned and name in values
    }
