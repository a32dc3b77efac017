"""The host tiers: what goes out comes back bit for bit, memory is reused, and faults are one clear line."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.meter import peak_bytes
from fxremat.device import CPU as CPUS
from fxremat.device import KINDS, Ability, kind_of
from fxremat.errors import FxrematError
from fxremat.host import files, pinned, pool
from fxremat.host import tier as tier_module
from fxremat.host.default import default_tier
from fxremat.host.files import FileTier
from fxremat.host.pinned import PinnedTier
from fxremat.host.pool import FilePool
from fxremat.host.tier import HostTier, span_bytes, span_of, tier_named
from fxremat.ops.host_copies import offload, prefetch, release, wait
from tests.dags import few

pytestmark = pytest.mark.usefixtures("torch_ready")

CPU = torch.device("cpu")
ABLE = replace(CPUS, abilities=frozenset(Ability))  # a CPU that plays a device with streams and pinned memory
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: torch.randn(33, 17),
    "columns": lambda: torch.randn(17, 33).t(),
    "channels last": lambda: torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "half": lambda: torch.randn(1000).to(torch.bfloat16),
    "masks": lambda: torch.rand(100) > 0.5,
    "whole numbers": lambda: torch.arange(77),
    "large": lambda: torch.randn(1 << 20),
}


def trip(tier: FileTier, tensor: Tensor) -> Tensor:
    host = tier.offload(tensor)
    tier.release(host)
    back = tier.prefetch(host, CPU)
    tier.wait(host)
    return back


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("speed", [None, 1e9], ids=["free", "throttled"])
def test_what_comes_back_is_what_left(layout: str, speed: float | None) -> None:
    tensor = LAYOUTS[layout]()
    back = trip(FileTier(to_host=speed, from_host=speed), tensor)
    assert torch.equal(back, tensor)
    assert (back.stride(), back.dtype) == (tensor.stride(), tensor.dtype)
    assert back.data_ptr() != tensor.data_ptr()


def test_the_functions_of_the_graphs_find_their_tier_by_name() -> None:
    tier, x = FileTier(), torch.randn(100)
    host = release(offload(x, tier.name), x, tier.name)
    assert torch.equal(wait(prefetch(host, CPU, tier.name), host, tier.name), x)


def test_a_tier_that_is_gone_is_named() -> None:
    name = FileTier().name
    gc.collect()
    with pytest.raises(FxrematError, match=f"{name} is gone"):
        tier_named(name)


def test_memory_is_reused_once_nothing_shows_it() -> None:
    tier = FileTier()
    for _ in range(200):
        trip(tier, torch.randn(1000))
    assert tier.bytes == 4000
    first, second = tier.offload(torch.zeros(1000)), tier.offload(torch.ones(1000))
    tier.release(first), tier.release(second)
    assert first.data_ptr() != second.data_ptr()
    assert tier.bytes == 8000


def test_memory_in_use_is_not_given_away_while_a_view_of_it_lives() -> None:
    tier = FileTier()
    host = tier.offload(torch.zeros(1000))
    tier.release(host)
    view = host.detach()[3:]
    del host
    tier.release(tier.offload(torch.ones(1000)))
    assert torch.equal(view, torch.zeros(997))


def test_a_copy_that_nobody_waits_for_keeps_its_memory_until_it_is_over() -> None:
    tier = FileTier(to_host=1e6)
    tier.offload(torch.ones(50_000))  # takes 0.2 s, and is dropped at once
    other = tier.offload(torch.zeros(50_000))
    tier.release(other)
    assert not other.any()
    assert tier.bytes == 400_000


def test_what_is_copied_is_freed_on_the_thread_that_waits(tmp_path: Path) -> None:
    """A profiler of that thread then sees all of it freed, and the peak of what follows is not too high."""
    with FileTier(tmp_path) as tier:

        def copies() -> None:
            for _ in range(20):
                host = tier.offload(torch.zeros(1 << 14))
                tier.release(host)
                tier.prefetch(host, torch.device("cpu"))
                tier.wait(host)
            torch.zeros(1 << 18)

        assert peak_bytes(copies) == 4 << 18


def test_what_nobody_waits_for_is_freed_when_the_next_copy_begins() -> None:
    with FileTier() as tier:
        tensor = torch.zeros(1 << 14)
        gone = weakref.ref(tensor)
        host = tier.offload(tensor)
        tier._lanes["out"]._thread.submit(int).result()  # type: ignore[union-attr]
        del tensor
        tier.release(tier.offload(torch.zeros(4)))
        assert gone() is None
        tier.release(host)


def test_autograd_may_hold_what_is_still_being_filled() -> None:
    """It must not take the copying for a change of what it saved."""
    tier = FileTier(to_host=1e7)

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(tier.offload(x))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (host,) = ctx.saved_tensors
            tier.release(host)
            return gradient * host

    x = torch.randn(1 << 19, requires_grad=True)
    loss = Save.apply(x).sum()  # type: ignore[no-untyped-call]
    time.sleep(0.15)  # more is copied meanwhile
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach())


def test_a_throttled_tier_takes_its_time_and_lets_others_work() -> None:
    tier, x = FileTier(to_host=2e7, from_host=4e7), torch.randn(1 << 20)
    start = time.perf_counter()
    host = tier.offload(x)
    begun = time.perf_counter() - start
    tier.release(host)
    out = time.perf_counter() - start
    tier.prefetch(host, CPU)
    tier.wait(host)
    back = time.perf_counter() - start - out
    assert begun < 0.1
    assert out >= (1 << 22) / 2e7
    assert back >= (1 << 22) / 4e7


@pytest.mark.parametrize("speed", [0, -1.0, float("nan")])
def test_speeds_are_positive(speed: float) -> None:
    with pytest.raises(FxrematError, match="bytes per second above 0"):
        FileTier(to_host=speed)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FxrematError, match=r"FileTier: there is no folder '.*missing'"):
        FileTier(tmp_path / "missing")


def test_a_full_disk_is_one_clear_line_and_the_next_step_works(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = FileTier()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(FxrematError, match=r"no room for .*No space left on device.*Offload\(limit="):
            tier.offload(torch.zeros(1000))
    assert tier.bytes == 0
    assert torch.equal(trip(tier, torch.ones(10)), torch.ones(10))


def test_files_have_no_name(tmp_path: Path) -> None:
    tier = FileTier(tmp_path)
    host = tier.offload(torch.zeros(1000))
    assert list(tmp_path.iterdir()) == []
    tier.release(host)


KILLED = """
import sys, torch
from fxremat.host.files import FileTier
tier = FileTier(sys.argv[1])
host = tier.offload(torch.zeros(1 << 20))
print("ready", flush=True)
tier.release(host)
input()
"""


def test_nothing_is_left_behind_by_a_process_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    if process.stdin:
        process.stdin.close()
    assert list(tmp_path.iterdir()) == []


def test_threads_share_a_tier() -> None:
    tier, wrong = FileTier(), []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(50):
            x = torch.randn(1000, generator=generator)
            if not torch.equal(trip(tier, x), x):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert tier.bytes <= 4 * 4000


def test_copies_of_a_tier_have_its_settings_and_files_of_their_own() -> None:
    tier = FileTier("/tmp", to_host=5.0, from_host=7.0)
    for other in (copy.deepcopy(tier), pickle.loads(pickle.dumps(tier))):
        assert (other.folder, other.to_host, other.from_host) == (Path("/tmp"), 5.0, 7.0)
        assert other.name != tier.name


def test_a_cpu_s_default_tier_is_files() -> None:
    assert isinstance(default_tier(CPU), FileTier)
    assert default_tier(CPU) is default_tier(CPU)


def test_a_refused_pinned_allocation_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    tensor = torch.zeros(1000)
    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setitem(KINDS, "cpu", ABLE)
    with pytest.raises(FxrematError, match=r"the host has no 3.9 KiB of pinned memory left; .*Offload\(limit="):
        PinnedTier().offload(tensor)


def test_a_view_takes_its_own_bytes_and_not_those_of_its_storage() -> None:
    """Flat parameters are views of one storage; so are the weights of a cuDNN LSTM."""
    flat = torch.arange(40_000.0)
    for speed in (None, 1e9):
        tier = FileTier(to_host=speed, from_host=speed)
        for view in (flat[100:200], flat[300:700].view(20, 20).t(), flat.view(200, 200)[:10, 5:25]):
            before = tier.bytes
            back = trip(tier, view)
            assert torch.equal(back, view)
            assert back.stride() == view.stride()
            assert tier.bytes - before <= 4 * (9 * 200 + 20)
    assert torch.equal(trip(FileTier(), torch.zeros(0, 4)), torch.zeros(0, 4))


def test_a_finalizer_that_runs_while_the_pool_is_in_use_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The collector may run at any allocation, and free a host tensor that an error's traceback kept in a cycle."""
    tier = FileTier()
    cycle: list[Any] = [tier.offload(torch.ones(1000))]
    tier.release(cycle[0])
    cycle.append(cycle)
    del cycle
    original = FilePool._reuse

    def collecting(self: Any, size: int) -> Any:
        gc.collect()
        return original(self, size)

    monkeypatch.setattr(FilePool, "_reuse", collecting)
    worker = threading.Thread(target=lambda: trip(tier, torch.ones(1000)), daemon=True)
    worker.start()
    worker.join(timeout=20)
    assert not worker.is_alive()


