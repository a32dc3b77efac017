"""`fxremat.fully_shard`, which shards the parameters of a model over ranks, or replicates them.

    sharded       `torch.distributed.fsdp.fully_shard` on every layer and on the model: optimizer, checkpoints and eval
                  work as with FSDP2, and fxremat.compile reads from the model how it is sharded
    replicated    parameters stay as they are; fxremat.compile averages their gradients within the backward
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from fxremat.errors import FxrematError
from fxremat.ops.gathered import Sharing
from fxremat.runtime.sharded import is_replicated, note_replicated
from fxremat.runtime.torch_fsdp import ShardedParameter, division, is_sharded


def fully_shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    replicate: bool = False,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Shard the parameters of a model over ranks, in place, before `fxremat.compile` and before making the optimizer.

    Afterwards each parameter is a DTensor, sharded along its first dimension: torch's own `fully_shard` is
    called on every layer of the model (an element of an `nn.ModuleList` or `nn.Sequential`) and on the model
    itself. If the user has called torch's function on the model already, this function is not needed.

    Args:
        mesh: the ranks. If it has two dimensions, parameters are sharded over the second one and replicated over the
            first (hybrid sharding). None: all ranks.
        replicate: True: every rank keeps all parameters, and gradients are averaged while the backward runs, as
            DistributedDataParallel does. Parameters and buffers become those of the first rank.
        param_dtype: the dtype to compute in, such as torch.bfloat16; the parameters themselves keep their dtype.
            None: the dtype of each parameter.
        reduce_dtype: the dtype in which gradients are added up. None: the dtype of the gradients.

    Returns:
        the model.

    Raises:
        FxrematError: there is no process group, the model is wrapped already, or the mesh has too many dimensions.
    """
    mesh = _checked(model, mesh)
    if replicate:
        return _replicated(model, mesh, param_dtype, reduce_dtype)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    for layer in _layers(model):
        torch_fully_shard(layer, mesh=mesh, mp_policy=policy)
    torch_fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _checked(model: nn.Module, mesh: DeviceMesh | None) -> DeviceMesh:
    if not (dist.is_available() and dist.is_initialized()):
        raise FxrematError(
            "fully_shard shares a model among processes, and there is no process group: call "
            "torch.distributed.init_process_group() first, in a job that torchrun has started"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise FxrematError("this model is wrapped by DistributedDataParallel; give fully_shard the module inside of it")
    if is_sharded(model) or is_replicated(model):
        raise FxrematError("fully_shard was called on this model already; compile it as it is")
    if mesh is None:
        device = next((parameter.device.type for parameter in model.parameters()), "cpu")
        mesh = init_device_mesh(device, (dist.get_world_size(),))
    if mesh.ndim > 2:
        raise FxrematError(f"the mesh has {mesh.ndim} dimensions; fully_shard takes one, or two (replicas, shards)")
    return mesh


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield outermost elements of nn.ModuleList and nn.Sequential; of those that have no forward, their elements.

    Elements without parameters, or that share one with a module outside of them, are left out.
    """
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        inside.update(module.modules())
        for layer in _called(module):
            own = Counter(id(p) for part in layer.modules() for p in part._parameters.values() if p is not None)
            if own and all(owners[number] == count for number, count in own.items()):
                yield layer


def _called(container: nn.Module) -> Iterator[nn.Module]:
    """Yield the elements of a container that can be called, and those of its elements that cannot."""
    for element in container.children():
        has_forward = type(element).forward is not nn.Module.forward
        yield from (element,) if has_forward else _called(element)


def _replicated(
    model: nn.Module, mesh: DeviceMesh, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> nn.Module:
    if mesh.ndim != 1:
        raise FxrematError("replicate=True takes a mesh of one dimension; for another, shard over one of the two")
    group = mesh.get_group()
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, name))
    first = dist.get_process_group_ranks(group)[0]
    for tensor in [*places, *model.buffers()]:
        dist.broadcast(_local(tensor.detach()), src=first, group=group)
    noted = []
    for parameter, found in places.items():
        if not parameter.requires_grad and param_dtype is None:
            continue
        floating = parameter.is_floating_point()
        computed = param_dtype if param_dtype and floating else parameter.dtype
        op, before, after = division(reduce_dtype or computed, group.size())
        shape = _local(parameter).shape
        sharing = Sharing(
            rows=shape[0] if shape else 1,
            dtype=computed,
            reduced_in=reduce_dtype,
            group="",
            replicas=group.group_name,
            op=op,
            before=before,
            after=after,
            bucket=0,
        )
        inner = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        noted.append(ShardedParameter(tuple(found), sharing, inner))
    note_replicated(model, noted)
    return model


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
