"""Every private name of torch that fxremat touches, each behind one function; read in torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
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


@contextlib.contextmanager
def differentiate_as_eager() -> Iterator[None]:
    """While AOTAutograd traces: what eager PyTorch would run, op for op, and a backward that may run again.

    Its settings of `torch._functorch.config` (2.11, 2.13):
    `donated_buffer`           off: saved tensors are not donated to the backward, so that `retain_graph=True` works
    `backward_pass_autocast`   off: `backward()` is called outside of `torch.autocast`, as its documentation asks
    """
    import torch._functorch.config as functorch_config

    with functorch_config.patch(donated_buffer=False, backward_pass_autocast="off"), _eager_kernels():
        yield


DECOMPOSED = (
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *(f"{kind}{n}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"),
    *("multi_margin_loss", "multilabel_margin_loss_forward"),
)


@contextlib.contextmanager
def _eager_kernels() -> Iterator[None]:
    """Take away the Python versions of interpolations and of two losses: they add in another order, and cost more.

    `torch/_decomp/decompositions.py` registers them in `OpOverload.py_kernels` for the Autograd and
    CompositeImplicitAutograd keys; `_dispatch_cache` remembers what was looked up (2.11, 2.13).
    """
    packets = [getattr(torch.ops.aten, name) for name in DECOMPOSED if hasattr(torch.ops.aten, name)]
    ops = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    registered = {op: dict(op.py_kernels) for op in ops if op.py_kernels}
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    try:
        for op in registered:
            for key in keys:
                op.py_kernels.pop(key, None)
            op._dispatch_cache.clear()
        yield
    finally:
        for op, kernels in registered.items():
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


def capture_settings() -> AbstractContextManager[Any]:
    """While tracing: one graph a shape however many shapes, and logging calls that do not break the graph.

    `recompile_limit` (2.11, 2.13) counts all graphs of one forward, those of other budgets included. The setting for
    logging has had two names (`ignore_logger_methods` before `ignore_logging_functions`): those that exist are set.
    """
    import torch._dynamo.config as dynamo_config

    settings: dict[str, Any] = {
        "recompile_limit": 512,
        "accumulated_recompile_limit": 4096,
        "ignore_logger_methods": (ignored := logging_functions()),
        "ignore_logging_functions": ignored,
    }
    known = {name: value for name, value in settings.items() if hasattr(dynamo_config, name)}
    patch: AbstractContextManager[Any] = dynamo_config.patch(known)
    return patch


def logging_functions() -> set[Callable[..., Any]]:
    """Calls that only write a message: `torch._dynamo.config.ignore_logging_functions` skips them.

    Libraries add methods such as `warning_once` to loggers, so the methods are looked up anew each time.
    """
    import logging
    import warnings

    levels = ("debug", "info", "warn", "error", "critical", "exception", "log")
    places = (logging, logging.Logger, *logging.Logger.__subclasses__())
    named = [item for place in places for item in vars(place).items()]
    return {value for name, value in named if name.startswith(levels) and callable(value)} | {warnings.warn}


def planning_error(error: BaseException) -> FxrematError | None:
    """Our own error inside dynamo's `BackendCompilerFailed` (2.11, 2.13), or None."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, FxrematError) else None


def backend_failure(error: BaseException) -> BaseException | None:
    """What was raised while a captured graph was differentiated or planned, inside `BackendCompilerFailed` or bare."""
    from torch._dynamo import exc

    return error.inner_exception if isinstance(error, exc.BackendCompilerFailed) else None


def graph_break_place(error: BaseException) -> str | None:
    """`file:line in function: code` that dynamo could not trace; None if the error is something else.

    `torch._dynamo.exc.Unsupported` and `UserError` carry `real_stack`, the frames up to there (2.11, 2.13). The last
    one outside of torch is named.
    """
    from torch._dynamo import exc

    if not isinstance(error, exc.TorchDynamoException):
        return None
    stack = getattr(error, "real_stack", None) or []
    torch_itself = os.path.dirname(torch.__file__) + os.sep
    frames = [frame for frame in stack if not frame.filename.startswith(torch_itself)] or stack
    frame = frames[-1] if frames else None
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


def storage_of(tensor: torch.Tensor) -> int:
    """A number that is equal for tensors, fake ones too, that share a storage: `UntypedStorage._cdata` (2.11, 2.13)."""
    return int(tensor.untyped_storage()._cdata)


def shell_of(kind: type[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """A tensor of a subclass that has the shape, type and device of another, and no memory.

    `torch.Tensor._make_wrapper_subclass` (2.11, 2.13) is what torch's own notes on `__torch_dispatch__` use.
    """
    shell: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        kind, like.shape, dtype=like.dtype, device=like.device
    )
    return shell


def without_memory(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the same layout on a device, whose storage has no bytes.

    `UntypedStorage.resize_` (2.11, 2.13) is what torch's own sharded training frees parameters with.
    """
    empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    empty.untyped_storage().resize_(0)
    return empty


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor has been written to: `Tensor._version` (2.11, 2.13), which autograd checks."""
    return int(tensor._version)


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


def nnpack_enabled() -> bool:
    """Whether convolutions may use NNPACK: `torch._C._get_nnpack_enabled` (2.11, 2.13), which has no public name."""
    return bool(torch._C._get_nnpack_enabled())


def is_effect_token(placeholder: fx.Node) -> bool:
    """Whether an input of a joint graph is a token of an op with effects, which has no gradient.

    AOTAutograd puts them before the caller's inputs, and says so in `meta["desc"]`, a `ForwardTokenAOTInput` of
    `torch._functorch._aot_autograd.descriptors` (2.11, 2.13).
    """
    return type(placeholder.meta.get("desc")).__name__ == "ForwardTokenAOTInput"


def parameter_name(placeholder: fx.Node) -> str | None:
    """The name in the model of the parameter that an input of dynamo's graph stands for; None for other inputs.

    `meta["grapharg"].source` is where dynamo found it, such as `L['self']._modules['0']._parameters['weight']`; its
    `name` is a method in 2.11 and a property in 2.13.
    """
    import re

    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    name: Any = getattr(source, "name", "")
    path = str(name() if callable(name) else name)
    parts = re.findall(r"\._(modules|parameters)\['([^']*)'\]", path)
    return ".".join(part for _, part in parts) if parts and parts[-1][0] == "parameters" else None
