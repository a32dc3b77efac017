"""Every private name of torch that fxremat touches, each behind one function; read in torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from fxremat.errors import FxrematError


def boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The module's forward as a function that takes one list, empties it, and frees each input after its last use.

    `torch.fx.graph._BoxedCodeGen` and the `_boxed_call` mark that AOTAutograd looks for are the same in 2.11 and 2.13.
    Without them the caller keeps every saved tensor alive through the whole backward.
    """
    from torch.fx.graph import _BoxedCodeGen

    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    function = module.forward

    def call(arguments: list[Any]) -> Any:
        return function(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def real_tensors() -> AbstractContextManager[Any]:
    """Leave fake-tensor mode (a partition function runs inside it); everything made inside is real.

    `torch.utils._python_dispatch._disable_current_modes` in 2.11 and 2.13.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def aot_backend(**options: Any) -> Callable[..., Any]:
    """A dynamo backend from forward and backward compilers and a partition function.

    `torch._dynamo.backends.common.aot_autograd` is what torch's own documentation of custom backends uses.
    """
    from torch._dynamo.backends.common import aot_autograd

    backend: Callable[..., Any] = aot_autograd(**options)
    return backend


def keep_saved_tensors() -> AbstractContextManager[Any]:
    """While compiling: saved tensors are not donated to the backward, so that `retain_graph=True` works."""
    import torch._functorch.config as functorch_config

    patch: AbstractContextManager[Any] = functorch_config.patch(donated_buffer=False)
    return patch


def capture_settings() -> AbstractContextManager[Any]:
    """While tracing: one graph a shape however many shapes, and logging calls that do not break the graph.

    `recompile_limit` (2.11, 2.13) counts all graphs of one forward, those of other budgets included. The setting for
    logging has had two names (`ignore_logger_methods` before `ignore_logging_functions`): those that exist are set.
    """
    import torch._dynamo.config as dynamo_config

    settings: dict[str, Any] = {
        "recompile_limit": 512,
        "accumulated_recompile_limit": 4096,
        "ignore_logger_methods": logging_functions(),
        "ignore_logging_functions": logging_functions(),
    }
    known = {name: value for name, value in settings.items() if hasattr(dynamo_config, name)}
    patch: AbstractContextManager[Any] = dynamo_config.patch(known)
    return patch


@functools.cache
def logging_functions() -> set[Callable[..., Any]]:
    """Calls that only write a message: `torch._dynamo.config.ignore_logging_functions` skips them."""
    import logging
    import warnings

    methods = ("debug", "info", "warning", "error", "critical", "exception", "log")
    named = {getattr(logging, method) for method in methods} | {getattr(logging.Logger, m) for m in methods}
    return named | {warnings.warn}


def planning_error(error: BaseException) -> FxrematError | None:
    """Our own error inside dynamo's `BackendCompilerFailed` (2.11, 2.13), or None."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, FxrematError) else None


def graph_break_place(error: BaseException) -> str | None:
    """`file:line in function` of the code that dynamo could not trace; None if the error is something else.

    `torch._dynamo.exc.Unsupported` and `UserError` carry `real_stack`, the user's frames (2.11, 2.13).
    """
    from torch._dynamo import exc

    if not isinstance(error, exc.TorchDynamoException):
        return None
    stack = getattr(error, "real_stack", None)
    frame = stack[-1] if stack else None
    return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" if frame else "an unknown line"


@contextlib.contextmanager
def allocation_trace() -> Iterator[Any]:
    """Record the CPU allocator's events; `events()` of the yielded recorder is to be called after the block.

    `kineto_results` of `torch.profiler.profile().profiler` (2.11, 2.13). Kineto prints a line a session to stderr
    unless its log level is set before its first message.
    """
    from torch.profiler import ProfilerActivity, profile

    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    recorder = _Recorder()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as session:
            yield recorder
        recorder.session = session
    finally:
        if before is None:
            os.environ.pop("KINETO_LOG_LEVEL", None)


class _Recorder:
    session: Any = None

    def allocations(self) -> list[tuple[int, int]]:
        """(time in ns, bytes allocated or, negative, freed), in order of time."""
        events = self.session.profiler.kineto_results.events()
        return sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")

    def marks(self, prefix: str) -> list[tuple[str, int, int]]:
        """(name, start, end) in ns of every `record_function` whose name starts with the prefix."""
        events = self.session.profiler.kineto_results.events()
        found = [e for e in events if e.name().startswith(prefix)]
        return [(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in found]


def cpu_name() -> str:
    """The processor's name where the system tells it, else its architecture."""
    import platform

    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """What a cost was measured on."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
