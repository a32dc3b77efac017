"""A tensor for `.grad` of parameters whose gradient the step has used up; using it raises an explanation."""

from __future__ import annotations

from typing import Any

import torch

from fxremat.errors import FxrematError


class Spent(torch.Tensor):
    """The `.grad` of a parameter that the backward has already updated; using it raises an error that says so."""

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise `FxrematError` for every op except the two that `zero_grad(set_to_none=False)` calls."""
        if op in (torch.ops.aten.zero_.default, torch.ops.aten.detach.default):
            return args[0]
        raise FxrematError(
            f"{op} asks for a gradient, but with weights on the host each parameter is updated as soon as its "
            "gradient is there, and the gradient is gone: clipping by the norm of all, GradScaler and what else needs "
            'all gradients at once work with Offload(weights=True, updates="step")'
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "Spent()"
