"""Mutation testing: the share of small mistakes in a module that the tests notice, and those that none does.

    python -m tests.mutants [--sample 20] [--seed 0] [--tests tests/some tests/others] [--json FILE] -- FILE.py ...

    a comparison flipped, a number off by one, + and - or `and` and `or` swapped, a condition negated, a statement
    dropped, True and False swapped

All happens in a copy of the repository. First the tests run there unchanged, twice: under coverage.py, which records
the test that executes each line, then without it, for their seconds. A test that fails either time is left out of what
follows. Each mutant is then put to the tests that execute its line, those of its module and the quickest first, in a
fork of a process that has imported all libraries. It is noticed when one of the tests fails, or when they do not end.

What is not mutated, because no mistake in it changes what the code does, or because no test could tell:

    annotations, decorators, and what `if TYPE_CHECKING` guards
    text, what f-strings contain, and methods named `__repr__`
    assertions and `strict=` of zip, which are checks themselves
    numbers from 100 on in constants of a module, which are limits and sizes: one more makes no difference
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import hashlib
import importlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / ".cache" / "mutants"
NOT_COPIED = (".git", ".venv", ".*cache", ".hypothesis", "*.egg-info")
QUICK = "@tests/quick.txt"
SECONDS = 10.0  # of tests for a mutant, at most
PATIENCE = 20.0  # seconds beyond three times what its tests take, before a mutant counts as endless
KEPT = 3  # records, besides the latest
RAN = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
LARGE = 100  # the least number that counts as a limit or a size in a constant of a module
FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
SWAPPED: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A module with one mistake."""

    line: int  # from 1
    statement: int  # the line on which its statement begins
    before: str
    after: str
    source: str  # of the whole module

    def __str__(self) -> str:
        return f"{self.line}: {self.before}  ->  {self.after}"


def mutants_of(source: str) -> list[Mutant]:
    """All mutants of a module, in the order of its lines."""
    encoded = source.encode()
    starts = [0]
    for line in encoded.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for old, new, statement in _changes(ast.parse(source), 1):
        begin = starts[old.lineno - 1] + old.col_offset
        end = starts[(old.end_lineno or 0) - 1] + (old.end_col_offset or 0)
        text = ast.unparse(new) if isinstance(new, ast.stmt) else f"({ast.unparse(new)})"
        mutated = (encoded[:begin] + text.encode() + encoded[end:]).decode()
        before, after = ast.unparse(old), ast.unparse(new)
        found.append(Mutant(line=old.lineno, statement=statement, before=before, after=after, source=mutated))
    return sorted(found, key=lambda mutant: mutant.line)


def _changes(node: ast.AST, statement: int) -> Iterator[tuple[Any, Any, int]]:
    """A part of the tree, what stands there instead, and the line on which its statement begins: all of them."""
    if _means_nothing(node):
        return
    if isinstance(node, ast.stmt):
        statement = node.lineno
    yield from ((node, new, statement) for new in _instead(node))
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare):
        yield node.test, ast.UnaryOp(ast.Not(), node.test), statement
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not (isinstance(node, ast.Module) and _is_limit(child)):
                yield from _changes(child, statement)


def _means_nothing(node: ast.AST) -> bool:
    """Tell whether no mistake in a part of the tree changes what the code does, as the top of this file lists them."""
    match node:
        case ast.JoinedStr() | ast.Assert() | ast.FunctionDef(name="__repr__") | ast.keyword(arg="strict"):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case _:
            return False


def _is_limit(statement: ast.AST) -> bool:
    """Tell whether a statement of a module gives a name to a large number."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        return False
    try:
        number = eval(compile(ast.Expression(statement.value), "", "eval"), {"__builtins__": {}})
    except Exception:  # refers to something else
        return False
    return isinstance(number, int | float) and number >= LARGE


def _instead(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=ops):
            for place, op in enumerate(ops):
                yield _with(node, ops=[*ops[:place], FLIPPED[type(op)](), *ops[place + 1 :]])
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.BinOp(op=ast.Add() | ast.Sub() as op):
            yield _with(node, op=SWAPPED[type(op)]())
        case ast.BoolOp(op=op):
            yield _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.AugAssign(op=op):
            yield ast.Pass()
            if type(op) in SWAPPED:
                yield _with(node, op=SWAPPED[type(op)]())
        case ast.Expr(value=value) if not isinstance(value, ast.Constant):
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case ast.Raise() | ast.Delete() | ast.Continue() | ast.Break():
            yield ast.Pass()


def _with(node: ast.AST, **changed: Any) -> ast.AST:
    return type(node)(**{**dict(ast.iter_fields(node)), **changed})


@dataclass(frozen=True, kw_only=True)
class Record:
    """Results of the tests on the unchanged sources."""

    libraries: list[str]  # modules of others that the tests import
    seconds: dict[str, float]  # of each test that passed, by node id
    lines: dict[str, dict[str, list[str]]]  # of each file, tests that execute a line; none where an import does

    def choose(self, file: str, line: int, statement: int) -> list[str]:
        """The tests that execute a line, of `SECONDS` together: its module's own first, then the quickest.

        There is at least one where any test executes the line.
        """
        chosen, spent = [], 0.0
        reaching = self._reaching(file, line, statement)
        for test in sorted(reaching, key=lambda test: (not _is_near(test, file), self.seconds[test], test)):
            spent += self.seconds[test]
            if chosen and spent > SECONDS:
                break
            chosen.append(test)
        return chosen

    def _reaching(self, file: str, line: int, statement: int) -> set[str]:
        """The tests that execute a line or, where Python does not tell it apart, the beginning of its statement.

        What runs when the module is imported is in the hands of all tests that execute any line of it.
        """
        lines = self.lines.get(file, {})
        for place in (str(line), str(statement)):
            if tests := lines.get(place):
                return set(tests)
        imported = str(line) in lines or str(statement) in lines
        return set().union(*lines.values()) if imported else set()


def _is_near(test: str, file: str) -> bool:
    """Tell whether a test stands in the folder of a module's tests, or in a file named after it or its folder."""
    path, (_, *folders) = Path(test.partition("::")[0]), Path(file).parent.parts
    return path.parent.name in folders or path.stem.removeprefix("test_") in (*folders, Path(file).stem)


