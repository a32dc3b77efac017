"""The throttled backend of the benchmarks: gloo's numbers, the link's time, and torch's training wrappers."""

from __future__ import annotations

import copy
import faulthandler
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks import throttle
from benchmarks.meter import peak_bytes
from fxremat.torch_private import torch_release

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        torch_release() < (2, 13),
        reason="torch 2.11 finds no collectives of a CPU in a process group that Python defines",
    ),
]

Check = Callable[[], None]
SECONDS = 0.15  # what one collective of the timed checks takes on the link
SLACK = 0.1  # seconds that processes which share two cores may lose

functional = torch.ops._c10d_functional


def numbers(group: dist.ProcessGroup) -> list[Tensor]:
    """The results of every collective on `group`, inputs different on each rank."""
    rank, size, name = dist.get_rank(group), dist.get_world_size(group), group.group_name
    average = dist.ReduceOp.AVG

    def drawn(*shape: int) -> Tensor:
        return torch.arange(float(torch.Size(shape).numel())).reshape(shape) * (rank + 1) + rank

    x, y = drawn(4, 3), drawn(6)
    in_place, summed, averaged, sent = x.clone(), x.clone(), x.clone(), x.clone()
    whole, part, parts = torch.empty(8, 3), torch.empty(2, 3), [torch.empty(4, 3) for _ in range(size)]
    turned, averaged_part, from_list = torch.empty(4, 3), torch.empty(2, 3), torch.empty(2, 3)

    dist.all_reduce(summed, group=group)
    dist.all_reduce(averaged, op=average, group=group)
    dist.all_gather_into_tensor(whole, x, group=group)
    dist.all_gather(parts, x, group=group)
    dist.reduce_scatter_tensor(part, x, group=group)
    dist.reduce_scatter_tensor(averaged_part, x, op=average, group=group, async_op=True).wait()  # type: ignore[union-attr]
    dist.reduce_scatter(from_list, list(x.chunk(size)), group=group)
    dist.broadcast(sent, 1, group=group)
    dist.all_to_all_single(turned, x, group=group)
    results = [summed, averaged, whole, *parts, part, averaged_part, from_list, sent, turned]

    functional.wait_tensor(functional.all_reduce_(in_place, "sum", name))
    started = [
        functional.all_gather_into_tensor(x, size, name),
        functional.reduce_scatter_tensor(x, "avg", size, name),
        functional.all_reduce(x, "sum", name),
        *functional.all_gather_into_tensor_coalesced([x, y], size, name),
        *functional.reduce_scatter_tensor_coalesced([x, y], "sum", size, name),
        *functional.all_reduce_coalesced([x, y], "avg", name),
    ]
    return [*results, in_place, *(functional.wait_tensor(t) for t in started)]


def gloo() -> dist.ProcessGroup:
    """The same ranks on plain gloo."""
    return dist.new_group(list(range(dist.get_world_size())), backend="gloo")


def throttled() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def a_quarter_of_a_megabyte(seconds: float = SECONDS) -> Tensor:
    """A tensor whose all-reduce between two takes `seconds`, as the link is set."""
    x = torch.ones(1 << 16)
    throttle.set_link(throttle.bytes_of([x]) / seconds)
    return x


def check_seconds(run: Callable[[], object], expected: float) -> None:
    """Assert that `run()`, begun by all ranks at once, never takes less than expected, and once no more."""
    found, together = [], gloo()
    for _ in range(2):
        dist.barrier(together)
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    assert expected <= min(found) <= expected + SLACK, found


def numbers_are_those_of_gloo() -> None:
    throttle.set_link(1e9, latency=1e-3)
    for ours, theirs in zip(numbers(throttled()), numbers(gloo()), strict=True):
        assert torch.equal(ours, theirs)


def objects_arrive() -> None:
    gathered, sent = [None, None], [dist.get_rank(), "text"]
    dist.all_gather_object(gathered, {"rank": dist.get_rank()})
    dist.broadcast_object_list(sent, src=1)
    assert gathered == [{"rank": 0}, {"rank": 1}]
    assert sent == [1, "text"]


