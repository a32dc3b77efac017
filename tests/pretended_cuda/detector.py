"""Races in a log: accesses of one granule of memory, one of which writes, that nothing orders.

    clock[a][b]     how many accesses of b happened before what a does next, for a and b streams or threads
    thread t issues work to stream s        clock[s] = max(clock[s], clock[t])
    an event                                carries its stream's clock at the record to whoever waits for it
    access n of b, then an access of a      are ordered where n <= clock[a][b]

Granules are looked at for all time: also through memory that the caching allocator, or that of pinned memory, has given
to somebody else meanwhile. An allocation is a write of the stream that it is for, so memory that is handed on while
somebody still uses it is found even where nothing else touches it. (torch's own `torch.cuda._sanitizer` forgets a
block when it is freed.)

Vector clocks: Fidge, 1988; Mattern, 1989. The checks of a granule, with its last write and the last read of every
stream and thread, are those of Flanagan and Freund, FastTrack, 2009.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tests.pretended_cuda.log import SOURCE_PAGEABLE, TARGET_PAGEABLE, Kind

GRANULE = 512  # bytes: blocks of the caching allocator begin at multiples of it
MOST = 20  # races that are reported of one log

OF_STREAMS = frozenset({Kind.READ, Kind.WRITE, Kind.COPY, Kind.SET, Kind.RECORD, Kind.WAIT})

Actor = tuple[str, int]  # ("stream", number) or ("thread", number)
Clock = dict[Actor, int]


class Access(NamedTuple):
    """An access of some granules."""

    actor: Actor
    count: int  # how many accesses of the actor there were, this one included
    what: str

    def __str__(self) -> str:
        return f"{self.what} on {self.actor[0]} {self.actor[1]}"


@dataclass(frozen=True, kw_only=True)
class Race:
    """Two accesses that nothing orders, in the order in which they were issued."""

    earlier: Access
    later: Access
    address: int

    def __str__(self) -> str:
        return f"{self.later} is not ordered after {self.earlier} ({self.address:#x})"


def races(entries: np.ndarray, names: Sequence[str]) -> list[Race]:
    """The races of a log, one for each pair of what races, in order; at most `MOST`.

    Args:
        entries: of the dtype `log.ENTRY`, in the order in which they were issued.
        names: what the details of marks number.
    """
    detector = Detector(names)
    for entry in entries.tolist():
        detector.see(*entry)
    return list(detector.found.values())[:MOST]


class Detector:
    """Clocks, and the last accesses of each granule."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.found: dict[tuple[str, str], Race] = {}
        self._names = names
        self._clocks: defaultdict[Actor, Clock] = defaultdict(dict)
        self._messages: defaultdict[tuple[str, int], Clock] = defaultdict(dict)  # of events and posts
        self._device_of: dict[Actor, int] = {}
        self._written: dict[int, Access] = {}
        self._read: defaultdict[int, dict[Actor, Access]] = defaultdict(dict)

    def see(
        self, kind: int, thread: int, device: int, stream: int, first: int, second: int, size: int, detail: int
    ) -> None:
        """Take the next entry into account."""
        host, queue = ("thread", thread), ("stream", stream)
        if kind in OF_STREAMS:
            self._device_of[queue] = device
        match kind:
            case Kind.READ | Kind.WRITE:
                self._issue(host, queue)
                self._access(queue, first, size, self._names[detail], kind == Kind.WRITE)
            case Kind.HOST_READ | Kind.HOST_WRITE:
                self._access(host, first, size, self._names[detail], kind == Kind.HOST_WRITE)
            case Kind.COPY:
                self._copy(host, queue, first, second, size, detail)
            case Kind.SET:
                self._issue(host, queue)
                self._access(queue, first, size, "a memset", True)
            case Kind.RECORD:
                self._issue(host, queue)
                self._messages["event", first] = dict(self._clocks[queue])
            case Kind.WAIT:
                self._issue(host, queue)
                merge(self._clocks[queue], self._messages["event", first])
            case Kind.SYNC_EVENT:
                merge(self._clocks[host], self._messages["event", first])
            case Kind.SYNC_STREAM:
                merge(self._clocks[host], self._clocks[queue])
            case Kind.SYNC_DEVICE:
                for other in [other for other, its in self._device_of.items() if its == device]:
                    merge(self._clocks[host], self._clocks[other])
            case Kind.POST:
                merge(self._messages["post", detail], self._clocks[host])
            case Kind.JOIN:
                merge(self._clocks[host], self._messages["post", detail])

    def _issue(self, host: Actor, queue: Actor) -> None:
        """Let a stream begin what a thread issues no sooner than it is issued."""
        merge(self._clocks[queue], self._clocks[host])

    def _copy(self, host: Actor, queue: Actor, target: int, source: int, size: int, pageable: int) -> None:
        """Read and write on the copy's stream.

        Pageable memory is read by the thread, before the call returns; where it is written, the call waits for the
        copy. What is smaller than a granule there is not looked at: the C library puts several such blocks into one.
        """
        watched = size >= GRANULE
        if pageable & SOURCE_PAGEABLE and watched:
            self._access(host, source, size, "a copy's read", False)
        self._issue(host, queue)
        if not pageable & SOURCE_PAGEABLE:
            self._access(queue, source, size, "a copy's read", False)
        if not pageable & TARGET_PAGEABLE:
            self._access(queue, target, size, "a copy's write", True)
            return
        merge(self._clocks[host], self._clocks[queue])
        if watched:
            self._access(host, target, size, "a copy's write", True)

    def _access(self, actor: Actor, address: int, size: int, what: str, writes: bool) -> None:
        clock = self._clocks[actor]
        clock[actor] = count = clock.get(actor, 0) + 1
        access = Access(actor, count, what)
        for granule in range(address // GRANULE, (address + max(size, 1) - 1) // GRANULE + 1):
            self._check(self._written.get(granule), access, clock, granule)
            if writes:
                for earlier in self._read.pop(granule, {}).values():
                    self._check(earlier, access, clock, granule)
                self._written[granule] = access
            else:
                self._read[granule][actor] = access

    def _check(self, earlier: Access | None, later: Access, clock: Clock, granule: int) -> None:
        if earlier is None or earlier.count <= clock.get(earlier.actor, 0):
            return
        race = Race(earlier=earlier, later=later, address=granule * GRANULE)
        self.found.setdefault((earlier.what, later.what), race)


def merge(clock: Clock, other: Clock) -> None:
    """Let all that happened before `other` have happened before `clock`."""
    for actor, count in other.items():
        if clock.get(actor, 0) < count:
            clock[actor] = count


def counted(entries: np.ndarray, *kinds: Kind) -> int:
    """Count the entries of these kinds."""
    return int(np.isin(entries["kind"], kinds).sum())


def described(found: Iterable[Race]) -> list[str]:
    """Races as sentences."""
    return [str(race) for race in found]