def test_the_pool_holds_no_more_than_was_needed_at_a_time() -> None:
    tier = FileTier()
    for size in range(1000, 40_000, 1000):
        trip(tier, torch.ones(size))
    assert tier.bytes <= 4 * 39_000
    together = [tier.offload(torch.ones(size)) for size in (1000, 2000, 3000)]
    for host in together:
        tier.release(host)
    del together, host
    addresses = set()
    for _ in range(5):  # steps of the same sizes find their files again
        together = [tier.offload(torch.ones(size)) for size in (1000, 2000, 3000)]
        addresses.update(host.data_ptr() for host in together)
        for host in together:
            tier.release(host)
        del together, host
    assert len(addresses) == 3


def test_the_pool_forgets_what_was_needed_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "WINDOW", 10)
    tier = FileTier()
    both = [tier.offload(torch.ones(size)) for size in (100_000, 10)]
    for host in both:
        tier.release(host)
    del both, host
    trip(tier, torch.ones(10))
    assert tier.bytes == 400_040
    for _ in range(30):
        trip(tier, torch.ones(10))
    assert tier.bytes == 40


@pytest.mark.parametrize("kind", [FileTier, PinnedTier])
def test_a_closed_tier_says_so(kind: type[HostTier]) -> None:
    x = torch.ones(1000)
    with kind() as tier:
        if isinstance(tier, FileTier):
            host = tier.offload(x)
    tier.close()
    with pytest.raises(FxrematError, match=rf"{tier.name} is closed; compile the model again"):
        tier.offload(x)
    with pytest.raises(FxrematError, match="is closed"):
        tier.prefetch(x, CPU)
    if isinstance(tier, FileTier):
        tier.release(host)
        assert torch.equal(host, x)  # what is there stays readable
        del host
        assert tier.bytes == 4000  # its file goes with the tier


