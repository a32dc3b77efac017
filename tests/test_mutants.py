"""The mutator makes the mistakes it says, one at a time, and leaves the rest of a module alone."""

from __future__ import annotations

import pytest

from tests.mutants import Record, mutants_of

pytestmark = pytest.mark.long

CASES = {
    "x = a < b <= c": ["x = a <= b <= c", "x = a < b < c"],
    "x = 3": ["x = 4"],
    "x = 0.5": ["x = 1.5"],
    "x = True": ["x = False"],
    "x = 'text'": [],
    'x = f"{1 + 1}"': [],
    "def f(a: 'list[1]') -> 2: return a": [],
    "a + b": ["pass", "a - b"],
    "a and b": ["pass", "a or b"],
    "x += y": ["pass", "x -= y"],
    "x[y] = z": ["pass"],
    "f(é, a is b)": ["pass", "f(é, a is not b)"],
    "while go(): pass": ["while not go(): pass"],
    "x = a if b else c": ["x = a if not b else c"],
    "assert a < 1, 'text'": [],
    "x = zip(a, b, strict=True)": [],
    "def __repr__(self): return 1": [],
    "if TYPE_CHECKING: x = 1": [],
    "LIMIT = 1 << 20": [],
    "PLACES = 3, 4": ["PLACES = 4, 4", "PLACES = 3, 5"],
    "def f(): x = 100": ["def f(): x = 101"],
}


@pytest.mark.parametrize("source", CASES)
def test_mistakes_of_a_line(source: str) -> None:
    found = [mutant.source for mutant in mutants_of(source)]
    assert [plain(text) for text in found] == [plain(text) for text in CASES[source]]


def plain(source: str) -> str:
    return source.replace("(", "").replace(")", "").replace(" ", "")


def test_a_mutant_changes_its_line_alone() -> None:
    source = '"""Two lines."""\n\nfirst = 1  # é\nsecond = (é +\n          2)\n'
    lines = source.splitlines()
    for mutant in mutants_of(source):
        assert mutant.source != source
        assert mutant.source.splitlines()[: mutant.line - 1] == lines[: mutant.line - 1]
    assert [str(mutant) for mutant in mutants_of(source)] == [
        "3: 1  ->  2",
        "4: é + 2  ->  é - 2",
        "5: 2  ->  3",
    ]


def test_the_quickest_tests_of_a_line_are_chosen() -> None:
    seconds = {"slow": 9.0, "quick": 0.1, "other": 5.0, "elsewhere": 0.0}
    lines = {"2": [], "7": ["slow", "quick", "other"], "8": ["slow"]}
    record = Record(libraries=[], seconds=seconds, lines={"fxremat/cost/a.py": lines})
    assert record.choose("fxremat/cost/a.py", 7, 7) == ["quick", "other"]
    assert record.choose("fxremat/cost/a.py", 9, 8) == ["slow"]
    assert record.choose("fxremat/cost/a.py", 9, 9) == []
    assert record.choose("fxremat/cost/a.py", 3, 2) == ["quick", "other"]  # run by the import


def test_the_tests_of_a_module_come_first() -> None:
    seconds = {"tests/test_main.py::a": 0.1, "tests/cost/test_walk.py::b": 2.0, "tests/test_cache.py::c": 1.0}
    record = Record(libraries=[], seconds=seconds, lines={"fxremat/cost/cache.py": {"1": [*seconds]}})
    assert record.choose("fxremat/cost/cache.py", 1, 1) == [
        "tests/test_cache.py::c", "tests/cost/test_walk.py::b", "tests/test_main.py::a",
    ]  # fmt: skip