def tensors_are_sent() -> None:
    x = torch.full((3,), float(dist.get_rank()))
    if dist.get_rank() == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    assert torch.equal(x, torch.zeros(3))


def collectives_of_a_group_take_the_sum_of_their_times() -> None:
    x, y = a_quarter_of_a_megabyte(), torch.ones(1 << 16)

    def both() -> None:
        works = [dist.all_reduce(t, async_op=True) for t in (x, y)]
        for work in works:
            assert work is not None
            work.wait()

    check_seconds(both, 2 * SECONDS)


def functional_collectives_wait_for_the_link() -> None:
    x = a_quarter_of_a_megabyte()
    name = throttled().group_name
    check_seconds(lambda: functional.wait_tensor(functional.all_reduce(x, "sum", name)), SECONDS)


def groups_have_links_of_their_own() -> None:
    x, y, other = a_quarter_of_a_megabyte(), torch.ones(1 << 16), dist.new_group([0, 1])

    def both() -> None:
        works = [dist.all_reduce(t, group=g, async_op=True) for t, g in ((x, throttled()), (y, other))]
        for work in works:
            assert work is not None
            work.wait()

    check_seconds(both, SECONDS)


def a_start_returns_at_once_and_compute_goes_on_beside() -> None:
    x, name = a_quarter_of_a_megabyte(), throttled().group_name
    issued: list[float] = []

    def beside() -> None:
        start = time.perf_counter()
        result = functional.all_reduce(x, "sum", name)
        issued.append(time.perf_counter() - start)
        time.sleep(SECONDS)
        functional.wait_tensor(result)

    check_seconds(beside, SECONDS)
    assert min(issued) < SECONDS / 2


def each_collective_carries_its_bytes() -> None:
    throttle.set_link(bytes_per_second=1e6, latency=0.02)
    x, name = torch.ones(1 << 14), throttled().group_name  # 2 ** 16 bytes
    full, half = 0.02 + 2**16 / 1e6, 0.02 + 2**15 / 1e6
    for start, seconds in {
        lambda: functional.all_gather_into_tensor(x, 2, name): full,
        lambda: functional.reduce_scatter_tensor(x, "sum", 2, name): half,
        lambda: functional.all_reduce(x, "sum", name): full,
    }.items():
        check_seconds(lambda start=start: functional.wait_tensor(start()), seconds)  # type: ignore[misc]


def the_memory_of_the_link_is_not_the_steps() -> None:
    throttle.set_link(1e9)
    x, name = torch.ones(1 << 16), throttled().group_name
    size = throttle.bytes_of([x])

    def reduce_a_copy() -> None:
        result = functional.reduce_scatter_tensor(x.clone(), "sum", 2, name)  # the copy is freed by the wait
        functional.wait_tensor(result)
        del result
        torch.empty(1 << 16)

    for _ in range(3):
        dist.barrier()
        assert peak_bytes(reduce_a_copy) == size + size // 2


def a_finished_collective_keeps_nothing() -> None:
    x = torch.ones(4)
    seen = weakref.ref(x)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    del x
    assert seen() is None


def errors_reach_who_waits() -> None:
    work = dist.all_to_all_single(torch.empty(3), torch.ones(4), group=throttled(), async_op=True)
    assert work is not None
    with pytest.raises(RuntimeError):
        work.wait()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 1))