def test_a_tier_that_writes_its_copies_down() -> None:
    tier, x = FileTier(to_host=1e7), torch.ones(1 << 17)
    tier.copies = []
    before = time.time_ns()
    trip(tier, x)
    out, back = tier.copies
    assert (out.way, out.bytes, back.way, back.bytes) == ("out", x.nbytes, "in", x.nbytes)
    assert before <= out.start < out.end <= back.start <= back.end <= time.time_ns()
    assert out.end - out.start >= x.nbytes / 1e7 * 1e9


def test_a_throttled_copy_moves_chunks_of_a_mebibyte() -> None:
    source, target = torch.arange(3 << 18).view(-1, 1), torch.zeros(3 << 18, 1, dtype=torch.int64)
    pieces = list(files._chunks(source, target))
    assert [(old.nbytes, new.nbytes) for old, new in pieces] == [(1 << 20, 1 << 20)] * 6
    for old, new in pieces:
        new.copy_(old)
    assert torch.equal(source, target)
    few_elements = torch.zeros(3, dtype=torch.complex128)
    assert [old.nbytes for old, _ in files._chunks(few_elements, few_elements)] == [48]


def test_a_failed_copy_is_raised_once_and_is_never_forgotten_before() -> None:
    lane = files._ThreadLane("out", None)
    lane.copy(torch.ones(3), torch.ones(4), 0, None)
    for key in range(1, 10):
        lane.copy(torch.ones(3), torch.ones(3), key, None)
    with pytest.raises(RuntimeError, match="size of tensor"):
        lane.finish(0)
    lane.finish(0)
    lane.finish(77)  # nobody has copied that
    lane.close()


