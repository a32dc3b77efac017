"""Passes by name, and the pipelines of passes that a captured graph goes through before it is read as a step graph.

    eager                 for PyTorch's own kernels on this device
    any device            for PyTorch's own kernels on another device, without assumptions about the CPU's kernels
    inductor              for ops compiled by Inductor: convolutions in channels_last, each BatchNorm as two ops
    inductor from seeds   as "inductor", with dropout masks drawn from seeds, which are values of the graph
    as given              for a graph that another tool captured, and that is run as emitted: its ops stay
    as given, measured    the same, but ops may overwrite operands that no other op reads, as measured layouts allow
    for compilers         for a graph that another compiler processes further: only PyTorch's own ops

A pipeline is a list of names. Each graph is checked before and after each pass, and stays functional.

    FXREMAT_LOG=passes                  logs how each pass changes the graph, as a diff
    FXREMAT_SKIP_PASSES=halve_exactly   leaves passes out, to see their effect; bits or memory may differ then
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from fxremat.errors import FxrematError
from fxremat.logs import is_logged
from fxremat.passes.batch_norm import drop_running_statistics, halve, halve_exactly
from fxremat.passes.channels_last import convolve_channels_last
from fxremat.passes.collectives import wait_at_once
from fxremat.passes.detach import drop_detach
from fxremat.passes.dropout import drop_as_eager
from fxremat.passes.gradients import lay_out_gradients
from fxremat.passes.in_place import note_overwriting
from fxremat.passes.numbers import copy_views_by_number, keep_checks, refuse_symbols
from fxremat.passes.recurrent import sum_recurrent_gradients
from fxremat.passes.seeded_dropout import draw_from_seeds
from fxremat.passes.sharding import share
from fxremat.passes.tangents import copy_gradients_of_other_layouts, reshape_gradients
from fxremat.passes.triton_kernels import launch_as_ops

log = logging.getLogger("fxremat.passes")
SKIPPED = "FXREMAT_SKIP_PASSES"


@dataclass(frozen=True)
class Pass:
    """A pass: a function that rewrites a graph in place, with its name."""

    name: str
    rewrite: Callable[[fx.Graph], None]

    @property
    def purpose(self) -> str:
        """The first line of the docstring of the pass."""
        return (self.rewrite.__doc__ or "").strip().partition("\n")[0]


@dataclass(frozen=True)
class Rewrite:
    """The effect of one pass on one graph, for logging."""

    name: str
    before: int  # number of nodes before the pass
    after: int  # number of nodes after the pass
    diff: str = ""  # diff of the graph's text, if FXREMAT_LOG contains "passes"

    def __str__(self) -> str:
        return f"{self.name}: {self.before} nodes, then {self.after}\n{self.diff}".rstrip()


PASSES: Mapping[str, Pass] = {
    rewrite.__name__: Pass(rewrite.__name__, rewrite)
    for rewrite in (
        share,
        wait_at_once,
        drop_detach,
        launch_as_ops,
        drop_running_statistics,
        reshape_gradients,
        copy_gradients_of_other_layouts,
        sum_recurrent_gradients,
        lay_out_gradients,
        drop_as_eager,
        draw_from_seeds,
        keep_checks,
        copy_views_by_number,
        convolve_channels_last,
        halve_exactly,
        halve,
        note_overwriting,
    )
}

_FIRST = (
    *("share", "wait_at_once", "drop_detach", "launch_as_ops", "drop_running_statistics", "reshape_gradients"),
    *("sum_recurrent_gradients", "lay_out_gradients"),
)
_FOR_SINGLE_OPS = ("copy_gradients_of_other_layouts", "drop_as_eager")
_NUMBERS = ("keep_checks", "copy_views_by_number")
_FOR_REGIONS = (*_NUMBERS, "convolve_channels_last", "halve", "note_overwriting")
_GRAPHS_OF_OTHERS = ("wait_at_once", "drop_detach", "drop_running_statistics")
_AS_GIVEN = (*_GRAPHS_OF_OTHERS, *_NUMBERS, "launch_as_ops")
PIPELINES: Mapping[str, tuple[str, ...]] = {
    "any device": (*_FIRST, *_FOR_SINGLE_OPS, *_NUMBERS, "note_overwriting"),
    "eager": (*_FIRST, *_FOR_SINGLE_OPS, *_NUMBERS, "halve_exactly", "note_overwriting"),
    "inductor": (*_FIRST, "drop_as_eager", *_FOR_REGIONS),
    "as given": (*_AS_GIVEN, "halve_exactly"),
    "as given, measured": (*_AS_GIVEN, "halve_exactly", "note_overwriting"),
    "for compilers": (*_GRAPHS_OF_OTHERS, "copy_views_by_number"),
    "inductor from seeds": (*_FIRST, "draw_from_seeds", *_FOR_REGIONS),
}


def normalize(module: fx.GraphModule, passes: Sequence[str | Pass] = PIPELINES["eager"]) -> fx.GraphModule:
    """Run passes on a joint graph, in place; `module.meta["rewrites"]` then lists their effects.

    O(nodes) for each pass.

    Args:
        passes: a pipeline, or names of passes, in order.

    Raises:
        CaptureError: a size depends on data.
        FxrematError: a pass does not exist, in `passes` or in the environment variable that leaves out passes.
    """
    graph = module.graph
    refuse_symbols(graph)
    module.meta["rewrites"] = tuple(_run(each, graph) for each in _wanted(passes))
    return module


def _wanted(passes: Sequence[str | Pass]) -> Iterator[Pass]:
    """Yield the passes, except for those that the environment variable FXREMAT_SKIP_PASSES names."""
    skipped = {name.strip() for name in os.environ.get(SKIPPED, "").split(",") if name.strip()}
    chosen = [_named(each) if isinstance(each, str) else each for each in passes]
    for name in skipped:
        _named(name)
    for each in chosen:
        if each.name in skipped:
            log.warning("%s is left out, as %s says", each.name, SKIPPED)
        else:
            yield each


def _named(name: str) -> Pass:
    if name not in PASSES:
        raise FxrematError(f"there is no pass {name!r}; there are {', '.join(PASSES)}")
    return PASSES[name]


def _run(each: Pass, graph: fx.Graph) -> Rewrite:
    """Run one pass on a graph, check the graph, and remove nodes that have become unused."""
    logged, before = is_logged("passes"), len(graph.nodes)
    text = str(graph).splitlines() if logged else []
    each.rewrite(graph)
    graph.eliminate_dead_code()  # also checks the graph
    lines = difflib.unified_diff(text, str(graph).splitlines(), lineterm="", n=0) if logged else ()
    # drops the two header lines of the diff
    done = Rewrite(each.name, before, len(graph.nodes), "\n".join([*lines][2:]))
    if logged:
        log.info("%s", done)
    return done
