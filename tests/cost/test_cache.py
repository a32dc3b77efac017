"""The cost cache: what decides a cost is in its key, and whatever happens to its file, plans are made."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from benchmarks import meter
from fxremat import store
from fxremat.cost import environment as surroundings
from fxremat.cost.cache import CostCache
from fxremat.cost.environment import cuda_hardware, cuda_switches, switches
from fxremat.settings import Search
from fxremat.step.costs import OpCost
from tests.toys import Loss

pytestmark = pytest.mark.usefixtures("torch_ready")

CPU = torch.device("cpu")
COST = OpCost(1.5, 7, (4, 0))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "costs.sqlite"


def kept(path: Path, **costs: OpCost) -> CostCache:
    cache = CostCache(path)
    for key, cost in (costs or {"key": COST}).items():
        cache.keep_op(key, cost)
    cache.save()
    return cache


def test_what_is_kept_is_there_in_the_next_process(path: Path) -> None:
    first = kept(path)
    assert first.op("key") == COST
    again = CostCache(path)
    assert again.op("key") == COST
    assert again.op("other") is None
    again.keep("factor", [0.75])
    again.keep_op("key", OpCost(2.0, 0))
    again.save()
    last = CostCache(path)
    assert (last.numbers("factor"), last.numbers("factor", 1), last.numbers("factor", 2)) == ([0.75], [0.75], None)
    assert last.op("key") == OpCost(2.0, 0)
    assert [file.name for file in path.parent.iterdir()] == ["costs.sqlite"]


def test_a_cost_that_was_just_measured_is_believed_whatever_it_is(path: Path) -> None:
    cache = kept(path, zero=OpCost(0.0, 0))
    assert cache.op("zero") == OpCost(0.0, 0)
    assert CostCache(path).op("zero") is None


# What a file may be instead of a cache.

FOREIGN: dict[str, bytes] = {
    "nothing": b"",
    "text": b"{ not json",
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "another shape": b'{"a": null, "b": [null], "c": [[1]]}',
    "not numbers": b'{"key": [NaN, Infinity, 1e999]}',
    "a large number": b'{"key": [1' + b"0" * 400 + b"]}",
    "nested": b"[" * 100_000 + b"]" * 100_000,
    "random": bytes(range(256)) * 64,
    "a cut header": b"SQLite format 3\0",
    "a broken database": b"SQLite format 3\0" + bytes(range(256)) * 64,
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_that_is_no_cache_counts_as_absent_and_is_replaced(kind: str, path: Path) -> None:
    path.write_bytes(FOREIGN[kind])
    assert CostCache(path).op("key") is None
    kept(path)
    assert CostCache(path).op("key") == COST


@pytest.mark.parametrize(
    "table", ["costs (a)", "costs (key TEXT, content BLOB)", "others (key TEXT, content BLOB)"]
)
def test_a_database_with_other_tables_counts_as_absent(table: str, path: Path) -> None:
    with closing(sqlite3.connect(path)) as file, file:
        file.execute(f"CREATE TABLE {table}")
    assert CostCache(path).op("key") is None
    kept(path)
    assert CostCache(path).op("key") == COST


def doubles(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}d", *numbers)


def undoubled(row: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(row) // 8}d", row))


IMPLAUSIBLE: dict[str, Any] = {
    "text": "1.5, 7",
    "an integer": 3,
    "an empty blob": b"",
    "an odd blob": b"12345",
    "a huge blob": bytes(1 << 17),
    "one number": doubles(1.5),
    "no seconds": doubles(0.0, 7),
    "negative seconds": doubles(-1.5, 7),
    "infinite seconds": doubles(math.inf, 7),
    "seconds that are no number": doubles(math.nan, 7),
    "negative bytes": doubles(1.5, -7),
    "half a byte": doubles(1.5, 7.5),
    "infinite bytes": doubles(1.5, 7, math.inf),
    "bytes that are no number": doubles(1.5, 7, math.nan),
}


@pytest.mark.parametrize("kind", IMPLAUSIBLE)
def test_an_implausible_row_counts_as_absent(kind: str, path: Path) -> None:
    kept(path, good=COST)
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("INSERT INTO costs VALUES ('bad', ?, 0)", (IMPLAUSIBLE[kind],))
        file.execute("INSERT INTO costs VALUES (CAST(x'ff' AS TEXT), ?, 0)", (doubles(1, 2),))  # not UTF-8
    cache = CostCache(path)
    assert (cache.op("bad"), cache.op("good")) == (None, COST)


@pytest.mark.parametrize("number", [0.0, -1.0, math.inf, math.nan])
def test_speeds_and_factors_are_finite_and_positive(number: float, path: Path) -> None:
    cache = CostCache(path)
    cache.keep("factor", [number])
    cache.keep("link", [1e9, number])
    cache.save()
    assert CostCache(path).numbers("factor") is None
    assert CostCache(path).numbers("link", 2) is None


def test_a_file_that_is_too_large_is_not_read_and_is_replaced(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(path)
    monkeypatch.setattr(store, "MOST_FILE", 100)
    assert CostCache(path).op("key") is None
    kept(path, new=COST)
    monkeypatch.undo()
    assert (CostCache(path).op("key"), CostCache(path).op("new")) == (None, COST)


def test_a_large_foreign_file_takes_no_time(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b'{"a": [')
        file.truncate(store.MOST_FILE)
    start = time.perf_counter()
    assert CostCache(path).op("key") is None
    assert time.perf_counter() - start < 1


def test_places_that_cannot_be_written_keep_nothing_and_raise_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder.sqlite").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe.sqlite")
    for path in ("folder.sqlite", "file/costs.sqlite", "pipe.sqlite"):
        assert kept(tmp_path / path).op("key") == COST
        assert CostCache(tmp_path / path).op("key") is None
    monkeypatch.delenv("FXREMAT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert kept(store.folder() / "costs.sqlite").op("key") == COST  # there is no home


def test_a_plan_is_made_whatever_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path))
    model, x = Loss(nn.Linear(4, 4)), torch.ones(2, 4)
    fxremat.plan(model, x, mem="100%", search=Search(seconds=0))
    (file,) = tmp_path.glob("*.sqlite")
    good = store.Store(file).all("costs")
    for damage in ("[]", {"seconds": math.nan}, {"sizes": -1.0}):
        torch._dynamo.reset()
        if isinstance(damage, str):
            file.write_text(damage)
        else:
            rows = {key: doubles(*_damaged(undoubled(row), **damage)) for key, row in good.items()}
            assert store.Store(file).put("costs", rows)
        plan = fxremat.plan(model, x, mem="100%", search=Search(seconds=0))
        assert plan.predicted_time > 0
        assert str(plan)
        assert store.Store(file).all("costs").keys() == good.keys()


def _damaged(numbers: list[float], seconds: float | None = None, sizes: float | None = None) -> list[float]:
    first = numbers[0] if seconds is None else seconds
    return [first, *(size if sizes is None else sizes for size in numbers[1:])]


# Several processes, and faults.

WRITER = """
import sys
from pathlib import Path
from fxremat.cost.cache import CostCache
from fxremat.step.costs import OpCost
path, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
cache = CostCache(path)
print("ready", flush=True)
sys.stdin.readline()
for number in range(count):
    cache.keep_op(f"{name}-{number}", OpCost(1.5, number))
    cache.save()
