"""Wraps private functions of PyTorch that compile a part of a graph with Inductor, each behind one function.

Each docstring names the versions of torch that it was checked with. Nothing here is imported before a region is
compiled.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import shlex
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxremat.errors import FxrematError
from fxremat.torch_private import copied, real_tensors, storage_of, torch_release

CUDA_GRAPHS = "triton.cudagraphs"
ALWAYS = {
    CUDA_GRAPHS: False,
    # it bundles compilation results of one graph at a time, and here threads compile several
    "bundle_triton_into_fx_graph_cache": False,
}


def with_strides(graph: fx.Graph, node: fx.Node, strides: Sequence[Any]) -> fx.Node:
    """Insert a node by which Inductor lays out a tensor in the order of given strides; return it.

    `torch.ops.prims.inductor_force_stride_order` (torch 2.11, 2.13): nothing is copied where the tensor lies so.
    """
    import torch._inductor.inductor_prims  # defines the op

    return graph.call_function(torch.ops.prims.inductor_force_stride_order.default, (node, list(strides)))


def compile_region(
    module: fx.GraphModule,
    given: Sequence[torch.Tensor],
    donated: Collection[int],
    settings: Mapping[str, Any],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile an fx graph of functional aten ops with Inductor.

    Return a function that takes a list of inputs and empties the list.

    It makes the same calls as `torch.compile` for a graph that AOTAutograd has differentiated (torch 2.11, 2.13): ops
    are decomposed by `select_decomp_table()`, `joint_graph_passes` folds constants and turns scatters onto constants
    into pointwise code, `compile_fx_inner` makes kernels. `user_visible_output_idxs` fixes the strides of what is
    returned; `bw_donated_idxs` of the tracing context, which is read with `is_backward`, names inputs that kernels may
    overwrite. Those passes drop ops without effect, such as adding zeros, and an output may then be an input, or
    another output: it is copied. So is a product that they have padded, whose rows are then longer than its readers
    expect. The key of the cache of compiled graphs contains neither donation nor the number of threads that kernels
    are made for; it contains the names of the inputs, which are chosen to include both.

    Args:
        given: tensors, which may be fake, with the shapes and strides of the inputs.
        donated: indices of inputs that may be overwritten.
        settings: patches of `torch._inductor.config`.
        decompositions: functions that compute fxremat's own ops from ops of aten.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    link_in_any_folder()
    with _my_turn(), real_tensors(), torch.no_grad(), inductor_config.patch({**settings, **ALWAYS}):
        graph, fakes, mode, strides = _decomposed(module, given, decompositions)
        _copy_outputs(graph, strides)
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        for place, node in enumerate(placeholders):
            kind = "donated" if place in donated else "given"
            node.target = node.name = f"{kind}_{place}_of_{torch.get_num_threads()}_threads"
        graph.recompile()
        output: Any = graph.graph.output_node()
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
        context: Any = torch._guards.TracingContext(mode)
        context.fw_metadata = types.SimpleNamespace(bw_donated_idxs=sorted(donated)) if donated else None
        with V.set_fake_mode(mode), torch._guards.tracing(context):
            compiled: Any = compile_fx_inner(
                graph, fakes, static_input_idxs=(), is_backward=bool(donated), layout_opt=False
            )
    return lambda arguments: compiled(arguments)


def configuration(settings: Mapping[str, Any]) -> str:
    """Return a hash of `torch._inductor.config` with these settings: equal configurations have equal hashes.

    `save_config_portable` (torch 2.11, 2.13).
    """
    import torch._inductor.config as inductor_config

    with inductor_config.patch(dict(settings)):
        known = inductor_config.save_config_portable()
    return hashlib.sha256(repr(sorted(known.items(), key=lambda item: item[0])).encode()).hexdigest()[:16]


_turn = threading.Lock()  # held by the thread that runs Inductor's lowering, which is not thread-safe
_mine = threading.local()  # `_mine.lowers` is True in the thread that holds `_turn`


@contextlib.contextmanager
def _my_turn() -> Iterator[None]:
    """Let only one thread at a time run Inductor in this context; while it waits for compiler processes, another may.
    """
    _let_others_go_on_while_waiting()
    with _turn:
        _mine.lowers = True
        try:
            yield
        finally:
            _mine.lowers = False


@functools.cache
def _let_others_go_on_while_waiting() -> None:
    """Release the lock `_turn` while Inductor waits for its compiler processes.

    This wraps `torch._inductor.async_compile.AsyncCompile._wait_futures` (torch 2.11, 2.13). Threads that
    compile something else call it as usual.
    """
    from torch._inductor.async_compile import AsyncCompile

    waiting: Any = AsyncCompile._wait_futures

    def let_others_go_on(self: Any, scope: dict[str, Any]) -> None:
        if not getattr(_mine, "lowers", False):
            waiting(self, scope)
            return
        _turn.release()
        try:
            waiting(self, scope)
        finally:
            _turn.acquire()

    AsyncCompile._wait_futures = let_others_go_on  # type: ignore[method-assign]


@contextlib.contextmanager
def several_at_once(settings: Mapping[str, Any]) -> Iterator[None]:
    """Within this context, threads may compile regions at once; afterwards PyTorch's global settings are as before.

    A thread that waits for compiler processes lets another begin, which takes the first one's settings for the user's,
    and restores those at its end. They are `torch.fx._lazy_graph_module._use_lazy_graph_module_flag`, which
    `compile_fx_inner` sets (torch 2.11, 2.13), and the patches of `torch._inductor.config`, global in torch 2.11.
    """
    import torch._inductor.config as inductor_config
    from torch.fx import _lazy_graph_module as lazy

    before, own = lazy._use_lazy_graph_module_flag, {**settings, **ALWAYS}
    with inductor_config.patch({name: getattr(inductor_config, name) for name in own}):
        try:
            yield
        finally:
            lazy._use_lazy_graph_module_flag = before


def link_in_any_folder() -> None:
    """Fix Inductor's linking if PyTorch is in a folder whose path has a space; this also affects `torch.compile`.

    `torch._inductor.cpp_builder.BuildOptionsBase.get_libraries_dirs` (torch 2.11, 2.13) names folders that a command
    line takes unquoted; torch 2.14 and 2.15 quote them there.
    """
    if torch_release() >= (2, 14):
        return
    from torch._inductor.cpp_builder import BuildOptionsBase

    folders: Any = BuildOptionsBase.get_libraries_dirs
    if getattr(folders, "quotes", False):  # done already, perhaps by another copy of this module
        return

    def quoted(options: Any) -> list[str]:
        return [*map(shlex.quote, folders(options))]

    BuildOptionsBase.get_libraries_dirs = quoted  # type: ignore[method-assign, assignment]
    vars(quoted)["quotes"] = True


def _copy_outputs(graph: fx.GraphModule, strides: Sequence[tuple[int, ...] | None]) -> None:
    """Clone each output of a graph that shares its storage with an input or an earlier output, or has other strides.

    Args:
        strides: those that the outputs should have; a clone gets them where they are contiguous.
    """
    output: Any = graph.graph.output_node()
    taken = {storage_of(node.meta["val"]) for node in graph.graph.find_nodes(op="placeholder")}
    returned: list[Any] = []
    for node, wanted in zip(output.args[0], strides, strict=True):
        if isinstance(node, fx.Node):
            shown, storage = node.meta["val"], storage_of(node.meta["val"])
            dense = torch.empty(shown.shape, device="meta").stride()
            padded = wanted != shown.stride() and wanted == dense
            if storage in taken or padded:
                with graph.graph.inserting_before(output):
                    how: Any = {"memory_format": torch.contiguous_format} if padded else {}
                    copy = graph.graph.call_function(torch.ops.aten.clone.default, (node,), how)
                with shown.fake_mode:
                    copy.meta["val"] = shown.new_empty_strided(shown.shape, dense if padded else shown.stride())
                node, storage = copy, storage_of(copy.meta["val"])
            taken.add(storage)
        returned.append(node)
    output.args = (tuple(returned),)


class _Reshaping(fx.Interpreter):
    """Runs a graph, and copies where a view cannot be made of what a decomposition returns.

    It may return other strides than the op: without the empty tensor among its inputs, `cat` keeps those of the other.
    """

    VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(torch.ops.aten.reshape.default if target in self.VIEWS else target, args, kwargs)

    def outputs(self, *inputs: Any) -> Any:
        """Return what the graph returns, as it stands in its output node."""
        return self.run(*inputs, enable_io_processing=False)


def _decomposed(
    module: fx.GraphModule,
    given: Sequence[torch.Tensor],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> tuple[fx.GraphModule, list[torch.Tensor], Any, list[tuple[int, ...] | None]]:
    """Decompose a graph into the ops that Inductor lowers.

    Return it, fake inputs with the layout of `given`, their mode, and the strides of its outputs before Inductor's
    passes, which may pad matrix products.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with mode:
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in given]
        table = {**select_decomp_table(), **decompositions}
        graph = make_fx(_Reshaping(module).outputs, decomposition_table=table, tracing_mode="real")(*fakes)
    graph.graph.eliminate_dead_code()
    output: Any = graph.graph.output_node()
    strides = [node.meta["val"].stride() if isinstance(node, fx.Node) else None for node in output.args[0]]
    context = torch._guards.TracingContext(mode)
    with V.set_fake_mode(mode), torch._guards.tracing(context):
        joint_graph_passes(graph)
    graph.recompile()
    return graph, fakes, mode, strides


