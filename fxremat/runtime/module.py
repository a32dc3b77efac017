"""The drop-in module: trains inside the budget, evaluates as ever, and is the model in all other respects.

It shares the model's parameters, buffers, submodules and attributes (they are the same objects); only `forward`
differs. A training call (train mode, gradients enabled) runs the planned graphs, any other call the plain model.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import torch
from torch import nn

from fxremat._torch import capture_settings, graph_break_place
from fxremat.backend import Backend, PlannedOnly
from fxremat.errors import CaptureError, FxrematError
from fxremat.plans import Plan
from fxremat.runtime.advice import explained
from fxremat.runtime.libraries import set_up
from fxremat.runtime.weights import Weights

SHARED = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")


class Rematerialized(nn.Module):
    """A model that trains inside a memory budget; `.plan` says how."""

    def __init__(self, model: nn.Module, backend: Backend) -> None:
        super().__init__()
        self.__class__ = _with_the_signature_of(type(model))
        for name in SHARED:
            self.__dict__[name] = model.__dict__[name]
        self.__dict__["_model"] = model
        self.__dict__["_backend"] = backend
        self.__dict__["_compiled"] = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)

    @property
    def plan(self) -> Plan:
        """The latest plan. Raises `FxrematError` before the first training call."""
        if not self._backend.plans:
            raise FxrematError(
                "there is no plan yet: it is made at the first training call, or by compile(..., example_inputs=...)"
            )
        latest: Plan = self._backend.plans[-1]
        return latest

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Every plan so far: one for each combination of input shapes."""
        return tuple(self._backend.plans)

    @property
    def training(self) -> bool:
        """The model's own flag."""
        return self._model.training if "_model" in self.__dict__ else True

    @training.setter
    def training(self, mode: bool) -> None:
        if "_model" in self.__dict__:
            self._model.training = mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        if not (self.training and torch.is_grad_enabled()):
            return self._model(*args, **kwargs)
        return self._train(args, kwargs)

    def _train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_trainable(args, kwargs)
        weights = self._backend.prepare_weights([*_tensors((args, kwargs)), *self._model.parameters()])
        if weights and not self._backend.only_plan:
            self._settle(weights, args, kwargs)
        try:
            with weights.seen_on_the_device() if weights else contextlib.nullcontext():
                outputs = self._run(args, kwargs)
        except PlannedOnly:
            raise
        except Exception as error:
            if (clear := explained(error)) is None:
                raise
            raise clear.with_traceback(None) from clear.__cause__  # the way through dynamo would hide it
        return _refuse_double_backward(outputs)

    def _settle(self, weights: Weights, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan before the first step that updates weights itself, and move to the host those that live there."""
        if not self._backend.plans:
            self.make_plan(args, kwargs)
        weights.settle(self._backend.hosted)
        weights.begin()

    def to_device(self) -> Rematerialized:
        """Bring home, with offload_weights, what lives on the host: parameters and optimizer state, bit for bit.

        Then model and optimizer train without fxremat as they would have all along. The next training call of this
        module moves them to the host again.
        """
        if self._backend.weights:
            self._backend.weights.back_to_device()
        return self

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with capture_settings():
            try:
                return self._compiled(*args, **kwargs)
            except Exception as error:
                if not set_up(self._model, graph_break_place(error) or ""):
                    raise
            return self._compiled(*args, **kwargs)

    def make_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """Plan for these inputs without running the model. The model is not changed in any way."""
        if not self.training:
            raise FxrematError(
                "the model is in eval mode, where it runs as it is and needs no plan; call model.train() first"
            )
        self._backend.only_plan = True
        try:
            with torch.enable_grad():
                self._train(args, kwargs)
        except PlannedOnly:
            pass
        finally:
            self._backend.only_plan = False
        return self.plan

    def _check_trainable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [*self._model.parameters(), *_tensors((args, kwargs))]
        if not any(tensor.requires_grad for tensor in tensors):
            raise FxrematError(
                "nothing to train: no parameter and no input requires grad; "
                "use model.eval() or torch.no_grad() to run the plain model"
            )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_model" not in self.__dict__:
                raise
            return getattr(self.__dict__["_model"], name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self._model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the model."""
        return self._model.load_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._model._apply(*args, **kwargs)
        return self

    def train(self, mode: bool = True) -> Any:
        """Set the model's mode."""
        self._model.train(mode)
        return self

    def extra_repr(self) -> str:
        """The budget."""
        return f"mem={self._backend.mem!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Rematerialized:
        return Rematerialized(copy.deepcopy(self._model, memo), self._backend.fresh())

    def __reduce__(self) -> Any:
        return Rematerialized, (self._model, self._backend.fresh())


def _with_the_signature_of(model: type[nn.Module]) -> type[Rematerialized]:
    """A class whose `forward` takes what the model's takes: trainers look there for the names of inputs and labels."""

    @functools.wraps(model.forward)
    def forward(self: Rematerialized, *args: Any, **kwargs: Any) -> Any:
        return Rematerialized.forward(self, *args, **kwargs)

    return type("Rematerialized", (Rematerialized,), {"forward": forward, "__module__": __name__})


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _refuse_double_backward(outputs: Any) -> Any:
    """A gradient of a gradient would silently lack the recomputed part: say so when it is asked for."""
    for tensor in _tensors(outputs):
        if tensor.requires_grad and tensor.grad_fn is not None:
            tensor.register_hook(_check_single_backward)
    return outputs


def _check_single_backward(gradient: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        raise CaptureError(
            "backward(create_graph=True) asks for gradients of gradients, which a planned step does not keep; "
            "use the uncompiled model for double backward"
        )
