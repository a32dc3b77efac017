"""What searches have found, on disk: a later process finds what was searched for, and never more than that."""

from __future__ import annotations

import os
import pickle
import zlib
from pathlib import Path

import pytest

import fxremat
from fxremat.chains.simulate_join import JoinTimeline
from fxremat.planning import found_files, frontier_cache
from fxremat.planning.frontier_cache import NO_GRAPH
from fxremat.plans import Plan
from fxremat.search import survey
from fxremat.search.refine import Ladder
from fxremat.settings import Search
from tests.linearize.test_towers import Pair, inputs
from tests.test_planner import INPUTS, Deep

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


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / found_files.FOLDER).iterdir())


def test_a_later_process_searches_for_nothing_and_plans_the_same(surveys: list[int], tmp_path: Path) -> None:
    first = planned()
    assert len(surveys) == 1
    assert told(planned()) == told(first)
    assert len(surveys) == 1
    assert len(files(tmp_path)) == 1


def test_it_goes_on_where_the_search_was_left(
    surveys: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    planned("40%")
    (file,) = files(tmp_path)
    little = file.read_bytes()
    later = planned("80%")
    assert len(surveys) == 1
    assert file.read_bytes() != little
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
    (file,) = files(tmp_path)
    good = file.read_bytes()
    for bad in (content, good[: len(good) // 2]):
        file.write_bytes(bad)
        del surveys[:]
        assert told(planned()) == told(first)
        assert len(surveys) == 1
        assert file.read_bytes() == good


def test_nothing_but_a_ladder_is_called(tmp_path: Path) -> None:
    planned()
    (file,) = files(tmp_path)
    file.write_bytes(zlib.compress(pickle.dumps(Evil(tmp_path / "evil"))))
    planned()
    assert not (tmp_path / "evil").exists()


def test_other_code_finds_nothing(surveys: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    planned()
    monkeypatch.setattr(found_files, "_code", lambda: "another version")
    planned()
    assert len(surveys) == 2


def test_the_latest_files_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(found_files, "AT_MOST", 3)
    ladder = Ladder(given=planned("100%").alternatives.each(lambda candidate: candidate)).on(NO_GRAPH)
    for file in files(tmp_path):
        file.unlink()
    for number, key in enumerate("abc"):
        found_files.write(key, ladder)
        (new,) = [file for file in files(tmp_path) if file.stat().st_mtime > 1e6]
        os.utime(new, (number, number))
    assert found_files.read("a", Ladder) is not None  # which makes it the latest
    found_files.write("d", ladder)
    assert [key for key in "abcd" if found_files.read(key, Ladder) is not None] == ["a", "c", "d"]


def test_where_nothing_can_be_written_nothing_is_kept(surveys: list[int], tmp_path: Path) -> None:
    (tmp_path / found_files.FOLDER).touch()
    assert told(planned()) == told(planned())
    assert len(surveys) == 2
