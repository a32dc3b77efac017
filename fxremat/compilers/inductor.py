"""A partition function for Inductor that plans within a budget: `torch._inductor.config.custom_partitioner_fn`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import fx
from torch._functorch import (
    config as functorch_config,  # enable_autograd_cache: as in torch 2.11, 2.13, 2.14
)
from torch._inductor.custom_graph_pass import (  # as in torch 2.11, 2.13 and 2.14
    CustomPartitionerFn,
    get_hash_for_files,
)

from fxremat.compilers.partition import Partitioner
from fxremat.compilers.planning import PassOptions, pass_options
from fxremat.cost.metering import peak_of
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
NEAR = 0.93  # `fit` is content with a real peak of at least this fraction of the budget
SAFE = 0.98  # each try of `fit` uses this fraction of the budget that the last peak suggests


@dataclass
class _Bounds:
    """Bounds, from the tries of `fit` so far, on the bytes to plan for; 0: not known."""

    least: int = 0  # no plan of single ops takes less
    fits: int = 0  # the most whose real peak fits
    exceeds: int = 0  # the least whose real peak does not


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
        """Run a training step by torch.compile, and plan until its real peak fits the budget; return it in bytes.

            within = InductorPartitioner("4GiB")
            with inductor_config.patch(custom_partitioner_fn=within):
                compiled = torch.compile(model)
                within.fit(lambda: compiled(x).backward())

        Where the real peak is larger than the budget, or no plan of single ops fits, which take more memory than what
        Inductor fuses, plans are made for less or more; also for more where less than `NEAR` of the budget is used and
        something is recomputed. Each of at most `TRIES` tries resets torch.compile and compiles again.

        Args:
            step: runs forward and backward of the compiled model; it accumulates into existing gradients.

        Raises:
            BudgetTooSmall: the real peak does not fit in any try.
            FxrematError: the step compiled no graph with a backward.
        """
        tried: dict[int, int] = {}  # bytes that were planned for -> real peak
        wanted, bounds = 0, _Bounds()
        for _ in range(TRIES):
            try:
                peak = self._compiled_peak(step)
            except Exception as error:
                if (short := _too_small(error)) is None:
                    raise
                wanted, bounds.least = wanted or short.budget, short.minimum
                if short.minimum in tried:
                    break
                self._begin(replace(self._options, mem=short.minimum))
                continue
            planned = self.plans[0].budget
            wanted, tried[planned] = wanted or planned, peak
            if (following := self._following(planned, peak, wanted, bounds)) is None:
                break
            self._begin(replace(self._options, mem=following))
        if not bounds.fits:
            raise BudgetTooSmall(minimum=min(tried.values(), default=bounds.least), budget=wanted)
        if not self.plans or self.plans[0].budget != bounds.fits:
            self._begin(replace(self._options, mem=bounds.fits))
            self._compiled_peak(step)
        return tried[bounds.fits]

    def _following(self, planned: int, peak: int, wanted: int, bounds: _Bounds) -> int | None:
        """Return the bytes to plan for after a try, whose result is noted in the bounds; None: no better is expected.
        """
        following = int(planned * wanted / peak * SAFE)
        if peak > wanted:
            bounds.exceeds = min(bounds.exceeds or planned, planned)
            if planned <= bounds.least:
                return None
            following = (bounds.fits + planned) // 2 if bounds.fits else max(following, bounds.least)
        else:
            bounds.fits = max(bounds.fits, planned)
            if peak >= NEAR * wanted or not any(plan.program.recomputed for plan in self.plans):
                return None
            if bounds.exceeds:
                following = min(following, (planned + bounds.exceeds) // 2)
        return None if abs(following - planned) < (1 - NEAR) / 2 * planned else following

    def _compiled_peak(self, step: Callable[[], Any]) -> int:
        """Compile the model anew by running a step, and return the peak of another step in bytes."""
        torch.compiler.reset()
        self.plans.clear()
        with functorch_config.patch(enable_autograd_cache=False):  # a cached graph is not partitioned: it has no plan
            step()
        if not self.plans:
            raise FxrematError("the step compiled no graph with a backward: set custom_partitioner_fn, and train")
        gc.collect()  # what Python freed within the step, as of a try before that failed, would be subtracted
        peak, _ = peak_of(step, device_of(self.plans[0].graph))
        return peak

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


def _too_small(error: BaseException | None) -> BudgetTooSmall | None:
    """Return the `BudgetTooSmall` that torch.compile has wrapped into its own error; None if there is none."""
    while error is not None and not isinstance(error, BudgetTooSmall):
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return error


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
