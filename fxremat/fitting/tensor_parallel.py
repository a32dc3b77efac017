"""The part of a model of transformers that one of several tensor-parallel devices has, by the model's own plan.

A device has some heads of each attention, some columns of each MLP, and some rows of the embedding and of the head: a
model of the same code with smaller settings. Its products are summed over the devices; that is left out.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from fxremat.errors import FxrematError
from fxremat.fitting.loaded import META

COUNTS = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")  # of settings
SPLIT = ("colwise", "rowwise", "colwise_gather_output", "embedding_rowwise", "packed_colwise")  # styles of plans
WHOLE = ("replicated_with_grad_allreduce", "moe_tp_experts")
NOTE = "tp: the part of one device was captured; sums over devices take no time in it"


def part_of_one(make: Any, config: Any, devices: int, name: str) -> nn.Module:
    """Return what one device has of a model without data.

    Args:
        make: returns the model of a configuration.

    Raises:
        FxrematError: transformers has no plan for the model, or the plan does not divide the model evenly.
    """
    if not hasattr(config, "vocab_size"):
        raise FxrematError(f'{name}: shard="tp" is answered for models of text alone')
    with META:
        whole = make(config)
    plan: dict[str, str] = dict(getattr(whole, "tp_plan", None) or {})
    if not plan:
        raise FxrematError(f'{name}: shard="tp" needs a plan, and transformers has none for {type(whole).__name__}')
    if unknown := sorted(set(plan.values()) - {*SPLIT, *WHOLE}):
        raise FxrematError(f'{name}: shard="tp" is not answered for parameters that are {", ".join(unknown)}')
    with META:
        part = make(_smaller(config, devices, name))
    _cut_vocabulary(part, plan, devices)
    _check(whole, part, plan, devices, name)
    made: nn.Module = part
    return made


def _smaller(config: Any, devices: int, name: str) -> Any:
    found = type(config).from_dict(config.to_dict())
    if getattr(found, "head_dim", None) is None and hasattr(found, "num_attention_heads"):
        found.head_dim = found.hidden_size // found.num_attention_heads
    for key in COUNTS:
        count = getattr(found, key, None)
        if isinstance(count, int):
            if count % devices:
                raise FxrematError(f"{name}: {key} is {count}, and {devices} devices do not divide it")
            setattr(found, key, count // devices)
    return found


def _cut_vocabulary(part: Any, plan: dict[str, str], devices: int) -> None:
    """Leave the device that has most its rows of the embedding and of the head, as far as the plan divides them."""
    names = {module: name for name, module in part.named_modules()}
    embedding, head = part.get_input_embeddings(), part.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    layers = [layer for layer in (embedding, head) if layer is not None and names[layer] in plan]
    for layer in layers:
        rows = -(-layer.weight.shape[0] // devices)
        layer.weight = nn.Parameter(layer.weight[:rows].detach())
        if isinstance(layer, nn.Embedding):
            layer.padding_idx = None  # of the whole vocabulary
    if tied and layers:
        head.weight = embedding.weight = layers[0].weight
    if head in layers:
        part.set_output_embeddings(_Gathered(head, head.out_features))


def _check(whole: Any, part: Any, plan: dict[str, str], devices: int, name: str) -> None:
    """Raise `FxrematError` if a parameter of the part has another size than the plan says."""
    found = dict(part.named_parameters())
    for key, parameter in whole.named_parameters():
        module, _, kind = key.rpartition(".")
        style = plan.get(_general(key), plan.get(_general(module), ""))
        cut = style in SPLIT and not (style == "rowwise" and kind == "bias")
        expected = -(-parameter.numel() // devices) if cut else parameter.numel()
        size = found[key].numel() if key in found else 0
        row = parameter[0].numel()  # an uneven number of rows is rounded up
        if not 0 <= size - expected < (row if cut else 1):
            raise FxrematError(
                f'{name}: shard="tp" is not answered: {key} has {expected} numbers on one of {devices} devices by '
                f"the plan of {type(whole).__name__}, and {size} in a model with fewer heads and columns"
            )


def _general(name: str) -> str:
    """Return a name as plans have it, with a star in the place of a layer's number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


class _Gathered(nn.Module):
    """A head of which the device has some rows, and whose result is gathered."""

    def __init__(self, head: nn.Linear, count: int) -> None:
        super().__init__()
        self.weight, self.bias, self.count = head.weight, head.bias, count

    def forward(self, x: Tensor) -> Tensor:
        """Return the whole result, of which the device computes its part."""
        part: Any = nn.functional.linear(x, self.weight, self.bias)
        gathered: Tensor = _gather(part, self.count)
        return gathered


class _Gather(torch.autograd.Function):
    """Gathers a last dimension; the gradient of the device's part is its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, count: int) -> Tensor:
        ctx.own = part.shape[-1]
        return torch.cat([part] * -(-count // ctx.own), -1)[..., :count].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient[..., : ctx.own].contiguous(), None


_gather: Any = _Gather.apply
