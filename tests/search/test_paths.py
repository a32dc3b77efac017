"""One program for each call on every path: the dynamic program against all choices, and what a tree knows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fxremat.search import paths
from fxremat.search.call_programs import BackwardMemory, CallProgram, HostCopies
from fxremat.search.paths import Node
from fxremat.step.costs import Link

ORDER: Any = None  # the numbers of a program are all that is asked for here
LINK = Link(to_host=1.0, from_host=1.0)
SMALL = st.integers(0, 40)


def program(time: int, saved: int, forward: int, backward: int, hosted: int = 0) -> CallProgram:
    on_host = HostCopies(program=ORDER, sizes=(hosted,), added=(0.0, 0.0), link=LINK) if hosted else None
    return CallProgram(
        order=ORDER,
        on_host=on_host,
        saved=saved,
        forward=forward,
        backward=backward,
        memory=BackwardMemory(during=np.array([backward]), gradients={}),
        time=float(time),
        outputs=frozenset(),
    )


@st.composite
def trees(draw: Any, depth: int = 3) -> Node:
    """A call and what may follow, as a tree."""
    found = draw(st.lists(st.builds(program, st.integers(1, 9), SMALL, SMALL, SMALL), min_size=1, max_size=3))
    node = Node(draw(st.integers()), programs=sorted(found, key=lambda p: p.time))
    node.before, node.after, node.back, node.behind = (draw(SMALL) for _ in range(4))
    children = draw(st.lists(trees(depth - 1), max_size=2)) if depth > 1 else []
    node.children = dict(enumerate(children))
    node.count = sum(child.count for child in children) + draw(st.integers(0 if children else 1, 3))
    return node


@st.composite
def chains(draw: Any) -> tuple[Node, list[Node]]:
    """A begin with one path of calls."""
    root = Node(None)
    nodes = [draw(trees(1)) for _ in range(draw(st.integers(1, 4)))]
    for before, node in itertools.pairwise([root, *nodes]):
        before.children, node.children, node.count = {0: node}, {}, 1
    return root, nodes


@settings(max_examples=300, deadline=None)
@given(chains(), st.integers(1, 60))
def test_no_choice_of_programs_beats_the_plan_of_a_path(chain: tuple[Node, list[Node]], scale: int) -> None:
    """Nothing is lost by rounding if the budget has as many bytes as there are levels."""
    root, nodes = chain
    mem = paths.LEVELS
    for node in nodes:
        node.before, node.after, node.back, node.behind = (
            scale * n for n in (node.before, node.after, node.back, node.behind)
        )
        node.programs = [
            program(int(p.time), scale * p.saved, scale * p.forward, scale * p.backward) for p in node.programs
        ]
    every = (paths.with_programs(nodes, choice) for choice in itertools.product(*(n.programs for n in nodes)))
    best = min((path.time for path in every if path.peak <= mem), default=None)
    expected = paths.plan(root, mem)
    planned = paths.planned(nodes, mem)
    if best is None:
        assert expected >= paths.NEVER
        assert planned is None
    else:
        assert planned is not None
        assert planned.peak <= mem
        assert planned.time == best == expected


@settings(max_examples=100, deadline=None)
@given(trees(), st.integers(1, 300))
def test_no_path_of_a_tree_exceeds_the_budget(tree: Node, mem: int) -> None:
    root = Node(None, children={0: tree})
    expected = paths.plan(root, mem)
    planned = [paths.planned(path, mem) for path in root.paths()]
    assert all(path is None or path.peak <= mem for path in planned)
    assert (expected < paths.NEVER) == all(path is not None for path in planned)


@settings(max_examples=100, deadline=None)
@given(trees(), st.data(), st.integers(1, 60), st.integers(0, 80))
def test_no_path_has_more_on_the_host_than_is_allowed(tree: Node, data: Any, mem: int, host_mem: int) -> None:
    root = Node(None, children={0: tree})
    for node in root.walk():
        copying = [
            program(int(p.time), 0, p.forward, 0, data.draw(st.integers(1, 50), label="hosted"))
            for p in node.programs
        ]
        node.programs = sorted([*node.programs, *copying], key=lambda p: p.time)
    freely = paths.plan(root, mem)
    at_most = paths.most_hosted(root, mem)
    expected = paths.plan_within(root, mem, host_mem)
    planned = [paths.planned(path, mem) for path in root.paths()]
    assert paths.most_hosted(root, mem) <= host_mem
    assert all(path is None or path.peak <= mem for path in planned)
    assert expected == freely if at_most <= host_mem else expected >= freely
    for node in root.walk():
        node.programs = [program for program in node.programs if not program.hosted]
    without = paths.plan(root, mem)
    assert expected < paths.NEVER or without >= paths.NEVER
    assert paths.plan_within(root, mem, None) == without


@settings(max_examples=50, deadline=None)
@given(trees())
def test_the_least_budget_works_and_hardly_less_does(tree: Node) -> None:
    root = Node(None, children={0: tree})
    least = paths.least(root)
    assert paths.plan(root, least) < paths.NEVER
    assert least <= 2 or paths.plan(root, int(least / 1.002) - 2) >= paths.NEVER
    assert least <= max(1, paths.keep_all(root))


@settings(max_examples=50, deadline=None)
@given(trees())
def test_the_tightest_moment_has_the_largest_peak_of_all_paths(tree: Node) -> None:
    root = Node(None, children={0: tree})
    mem = paths.least(root)
    found = paths.tightest(root, mem)
    assert found is not None
    assert all(node.policy is None for node in root.walk())
    paths.plan(root, mem)
    planned = (paths.planned(nodes, mem) for nodes in root.paths())
    assert found.path.peak == max(path.peak for path in planned if path)
    node, program = found.path.nodes[found.place], found.path.programs[found.place]
    assert found.earlier + node.heights(program)[found.phase] == found.path.peak


def test_a_rare_branch_that_needs_much_is_not_averaged_away() -> None:
    def call(need: int, *following: Node, count: int = 1) -> Node:
        node = Node(object(), programs=[program(1, 0, need, need)], count=count)
        node.children = dict(enumerate(following))
        return node

    long = call(100, call(100, call(100_000)))
    root = Node(None, children={0: call(100, long, call(100, count=9), count=10)})
    assert paths.plan(root, 50_000) >= paths.NEVER
    assert paths.least(root) == 100_000


def test_a_tree_forgets_what_few_steps_passed() -> None:
    root = Node(None)
    for number in range(20):
        root.children[number] = Node(number, count=1 + 9 * (number == 7))
    paths.forget(root, most=5)
    assert list(root.children) == [7]