class Watch:
    """A plugin of pytest that notes what each test took, and tells coverage.py which one runs."""

    def __init__(self, coverage: Any = None) -> None:
        self.coverage = coverage
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self.coverage is not None:
            self.coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            if self.coverage is not None:
                self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    @property
    def passed(self) -> dict[str, float]:
        """Seconds of each test that passed."""
        return {test: seconds for test, seconds in self.seconds.items() if test not in self.failed}


class _Only:
    """A plugin of pytest that runs these tests and no others, in this order."""

    def __init__(self, tests: Sequence[str]) -> None:
        self.place = {test: place for place, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self.place), key=lambda item: self.place[item.nodeid]
        )


def _files_of(tests: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(test.partition("::")[0] for test in tests))


def _record_lines(copy: Path, tests: list[str], file: Path) -> int:
    """Run the tests under coverage.py, and write a `Record`; in a process of its own."""
    import coverage

    measured = coverage.Coverage(
        data_file=None, include=[str(copy / "*")], omit=[str(copy / "tests" / "*")], config_file=False
    )
    watch = Watch(measured)
    measured.start()
    status = _pytest(copy, tests, [watch])
    measured.stop()
    data = measured.get_data()
    lines = {
        str(Path(path).relative_to(copy)): {
            str(line): sorted(watch.passed.keys() & set(contexts))
            for line, contexts in data.contexts_by_lineno(path).items()
        }
        for path in data.measured_files()
    }
    libraries = [name for name, module in list(sys.modules.items()) if _is_library(module, copy)]
    file.write_text(json.dumps({"libraries": libraries, "seconds": watch.passed, "lines": lines}))
    return 0 if status in RAN else status


def _record_seconds(copy: Path, file: Path) -> int:
    """Run the tests of a record as they run for mutants, and keep those that pass; in a process of its own."""
    known = json.loads(file.read_text())
    watch = Watch()
    tests = sorted(known["seconds"])
    status = _pytest(copy, _files_of(tests), [watch, _Only(tests)])
    lines = {
        path: {line: sorted(watch.passed.keys() & set(reached)) for line, reached in by_line.items()}
        for path, by_line in known["lines"].items()
    }
    file.write_text(json.dumps(known | {"seconds": watch.passed, "lines": lines}))
    return 0 if status in RAN else status


def record(copy: Path, tests: list[str]) -> Record:
    """The record of these tests on these sources: from an earlier run where nothing has changed since."""
    sources = sorted(path for path in copy.rglob("*") if path.suffix in (".py", ".txt"))
    digest = hashlib.sha256(repr([(str(p.relative_to(copy)), p.read_bytes()) for p in sources] + tests).encode())
    file = RECORDS / f"{digest.hexdigest()[:16]}.json"
    if not file.exists():
        RECORDS.mkdir(parents=True, exist_ok=True)
        print(f"running the tests twice, unchanged: {file.relative_to(ROOT)}", flush=True)
        written = file.with_suffix(".part")
        for work in (lambda: _record_lines(copy, tests, written), lambda: _record_seconds(copy, written)):
            if _in_a_process(work, copy, timeout=None):
                raise SystemExit("the tests ended early:\n" + (copy / "log").read_text()[-2000:])
        for old in sorted(RECORDS.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink()
        written.rename(file)
    return Record(**json.loads(file.read_text()))


class Verdict(Enum):
    """The fate of a mutant."""

    NOTICED = "noticed"
    ENDLESS = "endless"
    SURVIVED = "survived"
    UNREACHED = "unreached"


def judge(copy: Path, file: str, mutant: Mutant, known: Record) -> Verdict:
    """Put a mutant in the place of its module, run the tests that reach it, and put the module back."""
    tests = known.choose(file, mutant.line, mutant.statement)
    if not tests:
        return Verdict.UNREACHED
    path = copy / file
    original, stat = path.read_bytes(), path.stat()
    path.write_text(mutant.source)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + next(_seconds_later) * 10**9))
    try:
        patience = PATIENCE + 3 * sum(known.seconds[test] for test in tests)
        run = ["-x", *_files_of(tests)]
        status = _in_a_process(lambda: _pytest(copy, run, [_Only(tests)]), copy, timeout=patience)
    finally:
        path.write_bytes(original)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    if status is None:
        return Verdict.ENDLESS
    nothing_failed = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    return Verdict.SURVIVED if status in nothing_failed else Verdict.NOTICED