def test_copies_of_one_direction_run_one_after_the_other() -> None:
    lane, notes = files._ThreadLane("in", 1e7), list[files.Copied]()
    for key in range(3):
        lane.copy(torch.ones(1 << 14), torch.ones(1 << 14), key, notes)
    lane.close()
    assert all(before.end <= after.start for before, after in itertools.pairwise(notes))
    assert len(notes) == 3
    files._ThreadLane("in", None).close()  # has no thread


def test_a_tier_copies_into_its_own_files_alone() -> None:
    tier, x = FileTier(), torch.ones(3)
    theirs = FileTier().offload(x)
    for refused in (lambda: tier.store(x, theirs), lambda: tier.prefetch(theirs, CPU)):
        with pytest.raises(FxrematError, match="offloaded by another process, before a fork"):
            refused()
    host = tier.host_like(x)
    tier.close()
    with pytest.raises(FxrematError, match="is closed"):
        tier.store(x, host)


def test_leaving_its_block_closes_a_tier() -> None:
    with FileTier() as tier:
        assert not tier.closed
    assert tier.closed


@pytest.mark.parametrize("element", [torch.uint8, torch.float64])
def test_a_chunk_is_one_element_at_least(element: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHUNK", 2)
    pieces = [old.nbytes for old, _ in files._chunks(torch.zeros(4, dtype=element), torch.zeros(4, dtype=element))]
    assert pieces == ([2, 2] if element is torch.uint8 else [8, 8, 8, 8])


def test_files_where_none_can_be_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    assert torch.equal(trip(FileTier(), torch.ones(1000)), torch.ones(1000))


def test_a_closed_tier_gives_its_idle_files_back() -> None:
    tier = FileTier()
    trip(tier, torch.ones(1, dtype=torch.uint8))
    assert tier.bytes == 1
    tier.close()
    assert tier.bytes == 0


@pytest.mark.parametrize("speeds", [{"to_host": 0.5}, {"from_host": 0.5}, {"from_host": -1.0}])
def test_each_speed_is_checked(speeds: dict[str, float]) -> None:
    if min(speeds.values()) > 0:
        FileTier(**speeds)
        return
    with pytest.raises(FxrematError, match=r"from_host is -1.0; it is a number of bytes per second above 0"):
        FileTier(**speeds)


def test_tiers_of_equal_speed_have_one_description() -> None:
    assert FileTier("/tmp", to_host=5.0, from_host=7.0).description == "files in /tmp at 5.0, 7.0 bytes/s"
    assert FileTier().description == f"files in {tempfile.gettempdir()} at None, None bytes/s"
    assert PinnedTier().description == "pinned memory"
    assert isinstance(pickle.loads(pickle.dumps(PinnedTier())), PinnedTier)


def test_names_are_numbered_by_kind() -> None:
    first, second = FileTier(), FileTier()
    kind, number = first.name.split("-")
    assert kind == "FileTier"
    assert second.name == f"FileTier-{int(number) + 1}"
    assert tier_named(second.name) is second


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_renews_its_tiers_and_no_others() -> None:
    tier = FileTier()
    pool, lanes = tier._pool, tier._lanes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other threads may run
        pid = os.fork()
    if pid == 0:
        os._exit(0 if tier._pool is not pool and tier._lanes is not lanes else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert tier._pool is pool
    tier_module._forked()
    assert tier._pool is not pool


@pytest.mark.parametrize(
    ("tensor", "span"),
    [
        (torch.zeros(()), 1),
        (torch.zeros(0, 4), 0),
        (torch.zeros(7), 7),
        (torch.zeros(3, 5), 15),
        (torch.zeros(10, 10)[2:4, 1:3], 12),
        (torch.zeros(10)[::3], 10),
        (torch.zeros(4).expand(3, 4), 4),
    ],
)
def test_the_span_of_a_layout(tensor: Tensor, span: int) -> None:
    assert span_of(tensor) == span
    assert span_bytes(tensor.double()) == 8 * span_of(tensor.double())


def test_a_device_is_current_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: f"current: {index}")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    assert isinstance(kind_of(CPU).current(CPU), contextlib.nullcontext)
    here, there = torch.device("cuda", 0), torch.device("cuda", 1)
    assert isinstance(kind_of(here).current(here), contextlib.nullcontext)
    assert kind_of(there).current(there) == "current: 1"


@dataclass
class NaivePool:
    """A model of `FilePool` that keeps lists: which file a tensor gets, and how many bytes there are."""

    waiting: list[tuple[int, int]] = field(default_factory=list)  # size and address, longest first
    shown: list[tuple[int, int]] = field(default_factory=list)
    most: tuple[int, int] = (0, 0)  # in the last window and in this one
    taken: int = 0

    @property
    def used(self) -> int:
        return sum(size for size, _ in self.shown)

    @property
    def bytes(self) -> int:
        return self.used + sum(size for size, _ in self.waiting)

    def shrink(self, most: int) -> None:
        while self.waiting and self.bytes > most:
            self.waiting.pop(0)

    def take(self, size: int, address: int) -> None:
        """The latest file of that size that waits, where there is one."""
        same = [file for file in self.waiting if file[0] == size]
        if same:
            assert address == same[-1][1]
            self.waiting.remove(same[-1])
        else:
            self.shrink(max(*self.most, self.used + size) - size)
        self.shown.append((size, address))
        self.most = self.most[0], max(self.most[1], self.used)
        self.taken += 1
        if self.taken == 5:
            self.most, self.taken = (self.most[1], self.used), 0
            self.shrink(max(self.most))


ACTIONS = st.tuples(st.sampled_from(["take", "take", "free", "free", "shrink", "look"]), st.integers(0, 9))


@few(80)
@given(st.lists(ACTIONS, min_size=10, max_size=50))
def test_a_pool_is_like_lists_of_files(actions: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "WINDOW", 5)
        files, model, tensors = FilePool(None), NaivePool(), list[Tensor]()
        for action, number in actions:
            if action == "take":
                like = torch.empty(1 + number % 4, dtype=torch.uint8)
                tensors.append(files.take(like))
                model.take(like.nbytes, tensors[-1].data_ptr())
                assert files.owns(tensors[-1])
            elif action == "free" and tensors:
                gone = tensors.pop(number % len(tensors))
                model.waiting.append(model.shown.pop(number % len(model.shown)))
                assert model.waiting[-1][1] == gone.data_ptr()
                del gone
            elif action == "shrink":
                files.shrink(number)
                model.shrink(number)
            elif action == "look":
                assert files.bytes == model.bytes
                assert files.used == model.used
                assert len(files._shown) == len(tensors)
                assert not files.owns(torch.zeros(1))
        assert files.bytes == model.bytes
        assert files.owns(torch.zeros(0))
        tensors.clear()


@few(40)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 7)), min_size=2, max_size=6))
def test_a_pool_forgets_what_it_needed_as_lists_do(phases: list[tuple[int, int]]) -> None:
    """Some steps that offload two tensors of a size, then some of another size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "WINDOW", 5)
        files, model = FilePool(None), NaivePool()
        for size, steps in phases:
            for _ in range(steps):
                tensors = []
                for bytes_ in (size, 1):
                    tensors.append(files.take(torch.empty(bytes_, dtype=torch.uint8)))
                    model.take(bytes_, tensors[-1].data_ptr())
                    assert files.bytes == model.bytes
                while tensors:
                    model.waiting.append(model.shown.pop(0))
                    del tensors[0]
                assert files.bytes == model.bytes


def test_closing_waits_for_copies_and_ends_the_threads() -> None:
    before = set(threading.enumerate())
    tier, x = FileTier(to_host=2e7), torch.ones(1 << 18)
    host = tier.offload(x)
    assert set(threading.enumerate()) - before
    tier.close()
    assert torch.equal(host, x)
    assert not set(threading.enumerate()) - before


def test_a_closed_default_tier_is_replaced() -> None:
    default_tier(CPU).close()
    assert not default_tier(CPU).closed
    assert default_tier(CPU) is default_tier(CPU)


FORKED = """
import os, sys, torch
from fxremat.errors import FxrematError
from fxremat.host.files import FileTier
cpu, tier = torch.device("cpu"), FileTier(to_host=1e9)

