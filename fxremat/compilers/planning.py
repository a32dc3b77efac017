"""Plans for graphs that others captured, with the options of `fxremat.plan` that make sense there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

import torch
from torch import fx

from fxremat.compilers.reading import Given, read_given
from fxremat.cost.devices import Device
from fxremat.cost.layouts import LayoutsDiffer
from fxremat.cost.trace import Timer, Trace
from fxremat.errors import CaptureError
from fxremat.graphs.captured import inputs_of
from fxremat.host.tier import HostTier
from fxremat.options import Options, options_of
from fxremat.planning.captured_step import FixedStep
from fxremat.planning.step import Step
from fxremat.plans import Plan
from fxremat.settings import Loss, Offload, Search, Slices, Wish
from fxremat.torch_private import is_real, real_tensors


class PassOptions(TypedDict, total=False):
    """The options of a plan for somebody else's graph; `fxremat.options.Options` says what each may be."""

    solver: str
    offload: bool | HostTier | Offload
    slices: bool | Slices
    costs: str | Device | Trace | Timer
    loss: int | str | Loss | None
    search: Search
    optimizer: torch.optim.Optimizer | str | None
    never_again: Wish | Sequence[Wish]
    keep: Wish | Sequence[Wish]


def pass_options(mem: int | str, options: Mapping[str, Any]) -> Options:
    """Return checked options for planning graphs of others; costs are estimates where nothing else is said."""
    usual: dict[str, Any] = {"costs": "estimate", "search": Search(progress=False), "dynamic": False}
    found = options_of(mem=mem, **{**usual, **options})
    return replace(found, pure=not found.measures)


def pipeline_of(options: Options) -> str:
    """Return the name of the passes for a graph that runs as it is emitted."""
    return "as given, measured" if options.measures else "as given"


def step_of(given: Given, options: Options, inputs: Sequence[Any] = ()) -> FixedStep:
    """Return a graph of somebody else's as a step that can be planned.

    Args:
        inputs: the inputs of the graph, on which ops are measured; (), or fake tensors: on made-up data.
    """
    known = inputs_of(given.captured)
    real = len(inputs) == len(known) and all(is_real(each) for each in inputs if isinstance(each, torch.Tensor))
    return FixedStep(Step(graph=given.captured, inputs=tuple(inputs) if real else ()), options)


def planned(given: Given, options: Options, inputs: Sequence[Any] = ()) -> Plan:
    """Return the plan of a graph of somebody else's. Raises what `CapturedStep.plan` raises."""
    with real_tensors():
        try:
            return step_of(given, options, inputs).plan()
        except LayoutsDiffer as error:
            raise CaptureError(
                f"results of {', '.join(error.ops)} lie otherwise in memory than the graph was traced with: trace it "
                'with real strides, or plan with costs="estimate"'
            ) from None


class PlanningPass:
    """Base of passes that plan graphs of others.

    Attributes:
        plans: the plans that were made, newest last.

    Args:
        pipeline: the passes that a copy of the graph goes through first, by name; "": those for graphs that run as they
            are emitted.
    """

    def __init__(self, options: Options, pipeline: str = "") -> None:
        self.options, self._pipeline = options, pipeline or pipeline_of(options)
        self.plans: list[Plan] = []

    @property
    def plan(self) -> Plan | None:
        """The latest plan; None before the pass has run."""
        return self.plans[-1] if self.plans else None

    def read_and_plan(
        self, graph: fx.GraphModule, num_fwd_outputs: int | None = None, inputs: Sequence[Any] = ()
    ) -> tuple[Given, Plan]:
        """Return a graph as it was read, and its plan. Raises what `read_given` and `CapturedStep.plan` raise."""
        given = read_given(graph, num_fwd_outputs, pipeline=self._pipeline)
        plan = planned(given, self.options, inputs)
        self.plans.append(plan)
        return given, plan
