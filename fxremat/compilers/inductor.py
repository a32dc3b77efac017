"""A partition function of Inductor that plans: `torch._inductor.config.custom_partitioner_fn`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from torch import fx
from torch._inductor.custom_graph_pass import (  # torch 2.11, 2.13, 2.14
    CustomPartitionerFn,
    get_hash_for_files,
)

from fxremat.compilers.partition import Partitioner
from fxremat.compilers.planning import PassOptions, pass_options
from fxremat.errors import FxrematError
from fxremat.graphs.nodes import is_random
from fxremat.options import Options
from fxremat.plans import Plan


class InductorPartitioner(CustomPartitionerFn):
    """A partition function for Inductor: what its two graphs keep and recompute fits into a budget.

        torch._inductor.config.custom_partitioner_fn = fxremat.passes.InductorPartitioner("4GiB")
        model = torch.compile(model)

    Inductor fuses and reorders the ops afterwards, so that the peak of the plan is an estimate of the real one. Random
    ops never run twice. Compiled graphs are cached by `uuid()`.

    Args:
        mem: the budget, in any form that `fxremat.compile` takes.
        options: as those of `fxremat.plan`; offloading and slices are refused, since Inductor compiles all ops.

    Raises:
        InvalidBudget, FxrematError: an option has a value that it cannot have.
    """

    def __init__(self, mem: int | str, **options: Unpack[PassOptions]) -> None:
        given = pass_options(mem, options)
        if given.host or given.slicing:
            raise FxrematError("InductorPartitioner plans what is kept and recomputed; offload and slices stay out")
        self._begin(given)

    def _begin(self, options: Options) -> None:
        self._options = options
        once = replace(options, never_again=(*options.wishes, is_random))
        self._partitioner = Partitioner(once, pipeline="for compilers")

    def __getstate__(self) -> Options:
        """Return the options: Inductor pickles its configuration, and plans are not part of it."""
        return self._options

    def __setstate__(self, options: Options) -> None:
        self._begin(options)

    @property
    def plans(self) -> list[Plan]:
        """The plans that were made, newest last."""
        return self._partitioner.plans

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and the backward graph. Raises what `Partitioner` raises."""
        return self._partitioner(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        """Return a hash of all that plans depend on: fxremat's source and the options.

        None, so that compiled graphs are not cached, where ops are measured, or a wish is a function.
        """
        if self._options.measures or not all(isinstance(wish, str) for wish in self._options.wishes):
            return None
        sources = sorted(str(file) for file in Path(__file__).parents[1].rglob("*.py"))
        return get_hash_for_files(tuple(sources), repr(self._options))
