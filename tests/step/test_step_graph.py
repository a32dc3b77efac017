"""A step graph as one of networkx: its order and its cuts are what networkx's own algorithms find."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given

from fxremat.linearize.crossings import crossings
from fxremat.step.step_graph import StepGraph
from tests.joints import joints
from tests.saved_steps import saved


def forward_of(graph: StepGraph) -> nx.DiGraph:
    """The forward ops that depend on something that is differentiated, with what they write, as they run again.

    A BatchNorm's running statistics go from one call to the next, and a second execution leaves them alone.
    """
    whole = graph.to_networkx()
    ops = [op for op in graph.forward_ops if not op.anchored]
    once = [(("value", value), ("op", op.index)) for op in ops for value in {*op.reads} - {*op.again_reads}]
    nodes = [("op", op.index) for op in ops]
    nodes += [("value", value) for op in ops for value in op.writes]
    return nx.restricted_view(whole.subgraph(nodes), [], [edge for edge in once if edge in whole.edges])


@pytest.mark.parametrize("name", ["gpt", "resnet", "unet"])
def test_ops_stand_in_a_topological_order_and_values_have_one_maker(name: str) -> None:
    graph = saved(name).graph
    found = graph.to_networkx()
    assert nx.is_directed_acyclic_graph(found)
    place = {node: number for number, node in enumerate(nx.lexicographical_topological_sort(found, key=lambda n: n[1]))}
    assert len(place) == len(graph.ops) + len(graph.values)
    for before, after in nx.transitive_reduction(found).edges:
        if before[0] == "value" and (maker := graph.values[before[1]].producer) is not None:
            assert maker < after[1]
    for value in graph.values:
        assert list(found.predecessors(("value", value.index))) == (
            [] if value.producer is None else [("op", value.producer)]
        )
        assert found.nodes["value", value.index]["bytes"] == value.bytes


@pytest.mark.parametrize("name", ["gpt", "unet", "encoder_decoder", "siamese"])
def test_what_crosses_a_position_separates_what_lies_before_it_from_what_follows(name: str) -> None:
    graph = saved(name).graph
    forward, crossing = forward_of(graph), crossings(graph)
    late = nx.DiGraph(forward)
    ops = [op for op in graph.forward_ops if not op.anchored]
    for op in ops[:: max(1, len(ops) // 20)]:
        before = [("op", other.index) for other in ops if other.index <= op.index]
        after = [("op", other.index) for other in ops if other.index > op.index]
        without = nx.restricted_view(late, [("value", value) for value in crossing.at[op.index]], [])
        reached = nx.multi_source_dijkstra_path_length(without, before)
        assert reached.keys().isdisjoint(after)
        for value in crossing.at[op.index]:  # and each of them is needed
            others = nx.restricted_view(late, [("value", v) for v in crossing.at[op.index] - {value}], [])
            assert not nx.multi_source_dijkstra_path_length(others, before).keys().isdisjoint(after)


@given(joints())
def test_every_value_and_op_is_there(graph: StepGraph) -> None:
    found = graph.to_networkx()
    assert sum(kind == "op" for kind, _ in found) == len(graph.ops)
    assert {index for kind, index in found if kind == "value"} == {value.index for value in graph.values}
    given_ = {index for kind, index in found if kind == "value" and not found.in_degree((kind, index))}
    assert graph.given <= given_
