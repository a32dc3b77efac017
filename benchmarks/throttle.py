"""A link of a given speed for torch.distributed on one machine: gloo, with every collective as slow as on a network.

Overlap of communication and compute can then be measured on CPUs. Each process group has one link, which works like
the stream of an NCCL communicator: its collectives run one after the other in the order of issue, beside compute,

    end = max(moment of issue, end of the group's previous collective) + latency + bytes / speed

where `bytes` is what this rank sends or receives, whichever is more:

    all-gather        output - own share            all-reduce            2 (n - 1) / n * tensor
    reduce-scatter    input - own share             broadcast, reduce     tensor

Gloo does the operation itself, so the numbers are right; a collective is complete when gloo is done and that moment has
come. Each rank counts from its own moment of issue: a rank that comes first waits for the last one through gloo.
A thread for each group runs gloo and sleeps; what gloo allocates there is no memory of the step (a profiler of the
step's threads does not see it), as the buffers of NCCL are none. Inputs and outputs are kept until `wait`.

    >>> register()
    >>> set_link(bytes_per_second=1e9, latency=20e-6)
    >>> torch.distributed.init_process_group("throttled", ...)  # doctest: +SKIP

Point-to-point operations (send, recv) go to gloo unthrottled and in no order with collectives.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.futures import Future
from torch.utils._pytree import tree_map_only

SPEED, LATENCY = "THROTTLED_BYTES_PER_SECOND", "THROTTLED_LATENCY"  # environment variables: child processes inherit


@dataclass(frozen=True, kw_only=True)
class Link:
    """The speed and latency of a link, which set the time of a collective beside gloo's own."""

    bytes_per_second: float
    latency: float  # seconds

    def seconds(self, size: float) -> float:
        """Seconds to carry `size` bytes.

        >>> Link(bytes_per_second=100.0, latency=0.5).seconds(50)
        1.0
        """
        return self.latency + size / self.bytes_per_second


def set_link(bytes_per_second: float, latency: float = 0.0) -> None:
    """Set the link of all groups of this process, and of the processes that it starts from now on."""
    os.environ[SPEED], os.environ[LATENCY] = repr(float(bytes_per_second)), repr(float(latency))


def link() -> Link:
    """The link as set last; without a setting, collectives are as fast as gloo's."""
    return Link(
        bytes_per_second=float(os.environ.get(SPEED, "inf")), latency=float(os.environ.get(LATENCY, "0"))
    )


def register() -> None:
    """Make the backend known as "throttled"; a second call changes nothing."""
    if "THROTTLED" not in dist.Backend._plugins:
        dist.Backend.register_backend("throttled", ThrottledGroup, devices=["cpu"])


