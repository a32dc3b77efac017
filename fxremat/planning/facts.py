"""The costs of a captured step's ops: measured on real values, estimated, or known from earlier runs.

The bytes that a loss outside of the model allocates, stated by the user or measured, are added to them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from fxremat.cost.devices import Device
from fxremat.cost.estimate import cost_of, estimate
from fxremat.cost.measure import fresh_as_known, known_costs, measure
from fxremat.cost.resized import resized
from fxremat.cost.trace import Trace, timed_by
from fxremat.graphs.accounting import (
    as_traced,
    device_of,
    held_beside_copies,
    numbers_of_loss,
    outer_gradients,
    outside_bytes,
    scale_of_loss,
)
from fxremat.graphs.captured import Captured
from fxremat.options import Options, SeenLoss
from fxremat.planning.step import Step
from fxremat.plans import Plan
from fxremat.search.executions import keep_all_peak
from fxremat.step.costs import Costs
from fxremat.step.liveness import Sizes
from fxremat.step.step_graph import Kind, StepGraph

Order = Callable[[], Sequence[int]]  # a function that returns the order in which ops run while their costs are measured


def facts_of(step: Step, options: Options, order: Order | None = None, like: Captured | None = None) -> Costs:
    """Return the costs of a step's ops: measured, or estimated where the user asks for that.

    Args:
        order: returns the order in which ops run while they are measured; None: the order of the graph.
        like: a graph that was measured before, of which the step's is a rewrite that leaves layouts as they are: only
            ops that it adds run.
    """
    graph = step.graph
    if not options.measures:
        costs = _estimated(graph, options)
    else:
        costs = measure(graph, step.inputs, order=order, ranks=step.ranks, like=like)
    return with_loss(graph, costs, options)


def _estimated(graph: Captured, options: Options) -> Costs:
    """Return estimated costs; seconds come from the user's profiler trace or function, if there is one."""
    costs = estimate(graph, estimated_device(graph, options), fresh_as_known(graph))
    if options.timer is None:
        return costs
    return replace(costs, seconds=timed_by(options.timer, graph.nodes, costs.seconds).seconds)


def source_of_times(graph: Captured, options: Options) -> str:
    """Say in words that the seconds of a plan come from the user's profiler trace or function; "" if there is neither.
    """
    if options.timer is None:
        return ""
    rough = estimate(graph, estimated_device(graph, options)).seconds
    source = f"from {os.path.basename(options.timer.path)}" if isinstance(options.timer, Trace) else "given"
    return timed_by(options.timer, graph.nodes, rough).words(source)


def assumed_facts(graph: Captured, options: Options, rate: float = 1.0) -> Costs:
    """Return the stored costs of ops that were measured before, and estimates for all others; nothing runs.

    Args:
        rate: the seconds of estimates are multiplied by it.
    """
    return with_loss(graph, known_costs(graph, rate), options)


def facts_at_other_sizes(graph: Captured, known: Plan, options: Options) -> Costs:
    """Return the costs of a graph at new input sizes, from those of a plan for other sizes; only few ops have to run.
    """
    if not options.measures:
        costs = _estimated(graph, options)
    else:
        costs = resized(graph, known.captured, known.costs)
    return with_loss(graph, costs, options)


def with_loss(graph: Captured, costs: Costs, options: Options) -> Costs:
    """Return the costs with the bytes of a loss outside the model: the larger of the user's and the measured figure.

    Where the model returns its loss, they are of what the program computes beside it before the backward.
    """
    said, seen, sizes = options.loss_outside.size, options.loss_seen, costs.sizes
    if seen is None:
        return costs if said is None else replace(costs, sizes=replace(sizes, outside=said))
    if seen.as_traced:
        costs = as_traced(graph, costs)
        sizes = costs.sizes
    if not outer_gradients(graph):
        return replace(costs, sizes=sizes_with_loss(graph, sizes, seen, said))
    early = _early(graph, seen)
    assumed = outside_bytes(graph)
    measured = seen.peak_at(assumed)
    outside = max(said or 0, (sizes.outside if measured is None else measured) + early)
    stays = seen.held_at(assumed) + held_beside_copies(graph, device_of(graph))
    root = max(sizes.root, stays) + early
    return replace(costs, sizes=replace(sizes, outside=outside, root=root))


def sizes_with_loss(graph: Captured, sizes: Sizes, seen: SeenLoss, said: int | None) -> Sizes:
    """Return the sizes of a step that returns its loss, with the bytes that the program needs beside that.

    Args:
        said: the bytes that the user says for it.
    """
    (peak, stays), early = seen.beside_at(scale_of_loss(graph)), _early(graph, seen)
    numbers = numbers_of_loss(device_of(graph)) * len(graph.tangent_nodes)
    return replace(sizes, outside=max(said or 0, peak + early if peak else 0), root=max(numbers, stays) + early)


def _early(graph: Captured, seen: SeenLoss) -> int:
    """Return the bytes of gradients of parameters that are there before the model's backward, with their numbers."""
    return seen.early + numbers_of_loss(device_of(graph)) if seen.early else 0


def rate_of(graph: Captured, costs: Costs, options: Options) -> float:
    """Return measured / estimated seconds, summed over the ops that run in slices; 1.0 if there are none."""
    if not options.measures:
        return 1.0
    rough = Device.named(device_of(graph).type)
    cut = [op for op in graph.ops if op.kind is Kind.SLICED]
    estimated = sum(cost_of(op, graph, rough).seconds for op in cut)
    return costs.time_of(op.index for op in cut) / estimated if estimated else 1.0


def estimated_device(graph: StepGraph, options: Options) -> Device:
    """Return the device to estimate costs for: the one that the user named, or a typical one of the step's type."""
    return options.device or Device.named(device_of(graph).type)


def estimated_keep_all(graph: Captured, options: Options) -> int:
    """Estimate the peak in bytes of a step that recomputes nothing; nothing runs, however large the sizes are."""
    return keep_all_peak(graph, with_loss(graph, estimate(graph, estimated_device(graph, options)), options))