def trip(x):
    host = tier.offload(x)
    tier.release(host)
    back = tier.prefetch(host, cpu)
    tier.wait(host)
    return host, back

kept, _ = trip(torch.ones(1000))
idle, _ = trip(torch.ones(2000))
del idle
pid = os.fork()
if pid == 0:
    code = 1
    try:
        host, back = trip(torch.full((2000,), 2.0))
        small, _ = trip(torch.full((1000,), 2.0))
        code = 0 if bool((back == 2).all()) and tier.bytes == 12_000 else 2
        try:
            tier.prefetch(kept, cpu)
            code = 3
        except FxrematError as error:
            code = code if "before a fork" in str(error) else 4
    finally:
        os._exit(code)
_, status = os.waitpid(pid, 0)
assert bool((kept == 1).all())
host, back = trip(torch.full((2000,), 3.0))
assert bool((back == 3).all())
print("child", os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_threads_and_files_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60)
    assert done.stdout == "child 0\n", done.stderr


@dataclass
class Gpus:
    """A stand-in for streams and events that writes down what waits for what; events pass when they are told to."""

    log: list[str] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        gpus = self

        class Stream:
            def __init__(self, device: torch.device, name: str = "side") -> None:
                self.name = f"{name} of {device}"

            def wait_stream(self, other: Any) -> None:
                gpus.log.append(f"{self.name} waits for {other.name}")

            def wait_event(self, event: Any) -> None:
                gpus.log.append(f"{self.name} waits for {event.name}")

            def synchronize(self) -> None:
                for event in gpus.events:
                    event.passed = True

            def __enter__(self) -> None:
                gpus.log.append(f"{self.name} is current")

            def __exit__(self, *_: object) -> None: ...

        class Event:
            def __init__(self, *_: Any, **__: Any) -> None:
                self.name, self.passed = f"event {len(gpus.events)}", False
                gpus.events.append(self)

            def record(self, stream: Stream) -> None:
                gpus.log.append(f"{stream.name} records {self.name}")

            def query(self) -> bool:
                return bool(self.passed)

        patch.setattr(torch, "Stream", Stream)
        patch.setattr(torch, "Event", Event)
        patch.setattr(torch.accelerator, "current_stream", lambda device: Stream(device, "compute"))
        patch.setitem(KINDS, "cpu", ABLE)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    found = Gpus()
    found.patch(monkeypatch)
    return found