_seconds_later = itertools.count(1)  # each mutant has a time of its own: bytecode of another is not taken for its


def _pytest(copy: Path, arguments: list[str], plugins: list[object]) -> int:
    options = ["-q", "-p", "no:cacheprovider", "--assert=plain", f"--rootdir={copy}"]
    options += [f"--basetemp={copy.parent / 'tmp'}", "-c", str(copy / "pyproject.toml")]
    return int(pytest.main([*options, *arguments], plugins=plugins))


def _in_a_process(work: Callable[[], int], copy: Path, timeout: float | None) -> int | None:
    """Return what `work` returns in a fork of this process whose sources are the copy's; None after `timeout` seconds.

    A fork, because what the tests import from elsewhere takes seconds and is imported already.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        log = os.open(copy / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(copy)
        sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
        for name in [n for n, module in sys.modules.items() if n != "__main__" and _is_ours(module)]:
            del sys.modules[name]
        status = 99
        try:
            status = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    end = time.monotonic() + (timeout or 1e9)
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _is_ours(module: Any) -> bool:
    return _is_below(module, ROOT) and not _is_below(module, Path(sys.prefix))


def _is_library(module: Any, copy: Path) -> bool:
    """Tell whether a module may be imported before its user is: its file is none of ours, and pytest rewrites none."""
    return hasattr(module, "__file__") and not _is_ours(module) and not _is_below(module, copy)


def _is_below(module: Any, folder: Path) -> bool:
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), "")
    return Path(file).is_relative_to(folder)


def _import(libraries: list[str]) -> None:
    """Import modules that forks then need not; one that cannot be imported by itself is left out."""
    for library in libraries:
        with contextlib.suppress(Exception):
            importlib.import_module(library)
    gc.collect()
    gc.freeze()  # a fork writes to none of it


def _required() -> list[str]:
    """The libraries that the project depends on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [re.split(r"[^\w.]", requirement)[0] for requirement in project["dependencies"]]


def main(arguments: list[str] | None = None) -> None:
    """Print each survivor, and the share noticed of each module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.py")
    parser.add_argument("--sample", type=int, default=20, help="mutants of each file; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="+", default=[QUICK], help=f"that may notice; {QUICK} otherwise")
    parser.add_argument("--json", type=Path, help="a file of results, in which those of these files are replaced")
    options = parser.parse_args(arguments)
    files = [str(file.resolve().relative_to(ROOT)) for file in options.files]
    _import(_required())
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve() / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
        known = record(copy, options.tests)
        _import(known.libraries)
        for file in files:
            result = examine(copy, file, known, options.sample, options.seed)
            print(f"{file}: {result}", flush=True)
            if options.json:
                _write(options, file, result)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The fates of a sample of the mutants of a file."""

    mutants: int  # that there are
    sample: int
    noticed: int  # of the sample
    endless: int  # of those noticed
    survivors: list[str]

    def __str__(self) -> str:
        if not self.sample:
            return "nothing to mutate"
        share = f"{self.noticed / self.sample:.0%} noticed"
        return f"{share} ({self.noticed} of {self.sample}, {self.endless} endless; {self.mutants} mutants in all)"


def examine(copy: Path, file: str, known: Record, sample: int, seed: int) -> Result:
    """Judge a sample of the mutants of a file, and print the survivors."""
    mutants = mutants_of((copy / file).read_text())
    chosen = mutants if not sample else random.Random(seed).sample(mutants, min(sample, len(mutants)))
    verdicts, survivors = [], []
    for mutant in sorted(chosen, key=lambda mutant: mutant.line):
        verdicts.append(judge(copy, file, mutant, known))
        if verdicts[-1] in (Verdict.SURVIVED, Verdict.UNREACHED):
            survivors.append(f"{mutant}" + " (no test gets there)" * (verdicts[-1] is Verdict.UNREACHED))
            print(f"{file}:{survivors[-1]}", flush=True)
    return Result(
        mutants=len(mutants),
        sample=len(verdicts),
        noticed=len(verdicts) - len(survivors),
        endless=verdicts.count(Verdict.ENDLESS),
        survivors=survivors,
    )


def _write(options: argparse.Namespace, file: str, result: Result) -> None:
    """Put a result in the place of the last one of its file."""
    known = json.loads(options.json.read_text())["files"] if options.json.exists() else {}
    tests = " ".join(options.tests)
    command = f"python -m tests.mutants --sample {options.sample} --seed {options.seed} --tests {tests} -- FILE.py ..."
    files = dict(sorted((known | {file: asdict(result)}).items()))
    options.json.write_text(json.dumps({"command": command, "files": files}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