class ThrottledWork(dist.Work):
    """A collective under way. It holds its tensors until it is waited for, so that the waiting thread frees them."""

    def __init__(self, run: Callable[[], Any], outputs: list[Tensor], seconds: float) -> None:
        super().__init__()
        self._run: Callable[[], Any] | None = run
        self._outputs: list[Tensor] = outputs
        self._seconds = seconds
        self._issued = time.perf_counter()
        self._done = threading.Event()
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._future: Future[list[Tensor]] | None = None

    def carry(self, free: float) -> float:
        """Run on a link that is free from the moment `free`; returns when it is free again. Called by the link."""
        end = max(self._issued, free) + self._seconds
        try:
            assert self._run is not None
            self._run().wait()
        except Exception as error:  # told to whoever waits
            self._error = error
        if (rest := end - time.perf_counter()) > 0:
            time.sleep(rest)
        with self._lock:
            self._done.set()
            if self._future is not None:
                self._complete(self._future)
        return max(end, time.perf_counter() - 1e-3)  # waking late is no work of the link

    def _complete(self, future: Future[list[Tensor]]) -> None:
        if self._error is not None:
            future.set_exception(self._error)  # type: ignore[arg-type]
        else:
            future.set_result(self._outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Sleep until the collective is complete; raises what gloo raised. `timeout` is gloo's affair."""
        self._done.wait()
        self._run, self._outputs = None, []
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def get_future(self) -> Future[list[Tensor]]:
        """A future of the outputs, which the link completes: what DistributedDataParallel waits for."""
        with self._lock:
            if self._future is None:
                self._future = Future()
                if self._done.is_set():
                    self._complete(self._future)
            return self._future


def _serve(works: queue.SimpleQueue[ThrottledWork | None]) -> None:
    """Carry what is issued on one group until None comes."""
    free = 0.0
    with torch.no_grad():
        while (work := works.get()) is not None:
            free = work.carry(free)
            del work  # while it waits for the next one, the link holds nothing


class ThrottledGroup(dist.ProcessGroup):
    """A process group whose collectives go through gloo and take the time of the link.

    What C++ calls of it are the methods that torch lets Python override (PyProcessGroup.hpp); the others are called
    by torch.distributed's Python functions alone.
    """

    def __init__(self, store: c10d.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo: Any = dist.ProcessGroup(store, rank, size)
        self._gloo._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        backend = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._gloo._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        self.busy_seconds = 0.0  # the link's seconds of all collectives so far
        self._works: queue.SimpleQueue[ThrottledWork | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._works,), name="throttled link", daemon=True).start()
        weakref.finalize(self, self._works.put, None)

    def getBackendName(self) -> str:  # noqa: N802
        return "throttled"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def _issue(self, name: str, args: Sequence[Any], outputs: Iterable[Tensor], size: float) -> ThrottledWork:
        """Put gloo's collective `name`, of `size` bytes on the link, behind those issued before."""
        seconds = link().seconds(size)
        work = ThrottledWork(lambda: getattr(self._gloo, name)(*borrowed(args)), list(outputs), seconds)
        self.busy_seconds += seconds
        self._works.put(work)
        return work

    def _ring(self, tensors: Iterable[Tensor]) -> float:
        """Bytes that a ring all-reduce of the tensors sends from each rank."""
        return 2 * (self.size() - 1) / self.size() * bytes_of(tensors)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> ThrottledWork:  # type: ignore[override]
        opts = opts or c10d.AllreduceOptions()
        return self._issue("allreduce", (tensors, opts), tensors, self._ring(tensors))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> ThrottledWork:
        opts = opts or c10d.AllreduceCoalescedOptions()
        return self._issue("allreduce_coalesced", (tensors, opts), tensors, self._ring(tensors))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> ThrottledWork:
        opts = opts or c10d.AllgatherOptions()
        args = (output, input, opts)
        return self._issue("all_gather_single", args, [output], bytes_of([output]) - bytes_of([input]))

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> ThrottledWork:
        opts = opts or c10d.AllgatherOptions()
        args = (outputs, inputs, opts)
        return self._issue("all_gather_single_coalesced", args, outputs, bytes_of(outputs) - bytes_of(inputs))

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> ThrottledWork:
        opts, flat = opts or c10d.AllgatherOptions(), flattened(outputs)
        return self._issue("allgather", (outputs, inputs, opts), flat, bytes_of(flat) - bytes_of(inputs))

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> ThrottledWork:
        opts, flat = opts or c10d.AllgatherOptions(), flattened(outputs)
        args = (outputs, inputs, opts)
        return self._issue("allgather_coalesced", args, flat, bytes_of(flat) - bytes_of(inputs))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> ThrottledWork:
        opts = opts or c10d.ReduceScatterOptions()
        args = (output, input, opts)
        return self._issue("reduce_scatter_single", args, [output], bytes_of([input]) - bytes_of([output]))

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> ThrottledWork:
        opts, size = opts or c10d.ReduceScatterOptions(), bytes_of(inputs) - bytes_of(outputs)
        return self._issue("reduce_scatter_single_coalesced", (outputs, inputs, opts), outputs, size)

    def reduce_scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> ThrottledWork:
        opts, size = opts or c10d.ReduceScatterOptions(), bytes_of(flattened(inputs)) - bytes_of(outputs)
        return self._issue("reduce_scatter", (outputs, inputs, opts), outputs, size)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> ThrottledWork:  # type: ignore[override]
        opts = opts or c10d.BroadcastOptions()
        return self._issue("broadcast", (tensors, opts), tensors, bytes_of(tensors))

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> ThrottledWork:  # type: ignore[override]
        return self._issue("reduce", (tensors, opts or c10d.ReduceOptions()), tensors, bytes_of(tensors))

    def gather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> ThrottledWork:
        opts, flat = opts or c10d.GatherOptions(), flattened(outputs)  # outputs are empty but on the root
        size = bytes_of(flat) - bytes_of(inputs) if flat else bytes_of(inputs)
        return self._issue("gather", (outputs, inputs, opts), flat, size)

    def scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> ThrottledWork:
        opts, flat = opts or c10d.ScatterOptions(), flattened(inputs)  # inputs are empty but on the root
        size = bytes_of(flat) - bytes_of(outputs) if flat else bytes_of(outputs)
        return self._issue("scatter", (outputs, inputs, opts), outputs, size)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: list[int] | None,
        input_sizes: list[int] | None,
        opts: Any = None,
    ) -> ThrottledWork:
        args = (output, input, output_sizes or [], input_sizes or [], opts or c10d.AllToAllOptions())
        size = (self.size() - 1) / self.size() * max(bytes_of([output]), bytes_of([input]))
        return self._issue("all_to_all_single", args, [output], size)

    def barrier(self, opts: Any = None) -> ThrottledWork:
        return self._issue("barrier", (opts or c10d.BarrierOptions(),), (), 0)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        return self._gloo.send(tensors, to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        return self._gloo.recv(tensors, source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        return self._gloo.recv_anysource(tensors, tag)


def borrowed(values: Any) -> Any:
    """The same with tensors that share memory with the given ones and do not keep it.

    A thread of gloo lets go of its tensors some time after the operation is complete; it must not be the one that frees
    memory of the step.
    """
    return tree_map_only(Tensor, _borrowed, values)


def _borrowed(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous() or tensor.numel() == 0:
        return tensor
    memory = (ctypes.c_char * bytes_of([tensor])).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the elements of all tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def flattened(lists: Iterable[Iterable[Tensor]]) -> list[Tensor]:
    """The tensors of all lists in order."""
    return [t for tensors in lists for t in tensors]