def test_copies_wait_for_streams_of_their_tensor_s_own_device(gpus: Gpus) -> None:
    lane, x, y = pinned._StreamLane(torch.device("cuda", 1)), torch.ones(3), torch.zeros(3)
    lane.copy(x, y, 7)
    lane.finish(7)
    assert gpus.log == [
        "side of cuda:1 waits for compute of cuda:1",
        "side of cuda:1 is current",
        "side of cuda:1 records event 0",
        "compute of cuda:1 waits for event 0",
    ]
    lane.finish(7)
    assert len(gpus.log) == 4


def test_what_a_side_stream_writes_is_held_until_its_event_has_passed(gpus: Gpus) -> None:
    """An exception between prefetch and wait leaves a copy that nobody holds and nobody will wait for."""
    lane, held = pinned._StreamLane(torch.device("cuda", 0)), []
    for number in range(3):
        source, target = torch.ones(3), torch.zeros(3)
        held.append((weakref.ref(source), weakref.ref(target)))
        lane.copy(source, target, 5)  # the same host memory each time: a step that is tried again
        del source, target
        assert all(ref() is not None for pair in held for ref in pair), number
    gpus.events[0].passed = True
    lane.copy(torch.ones(3), torch.zeros(3), 6)
    assert [ref() is not None for pair in held for ref in pair] == [False] * 2 + [True] * 4
    lane.finish(5)  # the latest of them
    assert gpus.log[-1].endswith("waits for event 2")
    assert held[2][1]() is None
    lane.synchronize()
    assert held[1][1]() is None
    assert not lane._under_way
    assert not lane._latest


