"""Mutation testing: the share of small mistakes in a module that the tests notice, and those that none does.

    python -m tests.mutants [--sample 20] [--seed 0] [--tests tests/some tests/others] FILE.py ...

    a comparison flipped, a number off by one, + and - or `and` and `or` swapped, a condition negated, a statement
    dropped, True and False swapped

All happens in a copy of the repository. First the tests run there unchanged, once, and coverage.py records which
test executes which line; a test that fails then is left out of what follows. Each mutant is then put to the quickest
tests that execute its line. It is noticed when one of them fails, or when they do not end.

What is not mutated, because few tests could notice: annotations, decorators, text, and what f-strings contain.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / ".cache" / "mutants"
NOT_COPIED = (".git", ".venv", ".*cache", ".hypothesis", "*.egg-info")
SECONDS = 20.0  # of tests for a mutant, at most
PATIENCE = 30.0  # seconds beyond three times what its tests take, before a mutant counts as endless
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
    for old, new in _changes(ast.parse(source)):
        begin = starts[old.lineno - 1] + old.col_offset
        end = starts[(old.end_lineno or 0) - 1] + (old.end_col_offset or 0)
        text = ast.unparse(new) if isinstance(new, ast.stmt) else f"({ast.unparse(new)})"
        mutated = (encoded[:begin] + text.encode() + encoded[end:]).decode()
        found.append(
            Mutant(line=old.lineno, before=ast.unparse(old), after=ast.unparse(new), source=mutated)
        )
    return sorted(found, key=lambda mutant: mutant.line)


def _changes(node: ast.AST) -> Iterator[tuple[Any, Any]]:
    """Pairs of a part of the tree and what stands there instead."""
    yield from ((node, new) for new in _instead(node))
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare):
        yield node.test, ast.UnaryOp(ast.Not(), node.test)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield from _changes(child)


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
    """What the tests did on the unchanged sources."""

    seconds: dict[str, float]  # of each test that passed, by node id
    lines: dict[str, dict[str, list[str]]]  # of each file, tests that execute a line

    def choose(self, file: str, line: int) -> list[str]:
        """The quickest tests that execute a line, of `SECONDS` together; at least one where there is any."""
        chosen, spent = [], 0.0
        for test in sorted(self.lines.get(file, {}).get(str(line), []), key=self.seconds.__getitem__):
            spent += self.seconds[test]
            if chosen and spent > SECONDS:
                break
            chosen.append(test)
        return chosen


class _Recorder:
    """A plugin of pytest that tells coverage.py which test runs."""

    def __init__(self, coverage: Any) -> None:
        self.coverage = coverage
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)


def _record(copy: Path, tests: list[str], file: Path) -> int:
    """Run the tests under coverage.py, and write a `Record`; in a process of its own."""
    import coverage

    measured = coverage.Coverage(
        data_file=None, include=[str(copy / "*")], omit=[str(copy / "tests" / "*")], config_file=False
    )
    recorder = _Recorder(measured)
    measured.start()
    _pytest(copy, tests, [recorder])
    measured.stop()
    data, lines = measured.get_data(), {}
    passed = {test: seconds for test, seconds in recorder.seconds.items() if test not in recorder.failed}
    for path in data.measured_files():
        reached = {
            str(line): sorted(passed.keys() & set(contexts))
            for line, contexts in data.contexts_by_lineno(path).items()
        }
        lines[str(Path(path).relative_to(copy))] = reached
    file.write_text(json.dumps({"seconds": passed, "lines": lines}))
    return 0


def record(copy: Path, tests: list[str]) -> Record:
    """The record of these tests on these sources: from an earlier run where nothing has changed since."""
    sources = sorted(path for path in copy.rglob("*.py") if ".cache" not in path.parts)
    digest = hashlib.sha256(repr([(str(p.relative_to(copy)), p.read_bytes()) for p in sources] + tests).encode())
    file = RECORDS / f"{digest.hexdigest()[:16]}.json"
    if not file.exists():
        RECORDS.mkdir(parents=True, exist_ok=True)
        print(f"running {' '.join(tests) or 'the tests'} once, unchanged: {file.relative_to(ROOT)}", flush=True)
        _in_a_process(lambda: _record(copy, tests, file), copy, timeout=None)
        if not file.exists():
            raise SystemExit("the tests ended early:\n" + (copy / "log").read_text()[-2000:])
    return Record(**json.loads(file.read_text()))


class Verdict(Enum):
    """What became of a mutant."""

    NOTICED = "noticed"
    ENDLESS = "endless"
    SURVIVED = "survived"
    UNREACHED = "unreached"


def judge(copy: Path, file: str, mutant: Mutant, known: Record) -> Verdict:
    """Put a mutant in the place of its module, run the tests that reach it, and put the module back."""
    tests = known.choose(file, mutant.line)
    if not tests:
        return Verdict.UNREACHED
    path = copy / file
    original, stat = path.read_bytes(), path.stat()
    path.write_text(mutant.source)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + random.randrange(1, 10**6) * 10**9))
    try:
        patience = PATIENCE + 3 * sum(known.seconds[test] for test in tests)
        status = _in_a_process(lambda: _pytest(copy, ["-x", *tests]), copy, timeout=patience)
    finally:
        path.write_bytes(original)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    if status is None:
        return Verdict.ENDLESS
    return Verdict.SURVIVED if status == 0 else Verdict.NOTICED


def _pytest(copy: Path, arguments: list[str], plugins: list[object] | None = None) -> int:
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={copy}"]
    return int(pytest.main([*options, "-c", str(copy / "pyproject.toml"), *arguments], plugins=plugins))


def _in_a_process(work: Callable[[], int], copy: Path, timeout: float | None) -> int | None:
    """What `work` returns in a fork of this process whose sources are the copy's; None after `timeout` seconds.

    A fork, because what the tests import from elsewhere takes seconds and is imported already.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        log = os.open(copy / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(copy)
        sys.dont_write_bytecode = True
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
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), "")
    return Path(file).is_relative_to(ROOT) and not Path(file).is_relative_to(sys.prefix)


