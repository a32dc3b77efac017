"""The state that `torch.distributed.fsdp.fully_shard` (FSDP2) keeps for a model, read by private names of torch 2.13.

A module's state is `FSDPModule._get_fsdp_state()`, its parameters are in
`FSDPState._fsdp_param_groups[*].fsdp_params`, and the two hooks that FSDP2 adds to a module are methods of the
state. In torch 2.11 a state has one `_fsdp_param_group`, or None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Shard

from fxremat.errors import FxrematError
from fxremat.ops.gathered import Sharing


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """A parameter that is sharded, or replicated, by `fully_shard`."""

    # (module, attribute name) of each module that has the parameter; several for a tied parameter
    places: tuple[tuple[nn.Module, str], ...]
    sharing: Sharing
    # (mesh, placements) of the gathered parameter if tensor parallelism also shards it; None: it does not
    inner: tuple[Any, tuple[Any, ...]] | None


@dataclass(frozen=True, eq=False)
class Casts:
    """The dtypes that a module's mixed precision policy casts its inputs and outputs to; None: no cast."""

    inputs: torch.dtype | None
    outputs: torch.dtype | None


def is_sharded(model: nn.Module) -> bool:
    """Tell whether `fully_shard` was called on a part of the model, or on all of it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def states_of(model: nn.Module) -> Iterator[Any]:
    """Yield the states that FSDP2 keeps for a model's modules, without duplicates."""
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = _state_of(module)
            if id(state) not in seen:
                seen.add(id(state))
                yield state


def _state_of(module: Any) -> Any:
    return FSDPModule._get_fsdp_state(module)


def _groups_of(state: Any) -> Sequence[Any]:
    groups: Sequence[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        one = state._fsdp_param_group
        groups = [] if one is None else [one]
    return groups


def adopt(module: Any, model: Any) -> None:
    """Let FSDP2 find the state of `model` also through `module`, which replaces it (`_insert_module_state`)."""
    from torch.distributed._composable_state import _insert_module_state

    if isinstance(model, FSDPModule):
        _insert_module_state(module, _state_of(model))


def back_to_shards(model: nn.Module) -> None:
    """Free gathered parameters that an evaluation has left in the model, so that it has its shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and any(not group.is_sharded for group in _groups_of(_state_of(module))):
            module.reshard()


def syncs(model: nn.Module) -> bool:
    """Tell whether the next backward reduces gradients, as the user chose by `set_requires_gradient_sync`.

    Raises `FxrematError` if modules have different settings, or gradients are to be reduced over some ranks
    only.
    """
    groups = [group for state in states_of(model) for group in _groups_of(state)]
    found = {group.reduce_grads for group in groups}
    if any(group.reduce_grads and not group.all_reduce_grads for group in groups):
        raise FxrematError(
            "set_requires_all_reduce(False) reduces gradients over a part of the ranks only, which fxremat does not; "
            "use set_requires_gradient_sync(False), which communicates nothing"
        )
    if len(found) > 1:
        raise FxrematError("set_requires_gradient_sync was called on a part of the model; call it on the whole")
    return found != {False}


def is_hook(hook: Any) -> bool:
    """Tell whether FSDP2 installed this forward hook or forward pre-hook."""
    owner = getattr(hook, "__self__", None)
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return type(owner).__name__ == "FSDPState" or str(module).startswith("torch.distributed.fsdp._fully_shard")


def casts_of(model: nn.Module) -> Mapping[nn.Module, Casts]:
    """Return the casts that FSDP2's hooks do by the mixed precision policy, for modules that have casts."""
    found: dict[nn.Module, Casts] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            policy = _state_of(module)._mp_policy
            casts = Casts(policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype)
            if casts.inputs or casts.outputs:
                found[module] = casts
    return found


def parameters_of(model: nn.Module) -> list[ShardedParameter]:
    """Return the sharded parameters of a model.

    Raises:
        FxrematError: the shards are kept on the host, are gathered now, or are not cut along the first dimension.
    """
    found = []
    for number, group in enumerate(group for state in states_of(model) for group in _groups_of(state)):
        if isinstance(group.offload_policy, CPUOffloadPolicy):
            raise FxrematError(
                "fully_shard(offload_policy=CPUOffloadPolicy()) keeps shards on the host by itself; leave it out, and "
                "let fxremat move what has to: offload=True"
            )
        if not group.is_sharded:
            raise FxrematError("parts of the model are unsharded; call reshard() on them before fxremat.compile")
        found += [_parameter(parameter, group, number) for parameter in group.fsdp_params]
    return found


def _parameter(parameter: Any, group: Any, bucket: int) -> ShardedParameter:
    info = parameter._module_info
    places = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
    name = f"{type(info.module).__name__}.{info.param_name}"
    if parameter.fsdp_placement != Shard(0):
        raise FxrematError(
            f"{name} is sharded along dimension {parameter.fsdp_placement.dim}; fxremat gathers parameters that are "
            "sharded along the first: leave shard_placement_fn out"
        )
    sharded = parameter.sharded_param
    if not isinstance(sharded, DTensor):
        raise FxrematError(f"{name} is a {type(sharded).__name__}, not a DTensor as fully_shard makes them")
    mesh = parameter.mesh_info
    shards, replicas = getattr(mesh, "shard_process_group", None), getattr(mesh, "replicate_process_group", None)
    # torch 2.15 keeps the policy with the parameter, earlier releases with the group
    policy = parameter.mp_policy if hasattr(parameter, "mp_policy") else group.mp_policy
    stored = sharded.dtype
    computed = policy.param_dtype if policy.param_dtype and stored.is_floating_point else stored
    reduced_in = policy.reduce_dtype
    ranks = (1 if shards is None else shards.size()) * (1 if replicas is None else replicas.size())
    op, before, after = division(reduced_in or computed, ranks, group)
    whole: Any = getattr(parameter, "_unsharded_dtensor_spec", None)  # the attribute's name in torch 2.13
    whole = whole or getattr(parameter, "_tp_spec", None)  # the attribute's name in torch 2.11
    inner = (whole.mesh, tuple(whole.placements)) if parameter.is_dtensor else None
    return ShardedParameter(
        tuple(places),
        Sharing(
            rows=parameter._orig_size[0],
            dtype=computed,
            reduced_in=reduced_in,
            group="" if shards is None else shards.group_name,
            replicas="" if replicas is None else replicas.group_name,
            op=op,
            before=before,
            after=after,
            bucket=bucket,
        ),
        inner,
    )


def division(dtype: torch.dtype, ranks: int, group: Any = None) -> tuple[str, float, float]:
    """Return the op that reduces gradients ("avg" or "sum"), and the divisors of gradients before and after it.

    They are those of FSDP2. An "avg" needs no divisor; for float16, whose range is small, a part of the
    division is done before the sum.

    Args:
        dtype: the dtype in which gradients are reduced.
        group: FSDP2's group of parameters, where the user may have set another divisor; None: the divisor is `ranks`.
    """
    factor = getattr(group, "gradient_divide_factor", None)
    only_sums = getattr(group, "force_sum_reduction_for_comms", False)
    if dtype in (torch.float32, torch.bfloat16, torch.float64) and factor is None and not only_sums:
        return "avg", 1.0, 1.0
    divisor = float(ranks) if factor is None else float(factor)
    before = 1.0
    if dtype is torch.float16:
        while divisor % before == 0 and divisor / before > before:
            before *= 2
    return "sum", before, divisor / before
