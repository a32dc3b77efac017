"""One training step of any model, and all that it leaves behind.

    ours, plain = (step_of(model, lambda: model(**batch), lambda outputs: outputs.loss) for model in (compiled, twin))
    assert differences(ours, plain) == []
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.training import gradients_of, same, state_of, unequal


@dataclass(frozen=True, kw_only=True)
class Step:
    """All that a training step leaves behind; tensors are copies."""

    kind: type  # of what the model returned
    values: dict[str, object]  # what it returned and the loss, by where it was found
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]
    rng: Tensor


def step_of(model: nn.Module, call: Callable[[], Any], loss_of: Callable[[Any], Tensor]) -> Step:
    """Forward and backward of `loss_of(call())` from seed 3, with every `.grad` None before."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    outputs = call()
    loss = loss_of(outputs)
    loss.backward()
    return Step(
        kind=type(outputs),
        values={**dict(leaves(outputs)), "loss": loss.detach().clone()},
        gradients=gradients_of(model),
        state=state_of(model),
        rng=torch.get_rng_state(),
    )


def leaves(value: object, place: str = "outputs") -> Iterator[tuple[str, object]]:
    """All values inside of outputs, those of the library's own objects (caches of keys and values) included."""
    if isinstance(value, Tensor):
        yield f"{place} requires grad", value.requires_grad
        yield place, value.detach().clone()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{place}.{key}")
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from leaves(item, f"{place}[{index}]")
    elif type(value).__module__.startswith("transformers.") and hasattr(value, "__dict__"):
        yield f"type of {place}", type(value)
        yield from leaves(vars(value), place)
    else:
        yield place, value if isinstance(value, int | float | str | bool | None) else type(value)


def differences(ours: Step, plain: Step) -> list[str]:
    found = [] if ours.kind is plain.kind else [f"returns {ours.kind.__name__}, not {plain.kind.__name__}"]
    for place in {**plain.values, **ours.values}:
        mine, its = ours.values.get(place), plain.values.get(place)
        equal = same(mine, its) if isinstance(mine, Tensor) and isinstance(its, Tensor) else mine == its
        found += [] if equal else [place]
    found += [f"gradient of {name}" for name in unequal(ours.gradients, plain.gradients)]
    found += [f"value of {name}" for name in unequal(ours.state, plain.state)]
    return found + ([] if same(ours.rng, plain.rng) else ["random state"])
