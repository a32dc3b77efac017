"""docs/solvers.md: its examples run, its tables name every solver, and its figures are those on record."""

import contextlib
import doctest
import io
import re
import shlex

import pytest

from benchmarks import solver_page
from fxremat.__main__ import main
from fxremat.solvers.registry import CHOSEN, JOINS, SOLVERS

TEXT = solver_page.PAGE.read_text(encoding="utf-8")
PYTHON = "".join(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))
SHELL = "".join(re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL))


@pytest.mark.long
def test_the_examples_run(tmp_path, monkeypatch, capsys):
    """The Python first: it writes the files that the commands read."""
    monkeypatch.chdir(tmp_path)
    test = doctest.DocTestParser().get_doctest(PYTHON, {}, "solvers.md", None, 0)
    assert len(test.examples) > 20
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()):
        failed, _ = doctest.DocTestRunner().run(test, out=said.write)
    assert not failed, said.getvalue()
    commands = SHELL.split("$ python -m fxremat ")[1:]
    assert len(commands) >= 3
    for command in commands:
        line, _, promised = command.partition("\n")
        status = main(shlex.split(line))
        printed = capsys.readouterr()
        assert printed.out + printed.err == promised
        assert status == (2 if printed.err else 0)


def test_every_solver_is_in_its_table():
    chains, joins = TEXT.split("## Joins")
    tables = chains.split("<!-- optimality")[0].split("## References")
    chosen, references = (re.findall(r"^\| `(\w+)` \|.*\|.*\|.*\|.*\|$", t, re.MULTILINE) for t in tables)
    assert chosen == list(CHOSEN)
    assert references == [name for name in SOLVERS if name not in CHOSEN]
    assert re.findall(r"^\| `(\w+)` \|", joins, re.MULTILINE) == list(JOINS)


@pytest.mark.long
def test_the_figures_are_those_on_record():
    assert solver_page.filled(TEXT) == TEXT, "run `python -m benchmarks.solver_page`"
    assert "misses the optimum" in TEXT


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#:]+)\)", TEXT))))
def test_links_lead_somewhere(path):
    assert (solver_page.PAGE.parent / path).exists()