def gradients(model: nn.Module) -> list[Tensor]:
    """Whole gradients after the second of two steps on batches that differ between ranks."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
    found = [p.grad for p in model.parameters()]
    return [g.full_tensor() if isinstance(g, dist.tensor.DTensor) else g for g in found if g is not None]


def data_parallel_gradients_are_those_of_gloo() -> None:
    throttle.set_link(1e8, latency=1e-3)
    model = network()
    ours, theirs = (
        gradients(DistributedDataParallel(copy.deepcopy(model), process_group=g, bucket_cap_mb=1e-4))
        for g in (throttled(), gloo())
    )
    assert len(ours) == 8
    assert all(map(torch.equal, ours, theirs))


def the_backward_of_data_parallel_waits_for_the_link() -> None:
    model = DistributedDataParallel(network())
    model(torch.ones(4, 8)).sum().backward()  # the second backward reduces one bucket
    throttle.set_link(1e9, latency=SECONDS)
    check_seconds(lambda: model(torch.ones(4, 8)).sum().backward(), SECONDS)


def sharded(mesh: DeviceMesh, reshard: bool) -> nn.Module:
    model = network()
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh)


def fully_sharded_gradients_are_those_of_gloo() -> None:
    throttle.set_link(1e8, latency=1e-3)
    ours = init_device_mesh("cpu", (2,))
    assert dist.get_backend(ours.get_group()) == "throttled"
    theirs = DeviceMesh.from_group(gloo(), "cpu")
    for reshard in (True, False):
        expected = gradients(sharded(theirs, reshard))
        assert len(expected) == 8
        assert all(map(torch.equal, gradients(sharded(ours, reshard)), expected))


def rows_and_columns_of_a_mesh_reduce_among_themselves() -> None:
    throttle.set_link(1e8, latency=1e-3)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    row, column = mesh.get_coordinate() or (0, 0)
    x = torch.tensor([10.0 * row + column])
    down, across = x.clone(), x.clone()
    dist.all_reduce(down, group=mesh.get_group("rows"))
    dist.all_reduce(across, group=mesh.get_group("columns"))
    assert (down.item(), across.item()) == (10.0 + 2 * column, 20.0 * row + 1)


BETWEEN_TWO = (
    numbers_are_those_of_gloo,
    objects_arrive,
    tensors_are_sent,
    collectives_of_a_group_take_the_sum_of_their_times,
    functional_collectives_wait_for_the_link,
    groups_have_links_of_their_own,
    a_start_returns_at_once_and_compute_goes_on_beside,
    each_collective_carries_its_bytes,
    the_memory_of_the_link_is_not_the_steps,
    a_finished_collective_keeps_nothing,
    data_parallel_gradients_are_those_of_gloo,
    the_backward_of_data_parallel_waits_for_the_link,
    fully_sharded_gradients_are_those_of_gloo,
    errors_reach_who_waits,
)
AMONG_FOUR = (rows_and_columns_of_a_mesh_reduce_among_themselves,)


def run_checks(rank: int, size: int, folder: Path, checks: tuple[Check, ...]) -> None:
    """One process of a group of `size`: run the checks, and write for each what went wrong."""
    faulthandler.dump_traceback_later(60, exit=True)
    torch.set_num_threads(1)
    throttle.register()
    dist.init_process_group("throttled", init_method=f"file://{folder}/init", rank=rank, world_size=size)
    for check in checks:
        try:
            check()
            text = "passed"
        except Exception:
            text = traceback.format_exc()
        (folder / f"{check.__name__}.{rank}").write_text(text)
    dist.destroy_process_group()


def outcomes(size: int, folder: Path, checks: tuple[Check, ...]) -> Path:
    torch.multiprocessing.spawn(run_checks, (size, folder, checks), nprocs=size)
    return folder


@pytest.fixture(scope="module")
def between_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return outcomes(2, tmp_path_factory.mktemp("two"), BETWEEN_TWO)


@pytest.mark.parametrize("check", BETWEEN_TWO, ids=lambda check: check.__name__)
def test_between_two_processes(check: Check, between_two: Path) -> None:
    for rank in range(2):
        assert (between_two / f"{check.__name__}.{rank}").read_text() == "passed"


def test_among_four_processes(tmp_path: Path) -> None:
    outcomes(4, tmp_path, AMONG_FOUR)
    for check in AMONG_FOUR:
        assert [(tmp_path / f"{check.__name__}.{rank}").read_text() for rank in range(4)] == 4 * ["passed"]


def test_the_setting_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(throttle.SPEED, raising=False)
    monkeypatch.delenv(throttle.LATENCY, raising=False)
    assert throttle.link().seconds(1e9) == 0
    monkeypatch.setenv(throttle.SPEED, "100")
    monkeypatch.setenv(throttle.LATENCY, "0.5")
    assert throttle.link().seconds(50) == 1
    throttle.set_link(10, latency=1)
    assert throttle.link().seconds(50) == 6
