"""The state that every test starts from: one thread, a cost cache of its own, and a compiler that remembers nothing."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before torch is imported: its profiler reports every start and stop otherwise.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import importlib.util

import hypothesis
import pytest

# Without bytecode on disk, every worker and every child process compiles the package and the tests again, and pytest
# rewrites their assertions again, which is half of the time until tests begin.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def _let_torchvision_be_imported() -> None:
    """Declare what a torchvision without its compiled operators registers, where that is the one installed (for timm).

    Beside a CPU build of torch, a wheel of torchvision that was built for CUDA cannot load them; no test calls them.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


_libraries: list[object] = []  # torch forgets the declarations with their library
_let_torchvision_be_imported()


LONG = frozenset((Path(__file__).parent / "long.txt").read_text().splitlines())


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of `long.txt` as long: slow ones, the lines of which everyday tests execute, too."""
    if item.nodeid in LONG:
        item.add_marker("long")


@pytest.fixture(scope="session", autouse=True)
def _own_cost_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measured costs are shared within a run of the tests and never read from the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FXREMAT_CACHE", str(tmp_path_factory.getbasetemp() / "cost-cache"))
        yield


@pytest.fixture(scope="module", autouse=True)
def _collect_only_what_is_new() -> None:
    """Collections look through what came after a file's first test alone: each took a second at the end of all tests.

    What is held here is held by modules and caches, which stay.
    """
    gc.collect()
    gc.freeze()


os.environ["FXREMAT_VERIFY"] = "1"  # programs are checked against their step graphs, in child processes too
_tests = itertools.count()


@pytest.fixture(autouse=True)
def _own_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test searches by itself, in the way that it has set: nothing is found of earlier tests on disk."""
    monkeypatch.setattr("fxremat.planning.stored.TABLE", f"searches_{next(_tests)}")


@pytest.fixture(scope="session", autouse=True)
def _short_searches() -> Iterator[None]:
    """Searches for better programs stop far earlier than users' do; what is promised does not depend on it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fxremat.search.refine.PAGES", 50_000)
        patch.setattr("fxremat.search.improve.PATIENCE", 50)
        yield


@pytest.fixture
def surveys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[int]]:
    """One entry for each survey that is really made; nothing is known of earlier ones, or kept of these."""
    from fxremat.planning import frontier_cache, surveys
    from fxremat.search.survey import survey

    made: list[int] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        made.append(1)
        return survey(*arguments, **options)

    monkeypatch.setattr(surveys, "survey", counted)
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path))
    frontier_cache._latest.clear()
    yield made
    frontier_cache._latest.clear()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every graph that is captured during the test, in order."""
    from fxremat.runtime import dynamo

    seen: list[object] = []

    def noted(module: Any, passes: Any) -> Any:
        seen.append(module)
        return original(module, passes)

    original = dynamo.normalize
    monkeypatch.setattr(dynamo, "normalize", noted)
    return seen


@pytest.fixture
def torch_ready() -> Iterator[None]:
    """One thread, seed 0, and no compiled graphs left from the test before.

    For files whose tests use torch: `pytestmark = pytest.mark.usefixtures("torch_ready")`.
    """
    import torch

    from fxremat.torch_inductor import link_in_any_folder

    if " " in torch.__file__:  # torch.compile, which steps are compared with, does not link there before 2.14
        link_in_any_folder()
    _do_not_time_guards()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@functools.cache
def _do_not_time_guards() -> None:
    """Leave out what dynamo times once for each graph, for its log: it empties the processor's caches, in 27 ms."""
    from torch._dynamo import guards

    if hasattr(guards, "profile_guard_manager"):  # torch 2.11 to 2.15
        guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[assignment]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the texts in tests/golden anew")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cuda = [item for item in items if item.get_closest_marker("cuda")]
    if cuda and not _cuda_is_available():
        for item in cuda:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def _cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()


# Everyday runs draw the same examples every time; HYPOTHESIS_PROFILE=wide draws new ones.
hypothesis.settings.register_profile("everyday", derandomize=True)
hypothesis.settings.register_profile("wide", derandomize=False)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "everyday"))
