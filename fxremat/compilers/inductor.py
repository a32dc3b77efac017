"""A partition function for Inductor that plans within a budget: `torch._inductor.config.custom_partitioner_fn`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import fx
from torch._inductor.custom_graph_pass import (  # as in torch 2.11, 2.13 and 2.14
    CustomPartitionerFn,
    get_hash_for_files,
)

from fxremat.compilers.partition import Partitioner
from fxremat.compilers.planning import PassOptions, pass_options
from fxremat.cost.measure import peak_of
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.graphs.accounting import device_of
from fxremat.graphs.nodes import is_random
from fxremat.options import Options
from fxremat.plans import Plan
from fxremat.step.program import Role
from fxremat.torch_inductor import with_strides
from fxremat.torch_private import storage_of

BATCHED = {torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default}
TRIES = 6  # maximum number of plans that `fit` tries
SAFE = 0.98  # each try of `fit` uses this fraction of the budget that the last peak suggests


class InductorPartitioner(CustomPartitionerFn):
    """A partition function for Inductor that chooses what is kept and recomputed such that it fits into a budget.

        torch._inductor.config.custom_partitioner_fn = fxremat.passes.InductorPartitioner("4GiB")
        model = torch.compile(model)

    Inductor fuses and reorders the ops afterwards, so that the peak of the plan is only an estimate of the real
    one; `fit` measures the real one. Random ops are never recomputed. Compiled graphs are cached by `uuid()`.

    Gradients are those of torch.compile up to the order in which Inductor adds: it orders the loops of a sum by what
    it fuses into the sum, and it fuses otherwise where ops are recomputed.

    Args:
        mem: the budget, in any form that `fxremat.compile` takes.
        options: as those of `fxremat.plan`; offloading and slices are refused, since Inductor compiles all ops.

    Raises:
        InvalidBudget, FxrematError: an option has an invalid value.
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

    def fit(self, step: Callable[[], Any]) -> int:
        """Run a training step by torch.compile, and plan for less memory until its real peak fits; return it in bytes.

            within = InductorPartitioner("4GiB")
            with inductor_config.patch(custom_partitioner_fn=within):
                compiled = torch.compile(model)
                within.fit(lambda: compiled(x).backward())

        Each try resets torch.compile and compiles again.

        Args:
            step: runs forward and backward of the compiled model; it accumulates into existing gradients.

        Raises:
            BudgetTooSmall: the real peak does not fit after `TRIES` tries; or no program fits.
            FxrematError: the step compiled no graph with a backward.
        """
        wanted: int | None = None
        for _ in range(TRIES):
            torch.compiler.reset()
            self.plans.clear()
            step()  # compiles the model
            if not self.plans:
                raise FxrematError("the step compiled no graph with a backward: set custom_partitioner_fn, and train")
            wanted = wanted or self.plans[0].budget
            peak, _ = peak_of(step, device_of(self.plans[0].graph))
            if peak <= wanted:
                return peak
            self._begin(replace(self._options, mem=int(self.plans[0].budget * wanted / peak * SAFE)))
        assert wanted is not None
        raise BudgetTooSmall(minimum=peak, budget=wanted)

    def __getstate__(self) -> Options:
        """Return the options only, since Inductor pickles its configuration."""
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
        """Return the forward and the backward graph of a joint graph. Raises what `Partitioner` raises."""
        forward, backward = self._partitioner(gm, joint_inputs, **kwargs)
        fix_operands(backward)
        return forward, backward

    def uuid(self) -> Any:
        """Return a hash of all that plans depend on: fxremat's source and the options.

        None, so that compiled graphs are not cached, if ops are measured, or ops are selected by a function.
        """
        if self._options.measures or not all(isinstance(wish, str) for wish in self._options.wishes):
            return None
        sources = sorted(str(file) for file in Path(__file__).parents[1].rglob("*.py"))
        return get_hash_for_files(tuple(sources), repr(self._options))


def fix_operands(backward: fx.GraphModule) -> None:
    """Fix the strides of forward results that the backward computes for batched matrix products, to those captured.

    Inductor lays out results of pointwise ops as it likes. A batched product of operands that lie otherwise adds in
    another order, so that gradients would differ by rounding from those of saved operands.
    """
    of_forward = {Role.FORWARD.value, Role.RECOMPUTE.value}
    for node in [node for node in backward.graph.nodes if node.meta.get("fxremat", {}).get("role") in of_forward]:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or node.target in BATCHED or not _feeds_batched_product(node):
            continue
        with backward.graph.inserting_after(node):
            fixed = with_strides(backward.graph, node, value.stride())
        fixed.meta = dict(node.meta)
        node.replace_all_uses_with(fixed, delete_user_cb=lambda user, fixed=fixed: user is not fixed)
    backward.recompile()


def _feeds_batched_product(node: fx.Node) -> bool:
    """Tell whether a batched matrix product reads a tensor, directly or through views."""
    users = list(node.users)
    return any(user.target in BATCHED for user in users) or any(
        _feeds_batched_product(user) for user in users if _is_view_of(user, node)
    )


def _is_view_of(user: fx.Node, node: fx.Node) -> bool:
    base, value = node.meta.get("val"), user.meta.get("val")
    if not (isinstance(base, torch.Tensor) and isinstance(value, torch.Tensor)):
        return False
    return storage_of(base) == storage_of(value)
