"""A planned step inside of the model that it was planned for, for trainers that cannot be given another model."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Unpack

from torch import nn

from fxremat.api import compile as compiled
from fxremat.errors import FxrematError
from fxremat.options import CompileOptions
from fxremat.torch_private import call_instead


def with_optimizer(options: CompileOptions, optimizer: Any) -> CompileOptions:
    """Return options with the trainer's optimizer, whose state `device_mem` counts, unless they have one."""
    if options.get("device_mem") is None or "optimizer" in options or optimizer is None:
        return options
    return {**options, "optimizer": getattr(optimizer, "optimizer", optimizer)}  # accelerate and Lightning wrap it


class InPlace:
    """A model whose training calls run planned steps until `remove` is called.

    Args:
        model: the model; calls of it, or of its `method`, run planned steps in training.
        mem, options: as those of `fxremat.compile`.

    Raises:
        FxrematError: the model is compiled by fxremat already; or what `fxremat.compile` raises.
    """

    def __init__(self, model: nn.Module, mem: int | str | None, **options: Unpack[CompileOptions]) -> None:
        if hasattr(type(model), "_fxremat"):
            raise FxrematError(
                f"{type(model).__name__} was compiled by fxremat.compile already: leave the callback out, or hand the "
                "trainer the plain model"
            )
        before = getattr(vars(model).get("_compiled_call_impl"), "__self__", None)
        if hasattr(type(before), "_fxremat"):
            raise FxrematError(
                f"{type(model).__name__} runs the planned steps of another callback: leave one of the two out; if an "
                "exception has ended the training of that one, call its inside.remove() first"
            )
        self.model, self.method = model, options.get("method", "forward")
        self.planned: Any = compiled(model, mem, **options)
        self._undo: Callable[[], object]
        if self.method == "forward":
            self._undo = call_instead(model, self.planned.__call__)
        else:
            model.__dict__[self.method] = types.MethodType(getattr(type(self.planned), self.method), self.planned)
            self._undo = lambda: model.__dict__.pop(self.method)

    @property
    def plan(self) -> Any:
        """The latest plan; None before the first step."""
        return self.planned.fxremat.plan

    def remove(self) -> None:
        """Let calls of the model run its own forward again; calling it twice changes nothing."""
        undo, self._undo = self._undo, lambda: None
        undo()
