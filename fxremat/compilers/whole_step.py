"""A pass on the graph of a full training step: one graph in, one graph out, inside a budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import fx

from fxremat.compilers.planning import PassOptions, PlanningPass, pass_options
from fxremat.compilers.reading import MARK, OF_BACKWARD, TAG, Given
from fxremat.graphs.nodes import is_number
from fxremat.plans import Plan
from fxremat.torch_private import take_signature


class StepPass(PlanningPass):
    """A pass on graphs of full training steps. `step_pass` makes it."""

    __name__ = "step_pass"  # torchtitan selects and logs passes by this name

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None, **_: Any
    ) -> fx.GraphModule:
        """Return the graph of the same step inside the budget, with the same inputs and outputs; `gm` stays as it is.

        Args:
            example_inputs: the inputs of the graph, on which ops run where they are to be measured.

        Raises:
            BudgetTooSmall: no program fits.
            CaptureError: nothing marks the backward, or a node cannot be planned; names it.
        """
        given, plan = self.read_and_plan(gm, inputs=example_inputs or ())
        made = in_one(given, plan, marked=any(node.meta.get(MARK) for node in gm.graph.nodes))
        take_signature(made, gm.graph)
        return fx.GraphModule(gm, made, class_name=type(gm).__name__)


def step_pass(mem: int | str, **options: Unpack[PassOptions]) -> StepPass:
    """Return a pass on graphs of a full step (forward, loss and backward in one), which fits them into `mem`.

        within = fxremat.passes.step_pass("4GiB", costs="H100")
        graph = make_fx(step, tracing_mode="fake")(parameters, batch)
        ...                                                     # node.meta["partitioner_tag"] = "is_backward"
        graph = within(graph)
        print(within.plan)

    Nodes of the backward are marked by meta["partitioner_tag"] = "is_backward", or by meta["autograd_backward"]. Those
    of the new graph keep their metadata; what is recomputed is marked as part of the backward, and is named after its
    original. The predicted peak is the real one where the graph frees values after their last use, as generated code of
    torch.fx does for all but its inputs. Passes that merge equal ops must run before this one.

    Args:
        mem: the budget, in any form that `fxremat.compile` takes; the inputs of the graph are outside of it.
        options: as those of `fxremat.plan`; costs are estimates for the device that the graph is on, or for another.

    Raises:
        InvalidBudget, FxrematError: an option has a value that it cannot have.
    """
    return StepPass(pass_options(mem, options))


def in_one(given: Given, plan: Plan, *, marked: bool = False) -> fx.Graph:
    """Return forward and backward of a plan as one graph, with the outputs of the graph that was given. O(nodes).

    Args:
        marked: mark nodes of the backward by meta["autograd_backward"] too.
    """
    forward, backward = (each.graph for each in given.with_writes(plan.graphs))
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    _copy(forward, graph, made)
    returned = _results(forward, made)
    outputs, saved = returned[: given.forward_count], returned[given.forward_count :]
    numbers = [node for node in saved if is_number(node.meta["val"])]
    handed_over = [*numbers, *(node for node in saved if not is_number(node.meta["val"]))]
    made = dict(zip(backward.find_nodes(op="placeholder"), handed_over, strict=True))
    late = _copy(backward, graph, made)
    results = _results(backward, made)
    end = len(results) - len(given.written_late)
    inputs = {node.target: node for node in graph.find_nodes(op="placeholder")}
    for name, value in zip(given.written_late, results[end:], strict=True):
        late.append(graph.call_function(torch.ops.aten.copy_.default, (inputs[name], value)))
        late[-1].meta = {"val": inputs[name].meta["val"]}
    for node in late:
        node.meta |= {TAG: OF_BACKWARD} | ({MARK: True} if marked else {})
    graph.output(given.put_back([*outputs, *results[:end]]))
    graph.lint()
    return graph


def _copy(source: fx.Graph, target: fx.Graph, made: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """Copy the nodes that are not in `made` yet, except for the output; return the copies."""
    copies = []
    for node in source.nodes:
        if node.op != "output" and node not in made:
            made[node] = copy = target.node_copy(node, lambda argument: made[argument])
            copies.append(copy)
    return copies


def _results(graph: fx.Graph, made: dict[fx.Node, fx.Node]) -> list[Any]:
    results: tuple[Any, ...] = graph.output_node().args[0]  # type: ignore[assignment]
    return [made[result] if isinstance(result, fx.Node) else result for result in results]
