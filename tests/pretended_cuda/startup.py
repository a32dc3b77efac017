"""Adapt modules to a device that computes nothing, as soon as a process has imported them.

    torch                     gets attention in cuDNN: `attention`
    fxremat.ops.parameters    accepts any gradient of the loss: it is whatever the memory had, not 1

`site/sitecustomize.py` starts this in a pretended process and in those that it starts. fxremat knows nothing of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class AfterImport(MetaPathFinder):
    """Calls a function with a module once that was executed, for some names of modules."""

    def __init__(self, adapt: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self.adapt = adapt

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that Python's own finder has for the module, with the call; None for any other module."""
        if fullname not in self.adapt:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute, adapt = spec.loader.exec_module, self.adapt[fullname]

            def then_adapt(module: ModuleType) -> None:
                execute(module)
                adapt(module)

            spec.loader.exec_module = then_adapt  # type: ignore[method-assign]
        return spec


def _with_attention(_: ModuleType) -> None:
    from tests.pretended_cuda.attention import register

    register()


def _with_any_gradient(parameters: ModuleType) -> None:
    parameters.Weights.check_unscaled  # raises where it has another name now  # noqa: B018
    parameters.Weights.check_unscaled = lambda weights, gradients: None


ADAPT: Mapping[str, Callable[[ModuleType], None]] = {
    "torch": _with_attention,
    "fxremat.ops.parameters": _with_any_gradient,
}


def watch_imports() -> None:
    """Adapt each of these modules when this process imports it, before anybody can have taken a function from it.

    Raises:
        RuntimeError: one of them is there already.
    """
    if early := ADAPT.keys() & sys.modules.keys():
        raise RuntimeError(f"{', '.join(sorted(early))} was imported before the pretended CUDA")
    sys.meta_path.insert(0, AfterImport(ADAPT))