def decomposed_joint(module: fx.GraphModule, decompositions: Mapping[Any, Callable[..., Any]]) -> fx.GraphModule:
    """Decompose a joint graph into the ops that Inductor lowers, as `torch.compile` does before it partitions it.

    Inputs and outputs stay, with their names and their `meta`; each other node has the name of the one that it was made
    from in `meta["from_node"]`. The given graph stays as it is. The calls are those of `compile_region`, with
    `Interpreter` and `preserve_node_meta` of torch.fx (torch 2.11, 2.13).

    Args:
        decompositions: functions that compute fxremat's own ops from ops of aten.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    given = module.graph.find_nodes(op="placeholder")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    table = {**select_decomp_table(), **decompositions}
    with _my_turn(), real_tensors(), torch.no_grad(), mode, fx.traceback.preserve_node_meta():
        shown = [node.meta["val"] for node in given]
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in shown]
        graph = make_fx(_Reshaping(module).outputs, decomposition_table=table, tracing_mode="real")(*fakes)
        graph.graph.eliminate_dead_code()
        for old, new in zip(given, graph.graph.find_nodes(op="placeholder"), strict=True):
            new.name = new.target = old.name
            new.meta = {**old.meta, "val": new.meta["val"]}
        graph.graph.output_node().meta = dict(module.graph.output_node().meta)
        with V.set_fake_mode(mode), torch._guards.tracing(torch._guards.TracingContext(mode)):
            joint_graph_passes(graph)
    graph.recompile()
    return graph


def partitioned(
    module: fx.GraphModule, forward_outputs: int, share: float, once: Collection[str] = ()
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward into which `torch.compile` partitions a joint graph, which stays as it is.

    The forward's outputs behind the first `forward_outputs` are the inputs of the backward with the same names.

    `min_cut_rematerialization_partition`, `activation_memory_budget` and `meta["recompute"]` (torch 2.11, 2.13): it
    replaces equal nodes by one, and rewrites the graph that it is given.

    Args:
        share: of what is kept where only what Inductor fuses is recomputed, what may be kept, from 0 to 1.
        once: names of nodes that must not be recomputed.
    """
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graph = fx.GraphModule(module, copied(module.graph))
    for node in graph.graph.nodes:
        if node.name in once:
            node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
    with _my_turn(), real_tensors(), config.patch(activation_memory_budget=share):
        phases = min_cut_rematerialization_partition(graph, (), num_fwd_outputs=forward_outputs)
    for phase in phases:
        for node in phase.graph.nodes:
            node.meta.pop("recompute", None)
    return phases


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise `FxrematError` for a setting that fxremat forbids or `torch._inductor.config` lacks (torch 2.11, 2.13)."""
    import torch._inductor.config as inductor_config

    known = inductor_config.get_config_copy() if settings else {}
    for name in settings:
        if name == CUDA_GRAPHS and settings[name]:
            raise FxrematError(f"inductor={{{name!r}: True}}: graphs of CUDA keep memory that no budget bounds")
        if name not in known:
            raise FxrematError(f"inductor={{{name!r}: ...}}: torch._inductor.config has no such setting")


def inductor_seeds(count: int, *, device: torch.device) -> torch.Tensor:
    """Call Inductor's op that generates the seeds of a graph; meant to be traced and compiled.

    `torch._inductor.inductor_prims.seeds` (torch 2.11, 2.13). Compiled, it is `aten.randint.low` from the least int64
    to below the largest one; called eagerly, it draws from another range.
    """
    from torch._inductor import inductor_prims

    made: torch.Tensor = inductor_prims.seeds(count, device)
    return made


def inductor_uniform(seed: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Call Inductor's op that draws float32 numbers in [0, 1) from a seed; meant to be traced and compiled.

    `torch._inductor.inductor_prims.random` (torch 2.11; 2.13 adds an option). Called eagerly, it ignores its seed.
    """
    from torch._inductor import inductor_prims

    made: torch.Tensor = inductor_prims.random(shape, seed, "rand")
    return made
