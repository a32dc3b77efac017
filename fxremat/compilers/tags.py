"""A plan written on a graph in the form of torch's checkpointing tags, for executors that read these."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxremat.errors import FxrematError, PlanMismatch
from fxremat.graphs.captured import Captured
from fxremat.passes.collectives import WAIT
from fxremat.plans import Plan
from fxremat.step.program import Role, Transfer
from fxremat.units import shortened

GROUP = "ac_graph_id"  # key in `meta` of the group of nodes that torch's partitioner treats together


def tag(graph: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """Mark the forward ops of a graph by what a plan does with their results; return the graph, which is changed.

        joint = fxremat.capture(graph, num_fwd_outputs=1)
        fxremat.passes.tag(graph, joint.plan("60%"))

    `node.meta["recompute"]` becomes `CheckpointPolicy.MUST_SAVE` for values that stay in memory for the
    backward, `MUST_CPU_OFFLOAD` for values that are copied to the host, and `MUST_RECOMPUTE` for all others,
    views included. Tags say which values are kept, but not in which order ops run, so that the executor's peak
    differs from the plan's. When fxremat plans a graph with tags, it treats MUST_SAVE and MUST_CPU_OFFLOAD as
    wishes not to recompute: see `never_again`.

    Args:
        graph: the graph that the plan was made for, or one with nodes of the same names.

    Raises:
        PlanMismatch: the graph has none of the ops of the plan.
        FxrematError: the plan stores values in fewer bytes, which tags cannot say.
    """
    if not isinstance(graph, fx.GraphModule) or not isinstance(plan, Plan):
        raise FxrematError(
            f"tag marks a torch.fx.GraphModule by a plan; it was given {shortened(graph)} and {shortened(plan)}"
        )
    if plan.compression is not None:
        raise FxrematError("tags cannot say that values are stored in fewer bytes: plan with compress=False")
    policies = _policies(plan)
    for wait in graph.graph.find_nodes(op="call_function", target=WAIT):
        if wait.args[0].name in policies:
            policies[wait.name] = policies[wait.args[0].name]
    found = [node for node in graph.graph.nodes if node.name in policies]
    if not found:
        raise PlanMismatch("the graph has none of the ops of the plan: tag the graph that the plan was made for")
    for node in found:
        node.meta |= {"recompute": policies[node.name], GROUP: 0}
    return graph


def _policies(plan: Plan) -> dict[str, CheckpointPolicy]:
    """Return name -> checkpointing tag for each node of the forward: ops, getitems and views."""
    program, step, captured = plan.program, plan.graph, plan.captured
    late = program.steps[program.split :]
    hosted = {
        program.version_of[version]
        for each in program.steps
        if isinstance(each, Transfer) and each.role is Role.OFFLOAD
        for version in each.reads
    }
    made = {version for each in program.steps[: program.split] for version in each.writes}
    saved = {program.version_of[version] for each in late for version in each.reads if version in made}
    policies = {node.name: CheckpointPolicy.MUST_RECOMPUTE for node in _forward(captured)}
    for op in step.forward_ops:
        for value in op.writes:
            if value in hosted | saved:
                policy = CheckpointPolicy.MUST_CPU_OFFLOAD if value in hosted else CheckpointPolicy.MUST_SAVE
                policies[step.values[value].name] = policies[op.name] = policy
    return policies


def _forward(captured: Captured) -> Iterator[fx.Node]:
    """Yield the nodes that the forward computes, including views."""
    wanted = {*captured.nodes[: captured.forward_count], *captured.forward_outputs}
    for node in reversed(captured.module.graph.nodes):
        if node in wanted:
            wanted.update(node.all_input_nodes)
            if node.op == "call_function":
                yield node