def _import_what_they_need() -> None:
    """Import the libraries that the project depends on, which forks then need not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        importlib.import_module(re.split(r"[^\w.]", requirement)[0])


def main(arguments: list[str] | None = None) -> None:
    """Print each survivor, and the share noticed of each module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.py")
    parser.add_argument("--sample", type=int, default=20, help="mutants of each file; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="+", default=[], help="that may notice; all everyday ones otherwise")
    options = parser.parse_args(arguments)
    files = [str(file.resolve().relative_to(ROOT)) for file in options.files]
    _import_what_they_need()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve() / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
        known = record(copy, options.tests)
        for file in files:
            report(copy, file, known, options.sample, options.seed)


def report(copy: Path, file: str, known: Record, sample: int, seed: int) -> None:
    """Judge a sample of the mutants of a file, and print what came of it."""
    mutants = mutants_of((copy / file).read_text())
    chosen = mutants if not sample else random.Random(seed).sample(mutants, min(sample, len(mutants)))
    verdicts = []
    for mutant in sorted(chosen, key=lambda mutant: mutant.line):
        verdicts.append(judge(copy, file, mutant, known))
        if verdicts[-1] in (Verdict.SURVIVED, Verdict.UNREACHED):
            print(f"{file}:{mutant}" + (" (no test gets there)" * (verdicts[-1] is Verdict.UNREACHED)), flush=True)
    noticed = sum(verdict in (Verdict.NOTICED, Verdict.ENDLESS) for verdict in verdicts)
    share = f"{noticed / len(verdicts):.0%}" if verdicts else "nothing to mutate"
    endless = verdicts.count(Verdict.ENDLESS)
    print(
        f"{file}: {share} noticed ({noticed} of {len(verdicts)}, {endless} endless; {len(mutants)} mutants in all)",
        flush=True,
    )


if __name__ == "__main__":
    main()