"""


def writer(path: Path, name: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), name, str(count)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def start(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def close(process: subprocess.Popen[str]) -> None:
    process.wait(timeout=60)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def test_processes_that_write_at_the_same_time_lose_no_keys(path: Path) -> None:
    processes = [writer(path, name, 20) for name in "ab"]
    start(processes)
    for process in processes:
        close(process)
    found = CostCache(path)
    assert all(found.op(f"{name}-{number}") == OpCost(1.5, number) for name in "ab" for number in range(20))


def test_a_killed_writer_leaves_old_keys_and_no_litter(path: Path) -> None:
    kept(path, old=COST)
    for delay in (0.0, 0.02):
        process = writer(path, f"killed-{delay}", 10_000)
        start([process])
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        close(process)
    kept(path, new=COST)
    assert (CostCache(path).op("old"), CostCache(path).op("new")) == (COST, COST)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_full_disk_leaves_no_litter_and_old_keys(path: Path) -> None:
    resource = pytest.importorskip("resource")
    kept(path, old=COST)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, before[1]))
    try:
        many = {f"key-{number}": COST for number in range(1000)}
        assert kept(path, **many).op("key-7") == COST
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert CostCache(path).op("old") == COST


def test_a_file_that_another_process_locks_delays_a_plan_for_a_moment_only(path: Path) -> None:
    kept(path)
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        begun = time.perf_counter()
        cache = kept(path, new=COST)
        assert time.perf_counter() - begun < 3 * store.PATIENCE
    assert cache.op("new") == COST
    assert CostCache(path).op("key") == COST


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_a_file_is_as_open_as_the_user_s_other_files(mask: int, mode: int, path: Path) -> None:
    before = os.umask(mask)
    try:
        kept(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode


def test_without_sqlite_nothing_is_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sqlite3", None)
    assert kept(path).op("key") == COST
    assert not path.exists()


# What the key is made of.

backends: Any = torch.backends
mkldnn, cudnn, cuda = backends.mkldnn, backends.cudnn, backends.cuda
Set = Callable[[Any], object]


def attribute(of: Any, name: str) -> tuple[Callable[[], Any], Set]:
    return (lambda: getattr(of, name)), (lambda value: setattr(of, name, value))


def mkldnn_flag(place: int) -> tuple[Callable[[], Any], Set]:
    def change(value: Any) -> None:
        flags: list[Any] = list(mkldnn.set_flags())
        flags[place] = value
        mkldnn.set_flags(*flags)

    return (lambda: mkldnn.set_flags()[place]), change


FLAGS: dict[str, tuple[Callable[[], Any], Set, Any]] = {  # how to read it, how to set it, another value
    "threads": (torch.get_num_threads, torch.set_num_threads, 2),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "fill uninitialized memory": (
        *attribute(vars(torch.utils)["deterministic"], "fill_uninitialized_memory"),
        False,
    ),
    "flush denormal": (lambda: False, torch.set_flush_denormal, True),
    "float32 matmul": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "mkldnn": (*mkldnn_flag(0), False),
    "mkldnn deterministic": (*mkldnn_flag(1), True),
    "nnpack": (surroundings.nnpack_enabled, backends.nnpack.set_flags, False),
    "mkldnn matmul fp32": (*attribute(mkldnn.matmul, "fp32_precision"), "bf16"),
    "mkldnn conv fp32": (*attribute(mkldnn.conv, "fp32_precision"), "bf16"),
    "mkldnn rnn fp32": (*attribute(mkldnn.rnn, "fp32_precision"), "bf16"),
    "fp32": (*attribute(backends, "fp32_precision"), "tf32"),
    "cudnn": (*attribute(cudnn, "enabled"), False),
    "cudnn benchmark": (*attribute(cudnn, "benchmark"), True),
    "cudnn deterministic": (*attribute(cudnn, "deterministic"), True),
    "cudnn tf32": (*attribute(cudnn, "allow_tf32"), False),
    "cudnn conv fp32": (*attribute(cudnn.conv, "fp32_precision"), "ieee"),
    "cudnn rnn fp32": (*attribute(cudnn.rnn, "fp32_precision"), "ieee"),
    "matmul tf32": (*attribute(cuda.matmul, "allow_tf32"), True),
    "matmul fp32": (*attribute(cuda.matmul, "fp32_precision"), "tf32"),
    "matmul fp16 sums": (*attribute(cuda.matmul, "allow_fp16_accumulation"), True),
    "matmul fp16 reduction": (*attribute(cuda.matmul, "allow_fp16_reduced_precision_reduction"), False),
    "matmul bf16 reduction": (*attribute(cuda.matmul, "allow_bf16_reduced_precision_reduction"), False),
    "attention flash": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp, False),
    "attention efficient": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp, False),
    "attention math": (cuda.math_sdp_enabled, cuda.enable_math_sdp, False),
    "attention cudnn": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp, False),
    "attention reduction": (
        cuda.fp16_bf16_reduction_math_sdp_allowed,
        cuda.allow_fp16_bf16_reduction_math_sdp,
        True,
    ),
}


@pytest.fixture
def flag(request: pytest.FixtureRequest) -> Iterator[tuple[str, Callable[[], object]]]:
    read, change, other = FLAGS[request.param]
    with warnings.catch_warnings(action="ignore"):  # torch's, about old and new names of one setting
        before = read()
        yield request.param, lambda: change(other)
        change(before)


@pytest.mark.parametrize("flag", FLAGS, indirect=True)
def test_each_flag_is_part_of_the_key(flag: tuple[str, Callable[[], object]]) -> None:
    name, change = flag
    before = switches() | cuda_switches()
    assert before[name] != "unreadable"
    change()
    after = switches() | cuda_switches()
    assert after[name] != before[name]


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(surroundings, "MEASURING", 99),
        lambda patch: patch.setattr(torch, "__version__", "9.9"),
        lambda patch: patch.setattr(torch.version, "git_version", "abc"),
        lambda patch: patch.setattr(surroundings, "device_name", lambda _: "another processor"),
        lambda patch: patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX9"),
        lambda patch: patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
    ],
    ids=["our measuring", "torch", "its build", "processor", "its instructions", "a variable"],
)
def test_versions_and_the_machine_are_part_of_the_key(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = CostCache.of_device(CPU).path
    assert before == CostCache.of_device(CPU).path
    assert before.parent == store.folder()
    change(monkeypatch)
    assert CostCache.of_device(CPU).path != before


def test_a_gpu_s_slice_and_driver_are_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Properties:
        total_memory, multi_processor_count, major, minor = 10 << 30, 14, 9, 0

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    driver = tmp_path / "version"
    driver.write_text("NVRM version: 570.1\nGCC version: 12\n")
    monkeypatch.setattr(surroundings, "DRIVER", driver)
    found = [cuda_hardware(torch.device("cuda"))]
    monkeypatch.setattr(Properties, "total_memory", 20 << 30)
    found.append(cuda_hardware(torch.device("cuda")))
    driver.write_text("NVRM version: 575.2\n")
    found.append(cuda_hardware(torch.device("cuda")))
    assert len({json.dumps(hardware) for hardware in found}) == 3


class Convs(nn.Module):
    """Four convolutions, whose workspaces oneDNN decides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(1)


CHANGES: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "mkldnn off": lambda: torch.backends.mkldnn.flags(enabled=False),
    "deterministic algorithms": deterministic,
    "two threads": two_threads,
}


def test_saying_what_is_the_default_changes_nothing() -> None:
    before, precision = switches(), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    assert switches() == before


@pytest.mark.parametrize("change", CHANGES)
def test_a_budget_holds_after_a_flag_has_changed(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path))
    x = torch.randn(4, 8, 16, 16)
    fxremat.plan(Convs(), x, mem="100%", search=Search(seconds=0))  # fills the cache
    torch._dynamo.reset()
    with CHANGES[change]():
        model = fxremat.compile(Convs(), mem="100%", search=Search(seconds=0), example_inputs=x)
        peak = meter.peak_bytes(meter.training_step(model, (x,)))
    assert peak <= model.plan.budget
    assert len(list(tmp_path.glob("*.sqlite"))) == 2
