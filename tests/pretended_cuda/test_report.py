"""The page has the table of the record; claims tell what is not held; jobs cover what is asked for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.pretended_cuda import __main__ as command
from tests.pretended_cuda import report
from tests.pretended_cuda.libraries import Library, version_script

pytestmark = pytest.mark.long

ROW = {"model": "gpt", "expandable": True, "mem": "60%", "budget": 1000, "predicted": 1000, "requested": 998}
ROW |= {"allocated": 1010}
LOOP = {"device": 10**9, "optimizer": "SGD", "steps": 20, "ended": "", "budgets": [5, 4], "keep_all": 9}
LOOP |= {"reserved": 8, "retries": 0}
TALLY = {
    "programs": 10,
    "steps": 30,
    "failed_steps": 2,
    "copies": 90,
    "launches": 400,
    "racing": 0,
    "races": [],
}
GOOD: dict[str, Any] = {
    "date": "2026-01-01",
    "races": {"activations": TALLY},
    "mutants": [{"name": "nothing waits", "found": True, "programs": 3}],
    "memory": [{**ROW, "over": 0}, {**ROW, "expandable": False, "requested": 900, "over": 0}],
    "auto": [LOOP],
    "attention": [{"device": "A100", "cases": 264, "equal": 264, "others": {}}],
    "graphs": [{"model": "gpt", "captured": {"add": 1}, "assumed": {}}],
    "tests": {"passed": 30, "skipped": 1},
}


def test_the_page_has_the_table_of_the_record() -> None:
    page = report.PAGE.read_text()
    assert report.MARKS.search(page)
    if report.RECORD.exists():
        assert report.filled(page, report.read()) == page


@pytest.mark.parametrize(
    ("part", "found", "promise"),
    [
        ("races", {"activations": {**TALLY, "racing": 1}}, "no race"),
        ("mutants", [{"name": "nothing waits", "found": False}], "every mutant"),
        ("memory", [{**ROW, "over": 10}], "allocated bytes"),
        ("memory", [{**ROW, "requested": 1001, "over": 0}], "in expandable segments, requested"),
        ("memory", [{**ROW, "requested": 990, "over": 0}], "in expandable segments, requested"),
        ("tests", {"passed": 3, "failed": 1}, "tests/test_cuda.py"),
        ("auto", [LOOP, {**LOOP, "steps": 1, "ended": "OutOfMemoryError"}], 'training with mem="auto"'),
        ("attention", [{"device": "A100", "cases": 264, "equal": 263, "others": {"math -> flash": 1}}], "attention"),
        ("lost", ["run_tests"], "every job"),
    ],
)
def test_claims_tell_what_is_not_held(part: str, found: Any, promise: str) -> None:
    assert all(claim.held for claim in report.claims(GOOD))
    broken = [claim for claim in report.claims({**GOOD, part: found}) if not claim.held]
    assert len(broken) == 1
    assert broken[0].promise.startswith(promise)


def test_the_tables_have_every_part() -> None:
    text, page = report.table(GOOD), report.markdown({"2.11.0": GOOD, "2.9.1": {"date": "2026-01-02"}})
    for word in ("activations", "nothing waits", "gpt", "A100", "no race: held"):
        assert word in text
    assert page.index("torch 2.9.1") < page.index("torch 2.11.0")
    assert "264 of 264" in page


def test_jobs_have_as_many_programs_as_asked_for() -> None:
    jobs = list(command.jobs(command.PARTS, 1000))
    assert sum(job.arguments["count"] for job in jobs if job.part == "races") == 1000
    assert {job.does for job in jobs} == set(command.DOES)
    firsts = Counter((job.arguments["kind"], job.arguments["first"]) for job in jobs if job.part == "races")
    assert set(firsts.values()) == {1}


def test_results_of_jobs_are_put_together() -> None:
    job = command.Job(part="races", does="run_programs")
    rows = command.Job(part="memory", does="look_at_memory")
    record = command.joined([(job, {"a": TALLY}), (job, {"a": TALLY}), (rows, [1]), (rows, [2])])
    assert record["races"]["a"]["programs"] == 20
    assert record["memory"] == [1, 2]


def test_symbols_have_the_versions_that_are_looked_up() -> None:
    library = Library(soname="libx.so.1", symbols={"libx.so.1": {"xDo", "xAsk"}})
    assert version_script(library) == "libx.so.1 { global: xAsk; xDo; pretended_*; };\n"
    assert version_script(Library(soname="libx.so.1", symbols={"": {"xDo"}})) == "{ global: *; };\n"
