"""The tree of modules adds up to the plan, its table to the tree, and the printed table says the plan's figures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import astuple, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxremat
from fxremat.plans import Plan
from fxremat.search.candidate import Candidate
from fxremat.settings import Offload, Search
from fxremat.show.modules import ModuleNode, Share, added, module_tree
from fxremat.show.text import ROWS as MOST
from fxremat.show.text import WIDTH as COLUMNS
from fxremat.show.text import slicing_seconds, table, waiting_seconds
from fxremat.show.tree import OWN, Row, all_rows, rows_of, what_it_does
from fxremat.step.costs import Costs
from fxremat.step.kinds import MemoryKind, bytes_by_kind
from fxremat.step.program import Role
from fxremat.step.step_graph import Origin
from fxremat.units import format_bytes, format_seconds
from tests.dags import few
from tests.exported import PLANS
from tests.saved_steps import VARIED, saved, surveyed

pytestmark = pytest.mark.usefixtures("torch_ready")
ROWS, WIDTH = 64, 32


def check(candidate: Candidate, costs: Costs) -> ModuleNode:
    """The figures of all modules add up to those of a candidate's program."""
    tree, program, joint = module_tree(candidate, costs), candidate.program(), candidate.layout.graph
    sizes, total = costs.sizes, tree.total
    kept = bytes_by_kind(program, sizes)[MemoryKind.KEPT]
    assert total.saved == (kept[program.split] if program.split < len(kept) else 0)
    again = [step for step in program.executions if step.role is Role.RECOMPUTE]
    assert total.recomputed == sum(sizes.values[program.version_of[v]] for step in again for v in step.writes)
    if not joint.updates_of:
        assert total.gradients == sum(sizes.values[value] for value in joint.returned if is_gradient(joint, value))
        assert total.offloaded == (candidate.transfers.bytes if candidate.transfers else 0)
    by_role = {role: costs.time_of(s.op for s in program.executions if s.role is role) for role in Role}
    assert total.forward == pytest.approx(by_role[Role.FORWARD])
    assert total.backward == pytest.approx(by_role[Role.BACKWARD])
    assert total.extra == pytest.approx(by_role[Role.RECOMPUTE])
    assert total.seconds == pytest.approx(costs.time(program))

    for node in tree.walk():
        assert astuple(node.total) == pytest.approx(astuple(added([node.own, *(p.total for p in node.parts)])))
        assert min(astuple(node.total)) >= 0
        assert all(part.path.rpartition(".")[0] == node.path for part in node.parts)
        assert tree.at(node.path) is node
    assert {source.module for source in joint.sources} <= {node.path for node in tree.walk()}
    with pytest.raises(KeyError):
        tree.at("no.such.module")
    return tree


def is_gradient(joint: Any, value: int) -> bool:
    return joint.values[value].origin is Origin.BACKWARD


