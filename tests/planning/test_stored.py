"""Tests of search results on disk: a later process finds what was searched for, and never more than that."""

from __future__ import annotations

import os
import pickle
import sqlite3
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import fxremat
from fxremat.chains.simulate_join import JoinTimeline
from fxremat.planning import frontier_cache, graph_programs, stored
from fxremat.planning.frontier_cache import NO_GRAPH
from fxremat.plans import Plan
from fxremat.search import survey
from fxremat.search.call_programs import CallProgram
from fxremat.search.refine import Ladder
from fxremat.settings import Search
from fxremat.step.step_graph import StepGraph
from tests.linearize.test_towers import Pair, inputs
from tests.runtime.test_plans_of_several_graphs import net, rows
from tests.test_planner import INPUTS, Deep

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("torch_ready", "surveys")


def planned(mem: str = "50%") -> Plan:
    """The plan that a new process makes, in which nothing is known."""
    frontier_cache._latest.clear()
    return fxremat.plan(Deep(), INPUTS, mem=mem, costs="estimate")


def told(plan: Plan) -> list[tuple[int, float, str, tuple[int, ...]]]:
    """All that a frontier says of its programs."""
    frontier = plan.alternatives
    every = (plan.chosen, frontier.keep_all, *frontier.candidates)
    return [(c.peak, c.time, str(c.schedule), c.order().ops) for c in every]


class Rows:
    """The results of searches in the only store of a folder, by key."""

    def __init__(self, folder: Path) -> None:
        (self.path,) = folder.glob("*.sqlite")

    def __call__(self) -> dict[str, bytes]:
        with closing(sqlite3.connect(self.path)) as file:
            return dict(file.execute(f"SELECT key, content FROM {stored.TABLE}"))

    def set(self, content: bytes) -> None:
        with closing(sqlite3.connect(self.path)) as file, file:
            file.execute(f"UPDATE {stored.TABLE} SET content = ?", (content,))


def test_a_later_process_searches_for_nothing_and_plans_the_same(surveys: list[int], tmp_path: Path) -> None:
    first = planned()
    assert len(surveys) == 1
    assert told(planned()) == told(first)
    assert len(surveys) == 1
    assert len(Rows(tmp_path)()) == 1


def test_it_goes_on_where_the_search_was_left(
    surveys: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    planned("40%")
    little = Rows(tmp_path)()
    later = planned("80%")
    assert len(surveys) == 1
    assert little.keys() == Rows(tmp_path)().keys()
    assert little != Rows(tmp_path)()
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path / "other"))
    assert told(later) == told(planned("80%"))
    assert len(surveys) == 2


def test_towers_that_meet_are_kept_whole(surveys: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_solved", lambda *_: [])  # the schedules of the join alone are offered

    def joined() -> list[tuple[int, float, JoinTimeline | None]]:
        frontier_cache._latest.clear()
        plan = fxremat.plan(Pair(shared=False), inputs(), mem="100%", search=Search(seconds=0), costs="estimate")
        return [(c.peak, c.time, c.join) for c in plan.alternatives.candidates]

    first = joined()
    assert any(join is not None for _, _, join in first)
    assert joined() == first
    assert len(surveys) == 1


class Evil:
    """Makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no ladder",
        zlib.compress(b"no pickle"),
        zlib.compress(pickle.dumps(frozenset({1}))),
    ],
)
def test_what_is_no_ladder_counts_as_absent(content: bytes, surveys: list[int], tmp_path: Path) -> None:
    first = planned()
    rows = Rows(tmp_path)
    (good,) = rows().values()
    for bad in (content, good[: len(good) // 2]):
        rows.set(bad)
        del surveys[:]
        assert told(planned()) == told(first)
        assert len(surveys) == 1
        assert list(rows().values()) == [good]


def test_nothing_but_a_ladder_is_called(tmp_path: Path) -> None:
    planned()
    Rows(tmp_path).set(zlib.compress(pickle.dumps(Evil(tmp_path / "evil"))))
    planned()
    assert not (tmp_path / "evil").exists()


def test_other_code_finds_nothing(surveys: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    planned()
    monkeypatch.setattr(stored, "_code", lambda: "another version")
    planned()
    assert len(surveys) == 2


def test_those_that_were_used_last_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "AT_MOST", 3)
    ladder = Ladder(given=planned("100%").alternatives.each(lambda candidate: candidate)).on(NO_GRAPH)
    for key in "abc":
        stored.write(CPU, key, ladder)
    assert stored.read(CPU, "a", Ladder) is not None  # which makes it the latest
    stored.write(CPU, "d", ladder)
    assert [key for key in "abcd" if stored.read(CPU, key, Ladder) is not None] == ["a", "c", "d"]


def test_where_nothing_can_be_written_nothing_is_kept(
    surveys: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path / "file" / "folder"))
    (tmp_path / "file").touch()
    assert told(planned()) == told(planned())
    assert len(surveys) == 2


def test_programs_of_several_graphs_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []
    search = graph_programs.call_programs

    def counted(graph: StepGraph, *args: Any, **options: Any) -> tuple[CallProgram, ...]:
        searched.append(len(graph.ops))
        return search(graph, *args, **options)

    monkeypatch.setattr(graph_programs, "call_programs", counted)

    def plan(**options: Any) -> str:
        graph_programs._known.clear()
        settings: dict[str, Any] = {"mem": "70%", "costs": "estimate", "search": Search(seconds=0.0), **options}
        return str(fxremat.plan(net(), rows(), **settings))

    first = plan()
    graphs = len(searched)
    assert graphs > 1
    assert plan() == first
    assert len(searched) == graphs
    plan(costs="H200")  # ops take other times
    plan(offload=True)
    assert len(searched) == 3 * graphs
