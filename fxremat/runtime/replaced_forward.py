"""A `forward` that was replaced on an instance: it runs unplanned, but the part of the model that it calls is planned.

Trainers replace the forward of a model: to compute the loss in pieces, without logits (TRL), or under autocast
(accelerate). The replacement calls either the earlier forward, which is planned as usual, or parts of the
model. In that case a child module that has most of the parameters is planned by itself, and what is computed
from its outputs counts as a loss outside of it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from fxremat.torch_private import children_of

log = logging.getLogger(__name__)
WRAPPERS = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")
"""Python modules whose classes wrap a model in a forward that cannot be captured, as Lightning Fabric's do."""


def replaced_in(model: nn.Module, *, itself: bool) -> nn.Module | None:
    """Return the outermost module whose forward was replaced on the instance; None if there is none.

    A model that is a library's wrapper (`WRAPPERS`) counts as such a module.

    Args:
        itself: True if the model itself may be that module, since its forward was replaced before it was compiled.
    """
    modules = (m for m in model.modules() if "forward" in vars(m) and (itself or m is not model))
    return model if type(model).__module__ in WRAPPERS else next(modules, None)


def largest_child(module: nn.Module, least: float) -> str | None:
    """Return the name of the child whose parameters have the most elements; None if they are less than `least`.

    Children without a parameter that requires a gradient do not count.
    """
    children = [(sum(p.numel() for p in c.parameters()), name) for name, c in module.named_children() if _trains(c)]
    count, name = max(children, default=(0, None))
    return name if count >= least else None


def has_forward(module: nn.Module) -> bool:
    """Tell whether a module can be called; a list of modules cannot."""
    return type(module).forward is not nn.Module.forward


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


@dataclass(eq=False)
class PlannedChild:
    """The largest child of a module whose forward was replaced, and the compiled module that replaces the child."""

    parent: nn.Module
    name: str
    plain: nn.Module
    planned: Any  # a `Rematerialized`, the compiled form of `plain`
    told: bool = False  # True once `tell` has logged its message

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Within this context, the parent module has the planned child instead of the plain one, and so calls it."""
        with self._changed(self.plain, self.planned):
            yield

    @contextlib.contextmanager
    def put_aside(self) -> Iterator[None]:
        """Within this context, the parent module has its plain child again, even inside of `standing_in`."""
        with self._changed(self.planned, self.plain):
            yield

    @contextlib.contextmanager
    def _changed(self, one: nn.Module, other: nn.Module) -> Iterator[None]:
        children = children_of(self.parent)
        found = children.get(self.name) is one
        if found:
            children[self.name] = other
        try:
            yield
        finally:
            if found:
                children[self.name] = one

    def tell(self) -> None:
        """Log once that only this child of the model is planned."""
        if self.told:
            return
        self.told = True
        forward = vars(self.parent).get("forward", type(self.parent).forward)
        log.warning(
            "forward of %s was replaced by %s, which is not planned as a whole: its part `%s` is planned within the "
            "budget, and the rest counts as a loss outside of it",
            type(self.parent).__name__,
            getattr(forward, "__qualname__", forward),
            self.name,
        )
