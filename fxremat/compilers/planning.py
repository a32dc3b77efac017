"""Plans for graphs that other tools captured, with those options of `fxremat.plan` that apply to them."""

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
from fxremat.errors import CaptureError, FxrematError
from fxremat.graphs.captured import inputs_of
from fxremat.host.tier import HostTier
from fxremat.options import Options, options_of
from fxremat.planning.captured_step import FixedStep
from fxremat.planning.step import Step
from fxremat.plans import Plan
from fxremat.settings import Loss, Offload, Search, Slices, Wish
from fxremat.torch_private import is_real, real_tensors


class PassOptions(TypedDict, total=False):
    """The options of a plan for a graph that another tool captured; `fxremat.options.Options` describes each."""

    solver: str
    offload: bool | HostTier | Offload
    slices: bool | Slices
    costs: str | Device | Trace | Timer
    loss: int | str | Loss | None
    search: Search
    optimizer: torch.optim.Optimizer | str | None
    never_again: Wish | Sequence[Wish]
    keep: Wish | Sequence[Wish]


def pass_options(mem: int | str | None, options: Mapping[str, Any]) -> Options:
    """Return checked options for planning graphs that other tools captured; by default, costs are estimated."""
    usual: dict[str, Any] = {"costs": "estimate", "search": Search(progress=False), "dynamic": False, "compress": False}
    if options.get("device_mem") is not None:
        raise FxrematError("device_mem counts the tensors of a model, and this is a graph: give mem, for its step")
    found = options_of(mem=mem, **{**usual, **options})
    return replace(found, pure=not found.measures)


def pipeline_of(options: Options) -> str:
    """Return the name of the pipeline of passes for a graph that is not compiled afterwards."""
    return "as given, measured" if options.measures else "as given"


def step_of(given: Given, options: Options, inputs: Sequence[Any] = ()) -> FixedStep:
    """Return a graph that another tool captured as a step that can be planned.

    Args:
        inputs: the inputs of the graph, on which ops are measured; (), or fake tensors: made-up data is used.
    """
    known = inputs_of(given.captured)
    real = len(inputs) == len(known) and all(is_real(each) for each in inputs if isinstance(each, torch.Tensor))
    return FixedStep(Step(graph=given.captured, inputs=tuple(inputs) if real else ()), options)


def planned(given: Given, options: Options, inputs: Sequence[Any] = ()) -> Plan:
    """Return the plan for a graph that another tool captured. Raises what `CapturedStep.plan` raises."""
    with real_tensors():
        try:
            return step_of(given, options, inputs).plan()
        except LayoutsDiffer as error:
            raise CaptureError(
                f"results of {', '.join(error.ops)} lie otherwise in memory than the graph was traced with: trace it "
                'with real strides, or plan with costs="estimate"'
            ) from None


class PlanningPass:
    """Base of passes that plan graphs which other tools captured.

    Attributes:
        plans: the plans that were made, newest last.

    Args:
        pipeline: the name of the pipeline of passes that first runs on a copy of the graph; "": the one for graphs
            that run as they are emitted.
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
        """Read a graph and plan it; return both. Raises what `read_given` and `CapturedStep.plan` raise."""
        given = read_given(graph, num_fwd_outputs, pipeline=self._pipeline)
        plan = planned(given, self.options, inputs)
        self.plans.append(plan)
        return given, plan