def test_a_copy_that_cannot_start_leaves_nothing_under_way(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = pinned._StreamLane(torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match="size of tensor"):
        lane.copy(torch.ones(3), torch.zeros(4), 1)
    assert gpus.events[0].passed  # the stream was waited for
    assert not lane._under_way


def test_copies_that_nobody_waits_for_are_forgotten() -> None:
    tier, kept = FileTier(), []
    for _ in range(50):
        host = tier.offload(torch.ones(10))
        while not all(copying.future.done() for copying in tier._lanes["out"]._under_way.values()):
            time.sleep(0.001)
        kept.append(host)
    assert len(tier._lanes["out"]._under_way) == 1


def test_a_pinned_tier_has_lanes_for_both_directions(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_pinned_like", torch.empty_like)
    tier, x = PinnedTier(), torch.randn(3, 5).t()
    host = tier.offload(x)
    tier.release(host)
    back = tier.prefetch(host, CPU)
    tier.wait(host)
    assert torch.equal(back, x)
    assert back.stride() == x.stride()
    assert gpus.log == [
        "side of cpu waits for compute of cpu",
        "side of cpu is current",
        "side of cpu records event 0",
        "compute of cpu waits for event 0",
        "side of cpu waits for compute of cpu",
        "side of cpu is current",
        "side of cpu records event 1",
        "compute of cpu waits for event 1",
    ]
    out, into = tier._lanes["out", CPU], tier._lanes["in", CPU]
    tier.offload(x), tier.prefetch(host, CPU)
    assert (len(out._under_way), len(into._under_way)) == (1, 1)
    assert tier._lanes["out", CPU] is out
    tier.synchronize()
    assert (len(out._under_way), len(into._under_way)) == (0, 1)
    tier.close()
    assert not into._under_way
    assert not tier._lanes


def test_a_copy_of_a_lane_does_not_block(gpus: Gpus) -> None:
    class Target:
        """Stands for a tensor on a GPU, and the memory that autograd does not see."""

        def __init__(self) -> None:
            self.data, self.blocking = self, list[bool]()

        def copy_(self, source: Tensor, *, non_blocking: bool) -> None:
            self.blocking.append(not non_blocking)

    target: Any = Target()
    pinned._StreamLane(CPU).copy(torch.ones(3), target, 1)
    assert target.blocking == [False]


def test_a_lane_lets_go_of_the_latest_copy_of_a_key_alone(gpus: Gpus) -> None:
    lane = pinned._StreamLane(CPU)
    lane.copy(torch.ones(3), torch.zeros(3), 1)
    lane.copy(torch.ones(3), torch.zeros(3), 1)
    gpus.events[1].passed = True
    lane._let_go()
    assert len(lane._under_way) == 2  # copies end in order: the first one has not
    gpus.events[0].passed = True
    gpus.events[1].passed = False
    lane._let_go()
    assert list(lane._under_way) == [1]
    assert lane._latest == {1: 1}
    gpus.events[1].passed = True
    lane._let_go()
    assert (lane._under_way, lane._latest) == ({}, {})


def test_pinned_memory_has_the_layout_of_its_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def empty(size: int, *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        asked.append((size, pin_memory))
        return torch.zeros(size, dtype=dtype)

    like = torch.zeros(10, 10, dtype=torch.float16)[2:4, 1:3]
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setitem(KINDS, "cpu", ABLE)
    found = pinned._pinned_like(like)
    assert asked == [(12, True)]
    assert (found.shape, found.stride(), found.dtype) == (like.shape, like.stride(), like.dtype)


def test_a_gpu_s_default_tier_is_pinned_memory() -> None:
    assert isinstance(default_tier(torch.device("cuda")), PinnedTier)
    assert default_tier(torch.device("cuda", 1)) is default_tier(torch.device("cuda"))


@pytest.mark.cuda
def test_pinned_memory_under_stress() -> None:
    """Poisoned host buffers, reused device memory: what comes back is what left, every time."""
    tier, device = PinnedTier(), torch.device("cuda")
    for seed in range(50):
        generator = torch.Generator(device).manual_seed(seed)
        tensors = [torch.randn(1 << 20, device=device, generator=generator) for _ in range(4)]
        wanted = [float(tensor.double().sum()) for tensor in tensors]
        hosts = []
        while tensors:
            hosts.append(tier.offload(tensors[0]))
            tier.release(hosts[-1])
            del tensors[0]
            torch.full((1 << 20,), float("nan"), device=device)  # takes the memory that was let go
        found = []
        for host in hosts:
            back = tier.prefetch(host, device)
            tier.wait(host)
            found.append(float(back.double().sum()))
            host.fill_(float("nan"))
        assert found == wanted


@pytest.mark.cuda
def test_copies_run_beside_ops() -> None:
    tier, device = PinnedTier(), torch.device("cuda")
    x, a = torch.randn(1 << 26, device=device), torch.randn(8192, 8192, device=device)

    def seconds(step: Callable[[], object]) -> float:
        found = []
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            found.append(time.perf_counter() - start)
        return min(found)

    def both() -> None:
        host = tier.offload(x)
        a @ a
        tier.release(host)

    def copies() -> None:
        tier.release(tier.offload(x))

    assert seconds(both) < 0.9 * (seconds(copies) + seconds(lambda: a @ a))