@few(4)
@given(st.sampled_from(VARIED), st.integers(0, 100))
def test_modules_add_up_to_every_candidate(name: str, share: int) -> None:
    costs, frontier = saved(name).costs, surveyed(name)
    for candidate in {frontier.keep_all, *frontier.candidates[:: 1 + share // 10]}:
        total = check(candidate, costs).total
        assert total.extra == pytest.approx(candidate.time - frontier.keep_all.time, rel=1e-6, abs=1e-12)


class Block(nn.Module):
    """A layer of a transformer without its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Words(nn.Module):
    """A small language model that returns its loss."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@cache
def words(mem: str | int, **options: Any) -> Plan:
    given = {"search": Search(seconds=0), "costs": "estimate", "dynamic": False} | options
    torch.manual_seed(0)
    plan = fxremat.plan(Words(), torch.arange(ROWS).view(4, -1) % 50, mem=mem, **given)
    assert isinstance(plan, Plan)
    return plan


def test_modules_of_a_plan() -> None:
    plan = words("75%")
    for candidate in plan.alternatives.candidates:
        check(candidate, plan.costs)
    tree = plan.modules
    assert tree.total.recomputed
    assert tree.total.extra == pytest.approx(plan.predicted_time - plan.keep_all_time, rel=1e-6)
    assert waiting_seconds(plan, tree.total) == pytest.approx(0, abs=1e-6 * plan.keep_all_time)
    assert {f"blocks.{k}" for k in range(4)} == {part.path for part in tree.at("blocks").parts}
    assert tree.at("blocks.1.up").name == "up"
    assert tree.at("head").total.gradients == 4 * (50 * WIDTH + 50)
    between = tree.at("blocks").own  # additions of gradients between layers
    assert between == Share(backward=between.backward)


def test_modules_of_a_plan_that_keeps_everything() -> None:
    total = words("100%").modules.total
    assert (total.recomputed, total.offloaded, total.extra) == (0, 0, 0)
    assert total.gradients == 4 * sum(parameter.numel() for parameter in Words().parameters())


@cache
def offloading() -> Plan:
    return words(words(2**40, offload=True).minimum, offload=True)


def test_modules_of_a_plan_that_offloads() -> None:
    plan = offloading()
    assert plan.chosen.transfers
    for candidate in plan.alternatives.candidates:
        check(candidate, plan.costs)
    total = check(plan.chosen, plan.costs).total
    assert total.offloaded == plan.chosen.transfers.bytes > 0
    waited = waiting_seconds(plan, total)
    assert total.extra + waited == pytest.approx(plan.predicted_time - plan.keep_all_time, rel=1e-6)
    assert waited == pytest.approx(plan.chosen.time - plan.costs.time(plan.program), rel=1e-6, abs=1e-12)


def test_a_plan_that_waits_less_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = offloading()
    less = -0.25 * plan.keep_all_time
    monkeypatch.setattr("fxremat.show.text.waiting_seconds", lambda *_: less)
    line = next(line for line in plan.describe(full=True).splitlines() if "waiting" in line)
    assert line.split("  ")[1] == "waiting for copies, less than with everything kept"
    assert line.endswith(f" {format_seconds(-less)}")


def test_weights_on_the_host_are_no_activations() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)), nn.Flatten(0))
    options: dict[str, Any] = {"search": Search(seconds=0), "offload": Offload(weights=True), "costs": "estimate"}
    options["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.ones(ROWS, WIDTH)
    least = fxremat.plan(model, inputs, mem=2**40, **options).minimum
    plan = fxremat.plan(model, inputs, mem=least, **options)
    tree = check(plan.chosen, plan.costs)
    joint, program = plan.graph, plan.program
    out = [program.version_of[s.reads[0]] for s in program.steps if s.role is Role.OFFLOAD and s.reads]
    activations = [value for value in out if joint.values[value].origin is Origin.FORWARD]
    assert tree.total.offloaded == sum(plan.costs.sizes.values[value] for value in activations)
    assert program.fetched
    assert tree.total.saved < plan.keep_all_peak


# Tables of random trees. Figures are powers of two, so that floats add up exactly and equal modules look the same.
amounts = st.sampled_from([0, 0, 0, 1, 64, 2**20])
times = st.sampled_from([0.0, 0.0, 0.25, 1.0, 64.0])
shares = st.builds(Share, amounts, amounts, amounts, amounts, times, times, times)


def placed(node: ModuleNode, path: str) -> ModuleNode:
    """The same tree below another path."""
    parts = tuple(placed(part, f"{path}.{part.path}" if path else part.path) for part in node.parts)
    return ModuleNode(path=path, own=node.own, parts=parts)


@st.composite
def nodes(draw: st.DrawFn, depth: int) -> ModuleNode:
    """A module whose parts have names without a path; `placed` gives them theirs."""
    own = draw(st.one_of(st.just(Share()), shares))
    if not depth:
        return ModuleNode(path="", own=own, parts=())
    kinds = draw(st.lists(nodes(depth - 1), min_size=1, max_size=3))
    names = draw(st.sampled_from([(), ("a",), ("a", "b", "c"), ("0", "1", "2", "3", "4"), ("0", "1", "a", "2")]))
    chosen = [replace(draw(st.sampled_from(kinds)), path=name) for name in names]
    return ModuleNode(path="", own=own, parts=tuple(chosen))


trees = nodes(3).map(lambda node: placed(node, ""))


def below(rows: list[Row], place: int) -> list[Row]:
    """The rows one level below a row: its parts."""
    found = []
    for row in rows[place + 1 :]:
        if row.depth <= rows[place].depth:
            break
        if row.depth == rows[place].depth + 1:
            found.append(row)
    return found


def check_rows(tree: ModuleNode, rows: list[Row]) -> None:
    known = {node.path: node for node in tree.walk()}
    first = rows[0]
    assert (first.depth, first.label, first.count, first.paths) == (0, "Model", 1, ("",))
    assert first.share == tree.total
    for place, row in enumerate(rows):
        if place:
            assert 1 <= row.depth <= rows[place - 1].depth + 1
            assert any(what_it_does(row.share))
        assert row.paths
        assert len(set(row.paths)) == len(row.paths)
        of = [known[path].own if row.label == OWN else known[path].total for path in row.paths]
        assert what_it_does(row.share) == pytest.approx(what_it_does(added(of)))
        assert row.count in (1, len(row.paths))
        if row.count > 1:
            each = {what_it_does(share) for share in of}
            assert len(each) == 1 or "others" in row.label
            if len(each) == 1:
                assert what_it_does(row.each) == pytest.approx(each.pop())
        parts = below(rows, place)
        if parts:
            sums = what_it_does(added(part.share for part in parts))
            assert sums == pytest.approx(what_it_does(row.share)), row


@given(trees)
def test_the_full_table_has_every_module_and_adds_up(tree: ModuleNode) -> None:
    rows = all_rows(tree, "Model")
    check_rows(tree, rows)
    shown = {path for row in rows for path in row.paths}
    for node in tree.walk():
        if any(what_it_does(node.own)):
            assert node.path in shown
    for row in rows[1:]:
        assert "others" not in row.label


@settings(max_examples=50)
@given(trees, st.integers(1, 30))
def test_tables_add_up_and_are_no_longer_than_asked(tree: ModuleNode, most: int) -> None:
    rows = rows_of(tree, most, "Model")
    check_rows(tree, rows)
    assert 1 <= len(rows) <= most
    more = rows_of(tree, most + 1, "Model")
    assert len(more) >= len(rows)


@settings(max_examples=50)
@given(trees, st.integers(4, 30))
def test_other_figures_add_up_too(tree: ModuleNode, most: int) -> None:
    def gradients(share: Share) -> tuple[float, ...]:
        return (share.gradients, share.forward)

    rows = rows_of(tree, most, "Model", gradients)
    assert gradients(rows[0].share) == gradients(tree.total)
    if len(rows) > 1:
        assert gradients(added(row.share for row in rows if row.depth == 1)) == pytest.approx(gradients(tree.total))
        assert all(any(gradients(row.share)) for row in rows[1:])


@settings(max_examples=50)
@given(trees)
def test_equal_numbered_siblings_share_a_row(tree: ModuleNode) -> None:
    rows = all_rows(tree, "Model")
    for node in tree.walk():
        numbered = [part for part in node.parts if part.name.isdigit() and any(what_it_does(part.total))]
        for one in numbered:
            equal = {other.path for other in numbered if shape(other) == shape(one)}
            row = next((row for row in rows if one.path in row.paths and row.label != OWN), None)
            if row is not None:
                assert equal <= set(row.paths)


def shape(node: ModuleNode) -> object:
    """All figures of a module and of its parts."""
    return what_it_does(node.own), tuple((part.name, shape(part)) for part in node.parts)


def layers(*saved: int) -> ModuleNode:
    """A model of numbered layers, each with one part."""
    parts = tuple(
        ModuleNode(
            path=f"h.{number}",
            own=Share(),
            parts=(ModuleNode(path=f"h.{number}.up", own=Share(saved=size), parts=()),),
        )
        for number, size in enumerate(saved)
    )
    return ModuleNode(path="", own=Share(saved=5), parts=(ModuleNode(path="h", own=Share(), parts=parts),))


def test_a_table_by_hand() -> None:
    rows = all_rows(layers(10, 20, 10, 10), "Model")
    assert [(row.depth, row.label, row.count, row.share.saved, row.each.saved) for row in rows] == [
        (0, "Model", 1, 55, 55),
        (1, OWN, 1, 5, 5),
        (1, "h.0, 2-3", 3, 30, 10),
        (2, "up", 3, 30, 10),
        (1, "h.1", 1, 20, 20),
        (2, "up", 1, 20, 20),
    ]
    assert rows[3].paths == ("h.0.up", "h.2.up", "h.3.up")
    assert [row.label for row in rows_of(layers(10, 20, 10, 10), 4, "Model")] == ["Model", OWN, "h.0, 2-3", "h.1"]


def leaf(path: str, saved: int) -> ModuleNode:
    return ModuleNode(path=path, own=Share(saved=saved), parts=())


def test_numbers_are_those_that_python_writes() -> None:
    """A ModuleDict may call a part "²" or "01", which are digits and no numbers of layers."""
    parts = tuple(leaf(f"d.{name}", 8) for name in ("²", "³", "01", "1", "2"))
    tree = ModuleNode(path="", own=Share(), parts=(ModuleNode(path="d", own=Share(), parts=parts),))
    assert [row.label for row in all_rows(tree, "Model")] == ["Model", "d", "²", "³", "01", "1-2"]


def test_what_cancels_inside_of_a_module_is_shown() -> None:
    parts = (leaf("m.a", 5), leaf("m.b", -5))
    tree = ModuleNode(path="", own=Share(), parts=(ModuleNode(path="m", own=Share(), parts=parts),))
    rows = [(row.label, row.share.saved) for row in all_rows(tree, "Model")]
    assert rows == [("Model", 0), ("m", 0), ("a", 5), ("b", -5)]


def test_a_module_whose_parts_do_nothing_has_one_row() -> None:
    inner = ModuleNode(path="m", own=Share(saved=5), parts=(leaf("m.a", 0),))
    tree = ModuleNode(path="", own=Share(), parts=(inner, leaf("n", 6)))
    assert [row.label for row in all_rows(tree, "Model")] == ["Model", "m", "n"]


def test_the_time_of_slices_is_called_that() -> None:
    plan = PLANS["slices"]()
    assert plan.slices
    text = plan.describe(full=True)
    assert "running in slices" in text
    assert "waiting for" not in text
    own = plan.costs.time_of(range(len(plan.graph.ops)))
    assert slicing_seconds(plan) == pytest.approx(own - plan.keep_all_time)
    assert waiting_seconds(plan, plan.modules.total) == pytest.approx(0.0, abs=1e-9 * own)


def test_small_modules_share_the_last_row() -> None:
    parts = [ModuleNode(path=f"p{k}", own=Share(saved=size), parts=()) for k, size in enumerate([1000, 1, 2, 3])]
    tree = ModuleNode(path="", own=Share(), parts=tuple(parts))
    rows = rows_of(tree, 10, "Model")
    assert [(row.label, row.count, row.share.saved) for row in rows] == [
        ("Model", 1, 1006),
        ("p0", 1, 1000),
        ("3 others", 1, 6),
    ]
    assert rows[2].paths == ("p1", "p2", "p3")
    alone = ModuleNode(path="", own=Share(), parts=tuple(parts[:2]))
    assert [row.label for row in rows_of(alone, 10, "Model")] == ["Model", "p0", "p1"]


@settings(max_examples=50)
@given(trees, st.integers(1, 30))
def test_printed_tables_are_narrow(tree: ModuleNode, most: int) -> None:
    heads = ("saved", "recomputed", "offloaded", "extra time")
    for rows in (rows_of(tree, most, "M" * 200), all_rows(tree, "Model")):
        lines = list(table(rows, heads, what_it_does))
        assert len(lines) == len(rows) + 1
        assert all(len(line) <= COLUMNS for line in lines)


FIGURE = r"(?:-|[\d.e+]+ (?:B|[KMGT]iB|s|ms|us))"


def figures_of(line: str) -> list[str]:
    return re.findall(rf"(?<=  ){FIGURE}(?=  |$)", line)


def printed(plan: Plan) -> Iterator[str]:
    yield from str(plan).split("\n\n")[1].splitlines()


@pytest.mark.parametrize("plan", [lambda: words("75%"), lambda: words("100%"), offloading])
def test_the_printed_table_has_the_figures_of_the_plan(plan: Any) -> None:
    found: Plan = plan()
    text = str(found)
    assert max(map(len, text.splitlines())) <= COLUMNS
    heads, first, *others = printed(found)
    assert heads.split()[-5:] == ["saved", "recomputed", "offloaded", "extra", "time"]
    total = found.modules.total
    sizes = (total.saved, total.recomputed, total.offloaded)
    shown = [format_bytes(size) if size else "-" for size in sizes]
    assert figures_of(first) == [*shown, format_seconds(total.extra) if total.extra else "-"]
    assert first.split()[0] == "Words"
    rows = rows_of(found.modules, MOST, "Words")
    assert len(rows) - 1 <= len(others) <= len(rows)
    for row, line in zip(rows[1:], others, strict=False):
        saved = row.each.saved
        assert figures_of(line)[0] == (format_bytes(saved) if saved else "-")
        assert line.startswith("  " * (row.depth + 1) + row.label)
        assert (f" {row.count} x " in line) == (row.count > 1)
    waited = waiting_seconds(found, total)
    if len(others) == len(rows):
        assert "waiting" in others[-1]
        assert figures_of(others[-1]) == [format_seconds(abs(waited))]
    else:
        assert abs(waited) <= 1e-3 * found.keep_all_time


def test_the_full_text_has_a_row_for_every_module() -> None:
    plan = words("75%")
    lines = plan.describe(full=True).split("\n\n")[1].splitlines()
    assert len(lines) == len(all_rows(plan.modules, "Words")) + 1
    assert max(map(len, plan.describe(full=True).splitlines())) <= COLUMNS
