"""Every private name of torch that fxremat uses, each behind one function; read in torch 2.11 and 2.13."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import itertools
import math
import operator
import os
import re
import sys
import threading
import time
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, cast
from unittest import mock

import torch
from torch import fx

from fxremat.data_stack import with_room_for_calls
from fxremat.errors import FxrematError, NotSymbolic

T = TypeVar("T")


def boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return the module's forward as a function of one list, which frees each input after its last use.

    `torch.fx.graph._BoxedCodeGen` and the `_boxed_call` mark that AOTAutograd looks for are the same in torch 2.11 and
    2.13. Without them the caller keeps every saved tensor alive during the entire backward. The function keeps the
    module's attributes, and not its graph.
    """
    from torch.fx.graph import _BoxedCodeGen

    module.graph.set_codegen(_BoxedCodeGen())
    getattr(module, "real_recompile", module.recompile)()  # inference graphs compile lazily (torch 2.11, 2.13)
    attributes = torch.nn.Module()
    attributes.__dict__.update({key: value for key, value in module.__dict__.items() if key != "_graph"})
    forward: Any = type(module).forward

    return taking_a_list(functools.partial(forward, attributes))


def taking_a_list(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function whose only argument is a list that it empties, so that AOTAutograd passes one.

    AOTAutograd checks the attribute `_boxed_call` (torch 2.11, 2.13).
    """

    def call(arguments: list[Any]) -> Any:
        return function(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def group_named(name: str) -> Any:
    """Return the process group of this name, as functional collectives take it; None if no group has it.

    `torch._C._distributed_c10d._resolve_process_group` (torch 2.11, 2.13) raises if there is none.
    """
    if not torch.distributed.is_available():
        return None
    from torch._C._distributed_c10d import _resolve_process_group

    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError, TypeError):
        return None


def ranks_of_group(group: Any) -> list[int]:
    """Return the ranks of a process group in order: `torch.distributed.get_process_group_ranks` (torch 2.11, 2.13)."""
    return list(torch.distributed.get_process_group_ranks(group))


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Within this context, tensors are real even if a fake-tensor mode is active, as in a partition function.

    `torch.utils._python_dispatch._disable_current_modes` in torch 2.11 and 2.13. AOTAutograd also partitions under the
    Python dispatcher, where a collective's `wait_tensor` would block for ever: `torch._C._DisablePythonDispatcher`
    (both).
    """
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C._DisablePythonDispatcher():
        yield


def aot_backend(**options: Any) -> Callable[..., Any]:
    """Return a dynamo backend made of forward and backward compilers and a partition function.

    Does what the backends of `torch._dynamo.backends.common.aot_autograd` do (torch 2.11, 2.13), without the parts of
    Inductor that these import: dynamo traces neither the compilers nor what they return. AOTAutograd traces in anomaly
    mode (both), which warns of an error before it is raised: perhaps one after which the graph is captured otherwise.
    """
    from torch._functorch.aot_autograd import aot_module_simplified

    compile_backward = options.get("bw_compiler") or options["fw_compiler"]

    def backward(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return torch._dynamo.disable(torch._dynamo.disable(compile_backward)(graph, inputs))

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compilers: dict[str, Any] = {**options, "bw_compiler": backward}
        with _scalars_as_symbols(module, inputs) as traced, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Error detected in ", UserWarning)
            compiled: Callable[..., Any] = torch._dynamo.disable(aot_module_simplified(module, traced, **compilers))
        return compiled

    return backend


@contextlib.contextmanager
def _scalars_as_symbols(module: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Within this context, a graph that reads numbers from data can be traced outside of dynamo; yield inputs for it.

    A graph that checks its data, as `assert (ids >= 0).all().item()` does, holds such numbers as symbols of dynamo's
    `ShapeEnv`, which `meta["unbacked_bindings"]` names. Outside of dynamo, that is, in a tracing context without fake
    tensors, it needs that `ShapeEnv`, which knows what was checked: the one of its example values (torch 2.11, 2.13).
    """
    from torch._guards import TracingContext, detect_fake_mode

    context = TracingContext.try_get()
    reads = any("unbacked_bindings" in node.meta for node in module.graph.nodes)
    shown = [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]
    mode = detect_fake_mode(shown) if reads and context is not None and context.fake_mode is None else None
    if context is None or mode is None or detect_fake_mode(inputs) is not None:
        yield inputs
        return
    try:
        context.fake_mode = mode
        yield [mode.from_tensor(x, static_shapes=True) if isinstance(x, torch.Tensor) else x for x in inputs]
    finally:
        context.fake_mode = None


@contextlib.contextmanager
def differentiate_as_eager() -> Iterator[None]:
    """Let AOTAutograd trace what eager PyTorch would run, op for op, and a backward that may run again.

    Its settings of `torch._functorch.config` (torch 2.11, 2.13):
    `donated_buffer`           off: saved tensors are not donated to the backward, so that `retain_graph=True` works
    `backward_pass_autocast`   off: `backward()` is called outside of `torch.autocast`, as its documentation requires

    Outside of dynamo it gets a tracing context of its own, where `never_donate` finds what AOTAutograd keeps.

    `tensorify_python_scalars` of `graph_compile` (torch 2.13; ignored if it does not exist) makes tensors of numbers
    that sizes determine, from simplified expressions, which round differently from the model's.
    """
    import torch._functorch._aot_autograd.graph_compile as graph_compile
    import torch._functorch.config as functorch_config

    settings = functorch_config.patch(donated_buffer=False, backward_pass_autocast="off")
    name = "tensorify_python_scalars"
    before = vars(graph_compile).get(name)
    try:
        if before is not None:
            setattr(graph_compile, name, lambda *_: None)
        inside = torch._guards.TracingContext.try_get() is not None
        context = contextlib.nullcontext() if inside else torch._guards.tracing(torch._guards.TracingContext(None))
        with settings, _eager_kernels(), _eager_views(), context:
            yield
    finally:
        if before is not None:
            setattr(graph_compile, name, before)


def never_donate() -> None:
    """Allow the backward that is being compiled to run twice, whatever `donated_buffer` is set to later.

    Without `donated_buffer`, `ViewAndMutationMeta.bw_donated_idxs` stays None, and a second backward is refused unless
    the setting still holds; an empty list says that nothing is donated (torch 2.11, 2.13).
    """
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


@functools.cache
def holds_gradients() -> bool:
    """Tell whether a compiled backward keeps all gradients that autograd passes it alive until it returns.

    `CompiledFunction.backward` takes its arguments as a tuple that it never releases (torch 2.11), or releases (torch
    2.13, 2.14, 2.15); versions in between were not read.
    """
    return torch_release() < (2, 13)


def torch_release() -> tuple[int, ...]:
    """Return the release of PyTorch as numbers, such as (2, 13)."""
    return tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))


class _Whatever:
    """An object that equals everything; as the expected strides of a gradient, it accepts any strides."""

    def __eq__(self, _: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def take_gradients_as_they_lie() -> None:
    """Let the backward that is being compiled accept gradients in any memory layout, without copying them.

    `ViewAndMutationMeta.subclass_tangent_meta` has a `PlainTensorMeta` for each, whose `memory_format` says to which
    size and strides a gradient is copied if it has others (`coerce_to_expected_memory_format`; torch 2.11, 2.13, 2.14,
    2.15).
    """
    from torch._functorch._aot_autograd.schemas import MemoryFormatMeta, PlainTensorMeta

    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        for meta in context.fw_metadata.subclass_tangent_meta:
            if isinstance(meta, PlainTensorMeta):
                whatever: Any = _Whatever()
                meta.memory_format = MemoryFormatMeta(size=whatever, stride=whatever)


STASHED = "saved_tensor_with_no_vc_check"
"""Key of `Node.meta` of tensors that AOTAutograd keeps in `ctx._tensors_no_vc_check` (torch 2.11, 2.13, 2.14, 2.15)."""


def current_node() -> Any:
    """Return the node of autograd that this thread runs, also in its hooks.

    `torch._C._current_autograd_node` (torch 2.11, 2.13).
    """
    autograd: Any = torch._C
    return autograd._current_autograd_node()


def is_compiled_backward(node: Any) -> bool:
    """Tell, by its class, whether an autograd node is the backward of a graph of AOTAutograd (torch 2.11, 2.13)."""
    return type(node).__name__ == "CompiledFunctionBackward"


UNKNOWN_LINE = "an unknown line"  # where dynamo does not tell where it stopped


def graph_break_after(module: fx.GraphModule) -> str | None:
    """Return the line where dynamo broke the graph after this part, as `file:line in function: code`, or None.

    `GraphModule.compile_subgraph_reason` is a `GraphCompileReason`, with `graph_break` and `user_stack` (torch 2.11,
    2.13).
    """
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return _place(reason.user_stack) or UNKNOWN_LINE


INTERPOLATIONS = (
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *(f"{kind}{n}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"),
)
DECOMPOSED = (*INTERPOLATIONS, "multi_margin_loss", "multilabel_margin_loss_forward")


@contextlib.contextmanager
def _eager_kernels() -> Iterator[None]:
    """Within this context, remove PyTorch's Python kernels of interpolations and of two losses.

    They sum in another order than the C++ kernels, and cost more.

    `torch/_decomp/decompositions.py` registers them in `OpOverload.py_kernels` for the Autograd and
    CompositeImplicitAutograd keys; `_dispatch_cache` caches lookups (torch 2.11, 2.13).
    """
    from torch._subclasses.fake_impls import op_implementations_dict

    packets = [getattr(torch.ops.aten, name) for name in DECOMPOSED if hasattr(torch.ops.aten, name)]
    ops = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    registered = {op: dict(op.py_kernels) for op in ops if op.py_kernels}
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    backwards = [getattr(torch.ops.aten, f"{name}_backward", None) for name in INTERPOLATIONS]
    fakes = {packet.default: _interpolated_back for packet in backwards if packet is not None}
    fakes = {op: fake for op, fake in fakes.items() if op not in op_implementations_dict}
    try:
        op_implementations_dict.update(fakes)
        for op in registered:
            for key in (torch._C.DispatchKey.Autograd, composite):
                op.py_kernels.pop(key, None)
            if op._overloadname == "vec":
                op.py_kernels[composite] = functools.partial(_interpolated, op.overloadpacket.default)
            op._dispatch_cache.clear()
        yield
    finally:
        for op in fakes:
            del op_implementations_dict[op]
        for op, kernels in registered.items():
            op.py_kernels.pop(composite, None)
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


def _interpolated(op: Any, tensor: torch.Tensor, size: Sequence[Any] | None, *options: Any) -> Any:
    """Call the interpolation op with a computed size: the C++ kernel of its `vec` overload takes no symbolic sizes."""
    *corners, factors = options
    if size is None:
        pairs = zip(tensor.shape[2:], factors, strict=True)
        # the floor of a float would add a guard on the parity of sizes that other ops have halved
        size = [side * int(f) if float(f).is_integer() else math.floor(side * f) for side, f in pairs]
    return op(tensor, size, *corners, *(factors or [None] * len(size)))


def _interpolated_back(mode: Any, op: Any, gradient: torch.Tensor, _: Any, size: Sequence[Any], *__: Any) -> Any:
    """Return a fake gradient of an interpolation's input for symbolic sizes, which the C++ kernel does not support."""
    if not (is_symbolic(gradient) or any(isinstance(side, torch.SymInt) for side in size)):
        return NotImplemented  # the C++ kernel handles fixed sizes
    return gradient.new_empty(size)


@contextlib.contextmanager
def composite_kernels(
    kernels: Mapping[Any, Callable[..., Any]], key: str = "CompositeImplicitAutograd"
) -> Iterator[None]:
    """Let AOTAutograd trace composite ops (`OpOverload`) as these functions compute them.

    What `py_impl` registers in `OpOverload.py_kernels` for the CompositeImplicitAutograd key is looked up before C++
    kernels, also for calls from inside of them; `_dispatch_cache` caches lookups (torch 2.11, 2.13).

    Args:
        key: another dispatch key, such as "Autograd", if PyTorch has a Python kernel for that.
    """
    of_key = getattr(torch._C.DispatchKey, key)
    registered = {op: dict(op.py_kernels) for op in kernels}
    try:
        for op, kernel in kernels.items():
            op.py_kernels[of_key] = kernel
            op._dispatch_cache.clear()
        yield
    finally:
        for op, others in registered.items():
            op.py_kernels.pop(of_key, None)
            op.py_kernels.update(others)
            op._dispatch_cache.clear()


@contextlib.contextmanager
def _eager_views() -> Iterator[None]:
    """Give views of fake tensors the strides of real ones, also where a size is 1.

    What autograd runs depends on strides: a matrix product's gradient of a transposed operand is computed the other way
    round, and a convolution treats (1, C, H, W) as channels-last or not. torch has Python versions of `view` that give
    sizes of 1 other strides: in `op_implementations_dict` of `torch/_subclasses/fake_impls.py`, and as kernels for Meta
    (`torch._refs.view`). They are replaced by the C++ kernel and, for symbolic sizes, which it does not take, by
    `strides_of_view`. `FakeTensorMode.cache` caches earlier traces (torch 2.11, 2.13).
    """
    from torch._subclasses.fake_impls import op_implementations_dict
    from torch._subclasses.fake_tensor import FakeTensorMode

    key = torch._C.DispatchKey.Meta
    views = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
    fakes = {op: op_implementations_dict[op] for op in views if op in op_implementations_dict}
    kernels = {op: op.py_kernels.pop(key) for op in views if key in op.py_kernels}

    def view(mode: Any, op: Any, tensor: torch.Tensor, shape: Sequence[Any]) -> Any:
        numbers = (*tensor.shape, *tensor.stride(), *shape)
        if not (is_symbolic(tensor) or any(isinstance(number, torch.SymInt) for number in numbers)):
            return NotImplemented  # the C++ kernel handles fixed sizes
        if not any(isinstance(number, torch.SymInt) and depends_on_data(number) for number in numbers):
            shape = _without_minus_one(shape, tensor.numel())
            strides = strides_of_view(tensor.shape, tensor.stride(), shape)
            if strides is not None:
                return tensor.as_strided(shape, strides, tensor.storage_offset())
        return fakes[op](mode, op, tensor, shape) if op in fakes else NotImplemented

    def meta(op: Any, tensor: torch.Tensor, shape: Sequence[Any]) -> Any:
        """Compute the meta tensor of a view that another op's Meta kernel takes, such as a Fourier transform's."""
        symbolic = any(isinstance(number, torch.SymInt) for number in (*tensor.shape, *tensor.stride(), *shape))
        return kernels[op](tensor, shape) if symbolic else op._op_dk(key, tensor, shape)

    def forget() -> None:
        for op in views:
            op._dispatch_cache.clear()
        FakeTensorMode.cache_clear()

    for op in kernels:
        op.py_kernels[key] = functools.partial(meta, op)
    forget()
    op_implementations_dict.update(dict.fromkeys(views, view))
    try:
        yield
    finally:
        for op in views:
            op_implementations_dict.pop(op)
        op_implementations_dict.update(fakes)
        for op, kernel in kernels.items():
            op.py_kernels[key] = kernel
        forget()


@contextlib.contextmanager
def with_fake_strides(
    strides_of: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any], known: dict[Any, Any]
) -> Iterator[None]:
    """Within this context, fake results of ops have the strides that `strides_of` returns; AOTAutograd traces in it.

    `FakeTensorMode._dispatch_impl(self, func, types, args, kwargs)` computes results that are not in the dictionary
    `FakeTensorMode.cache`, which is replaced by another one meanwhile (torch 2.11, 2.13, 2.14, 2.15).

    Args:
        strides_of: called with an op and its arguments; returns strides of each output, None for unchanged ones.
        known: the cache of results that have those strides, which is extended; {}, or one of the same function.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode: Any = FakeTensorMode
    dispatch = mode._dispatch_impl

    def restrided(fake_mode: Any, tensor: Any, strides: Any) -> Any:
        if strides is None or not isinstance(tensor, torch.Tensor) or tuple(tensor.stride()) == tuple(strides):
            return tensor
        with fake_mode:
            return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)

    def laid_out(self: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = dispatch(self, op, types, args, kwargs)
        strides = strides_of(op, args, kwargs)
        if strides is None:
            return result
        if not isinstance(result, tuple | list):
            return restrided(self, result, strides[0])
        rest = [None] * (len(result) - len(strides))
        made = [restrided(self, r, s) for r, s in zip(result, (*strides, *rest), strict=True)]
        return getattr(type(result), "_make", type(result))(made)

    others = mode.cache
    mode._dispatch_impl, mode.cache = laid_out, known
    try:
        yield
    finally:
        mode._dispatch_impl, mode.cache = dispatch, others


def elementwise_strides(*tensors: torch.Tensor) -> tuple[Any, ...]:
    """Return the strides that TensorIterator gives a new result of operands of one shape (torch 2.11, 2.13, 2.15)."""
    from torch._prims_common import compute_elementwise_output_strides

    return tuple(compute_elementwise_output_strides(*tensors))


def _without_minus_one(shape: Sequence[Any], count: Any) -> list[Any]:
    """Return the shape with a size of -1 replaced by the size that the number of elements implies."""
    known = math.prod(size for size in shape if not (isinstance(size, int) and size == -1))
    return [count // known if isinstance(size, int) and size == -1 else size for size in shape]


def strides_of_view(shape: Sequence[Any], strides: Sequence[Any], new: Sequence[Any]) -> list[Any] | None:
    """Return the strides of a non-empty tensor that is viewed in a new shape; None if that needs a copy.

    Dimensions that are contiguous with each other are merged, from the last on, and divided anew; a size of 1 at the
    front of such a group gets the stride of what follows it, as `at::detail::computeStride` gives it. Sizes may be
    symbolic; comparing them adds guards.
    """
    if not shape:
        return [1] * len(new)
    made: list[Any] = []
    left = list(new)
    end = len(shape)
    while end:
        begin, base, count = end - 1, strides[end - 1], shape[end - 1]
        while begin and (shape[begin - 1] == 1 or strides[begin - 1] == count * base):
            begin -= 1
            count = count * shape[begin]
        viewed: Any = 1
        while left and (viewed < count or left[-1] == 1):
            made.append(viewed * base)
            viewed = viewed * left.pop()
        if viewed != count:
            return None
        end = begin
    return None if left else made[::-1]


RUNTIME = (__file__, os.path.join(os.path.dirname(__file__), "runtime", ""))
_steps = itertools.count(1)


def compiled_step(
    forward: Callable[..., Any],
    backend: Callable[..., Any],
    name: str,
    dynamic: bool | None = False,
    at_once: bool = False,
    on_fixed: Callable[[BaseException], None] = lambda error: None,
) -> Callable[..., Any]:
    """Return a function that dynamo captures as one graph, which it passes to `backend`.

    `torch.compile(..., fullgraph=True, dynamic=...)`, with three differences. The settings of `capture_settings` hold
    while dynamo traces, and are not touched by a call that finds its graph: `torch._dynamo.optimize` returns an
    `OptimizeContext` whose `callback` is called with a frame without a graph (torch 2.11, 2.13); `dynamic=False` would
    change settings at every call. The function has code of its own, and a name, since dynamo counts graphs by code
    object, and records which sizes have changed by file, line and name: models of one class share neither. And if
    tracing fails with sizes that may change, it is tried with fixed ones, from then on if that works.

    Args:
        dynamic: how sizes are treated, as in torch.compile.
        at_once: whether some sizes change already in the first call, although `dynamic` is None.
        on_fixed: called with the error that occurred before sizes were fixed.
    """

    fixed = False  # True once symbolic sizes have failed

    def capture(inner: Callable[..., Any], frame: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal dynamic, at_once, fixed
        try:
            with capture_settings(dynamic), sizes_unmarked(_tensors_in(frame) if fixed else ()):
                result = inner(frame, *args, **kwargs)
            at_once = True
            return result
        except Exception as error:
            if planning_error(error) is not None:
                at_once = True  # capturing succeeded, and the next call may have other sizes
                raise
            # in the first call, too, sizes are symbolic where their tensors are marked so
            symbolic = dynamic or at_once or isinstance(backend_failure(error), NotSymbolic)
            if dynamic is False or not symbolic:
                raise
            with capture_settings(False), sizes_unmarked(_tensors_in(frame)):
                result = inner(frame, *args, **kwargs)
            dynamic, fixed = False, True
            on_fixed(backend_failure(error) or error)
            return result

    return _captured_by(capture, forward, backend, name, fullgraph=True)


def _captured_by(
    capture: Callable[..., Any], forward: Callable[..., Any], backend: Callable[..., Any], name: str, *, fullgraph: bool
) -> Callable[..., Any]:
    """Return a function that calls `forward`, and passes frames that have no graph yet to `capture`.

    What a backward calls, if `forward` runs one, and what the runtime of fxremat does around it, stays Python: of
    `torch/_dynamo/types.py`, `ConvertFrameReturn` (torch 2.11, 2.13).

    Args:
        capture: called with dynamo's own callback for such frames, and the arguments for it.
    """
    import torch._dynamo
    from torch._dynamo import types

    dynamo: Any = types
    skip = dynamo.FrameExecStrategy(dynamo.FrameAction.SKIP, dynamo.FrameAction.SKIP)  # the function, and what it calls

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    own = call.__code__ = call.__code__.replace(co_name=f"{name} ({next(_steps)})")
    kept = _Captured(own, relay := _Relay(backend), capture)
    context: Any = torch._dynamo.optimize(backend=relay, nopython=fullgraph)
    inner = context.callback

    @functools.wraps(inner)
    @with_room_for_calls
    def callback(frame: Any, *args: Any, **kwargs: Any) -> Any:
        code = frame.f_code
        if code is not own and (in_backward() or code.co_filename.startswith(RUNTIME)):
            return dynamo.ConvertFrameReturn(skip, apply_to_code=False)
        assert kept.capture is not None, "a function captured for a model outlives it"
        found = kept.capture(inner, frame, *args, **kwargs)
        if found.guarded_code is not None:
            kept.guards.append(weakref.ref(found.guarded_code.guard_manager))
        return found

    callback._torchdynamo_orig_backend = inner  # type: ignore[attr-defined]
    context.callback = callback
    compiled: Callable[..., Any] = context(call)
    compiled._fxremat_backend = backend  # type: ignore[attr-defined]
    weakref.finalize(compiled, kept.forget).atexit = False
    return compiled


class _Relay:
    """Passes what dynamo captures on to a backend, and calls of the compiled functions on to these.

    dynamo never lets go of its backends (`torch._dynamo.eval_frame.cached_backends`, and the entries of code objects
    that stay), nor of some compiled functions (tracebacks of its guards hold the code that calls them, torch 2.11 to
    2.15); those of fxremat hold plans and graphs.
    """

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._backend = weakref.ref(backend)
        self._compiled = list[list[Callable[..., Any]]]()

    def __call__(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        backend = self._backend()
        assert backend is not None, "a function captured for a model outlives it"
        held = [backend(*args, **kwargs)]
        self._compiled.append(held)
        return lambda *given: held[0](*given)

    def forget(self) -> None:
        """Let go of the compiled functions."""
        for held in self._compiled:
            held.clear()


class _Captured:
    """The graphs and guards that dynamo keeps for a captured model, to be dropped with the model."""

    def __init__(self, code: types.CodeType, relay: _Relay, capture: Callable[..., Any]) -> None:
        self.code, self.relay = code, relay  # the code is of the model's own function
        self.capture: Callable[..., Any] | None = capture  # dynamo keeps its callback after an error (torch 2.13)
        self.guards = list[weakref.ref[Any]]()  # of all graphs, which functions of the user keep

    def forget(self) -> None:
        """Let dynamo drop what it compiled.

        As `CheckFunctionManager.invalidate` does for an object that guards compare by identity (torch 2.11 to 2.15).
        """
        from torch._dynamo.guards import DeletedGuardManagerWrapper

        self.capture = None
        self.relay.forget()
        for reference in self.guards:
            guards: Any = reference()
            if guards is not None and guards.cache_entry is not None and guards.extra_state is not None:
                gone = DeletedGuardManagerWrapper("the compiled model is gone")
                guards.extra_state.invalidate(guards.cache_entry, gone)
        frames: Any = torch._dynamo.eval_frame
        frames.reset_code(self.code)


# By id: dynamo puts a module's globals among the constants of functions that it resumes, which cannot be hashed then.
_left_to_python: weakref.WeakValueDictionary[int, types.CodeType] = weakref.WeakValueDictionary()


def functions_in_python() -> list[str]:
    """Return the user's functions on the call stack that dynamo did not capture, outermost first, with their lines.

    dynamo returns no `guarded_code` for them (`ConvertFrameReturn`, torch 2.11, 2.13).
    """
    found, frame = list[str](), cast(types.FrameType | None, sys._getframe())
    while frame is not None:
        if _left_to_python.get(id(frame.f_code)) is frame.f_code:
            code = frame.f_code
            found.append(f"{code.co_qualname} at {os.path.basename(code.co_filename)}:{frame.f_lineno}")
        frame = frame.f_back
    return found[::-1]


def compiled_in_parts(
    forward: Callable[..., Any],
    backend: Callable[..., Any],
    name: str,
    dynamic: bool | None,
    around: Callable[[], contextlib.AbstractContextManager[None]],
) -> Callable[..., Any]:
    """Return a function that dynamo captures as several graphs, each of which it passes to `backend`.

    `torch.compile(..., fullgraph=False)`, with the differences of `compiled_step`: dynamo's callback is called for each
    function that it reaches without a graph. Modules of torch.nn that consist of others are traced too where they are
    called from Python, which dynamo skips by default (`traced_torch_modules`).

    Args:
        dynamic: how sizes are treated, as in torch.compile; a function that cannot be captured so is captured for fixed
            sizes.
        around: returns a context in which functions are captured.
    """

    def capture(inner: Callable[..., Any], frame: Any, *args: Any, **kwargs: Any) -> Any:
        found = captured(inner, frame, *args, **kwargs)
        if found.guarded_code is None and not frame.f_code.co_filename.startswith(os.path.dirname(torch.__file__)):
            _left_to_python[id(frame.f_code)] = frame.f_code
        return found

    def captured(inner: Callable[..., Any], frame: Any, *args: Any, **kwargs: Any) -> Any:
        quiet = silent("torch._dynamo.variables.tensor")
        with around(), traced_torch_modules(), packed_sequences_left_to_python(), quiet:
            try:
                with capture_settings(dynamic), sizes_unmarked(_tensors_in(frame) if dynamic is False else ()):
                    return inner(frame, *args, **kwargs)
            except Exception as error:
                if dynamic is False or backend_failure(error) is None or planning_error(error) is not None:
                    raise
            # AOTAutograd marks what a graph of symbolic sizes has returned
            with capture_settings(False), sizes_unmarked(_tensors_in(frame)):
                return inner(frame, *args, **kwargs)

    return _captured_by(capture, forward, backend, name, fullgraph=False)


def trace_again(modules: Iterable[torch.nn.Module]) -> None:
    """Let dynamo look again at the methods of modules that it has skipped before, for another `torch.compile`.

    dynamo marks the code of a function that it has skipped once, such as one whose graph ends in a loop, or
    `Sequential.forward`, for all callbacks of the process (`set_code_exec_strategy`, torch 2.11 to 2.15). Functions
    that the user has disabled keep their mark.
    """
    frames: Any = torch._dynamo.eval_frame
    classes = {kind for module in modules for kind in type(module).__mro__ if kind is not torch.nn.Module}
    looked_at = frames.FrameExecStrategy(frames.FrameAction.DEFAULT, frames.FrameAction.DEFAULT)
    for method in (method for kind in classes for method in vars(kind).values()):
        if isinstance(method, types.FunctionType) and not getattr(method, "_torchdynamo_disable", False):
            frames.set_code_exec_strategy(method.__code__, looked_at)


def in_backward() -> bool:
    """Tell whether this thread runs a backward."""
    return backward_task() != -1


@contextlib.contextmanager
def traced_torch_modules() -> Iterator[None]:
    """Within this context, let dynamo trace composite modules of torch.nn that Python code calls, such as Sequential.

    `torch._dynamo.trace_rules.LEGACY_MOD_INLINELIST` names the modules of torch whose functions it does not skip (torch
    2.11, 2.13); leaf modules are not among them, as graphs of one op only add borders.
    """
    from torch._dynamo import trace_rules

    rules: Any = trace_rules
    composite = {f"torch.nn.modules.{name}" for name in ("container", "transformer", "activation")}
    added = composite - rules.LEGACY_MOD_INLINELIST
    rules.LEGACY_MOD_INLINELIST.update(added)
    rules.get_legacy_mod_inlinelist.cache_clear()
    try:
        yield
    finally:
        rules.LEGACY_MOD_INLINELIST.difference_update(added)
        rules.get_legacy_mod_inlinelist.cache_clear()


@contextlib.contextmanager
def methods_left_to_python() -> Iterator[None]:
    """Within this context, let dynamo end a graph before each call of methods that it would trace wrongly.

    * of a `random.Random` that the model has. dynamo would write the state that it saw into the graph, so that each
      call gives the same number (`RandomVariable.call_method` of `torch/_dynamo/variables/misc.py`, torch 2.11, 2.13).
    * `Tensor.backward`. Forward and backward would be one graph without gradients, which is not planned; and a loss
      that an earlier graph returned has no leaves that dynamo knows, so that no gradient would be written
      (`TensorVariable.call_method` of `torch/_dynamo/variables/tensor.py`, torch 2.11, 2.13, 2.14, 2.15).
    """
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.variables.misc import RandomVariable
    from torch._dynamo.variables.tensor import TensorVariable

    of_random, of_tensor = RandomVariable.call_method, TensorVariable.call_method

    def called_of_random(self: Any, tx: Any, name: str, *arguments: Any, **named: Any) -> Any:
        if self.source is None:
            return of_random(self, tx, name, *arguments, **named)
        return refused("random.Random of the model", f"{self} {name}", "Its state changes from call to call.")

    def called_of_tensor(self: Any, tx: Any, name: str, *arguments: Any, **named: Any) -> Any:
        if name != "backward":
            return of_tensor(self, tx, name, *arguments, **named)
        return refused("Tensor.backward in the model", f"{self}", "It runs the backward of the graphs before it.")

    def refused(kind: str, context: str, explanation: str) -> Any:
        return unimplemented(gb_type=kind, context=context, explanation=explanation, hints=[])

    with (
        mock.patch.object(RandomVariable, "call_method", called_of_random),
        mock.patch.object(TensorVariable, "call_method", called_of_tensor),
    ):
        yield


@contextlib.contextmanager
def names_of_classes() -> Iterator[None]:
    """Within this context, dynamo traces methods of the names of a tensor's class.

    `type(weight).__module__.startswith("torchao.")`, which peft's DoRA asks, ends a graph otherwise, though names are
    constants (`GetAttrVariable.call_method` of `torch/_dynamo/variables/misc.py`, torch 2.11, 2.13, 2.14).
    """
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.misc import GetAttrVariable

    own = GetAttrVariable.call_method

    def call_method(self: Any, tx: Any, name: str, *arguments: Any, **named: Any) -> Any:
        if self.name in ("__module__", "__name__", "__qualname__"):
            with contextlib.suppress(NotImplementedError):
                if isinstance(constant := self.as_python_constant(), str):
                    return ConstantVariable.create(constant).call_method(tx, name, *arguments, **named)
        return own(self, tx, name, *arguments, **named)

    with mock.patch.object(GetAttrVariable, "call_method", call_method):
        yield


@contextlib.contextmanager
def packed_sequences_left_to_python() -> Iterator[None]:
    """Within this context, dynamo ends a graph before each call of nn.RNN, nn.GRU or nn.LSTM with packed sequences.

    It goes on after the call. Ended is the graph where the layer's `forward` calls its kernel: the batch sizes are one
    argument more, before the list of weights (`TorchInGraphFunctionVariable.call_function` of
    `torch/_dynamo/variables/torch.py`, torch 2.11, 2.13). Nothing that guards compare is replaced.
    """
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    own, kernels = TorchInGraphFunctionVariable.call_function, recurrent_kernels().values()

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if any(self.value is kernel for kernel in kernels) and args[3].python_type() is not bool:
            return unimplemented(
                gb_type="recurrent layer that reads packed sequences",
                context=f"{self}",
                explanation="Its kernels run as they are.",
                hints=[],
            )
        return own(self, tx, args, kwargs)

    with mock.patch.object(TorchInGraphFunctionVariable, "call_function", call_function):
        yield


def recurrent_kernels() -> Mapping[str, Callable[..., Any]]:
    """Return the functions behind nn.LSTM, nn.GRU and nn.RNN, by the names of `RNNBase.mode` (torch 2.11, 2.13)."""
    vf: Any = torch._VF
    return {"LSTM": vf.lstm, "GRU": vf.gru, "RNN_TANH": vf.rnn_tanh, "RNN_RELU": vf.rnn_relu}


@contextlib.contextmanager
def autograd_inside_of_ops() -> Iterator[None]:
    """Within this context, autograd records ops that the kernel of another op calls, below which it is switched off.

    `torch._C._ForceDispatchKeyGuard` sets the keys that are excluded on this thread; AOTAutograd switches hooks of
    saved tensors off while it traces (both torch 2.11, 2.13).
    """
    keys: Any = torch._C
    excluded = keys._dispatch_tls_local_exclude_set()
    for name in ("AutogradCPU", "AutogradCUDA", "AutogradXPU", "AutogradMPS", "AutogradPrivateUse1", "AutogradOther"):
        excluded = excluded.remove(getattr(keys.DispatchKey, name))
    excluded = excluded.remove(keys.DispatchKey.ADInplaceOrView)
    traced = keys._autograd._saved_tensors_hooks_set_tracing(False)
    try:
        with keys._ForceDispatchKeyGuard(keys._dispatch_tls_local_include_set(), excluded):
            yield
    finally:
        keys._autograd._saved_tensors_hooks_set_tracing(traced)


def outside_graphs(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """Return a function that no `torch.compile` traces: `torch.compiler.disable(reason=...)` (torch 2.11, 2.13)."""
    disabled: Callable[..., Any] = torch.compiler.disable(function, reason=reason)
    return disabled


def is_traced() -> str | None:
    """Return which tracer or transform runs the current call: "torch.export", "torch.fx", "torch.jit", "torch.func".

    "TorchDispatchMode" if a mode sees each op, such as `FlopCounterMode`; dynamo skips all functions then. "forward_ad"
    within a level of dual numbers. None if none of these does.

    `torch.fx._symbolic_trace.is_fx_symbolic_tracing`, `torch._C._is_tracing`, `torch._C._len_torch_dispatch_stack`,
    `torch._C._functorch.peek_interpreter_stack` and `torch.autograd.forward_ad._current_level` (torch 2.11, 2.13).
    """
    from torch.fx._symbolic_trace import is_fx_symbolic_tracing

    if torch.compiler.is_exporting():
        return "torch.export"
    if is_fx_symbolic_tracing():
        return "torch.fx"
    if torch._C._is_tracing():
        return "torch.jit"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward_ad"
    modes = (torch._C._get_dispatch_stack_at(place) for place in range(torch._C._len_torch_dispatch_stack()))
    seen = any(not (mode.is_infra_mode() or mode.ignore_compile_internals()) for mode in modes)
    return "TorchDispatchMode" if seen else None


def any_batched(values: Iterable[Any]) -> bool:
    """Tell whether tensors stand for several each, as in a backward with `is_grads_batched=True`.

    `torch._C._functorch.is_legacy_batchedtensor` and `is_batchedtensor`, for gradients that `torch.vmap` passes
    (torch 2.11, 2.13).
    """
    known = torch._C._functorch
    given = (x for x in values if isinstance(x, torch.Tensor))
    return any(known.is_legacy_batchedtensor(x) or known.is_batchedtensor(x) for x in given)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor belongs to a transform of torch.func, and so has no storage.

    `torch._C._functorch.is_functorch_wrapped_tensor` (torch 2.11, 2.13). Dynamo leaves some alive.
    """
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def is_compiling() -> bool:
    """Tell whether dynamo is compiling a function now: `torch._guards.CompileContext` (torch 2.11, 2.13)."""
    return torch._guards.CompileContext.current_compile_id() is not None


class RunningCall:
    """A call of a function that `torch.compile` returned, inside of which a graph is compiled or runs.

    Attributes:
        function: the same in all calls of that function.
        module: the module that was given to `torch.compile`; None if it was a function.
        name: the name of the function, or of the module's class.
        is_whole: True if what is compiled or runs is that function itself, and neither a part of it that was called
            from Python nor one behind a graph break.
    """

    def __init__(self, wrapper: types.FrameType, between: Sequence[types.FrameType]) -> None:
        import torch._dynamo.external_utils as external_utils

        between_calls = (torch.nn.modules.module.__file__, external_utils.__file__)
        called, self._frame = wrapper.f_locals["fn"], wrapper
        self.function: Any = wrapper.f_locals["self"]
        module = getattr(called, "__self__", getattr(called, "__wrapped__", None))  # torch.nn's own classes are wrapped
        self.module = module if isinstance(module, torch.nn.Module) else None
        self.name: str = called.__name__ if self.module is None else type(self.module).__name__
        hooks = [] if self.module is None else [each for kind in forward_hooks_of(self.module) for each in kind]
        in_torch = all(frame.f_code.co_filename in between_calls for frame in between)
        self.is_whole = in_torch and not hooks

    def surround(self, enter: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        """Run each call of the function, including the present one, within a context manager that `enter` returns."""

        def begin() -> Callable[[], None]:
            before, context = sys.exc_info()[1], enter()
            context.__enter__()

            def end() -> None:
                error = sys.exc_info()[1]
                if error is None or error is before:
                    context.__exit__(None, None, None)
                else:
                    context.__exit__(type(error), error, error.__traceback__)

            return end

        self.function.enter_exit_hooks.append(begin)
        self._frame.f_locals["cleanups"].append(begin())


def running_call() -> RunningCall | None:
    """Return the running call of a function from `torch.compile` inside of which a graph is compiled or runs.

    None: there is none.
    """
    wrapper, between = _running_wrapper()
    return None if wrapper is None else RunningCall(wrapper, between)


def running_function() -> object | None:
    """Return `RunningCall.function` of the running call, in a few microseconds; None if there is none."""
    wrapper, _ = _running_wrapper()
    return None if wrapper is None else wrapper.f_locals["self"]


def _running_wrapper() -> tuple[types.FrameType | None, list[types.FrameType]]:
    """Return the innermost frame of `compile_wrapper`, and the frames between it and the caller's, without dynamo's.

    `compile_wrapper` of `torch/_dynamo/eval_frame.py` calls the `enter_exit_hooks` of its `self` before a call, and
    what these returned, its `cleanups`, after it (torch 2.11, 2.13, 2.14).
    """
    import torch._dynamo.convert_frame as convert_frame
    import torch._dynamo.eval_frame as eval_frame

    frame: types.FrameType | None = sys._getframe(2)  # a list with this function's own frame would be a cycle
    between: list[types.FrameType] = []
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_code.co_filename == eval_frame.__file__:
            return frame, between
        between.append(frame)
        if frame.f_code.co_filename == convert_frame.__file__:
            between.clear()  # forget the frames found so far, which are those of dynamo itself
        frame = frame.f_back
    return None, between


@contextlib.contextmanager
def capture_settings(dynamic: bool | None = False) -> Iterator[None]:
    """Within this context, dynamo may trace any number of graphs of a function, and ignores calls to loggers.

    `assume_static_by_default` and `automatic_dynamic_shapes` are what `dynamic` of torch.compile sets: False treats all
    sizes as fixed, True none, None those that have not changed so far. `use_duck_shape` of
    `torch.fx.experimental._config` is off: sizes that are equal in the captured call (a batch as large as the number of
    channels) are not assumed to be equal in others.
    `recompile_limit` (torch 2.11, 2.13) counts all graphs of one forward. The setting for logging has had two names
    (`ignore_logger_methods` before `ignore_logging_functions`): those that exist are set. The other settings mean:
    `specialize_float`            off: numbers that are no integers become inputs if they have changed
    `skip_nnmodule_hook_guards`   off: a hook that is registered later is noticed
    `optimize_ddp`                off: DistributedDataParallel does not split the graph by its buckets
    `use_numpy_random_stream`     on: random numbers of NumPy are NumPy's, not torch's; their calls end a graph
    `allow_unspec_int_on_nn_module`  on: integers that a module counts become inputs once they have changed; if all
                                  sizes are symbolic, every integer would be one
    `trace_autograd_ops`          on: `torch.autograd.grad` inside of forward
    `allow_rnn`                   on: nn.RNN, nn.GRU and nn.LSTM are traced, which `passes/recurrent.py` makes ops
    """
    import torch._dynamo.config as dynamo_config
    from torch.fx.experimental import _config

    settings: dict[str, Any] = {
        "recompile_limit": 512,
        "accumulated_recompile_limit": 4096,
        "assume_static_by_default": dynamic is not True,
        "automatic_dynamic_shapes": dynamic is not False,
        "specialize_float": dynamic is True,  # if off, every float would become an input
        "skip_nnmodule_hook_guards": False,
        "optimize_ddp": False,
        "use_numpy_random_stream": True,
        "allow_unspec_int_on_nn_module": dynamic is not True,
        "trace_autograd_ops": True,
        "allow_rnn": True,
        "ignore_logger_methods": (ignored := logging_functions()),
        "ignore_logging_functions": ignored,
    }
    known = {name: value for name, value in settings.items() if hasattr(dynamo_config, name)}
    shape_config: Any = _config
    apart = shape_config.patch(use_duck_shape=False)
    quiet = silent("torch._subclasses.fake_tensor", "torch._dynamo.exc", METRICS)
    refused, containers = _computed_by_python(), _containers_of_python()
    counted = _integers_of_globals_counted() if dynamic is not True else contextlib.nullcontext()
    left, named = methods_left_to_python(), names_of_classes()
    with dynamo_config.patch(known), apart, refused, containers, counted, quiet, left, named:
        yield


@contextlib.contextmanager
def _integers_of_globals_counted() -> Iterator[None]:
    """Within this context, an integer of a module or class becomes an input of the graph once it has changed.

    As integers of the model do with `allow_unspec_int_on_nn_module`. Dynamo takes all but those of local variables for
    constants (`torch._dynamo.utils.is_int_specialization_case`; torch 2.11, 2.13, 2.14, 2.15).
    """
    from torch._dynamo.source import is_from_defaults
    from torch._dynamo.utils import is_int_specialization_case as is_constant
    from torch._dynamo.variables import builder

    def is_constant_still(value: Any, source: Any) -> bool:
        return bool(is_constant(value, source) if source.guard_source.is_local() else is_from_defaults(source))

    with mock.patch.object(builder, "is_int_specialization_case", is_constant_still):
        yield


@contextlib.contextmanager
def _computed_by_python() -> Iterator[None]:
    """Within this context, the graph ends at what Python can compute, and tracing cannot or does wrong.

    An op that reads the numbers of a tensor fails, since the tensors of tracing have none: indexing by a tuple of
    tensors with one number each does so (`WITHOUT_DATA`). And some arithmetic of floats that depend on data is right
    for real numbers only: sympy takes what `x.item()` returns for one, so that `number != number`, which finds NaN, is
    false, `number == math.inf` too, and `number - number` is 0. Where a result is a constant or an operand is infinite,
    Python has to compute it. So has it a remainder: `torch.utils._sympy.functions.Mod` takes it for one of integers,
    and `% 1` is 0.

    `torch._dynamo.utils.run_node` computes what a call in the traced program returns; dynamo breaks the graph at
    `DataDependentOutputException` (torch 2.11, 2.13, 2.14, 2.15).
    """
    import torch._dynamo.utils as utils
    from torch._subclasses.fake_tensor import DataDependentOutputException
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    run: Callable[..., Any] = utils.run_node

    def running(tracer: Any, node: fx.Node, args: Any, kwargs: Any, module: Any) -> Any:
        read = any(isinstance(arg, torch.SymFloat) and depends_on_data(arg) for arg in args)
        refused = read and (node.target is operator.mod or any(map(is_infinite, args)))
        try:
            result = None if refused else run(tracer, node, args, kwargs, module)
        except RuntimeError as error:
            if WITHOUT_DATA not in str(error):
                raise
            refused = True
        if refused or (read and is_constant(result)):
            raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)
        return result

    def is_infinite(value: object) -> bool:
        return isinstance(value, float) and not math.isfinite(value)

    def is_constant(value: Any) -> bool:
        if isinstance(value, torch.SymBool):
            return statically_known_true(value) or statically_known_true(torch.sym_not(value))
        if isinstance(value, torch.SymInt | torch.SymFloat):
            return not value.node.expr.free_symbols
        return isinstance(value, bool | int | float)

    with mock.patch.object(utils, "run_node", running):
        yield


_left: ContextVar[Collection[int]] = ContextVar("_left", default=())  # what `left_to_python` names


@contextlib.contextmanager
def left_to_python(containers: Collection[int]) -> Iterator[None]:
    """Within this context, graphs end where one of these lists, dicts, sets or deques, named by its `id`, is used."""
    before = _left.set(containers)
    try:
        yield
    finally:
        _left.reset(before)


@contextlib.contextmanager
def _containers_of_python() -> Iterator[None]:
    """Within this context, dynamo captures a use of a list, dict, set or deque only once.

    * Where the graph ends inside the argument of `states.append(block(x))`, Python hands `states.append` to the graph
      that goes on. Dynamo knows such a method by its identity, and every `states.append` is another object, so that it
      would capture in each step again. Here it is known by its name and by what it is a method of.
    * Of a container that a model keeps, dynamo knows how long it is. One that grows from call to call is left to Python
      (`left_to_python`).

    `VariableBuilder._wrap` makes what dynamo knows of a value. `BoundBuiltinMethodVariable` stands for such a method
    (torch 2.13, 2.14, 2.15); in torch 2.11 `GetAttrVariable` does, as where the method is looked up in the graph.
    Whatever is done with an `UnknownVariable` ends the graph (torch 2.11, 2.13, 2.14, 2.15).
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import builder, misc
    from torch._dynamo.variables.base import VariableTracker

    wrap: Callable[..., Any] = builder.VariableBuilder._wrap
    bound: Any = getattr(builder, "BoundBuiltinMethodVariable", None)

    def wrapping(self: Any, value: Any) -> Any:
        owner = value.__self__ if isinstance(value, types.BuiltinMethodType) else None
        if id(value) in _left.get():
            self.install_guards(GuardBuilder.TYPE_MATCH)
            return misc.UnknownVariable(source=self.source)
        if not isinstance(owner, list | dict | set | deque) or self.source is None:
            return wrap(self, value)
        self.install_guards(GuardBuilder.TYPE_MATCH)
        install_guard(AttrSource(self.source, "__name__").make_guard(GuardBuilder.EQUALS_MATCH))
        name = value.__name__
        of: Any = VariableTracker.build(self.tx, owner, AttrSource(self.source, "__self__"))
        if bound is None:
            return misc.GetAttrVariable(of, name, source=self.source)
        return bound(inspect.getattr_static(type(owner), name), of, source=self.source)

    with mock.patch.object(builder.VariableBuilder, "_wrap", wrapping):
        yield


WITHOUT_DATA = "data is not allocated yet"
"""Part of the error of an op that reads the numbers of a fake tensor (torch 2.11, 2.13, 2.14, 2.15)."""

METRICS = "torch._dynamo.metrics_context"
"""Name of dynamo's logger of statistics, which cannot sort functions in `ignore_logging_functions` (torch 2.11)."""


@contextlib.contextmanager
def silent(*loggers: str) -> Iterator[None]:
    """Within this context, silence loggers of PyTorch that print tracebacks of errors which fxremat explains."""
    import logging

    def nothing(_: logging.LogRecord) -> bool:
        return False

    for logger in loggers:
        logging.getLogger(logger).addFilter(nothing)
    try:
        yield
    finally:
        for logger in loggers:
            logging.getLogger(logger).removeFilter(nothing)


def logging_functions() -> set[Callable[..., Any]]:
    """Return functions that only write a message: `torch._dynamo.config.ignore_logging_functions` skips them.

    Libraries add methods such as `warning_once` to loggers, so the methods are looked up each time.
    """
    import logging
    import warnings

    levels = ("debug", "info", "warn", "error", "critical", "exception", "log")
    places = (logging, logging.Logger, *logging.Logger.__subclasses__())
    named = [item for place in places for item in vars(place).items()]
    return {value for name, value in named if name.startswith(levels) and callable(value)} | {warnings.warn}


def mark_dynamic(tensor: torch.Tensor, dimensions: Iterable[int]) -> None:
    """Let dynamo treat sizes of a tensor as dynamic, unless the model's code fixes them.

    `torch._dynamo.maybe_mark_dynamic` (torch 2.11, 2.13). Sizes of 0 and 1 always get graphs of their own.
    """
    import torch._dynamo

    for dimension in dimensions:
        if tensor.shape[dimension] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def _tensors_in(frame: Any) -> list[torch.Tensor]:
    """Return the tensors among the local variables of a frame, and inside of these, each once."""
    values = torch.utils._pytree.tree_leaves([*frame.f_locals.values()])
    return [*{id(value): value for value in values if isinstance(value, torch.Tensor)}.values()]


@contextlib.contextmanager
def sizes_unmarked(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within this context, dynamo takes the sizes of these tensors as fixed, even where someone marked them as dynamic.

    The marks are attributes of the tensors (torch 2.11, 2.13): `_dynamo_dynamic_indices` and others, and
    `_has_dynamo_dim_marking`.
    """
    marks = [(vars(tensor), name, vars(tensor)[name]) for tensor in tensors for name in _marks_of(tensor)]
    for attributes, name, _ in marks:
        del attributes[name]
    try:
        yield
    finally:
        for attributes, name, value in marks:
            attributes.setdefault(name, value)


def _marks_of(tensor: torch.Tensor) -> list[str]:
    names = [name for name in vars(tensor) if name.startswith(("_dynamo_", "_has_dynamo_"))]
    return [name for name in names if "dynamic" in name or "unbacked" in name or "marking" in name]


def planning_error(error: BaseException) -> FxrematError | None:
    """Return the error of fxremat inside of dynamo's `BackendCompilerFailed` (torch 2.11, 2.13), or None."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, FxrematError) else None


def backend_failure(error: BaseException) -> BaseException | None:
    """Return the error that differentiating or planning a captured graph raised; None for any other error.

    It is the one inside of dynamo's `BackendCompilerFailed`.
    """
    from torch._dynamo import exc

    return error.inner_exception if isinstance(error, exc.BackendCompilerFailed) else None


def needs_data(error: BaseException) -> bool:
    """Tell whether tracing failed because it needed a data-dependent number.

    `torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode` (torch 2.11, 2.13).
    """
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return isinstance(error, GuardOnDataDependentSymNode)


def leaves_to_python(error: BaseException) -> bool:
    """Tell whether dynamo, where a backend ends in this error, runs the function in Python and captures what it calls.

    `torch._dynamo.exc.exceptions_allowed_to_be_fallback` (torch 2.11, 2.13), of ops that read data.
    """
    from torch._dynamo.exc import exceptions_allowed_to_be_fallback

    return isinstance(error, exceptions_allowed_to_be_fallback)


def graph_break_place(error: BaseException) -> str | None:
    """Return `file:line in function: code` of the code that dynamo could not trace.

    None if the error is something else.

    `torch._dynamo.exc.Unsupported` and `UserError` have `real_stack`, the frames up to there, and dynamo gives it to
    the errors that `needs_data` knows (torch 2.11, 2.13). The last frame outside of torch is named.
    """
    from torch._dynamo import exc

    if needs_data(error):
        return _place(getattr(error, "real_stack", None) or [])
    if not isinstance(error, exc.TorchDynamoException):
        return None
    return _place(getattr(error, "real_stack", None) or []) or UNKNOWN_LINE


def _place(stack: Iterable[Any]) -> str | None:
    """Return the last frame of a stack outside of PyTorch and Python's modules, as `file:line in function: code`.

    If all frames are inside of them, return the last one. Frames of fxremat are skipped; None if there are no
    others.
    """
    torchs, ours, pythons = (os.path.dirname(path) + os.sep for path in (torch.__file__, __file__, os.__file__))
    frames = [frame for frame in stack if not frame.filename.startswith(ours)]

    def installed(name: str) -> bool:
        return name.startswith(torchs) or (name.startswith(pythons) and "-packages" not in name)

    outside = [frame for frame in frames if not installed(frame.filename)] or frames
    frame = outside[-1] if outside else None
    return f"{frame.filename}:{frame.lineno} in {function_resumed(frame.name)}: {frame.line}" if frame else None


def function_resumed(name: str) -> str:
    """Return the name of the user's function that runs, where dynamo resumes it behind a break of the graph.

    dynamo calls such functions `torch_dynamo_resume_in_forward_at_14` (torch 2.11, 2.13).

    >>> function_resumed("torch_dynamo_resume_in_forward_at_14"), function_resumed("forward")
    ('forward', 'forward')
    """
    return re.sub(r"^(?:torch_dynamo_resume_in_)+(.+?)(?:_at_\d+)+$", r"\1", name)


def allocations(call: Callable[[], T], *, on_host: bool) -> tuple[T, list[int]]:
    """Run a call; return its result and the bytes of each allocation, or negative, of each deallocation, in order.

    The allocator is that of the host or of CUDA; others are not recorded. A thread that a user's profiler records
    already must be left alone: see `unprofiled`.
    """
    record = AllocationRecord(on_host=on_host)
    try:
        result = call()
    finally:
        changes = record.stop()
    return result, changes


class AllocationRecord:
    """Records the allocations and deallocations of this thread from its construction on.

    `torch.autograd._enable_profiler_legacy` with `profile_memory` (torch 2.11, 2.13): it records only this thread,
    without Kineto, and a session costs some microseconds. In the backward it goes on recording, as autograd takes over
    the state of the thread; it can be stopped only outside of it.
    """

    threads: ClassVar[weakref.WeakKeyDictionary[threading.Thread, AllocationRecord]] = weakref.WeakKeyDictionary()
    """The threads that are recorded now, each with its record."""
    _loud: ClassVar[contextlib.ExitStack] = contextlib.ExitStack()  # closed: torch warns again

    def __init__(self, *, on_host: bool = True) -> None:
        from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

        SharedRecord.give_way()
        if not self.threads:
            self._loud.enter_context(_allocator_quiet())
        # (memory is the only thing to record)
        settings: Any = (False, True, False, False, False, _ExperimentalConfig())
        self._name = "cpu_memory_usage" if on_host else "cuda_memory_usage"
        self._autograd: Any = torch.autograd
        self._autograd._enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, *settings))
        self.threads[threading.current_thread()] = self

    def stop(self) -> list[int]:
        """Stop recording; return the bytes of each allocation and, negative, of each deallocation, in order.

        A record that this thread does not run any more is empty: it must not end another's.
        """
        if self.threads.get(threading.current_thread()) is not self:
            return []
        del self.threads[threading.current_thread()]
        threads = self._autograd._disable_profiler_legacy()
        if not self.threads:
            self._loud.close()
        events = (event for thread in threads for event in thread if event.kind() == "memory_alloc")
        return [size for event in events if (size := getattr(event, self._name)())]


@contextlib.contextmanager
def _allocator_quiet() -> Iterator[None]:
    """Within this context, torch's CPU allocator does not warn on stderr of blocks older than a record of allocations.

    The warning is one of C++ (`c10/core/CPUAllocator.cpp`), which no filter of Python reaches: C++ logs nothing below
    an error as long. A job of several processes keeps it, as communication logs in the same way.
    """
    level = None if torch.distributed.is_available() and torch.distributed.is_initialized() else _level_of_logs()
    if level is None:
        yield
        return
    errors, before = 2, level.value
    level.value = max(before, errors)
    try:
        yield
    finally:
        level.value = before


@functools.cache
def _level_of_logs() -> ctypes.c_int | None:
    """Return the least severity that torch's C++ code logs; None where torch was built with gflags.

    `FLAGS_caffe2_log_level` of `libc10` (torch 2.11, 2.13, 2.14, 2.15).
    """
    library = next(Path(torch.__file__).parent.glob("lib/*c10.*"), None)
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


class AllocationReader:
    """Reads the allocations and deallocations of this thread from its construction on, beside any number of others.

    What is allocated while another profiler records the thread, and until `resume`, is missed; see `SharedRecord`.
    """

    def __init__(self) -> None:
        self.waits = False  # True: the record may end for another profiler, or after a minute
        self.is_paused = False
        self._unread: list[int] = []
        self._has_missed = False
        self._record = SharedRecord.of_this_thread()
        self._record.add(self)

    def read(self) -> tuple[list[int], bool]:
        """Return what `AllocationRecord.stop` does, from the last time on, and whether something was missed.

        Within a backward, what it has allocated so far is returned later.
        """
        is_recorded = self._record.share()
        found = self._unread, self._has_missed or not (is_recorded or self.is_paused)
        self._unread, self._has_missed = [], False
        return found

    def resume(self) -> bool:
        """Record again, if that has ended and is possible; tell whether this thread is recorded."""
        return self._record.resume()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within this context, record nothing; for this reader, it is not missed."""
        before, self.is_paused = self.is_paused, True
        self._record.end()
        try:
            yield
        finally:
            self.is_paused = before
            self.resume()

    def end(self) -> None:
        """Read no more. Within a backward, and on another thread, the record goes on until it gives way."""
        self._record.remove(self)

    def take(self, changes: Sequence[int]) -> None:
        """Keep what was recorded until it is read."""
        self._unread += changes

    def miss(self) -> None:
        """Note that allocations from now on are not recorded."""
        self._has_missed |= not self.is_paused


class SharedRecord:
    """Records a thread's allocations for several readers, until another profiler starts on the thread.

    A thread has one profiler at a time, and a second one raises. So fxremat's own ask `is_profiled` before, and those
    of a user pass one of `STARTS` (torch 2.11, 2.13), which are replaced while a thread has readers: the record ends
    then, if all readers wait. Readers begin it again. It also ends if all have waited for a minute, since it grows with
    each op; Python's garbage collector gives the occasion.
    """

    STARTS: ClassVar[tuple[tuple[str, str], ...]] = (
        ("profiler", "_prepare_profiler"),
        ("profiler", "_enable_profiler"),
        ("profiler_legacy", "_enable_profiler_legacy"),
    )
    """The modules of `torch.autograd`, and functions there, that start profilers."""

    most_seconds: ClassVar[float] = 60.0
    _of_threads: ClassVar[weakref.WeakKeyDictionary[threading.Thread, SharedRecord]] = weakref.WeakKeyDictionary()
    _replaced: ClassVar[dict[tuple[str, str], Callable[..., Any]]] = {}
    _set_up_now: ClassVar[set[SharedRecord]] = set()  # those that have readers, or still run

    def __init__(self) -> None:
        self._thread = weakref.ref(threading.current_thread())
        self._record: AllocationRecord | None = None
        self._readers: list[AllocationReader] = []
        self._began = time.monotonic()  # when something was read last

    @classmethod
    def of_this_thread(cls) -> SharedRecord:
        """Return the record of this thread."""
        return cls._of_threads.setdefault(threading.current_thread(), cls())

    @classmethod
    def give_way(cls) -> None:
        """End the record of this thread, if there is one, unless a backward runs, or a reader does not wait.

        A range that begins while one profiler records, as around compiled code, must not end while another kind does:
        torch takes the state of the one for that of the other.
        """
        record = cls._of_threads.get(threading.current_thread())
        if record is not None and all(reader.waits for reader in record._readers):
            record.end()

    @classmethod
    @contextlib.contextmanager
    def paused(cls) -> Iterator[None]:
        """Within this context, do not record this thread; readers do not miss what is allocated, and freed, in it."""
        record = cls._of_threads.get(threading.current_thread())
        stopped = record is not None and record._stop()
        try:
            yield
        finally:
            if record is not None and stopped:
                record.resume()

    def add(self, reader: AllocationReader) -> None:
        """Record for a reader, too."""
        self.share()
        self._readers.append(reader)
        self._set_up()
        self.resume()

    def remove(self, reader: AllocationReader) -> None:
        """Record for a reader no more."""
        self.share()
        if reader in self._readers:
            self._readers.remove(reader)
        if not self._readers:
            self.end()

    def share(self) -> bool:
        """Give readers what was recorded so far, and go on; tell whether this thread is recorded."""
        if self._stop():
            self.resume()
        return self._record is not None

    def resume(self) -> bool:
        """Record, if there is a reader, none is paused, and there is no other profiler; tell whether one records now.
        """
        is_read = self._readers and not any(reader.is_paused for reader in self._readers)
        if self._record is None and is_read and self._may_change and not is_profiled():
            self._record, self._began = AllocationRecord(), time.monotonic()
        return self._record is not None

    def end(self) -> None:
        """End the record, unless a backward runs, in which it cannot end, or this is another thread."""
        if self._stop():
            for reader in tuple(self._readers):
                reader.miss()
        thread = self._thread()
        if not self._readers and (self._record is None or thread is None or not thread.is_alive()):
            self._tear_down()

    @property
    def _may_change(self) -> bool:
        return self._thread() is threading.current_thread() and backward_task() < 0

    def _stop(self) -> bool:
        """Stop recording, and give readers what was recorded; return False if there is nothing to stop, or no way."""
        if self._record is None or not self._may_change:
            return False
        record, self._record = self._record, None  # first, since what ends a record may run in a garbage collection
        changes = record.stop()
        for reader in tuple(self._readers):
            reader.take(changes)
        return True

    def _set_up(self) -> None:
        if self in self._set_up_now:
            return
        self._set_up_now.add(self)
        gc.callbacks.append(self._look_at_clock)
        atexit.register(self.give_way)  # torch warns of a profiler that runs at the end of the process
        for start in () if self._replaced else self.STARTS:
            module, name = _autograd_module(start[0]), start[1]
            self._replaced[start] = getattr(module, name)
            setattr(module, name, functools.partial(self._instead, start))

    def _tear_down(self) -> None:
        if self not in self._set_up_now:
            return
        self._set_up_now.remove(self)
        gc.callbacks.remove(self._look_at_clock)
        atexit.unregister(self.give_way)
        while self._replaced and not self._set_up_now:
            (module, name), function = self._replaced.popitem()
            setattr(_autograd_module(module), name, function)

    def _look_at_clock(self, phase: str, _: object) -> None:
        late = not self._readers or time.monotonic() - self._began > self.most_seconds
        if phase == "stop" and late and all(reader.waits for reader in self._readers):
            self.end()

    @classmethod
    def _instead(cls, start: tuple[str, str], *args: Any, **kwargs: Any) -> Any:
        replaced = cls._replaced.get(start)
        cls.give_way()
        return (replaced or getattr(_autograd_module(start[0]), start[1]))(*args, **kwargs)


def _autograd_module(name: str) -> Any:
    return importlib.import_module(f"torch.autograd.{name}")


class RecordedEvent(NamedTuple):
    """An event of a `MemoryRecording`: an op or a named range with the events inside of it, or a (de)allocation."""

    name: str  # of the op or range; "" for an allocation
    sequence: int  # by which autograd pairs an op with its node in the backward; -1: none
    start: int  # nanoseconds
    inside: tuple[RecordedEvent, ...] = ()
    device: torch.device | None = None  # of an allocation; None for an op
    size: int = 0  # bytes that are allocated, or negative, freed
    address: int = 0
    total: int = 0  # bytes that the allocator of an accelerator has given out after this


class MemoryRecording:
    """Records ops, and allocations with their addresses, of this thread and of the backwards that it runs.

    `torch.autograd._prepare_profiler`, `_enable_profiler` and `_disable_profiler` are what torch.profiler calls (torch
    2.11, 2.13), whose own classes make objects of Python of all events, too. The first recording of a process takes a
    second, as Kineto is set up. It reports each start and stop on stderr, unless KINETO_LOG_LEVEL says otherwise.
    """

    def __init__(self) -> None:
        from torch._C._profiler import ProfilerActivity, ProfilerConfig, ProfilerState, _ExperimentalConfig

        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        # (memory is the only thing to record besides ops)
        settings: Any = (False, True, False, False, False, _ExperimentalConfig())
        config, activities = ProfilerConfig(ProfilerState.KINETO, *settings), {ProfilerActivity.CPU}
        self._autograd: Any = torch.autograd
        self._autograd._prepare_profiler(config, activities)
        self._autograd._enable_profiler(config, activities)

    def stop(self) -> tuple[RecordedEvent, ...]:
        """Stop recording; return the events that are inside of no other one, in the order of time."""
        roots = self._autograd._disable_profiler().experimental_event_tree()
        return tuple(sorted(map(_recorded_event, roots), key=lambda event: event.start))


def _recorded_event(event: Any) -> RecordedEvent:
    """Return an event of the profiler as plain data.

    Of `_ProfilerEvent`, `extra_fields` of allocations have ptr, alloc_size, total_allocated and device, those of ops
    sequence_number (torch 2.11, 2.13).
    """
    kind, more = event.tag.name, event.extra_fields
    if kind == "Allocation":
        return RecordedEvent(
            name="",
            sequence=-1,
            start=event.start_time_ns,
            device=more.device,
            size=more.alloc_size,
            address=more.ptr,
            total=more.total_allocated or 0,
        )
    return RecordedEvent(
        name=event.name,
        sequence=more.sequence_number if kind == "TorchOp" else -1,
        start=event.start_time_ns,
        inside=tuple(map(_recorded_event, event.children)),
    )


def named_range(name: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context that profilers record as a range of this name.

    `torch._C._profiler._RecordFunctionFast` (torch 2.11, 2.13) is no op, unlike `torch.profiler.record_function`, so
    that no trace of ops has it.
    """
    from torch._C._profiler import _RecordFunctionFast

    made: contextlib.AbstractContextManager[Any] = _RecordFunctionFast(name)
    return made


def watch_modules(enter: Callable[[Any], str], leave: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Call `enter` and `leave` around each call of a module on this thread; return what stops that.

    `enter` gets the module, and returns a name that profilers record the call under; `leave` gets the module and what
    it returned, None after an exception. To be stopped while dynamo traces, which calls of modules are part of.

    In the place of `nn.Module.__call__` they see all calls, those of compiled modules too, which call no global hooks
    or warn of them. `torch._dynamo.decorators.skip` (torch 2.11, 2.13): where a graph is broken, dynamo would trace the
    function around `plain`, and skipping it must not skip the module's own code.
    """
    from torch._C._profiler import _RecordFunctionFast
    from torch._dynamo.decorators import skip

    kind: Any = torch.nn.Module
    plain, thread = kind.__call__, threading.get_ident()
    before, after = (outside_graphs(call, "fxremat measures the memory of steps") for call in (enter, leave))

    def watched(module: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return plain(module, *args, **kwargs)
        name, result = before(module), None
        try:
            with _RecordFunctionFast(name):
                result = plain(module, *args, **kwargs)
            return result
        finally:
            after(module, result)

    def stop() -> None:
        if kind.__call__ is made:
            kind.__call__ = plain

    kind.__call__ = made = skip(watched)
    return stop


def watch_compilation(before: Callable[[Any], None], after: Callable[[Any], None]) -> Callable[[], None]:
    """Call `before` and `after` around each compilation by dynamo, that of backwards included; return what stops that.

    Registering functions that are registered already changes nothing. `torch._dynamo.reset()` forgets all of them.

    `torch._dynamo.callback.callback_handler` (torch 2.11, 2.13); what is called gets a `CallbackArgs`.
    """
    from torch._dynamo.callback import callback_handler as handler

    if before not in handler.start_callbacks:
        handler.register_start_callback(before)
    if after not in handler.end_callbacks:
        handler.register_end_callback(after)

    def stop() -> None:
        for callbacks, mine in ((handler.start_callbacks, before), (handler.end_callbacks, after)):
            if mine in callbacks:
                callbacks.remove(mine)

    return stop


def is_profiled() -> bool:
    """Tell whether a profiler records this thread that does not give way.

    `torch.autograd._profiler_enabled` (torch 2.11, 2.13).
    """
    SharedRecord.give_way()
    autograd: Any = torch.autograd
    return bool(autograd._profiler_enabled())


# (thread id, function called before a backward, function called after it)
_Watch = tuple[int, Callable[[], None], Callable[[], None]]
_watches: list[_Watch] = []
_in_backward: set[int] = set()  # ids of threads that are in a backward
_roots: dict[int, tuple[Any, ...]] = {}  # thread id -> what its watched backward differentiates
_kept: dict[int, bool] = {}  # thread id -> whether its latest watched backward kept its graph
_unwatched: list[Callable[..., Any]] = []  # the original `_engine_run_backward` while it is replaced


def watching_backward(before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
    """Call `before` and `after` around each backward of this thread, until the returned function is called.

    A backward nested in another one, which a hook may run, does not count.

    `torch.autograd._engine_run_backward` (torch 2.11, 2.13) is what `backward()` and `autograd.grad` call.
    """
    autograd: Any = torch.autograd
    watch = threading.get_ident(), before, after
    if not _watches:
        _unwatched[:] = [autograd._engine_run_backward]
        autograd._engine_run_backward = _watched()
    _watches.append(watch)

    def stop() -> None:
        if watch in _watches:
            _watches.remove(watch)
            if not _watches and autograd._engine_run_backward is _watched():
                autograd._engine_run_backward = _unwatched[0]

    return stop


@functools.cache
def _watched() -> Callable[..., Any]:
    """Return `_watched_backward`, in which dynamo traces nothing where a method that calls `backward()` is compiled."""
    return outside_graphs(_watched_backward, "fxremat measures the backward")


def _watched_backward(*args: Any, **kwargs: Any) -> Any:
    me = threading.get_ident()
    is_outermost = me not in _in_backward
    mine = [watch for watch in tuple(_watches) if watch[0] == me] if is_outermost else []
    if mine:
        _roots[me] = tuple(args[0])
    try:
        for _, before, _ in mine:
            before()
    finally:
        _roots.pop(me, None)
    if mine:  # the arguments are tensors, their gradients, and retain_graph, which is create_graph unless told
        _kept[me] = bool(args[2])
    _in_backward.add(me)
    try:
        return _unwatched[0](*args, **kwargs)
    finally:
        if is_outermost:
            _in_backward.remove(me)
        for _, _, after in reversed(mine):
            after()


def roots_of_backward() -> tuple[Any, ...]:
    """Return the autograd nodes at which this thread's backward begins.

    To be called by `before` of `watching_backward`.
    """
    edges = _roots.get(threading.get_ident(), ())  # tensors and `torch.autograd.graph.GradientEdge`
    nodes = (each.grad_fn if isinstance(each, torch.Tensor) else each.node for each in edges)
    return tuple(node for node in nodes if node is not None)


def accumulates_into(node: Any) -> torch.Tensor | None:
    """Return the leaf that a node of autograd's graph adds a gradient to; None for other nodes.

    `AccumulateGrad.variable` (torch 2.11, 2.13).
    """
    leaf = getattr(node, "variable", None)
    return leaf if isinstance(leaf, torch.Tensor) else None


def sequence_number(node: Any) -> int:
    """Return a node's place in the order in which autograd's graph was made; a backward runs higher ones first.

    `Node._sequence_nr` (torch 2.11, 2.13).
    """
    return int(node._sequence_nr())


def is_node_of(node: Any, package: str) -> bool:
    """Tell whether a node of autograd's graph is the backward of an `autograd.Function` that a package defines.

    The backward's class has the function as `_forward_cls` (torch 2.11, 2.13).
    """
    function = getattr(type(node), "_forward_cls", None)
    return function is not None and str(function.__module__).split(".")[0] == package


def kept_graph() -> bool:
    """Tell whether the latest backward of this thread that was watched kept its graph, which may then run again."""
    return _kept.get(threading.get_ident(), False)


def backward_task() -> int:
    """Return the number of the backward that this thread runs: each call of `backward` has its own; -1: none runs.

    `torch._C._current_graph_task_id` (torch 2.11, 2.13).
    """
    autograd: Any = torch._C
    return int(autograd._current_graph_task_id())


def after_backward(call: Callable[[], None]) -> None:
    """Call a function once the running backward is over.

    `torch.autograd.Variable._execution_engine.queue_callback` (torch 2.11, 2.13).
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def backward_keeps_graph() -> bool:
    """Tell whether the running backward may run again (retain_graph=True).

    `torch._C._autograd._get_current_graph_task_keep_graph` (torch 2.11, 2.13).
    """
    autograd: Any = torch._C._autograd
    return bool(autograd._get_current_graph_task_keep_graph())


@functools.cache
def allocates_in_expandable_segments() -> bool:
    """Tell whether torch's CUDA allocator has `expandable_segments:True`, as of the first call.

    `torch.cuda.memory._snapshot()["allocator_settings"]` (torch 2.11, 2.13) contains what environment variables and
    calls have set; it also lists all blocks, which takes milliseconds.
    """
    settings: Any = torch.cuda.memory._snapshot()["allocator_settings"]
    return bool(settings["expandable_segments"])


def allocate_in_expandable_segments() -> bool:
    """Turn `expandable_segments` on in this process, and tell whether the device supports it.

    `torch._C._accelerator_setAllocatorSettings` (torch 2.11, 2.13) may be called at any time: existing blocks stay
    where they are. A user's own memory pools are expandable too (torch 2.11, 2.13), so that allocating in a new one
    asks the driver.
    """
    set_to: Any = torch._C._accelerator_setAllocatorSettings
    set_to("expandable_segments:True")
    allocates_in_expandable_segments.cache_clear()
    try:
        with real_tensors(), torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            torch.empty(1, device="cuda")
    except RuntimeError:
        set_to("expandable_segments:False")
    return allocates_in_expandable_segments()


@contextlib.contextmanager
def not_compiling() -> Iterator[None]:
    """Make `torch.compiler.is_compiling()` False, as in a step, while real ops run inside of a compilation.

    Optimizers check it, and allocate differently. `torch.compiler._is_compiling_flag` (torch 2.11, 2.13).
    """
    compiler: Any = torch.compiler
    before, compiler._is_compiling_flag = compiler._is_compiling_flag, False
    try:
        yield
    finally:
        compiler._is_compiling_flag = before


def is_profiled_by_others() -> bool:
    """Tell whether a profiler that fxremat has not started records this thread."""
    autograd: Any = torch.autograd
    return bool(autograd._profiler_enabled()) and threading.current_thread() not in AllocationRecord.threads


def unrecorded(work: Callable[[], T]) -> T:
    """Run `work`, which keeps nothing that it allocates, so that neither fxremat nor a profiler records it."""
    with SharedRecord.paused():
        return unprofiled(work)


def unprofiled(work: Callable[[], T]) -> T:
    """Run `work`, on another thread if a profiler of the user records this one, so that `work` is not recorded."""
    if not is_profiled():
        return work()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def on_the_same_stream() -> T:
        with torch.cuda.stream(stream):
            return work()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(on_the_same_stream).result()


def has_data(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is neither a `FakeTensor` (torch 2.11, 2.13) nor on the meta device."""
    from torch._subclasses import FakeTensor

    return not (isinstance(tensor, FakeTensor) or tensor.is_meta)


def fake_mode() -> contextlib.AbstractContextManager[Any]:
    """Return a fake-tensor mode in which tensors have no memory, and which also accepts real tensors.

    `torch._subclasses.FakeTensorMode` with `allow_non_fake_inputs` (torch 2.11, 2.13). Dynamo accepts such tensors as
    inputs and parameters, and makes fake ones of its own of them.
    """
    from torch._subclasses import FakeTensorMode

    mode: contextlib.AbstractContextManager[Any] = FakeTensorMode(allow_non_fake_inputs=True)
    return mode


def as_without_fakes(error: Exception) -> Exception | None:
    """Return the error that real tensors would raise where fake tensors raised `error`.

    None if real tensors may raise none, since the error concerns data-dependent values or fake tensors alone.

    The classes of `torch._subclasses.fake_tensor` (torch 2.11, 2.13, 2.14, 2.15) are not a user's; an error
    about devices is a plain RuntimeError in torch 2.11, `Unhandled FakeTensor Device Propagation for ..., found
    two different devices cuda:0, cpu`.
    """
    if two := re.search(r"found (?:at least )?two (?:different )?devices,? (\S+?)(?:,| and) ([\w:]+)", str(error)):
        what = f"Expected all tensors to be on the same device, but found at least two devices, {two[1]} and {two[2]}!"
        return RuntimeError(what).with_traceback(error.__traceback__)
    return None if type(error).__module__.startswith("torch.") or needs_data(error) else error


def tensor_places(model: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Yield (dictionary, name, tensor) of each parameter, buffer and other tensor attribute of a model.

    Writing to the dictionary (`Module._parameters`, `Module._buffers`, `vars(module)`; torch 2.11, 2.13), as
    `torch.func.functional_call` does, replaces a parameter by any tensor, which setting an attribute would
    refuse.
    """
    for module in model.modules():
        for holder in (module._parameters, module._buffers, vars(module)):
            for name, value in holder.items():
                if isinstance(value, torch.Tensor):
                    yield holder, name, value


def children_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return the dictionary of a module's children, which may be modified: `Module._modules` (torch 2.11 to 2.15)."""
    return module._modules


def forward_hooks_of(module: torch.nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return a module's hooks before and after forward: `_forward_pre_hooks`, `_forward_hooks` (torch 2.11 to 2.15)."""
    return module._forward_pre_hooks, module._forward_hooks


def written_inputs() -> list[int]:
    """Return the indices of the inputs that a graph overwrites, while AOTAutograd has it compiled.

    `ViewAndMutationMeta.mutated_inp_runtime_indices` of the tracing context (torch 2.11 to 2.15).
    """
    context = torch._guards.TracingContext.try_get()
    known = context.fw_metadata if context is not None else None
    return list(known.mutated_inp_runtime_indices) if known else []


def forget_graphs() -> None:
    """Let dynamo forget the graphs of all functions: `torch._dynamo.reset` (torch 2.11 to 2.15)."""
    import torch._dynamo

    torch._dynamo.reset()


def global_hooks() -> tuple[tuple[int, ...], ...]:
    """Return the ids of the hooks of all modules, by kind; no hook gets the id of an earlier one.

    `torch.nn.modules.module._global_forward_hooks` and its kin (torch 2.11 to 2.15).
    """
    kinds = ("forward_pre", "forward", "backward_pre", "backward")
    return tuple(tuple(getattr(torch.nn.modules.module, f"_global_{kind}_hooks")) for kind in kinds)


def backward_hooks_of(module: torch.nn.Module) -> list[Any]:
    """Return a module's full backward hooks: those in `_backward_pre_hooks` and `_backward_hooks` (torch 2.11 to 2.15).
    """
    return [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]


def is_real(value: object) -> bool:
    """Tell whether a tensor has data: it is neither fake, nor on the meta device, nor a shell without memory."""
    if not isinstance(value, torch.Tensor) or not has_data(value):
        return False
    return value.layout is not torch.strided or value.numel() == 0 or value.untyped_storage().nbytes() > 0


def depends_on_data(symbol: object) -> bool:
    """Tell whether a symbolic number depends on data: on a data-dependent size or on a Python float.

    `torch.fx.experimental.symbolic_shapes.free_unbacked_symbols` (torch 2.11, 2.13).
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(symbol)) or depends_on_float(symbol)


def unknown_like(symbol: Any) -> Any:
    """Return a symbolic number of the same kind about which nothing is known, as if it was just read from data.

    `ShapeEnv.create_unbacked_symint` and its kin; symbols that no traced op makes are to be ignored by tracing
    (`ignore_fresh_unbacked_symbols`; torch 2.11, 2.13).
    """
    environment = symbol.node.shape_env
    kinds = {torch.SymInt: "symint", torch.SymFloat: "symfloat", torch.SymBool: "symbool"}
    with environment.ignore_fresh_unbacked_symbols():
        return getattr(environment, f"create_unbacked_{kinds[type(symbol)]}")()


def depends_on_float(symbol: object) -> bool:
    """Tell whether a symbolic number is a Python float, or is computed from one.

    Dynamo turns a float that has changed into an input, a tensor whose `.item()` is a symbol of the kind `SymT.FLOAT`
    (`torch.utils._sympy.symbol`; torch 2.11, 2.13, 2.14, 2.15).
    """
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    node = getattr(symbol, "node", None)
    free = getattr(getattr(node, "expr", None), "free_symbols", ())
    return any(symbol_is_type(one, SymT.FLOAT) for one in free)


def is_float(placeholder: fx.Node) -> bool:
    """Tell whether an input of dynamo's graph stands for a Python number, which dynamo wraps in a tensor at each call.

    The `source` of its `meta["grapharg"]` is a `FloatTensorSource` (torch 2.11, 2.13, 2.14, 2.15), or its
    `pass_arg_as_tensor` is set, as for a number among the model's attributes and an array of NumPy (torch 2.11, 2.13).
    """
    given, shown = placeholder.meta.get("grapharg"), placeholder.meta.get("example_value")
    wrapped = getattr(given, "pass_arg_as_tensor", False) and isinstance(shown, torch.Tensor) and shown.dim() == 0
    return wrapped or type(getattr(given, "source", None)).__name__ == "FloatTensorSource"


def forget_history(graph: fx.Graph) -> None:
    """Release the autograd history of the example values of dynamo's graph, with the tensors it keeps alive.

    `meta["example_value"]` is a fake tensor with a history, whose nodes keep real tensors of the numbers in the code
    (torch 2.13, 2.14, 2.15). Values inside of a transform of torch.func cannot be detached outside of it, and stay.
    """
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or is_transformed(value):
            continue
        if value.requires_grad and not is_leaf(value):
            node.meta["example_value"] = value.detach().requires_grad_()


def history_of(tensor: torch.Tensor) -> Any:
    """Return the node of autograd that computed a tensor; None for a leaf, and for a view that is not valid any more.

    Where several views were made at once, as by `chunk`, and their base was overwritten later, autograd raises.
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def is_leaf(tensor: torch.Tensor) -> bool:
    """Tell whether autograd did not compute a tensor; False for a view that is not valid any more: see `history_of`."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def input_place(primal: fx.Node) -> int | None:
    """Return the index of a primal (a forward input of AOTAutograd's graph) among the inputs of dynamo's graph.

    None for an input that AOTAutograd added. `meta["desc"]`, a `PlainAOTInput` of
    `torch._functorch._aot_autograd.descriptors` (torch 2.11, 2.13), has the index as `idx`.
    """
    place = getattr(primal.meta.get("desc"), "idx", None)
    return place if isinstance(place, int) else None


def is_symbolic(tensor: torch.Tensor) -> bool:
    """Tell whether a fake tensor was made with symbolic sizes, even if all of them are now ints.

    `Tensor._has_symbolic_sizes_strides` (torch 2.11, 2.13): `nbytes` of such a tensor is not available.
    """
    return bool(tensor._has_symbolic_sizes_strides)


def expression_of(symbol: Any) -> Any:
    """Return the sympy expression of a backed SymInt, SymFloat or SymBool: `SymNode.expr` (torch 2.11, 2.13)."""
    return symbol.node.expr


def guards_of(symbol: Any) -> list[Any]:
    """Return the assumptions that tracing made about sizes, as sympy expressions: `ShapeEnv.guards` (torch 2.11, 2.13).
    """
    return [guard.expr for guard in symbol.node.shape_env.guards]


def marked_most(given: object) -> dict[int, int]:
    """Map the dimensions of a tensor to the largest sizes that the user announced by `mark_dynamic(..., max=...)`.

    They are in the tensor's `_dynamo_dynamic_range` (torch 2.11, 2.13). The range of a symbol would not do: it is also
    what the model checks, such as its number of positions.
    """
    ranges = getattr(given, "_dynamo_dynamic_range", ())
    return {each.dim: int(each.max) for each in ranges if each.max is not None}


def size_now(symbol: Any) -> int:
    """Return the value that a SymInt had in the captured call, `SymNode.hint` (torch 2.11, 2.13); an int as it is."""
    return symbol if isinstance(symbol, int) else int(symbol.node.hint)


def suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """Return the memory format of an op's result for this operand: `Tensor::suggest_memory_format` (torch 2.11, 2.13).
    """
    from torch._prims_common import suggest_memory_format

    return suggest_memory_format(tensor)


def cudnn_reserve_bytes(x: torch.Tensor) -> int:
    """Return the bytes that cuDNN's BatchNorm of this input saves for the backward, at the sizes of the captured call.

    `torch._C._get_cudnn_batch_norm_reserve_space_size` asks cuDNN, and takes fake tensors (torch 2.11, 2.13); 0 without
    cuDNN, as on a CPU.
    """
    ask: Any = getattr(torch._C, "_get_cudnn_batch_norm_reserve_space_size", None)
    if ask is None or not x.is_cuda:
        return 0
    sizes, strides = (list(map(size_now, numbers)) for numbers in (x.shape, x.stride()))
    return int(ask(x.new_empty_strided(sizes, strides) if is_symbolic(x) else x, True))


def fake_like() -> Callable[[torch.Tensor, torch.device], torch.Tensor]:
    """Return a function (meta tensor, device) -> fake tensor that shares the meta tensor's storage.

    `torch._subclasses.FakeTensor(mode, meta tensor, device)` (torch 2.11, 2.13); it takes a tenth of the time of making
    them inside of the mode.
    """
    from torch._subclasses import FakeTensor, FakeTensorMode

    mode: Any = FakeTensorMode()
    return lambda made, device: FakeTensor(mode, made, device)


def graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Return a module with this graph and the attributes of `root`, whose code is generated when first needed.

    `torch.fx._lazy_graph_module._LazyGraphModule` (torch 2.11, 2.13).
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


def write_forward(module: torch.nn.Module) -> None:
    """Generate the `forward` of a graph module whose code is generated when first needed, so that dynamo can trace it.

    `torch.fx._lazy_graph_module._LazyGraphModule.force_recompile` (torch 2.11, 2.13); it ignores other modules.
    """
    if isinstance(module, fx.GraphModule):
        from torch.fx._lazy_graph_module import _LazyGraphModule

        _LazyGraphModule.force_recompile(module)


def input_and_dimension(placeholder: fx.Node, names: Sequence[str] = ()) -> tuple[str, int | None]:
    """Return the model input and the dimension whose size is an input of dynamo's graph.

    The dimension is None for an input that is a number itself. Inputs that are passed by position have one of `names`.
    `meta["grapharg"].source` is such as `L['args'][0].size()[1]`; `name` is a method in torch 2.11, a property in torch
    2.13.
    """
    import re

    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    name: Any = getattr(source, "name", "")
    path = without_dict(str(name() if callable(name) else name))
    size = re.search(r"\.size\(\)\[(\d+)\]$", path)
    path = path[: size.start()] if size else path
    path = re.sub(r"^L\['kwargs'\]\['([^']*)'\]", r"\1", path)
    if (place := re.match(r"^L\['args'\]\[(\d+)\]", path)) is not None:
        number = int(place[1])
        path = (names[number] if number < len(names) else f"input {number + 1}") + path[place.end() :]
    path = re.sub(r"^L\['([^']*)'\]", r"\1", path)
    return path or placeholder.name, int(size[1]) if size else None


def reads_data(node: fx.Node) -> bool:
    """Tell whether a node of dynamo's graph reads `tensor.data`: `torch._C._autograd._get_data_attr` (2.11, 2.13)."""
    return node.target is torch._C._autograd._get_data_attr  # type: ignore[attr-defined]


def assigns_data(node: fx.Node) -> bool:
    """Tell whether a node of dynamo's graph is `tensor.data = value`, with these two as its arguments.

    `torch.Tensor.set_` (torch 2.11, 2.13); `aten.shallow_copy_data_` (torch 2.14, 2.15).
    """
    if node.op != "call_function" or len(node.args) != 2:
        return False
    return node.target is torch.Tensor.set_ or "aten.shallow_copy_data_" in str(node.target)


def lowers_a_version(node: fx.Node) -> bool:
    """Tell whether a node of dynamo's graph only takes back the change of version that assigning to `.data` made.

    A function of this name in `torch/_dynamo/variables/builtin.py` (torch 2.11, 2.13).
    """
    return getattr(node.target, "__name__", "") == "_lower_version_count_by_1"


def storage_of(tensor: torch.Tensor) -> int:
    """Return an id of a tensor's storage, real or fake: `UntypedStorage._cdata` (torch 2.11, 2.13).

    A sparse tensor is assumed to share its indices and values with no other tensor.
    """
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else -id(tensor)


def is_allocated(tensor: torch.Tensor) -> bool:
    """Tell whether PyTorch's allocator owns a tensor's memory; that of a NumPy array, for example, it does not own.

    `UntypedStorage.resizable` (torch 2.11, 2.13): memory that others own cannot grow.
    """
    return tensor.layout is torch.strided and tensor.untyped_storage().resizable()


def storage_watch(tensor: torch.Tensor) -> Callable[[], bool]:
    """Return a function that tells whether a tensor's storage is still alive, without keeping it alive.

    `torch.multiprocessing.reductions.StorageWeakRef` (torch 2.11, 2.13).
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    reference: Any = StorageWeakRef(tensor.untyped_storage())
    return lambda: not reference.expired()


def holders_of(tensor: torch.Tensor) -> int:
    """Return how many tensors lie in a tensor's storage, this one and views of it included.

    `torch._C._storage_Use_Count` (read in torch 2.11, tried in 2.13 and 2.14) counts the storage's Python object, too.
    """
    count: Any = torch._C
    return int(count._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1


def shell_of(kind: type[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the subclass `kind` without memory, with the shape, dtype and device of `like`.

    `torch.Tensor._make_wrapper_subclass` (torch 2.11, 2.13) is what torch's own notes on `__torch_dispatch__` use.
    """
    shell: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        kind, like.shape, dtype=like.dtype, device=like.device
    )
    return shell


def without_memory(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device whose storage has no bytes, with the shape, strides and dtype of `like`.

    `UntypedStorage.resize_` (torch 2.11, 2.13) is what torch's own sharded training frees parameters with.
    """
    empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    empty.untyped_storage().resize_(0)
    return empty


def is_tensor_of_subclass(value: object) -> bool:
    """Tell whether a value is a tensor of a subclass that has methods of its own, and no kernels, nor inner tensors.

    Its `__torch_dispatch__` is that of `torch.Tensor` (torch 2.11, 2.13, 2.14, 2.15). Kernels take it for one that
    another class's `__torch_dispatch__` should run where a mode of torch's own is active.
    """
    if not isinstance(value, torch.Tensor) or type(value) in (torch.Tensor, torch.nn.Parameter):
        return False
    same = type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return same and not isinstance(value, torch.nn.Parameter)


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of in-place writes to a tensor: `Tensor._version` (torch 2.11, 2.13), which autograd checks."""
    return int(tensor._version)


def versions_of(values: Sequence[Any]) -> list[int | None]:
    """Return `version_of` each value; None for those that are no tensors. Called for all inputs in each step."""
    kind = torch.Tensor
    return [value._version if isinstance(value, kind) else None for value in values]


@functools.cache
def cpu_name() -> str:
    """Return the processor's name if /proc/cpuinfo has one, else its architecture."""
    import platform

    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def nnpack_enabled() -> bool:
    """Tell whether convolutions may use NNPACK: `torch._C._get_nnpack_enabled` (torch 2.11, 2.13), not public."""
    return bool(torch._C._get_nnpack_enabled())


def among_ranks() -> bool:
    """Tell whether this process is one of several in a job."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_data_parallel() -> bool:
    """Tell whether the forward of a DistributedDataParallel is running, whose backward will reduce gradients.

    `DistributedDataParallel._active_ddp_module` (torch 2.11, 2.13).
    """
    if "torch.nn.parallel.distributed" not in sys.modules:
        return False
    return getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None) is not None


def store_of_job() -> Any:
    """Return the key-value store of the default process group; None if there is no process group.

    `torch.distributed.distributed_c10d._get_default_store` (torch 2.11, 2.13).
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def own_connection(store: Any) -> Any:
    """Return a second connection to a TCPStore, which other threads of this process do not block.

    None for other stores.

    `Store.clone` is not documented (torch 2.13). Without it all users of the store share one connection and its lock.
    """
    import torch.distributed

    stores: Any = torch.distributed
    inner = store
    while isinstance(inner, stores.PrefixStore):
        inner = inner.underlying_store
    return store.clone() if isinstance(inner, stores.TCPStore) and hasattr(store, "clone") else None


def is_effect_token(placeholder: fx.Node) -> bool:
    """Tell whether an input of a joint graph is an effect token, which orders ops that have side effects.

    A token has no gradient.

    AOTAutograd puts them before the caller's inputs, and marks them in `meta["desc"]`, a `ForwardTokenAOTInput` of
    `torch._functorch._aot_autograd.descriptors` (torch 2.11, 2.13).
    """
    return type(placeholder.meta.get("desc")).__name__ == "ForwardTokenAOTInput"


@contextlib.contextmanager
def flex_attention_with_gradients() -> Iterator[None]:
    """Within this context, FlexAttention can be captured with its backward on a CPU, which has no kernel for that.

    `flex_attention` asks its module's `_validate_device` whether the device has a backward (torch 2.11, 2.13).
    """
    from torch.nn.attention import flex_attention as module

    validate = module._validate_device
    module._validate_device = lambda *_: None
    try:
        yield
    finally:
        module._validate_device = validate


def is_region(node: fx.Node) -> bool:
    """Tell whether a node calls a region that is compiled once (`torch.compiler.nested_compile_region`).

    `invoke_subgraph` takes the region's graph, its name, and its inputs; its results are a tuple (torch 2.11, 2.13).
    """
    return node.op == "call_function" and node.target is torch.ops.higher_order.invoke_subgraph


def is_step_of_region(joint: fx.GraphModule, joint_inputs: object) -> bool:
    """Tell whether a partition function is called for a region that is compiled once, and not for a step.

    `run_joint_graph_passes_on_hops` of AOTAutograd passes an empty list of inputs then, and a graph whose inputs it has
    counted from `primals_0`; those of a step are counted from 1 (torch 2.11, 2.13).
    """
    return joint_inputs == [] and any(node.name == "primals_0" for node in joint.graph.find_nodes(op="placeholder"))


def parameter_name(placeholder: fx.Node) -> str | None:
    """Return the qualified name of the parameter that an input of dynamo's graph stands for; None for other inputs."""
    parts = _path_in_model(placeholder)
    return ".".join(part for _, part in parts) if parts and parts[-1][0] == "parameters" else None


def is_state(placeholder: fx.Node) -> bool:
    """Tell whether an input of dynamo's graph stands for a parameter or buffer of the model."""
    parts = _path_in_model(placeholder)
    return bool(parts) and parts[-1][0] != "modules"


def without_dict(path: str) -> str:
    """Return dynamo's path to a part of a model in its short form, without `__dict__` (torch 2.11, 2.13).

    >>> without_dict("L['self'].__dict__['_modules']['base']._parameters['weight']")
    "L['self']._modules['base']._parameters['weight']"
    """
    return re.sub(r"""\.__dict__\[['"](_modules|_parameters|_buffers)['"]\]""", r".\1", path)


def _path_in_model(placeholder: fx.Node) -> list[tuple[str, str]]:
    """Return (kind, name) of each module, and of the parameter or buffer, on the path to the object of a graph input.

    `meta["grapharg"].source` is the path by which dynamo found it, as `L['self']._modules['0']._parameters['weight']`;
    its `name` is a method in torch 2.11 and a property in torch 2.13. Names are written as `repr` writes them.
    """
    from ast import literal_eval

    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    name: Any = getattr(source, "name", "")
    path = without_dict(str(name() if callable(name) else name))
    text = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
    found = re.findall(rf"\._(modules|parameters|buffers)\[({text})\]", path)
    return [(kind, literal_eval(quoted)) for kind, quoted in found]


def call_instead(module: torch.nn.Module, function: Callable[..., Any]) -> Callable[[], object]:
    """Let a call of a module call a function instead of its hooks and its forward; return what undoes that.

    `Module._compiled_call_impl` (torch 2.11, 2.13), which `Module.compile()` sets. Copies and pickles do not have it.

    Raises:
        FxrematError: `Module.compile()` was called on it.
    """
    if module.__dict__.get("_compiled_call_impl") is not None:
        raise FxrematError(f"{type(module).__name__}.compile() was called already; fxremat compiles the plain model")
    module.__dict__["_compiled_call_impl"] = function
    return lambda: module.__dict__.pop("_compiled_call_impl", None)


def first_after_step(optimizer: torch.optim.Optimizer, hook: Callable[..., Any]) -> Any:
    """Register a hook that runs after `optimizer.step()` and before all its other hooks; return its handle.

    `Optimizer._optimizer_step_post_hooks` (torch 2.11, 2.13).
    """
    handle = optimizer.register_step_post_hook(hook)
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(handle.id, last=False)
    return handle


def scaling_of(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor | None]:
    """Return what a `GradScaler` tells a fused optimizer, by attribute: the scale, and whether gradients are infinite.

    `GradScaler.step` sets both attributes for the optimizer's step, which then divides gradients by the scale.
    """
    return {name: getattr(optimizer, name, None) for name in ("grad_scale", "found_inf")}


def take_signature(graph: fx.Graph, like: fx.Graph) -> None:
    """Give a graph the calling convention of another one, with nested inputs and results.

    This copies `Graph._codegen` (torch 2.11, 2.13).
    """
    graph.set_codegen(like._codegen)


def copied(graph: fx.Graph) -> fx.Graph:
    """Copy a graph with the `meta` of all nodes; `graph_copy` alone (torch 2.11, 2.13) drops that of the output node.
    """
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {})).meta = dict(graph.output_node().meta)
    return copy


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions of a tensor in the order of memory, outermost first, as Inductor orders them.

    `torch._prims_common.compute_elementwise_output_logical_to_physical_perm` (torch 2.11, 2.13), called with the
    present sizes of the tensor, so that no symbolic size is compared.
    """
    from torch._prims_common import compute_elementwise_output_logical_to_physical_perm

    sizes, strides = ([size_now(number) for number in numbers] for numbers in (tensor.shape, tensor.stride()))
    with real_tensors():
        plain = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device="meta")
        order, _ = compute_elementwise_output_logical_to_physical_perm(plain)
    return [int(dimension) for dimension in order]


@dataclass(frozen=True)
class TritonLaunch:
    """A user's Triton kernel with its constants, as torch keeps them in the tables of this process.

    `torch._higher_order_ops.triton_kernel_wrap` has the tables and the op that launches (torch 2.11 to 2.15).
    """

    kernel_number: int
    constants_number: int
    descriptors: Mapping[str, Any]  # of the tensor memory accelerator, by the name of an argument

    @property
    def kernel(self) -> Any:
        """The kernel, as it is after `triton.jit` and `triton.autotune`."""
        return _triton_wrapper().kernel_side_table.get_kernel(self.kernel_number)

    @property
    def constants(self) -> Mapping[str, Any]:
        """The arguments that are no tensors and no numbers, by name."""
        return cast(Mapping[str, Any], _triton_wrapper().kernel_side_table.get_constant_args(self.constants_number))

    def run(self, grid: Any, arguments: Mapping[str, Any]) -> None:
        """Launch the kernel, which writes to some of the arguments; of fake tensors nothing is launched."""
        _triton_wrapper().triton_kernel_wrapper_mutation(
            kernel_idx=self.kernel_number,
            constant_args_idx=self.constants_number,
            grid=grid,
            tma_descriptor_metadata=self.descriptors,
            kwargs=arguments,
        )


def captured_triton_launches(graph: fx.Graph) -> list[tuple[fx.Node, TritonLaunch]]:
    """Return the nodes that launch users' Triton kernels, and what they launch.

    Such a node has the keyword arguments kernel_idx, constant_args_idx, grid, tma_descriptor_metadata, kwargs and
    tensors_to_clone, and returns a dict with copies of the last ones (torch 2.11 to 2.15).
    """
    name = "triton_kernel_wrapper_functional"
    nodes = [node for node in graph.nodes if getattr(node.target, "_name", "") == name]
    return [
        (
            node,
            TritonLaunch(
                node.kwargs["kernel_idx"],
                node.kwargs["constant_args_idx"],
                node.kwargs["tma_descriptor_metadata"],
            ),
        )
        for node in nodes
    ]


def launches_in_place(node: fx.Node) -> bool:
    """Tell whether a node launches a user's Triton kernel that overwrites its arguments (torch 2.11 to 2.15)."""
    return getattr(node.target, "_name", "") == "triton_kernel_wrapper_mutation"


def clone_with_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides, gaps included; `clone` drops them (torch 2.11 to 2.15)."""
    from torch._prims_common import clone_preserve_strides

    return cast(torch.Tensor, clone_preserve_strides(tensor))


def _triton_wrapper() -> Any:
    from torch._higher_order_ops import triton_kernel_wrap

    return triton_kernel_wrap


def autocast_ops(key: str) -> dict[str, Any]:
    """Return the ops for which autocast has a kernel, by name without "aten::"; `key` is AutocastCPU or AutocastCUDA.

    Every build of torch registers those of CUDA too (`torch._C._dispatch_get_registrations_for_dispatch_key`; torch
    2.11 to 2.15).
    """
    found = {}
    for name in torch._C._dispatch_get_registrations_for_dispatch_key(key):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if op is not None:
            found[name.removeprefix("aten::")] = op
    return found


@contextlib.contextmanager
def new_kernels(kernels: Mapping[Any, Callable[..., Any]], key: str) -> Iterator[None]:
    """Register kernels of ops (`OpOverload`) for a dispatch key for which they have none.

    A key for which an op has no kernel is left out of its dispatch, so that `composite_kernels` would not be asked.
    `Library._destroy` takes the kernels back, and `_dispatch_cache` caches lookups (torch 2.11 to 2.15).
    """
    library = torch.library.Library("aten", "IMPL", key)
    try:
        for op, kernel in kernels.items():
            library.impl(op, kernel)
            op._dispatch_cache.clear()
        yield
    finally:
        library._destroy()
        for op in kernels:
            op._dispatch_cache.clear()


@contextlib.contextmanager
def without_autocast_key() -> Iterator[None]:
    """Within this context, ops on a CPU skip autocast, as its own kernels let them (torch 2.11 to 2.15)."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        yield
