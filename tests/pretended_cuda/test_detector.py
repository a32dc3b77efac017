"""The race detector on logs written by hand: what orders two accesses, and what does not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.pretended_cuda.detector import GRANULE, races
from tests.pretended_cuda.log import ENTRY, SOURCE_PAGEABLE, TARGET_PAGEABLE, Kind

pytestmark = pytest.mark.long

NAMES = ["op", "other"]
COMPUTE, SIDE = -1, 1  # streams
MAIN, HELPER = 0, 1  # threads
DEVICE, HOST, EVENT = 1 << 20, 1 << 30, 7  # addresses, and an event

Line = tuple[int, ...]


def read(stream: int, address: int = DEVICE, size: int = GRANULE, thread: int = MAIN) -> Line:
    return (Kind.READ, thread, 0, stream, address, 0, size, 0)


def write(stream: int, address: int = DEVICE, size: int = GRANULE, thread: int = MAIN) -> Line:
    return (Kind.WRITE, thread, 0, stream, address, 0, size, 1)


def copy(stream: int, target: int, source: int, pageable: int = 0, thread: int = MAIN) -> Line:
    return (Kind.COPY, thread, 0, stream, target, source, GRANULE, pageable)


def host(kind: Kind, thread: int = MAIN, address: int = HOST) -> Line:
    return (kind, thread, 0, 0, address, 0, GRANULE, 0)


def record(stream: int, event: int = EVENT) -> Line:
    return (Kind.RECORD, MAIN, 0, stream, event, 0, 0, 0)


def wait(stream: int, event: int = EVENT) -> Line:
    return (Kind.WAIT, MAIN, 0, stream, event, 0, 0, 0)


def handed(kind: Kind, thread: int) -> Line:
    return (kind, thread, 0, 0, 0, 0, 0, 1)


def synchronized(kind: Kind, stream: int = 0, event: int = EVENT, device: int = 0) -> Line:
    return (kind, MAIN, device, stream, event, 0, 0, 0)


def found(*lines: Line) -> list[str]:
    """Which pairs race, as "earlier, later"."""
    entries = np.array([tuple(map(int, line)) for line in lines], ENTRY)
    return [f"{race.earlier.what}, {race.later.what}" for race in races(entries, NAMES)]


def test_one_stream_is_in_order() -> None:
    assert found(write(SIDE), read(SIDE), write(SIDE)) == []


@pytest.mark.parametrize(
    ("first", "second", "pair"),
    [
        (write(SIDE), read(COMPUTE), ["other, op"]),
        (read(SIDE), write(COMPUTE), ["op, other"]),
        (write(SIDE), write(COMPUTE), ["other, other"]),
        (read(SIDE), read(COMPUTE), []),
        (write(SIDE), read(COMPUTE, DEVICE + GRANULE), []),
        (write(SIDE, size=2 * GRANULE), read(COMPUTE, DEVICE + GRANULE), ["other, op"]),
    ],
)
def test_two_streams_race_where_one_of_them_writes(first: Line, second: Line, pair: list[str]) -> None:
    assert found(first, second) == pair


def test_an_event_orders_what_came_before_its_record() -> None:
    assert found(write(SIDE), record(SIDE), wait(COMPUTE), read(COMPUTE)) == []
    assert found(record(SIDE), write(SIDE), wait(COMPUTE), read(COMPUTE)) == ["other, op"]
    assert found(write(SIDE), record(SIDE), read(COMPUTE), wait(COMPUTE)) == ["other, op"]
    assert found(write(SIDE), record(SIDE), wait(COMPUTE, EVENT + 1), read(COMPUTE)) == ["other, op"]


def test_order_is_handed_on() -> None:
    """Through a third stream, and through the host."""
    third = 2
    over = [record(SIDE), wait(third), record(third, EVENT + 1), wait(COMPUTE, EVENT + 1)]
    assert found(write(SIDE), *over, read(COMPUTE)) == []
    for waited in (
        synchronized(Kind.SYNC_STREAM, SIDE),
        synchronized(Kind.SYNC_EVENT),
        synchronized(Kind.SYNC_DEVICE),
    ):
        assert found(write(SIDE), record(SIDE), waited, read(COMPUTE)) == []
    assert found(write(SIDE), synchronized(Kind.SYNC_DEVICE, device=1), read(COMPUTE)) == ["other, op"]


def test_memory_that_is_handed_on_while_a_copy_reads_it() -> None:
    out = copy(SIDE, HOST, DEVICE)
    before = [write(COMPUTE), record(COMPUTE), wait(SIDE), out]
    assert found(*before, write(COMPUTE)) == ["a copy's read, other"]
    assert found(*before, record(SIDE, EVENT + 1), wait(COMPUTE, EVENT + 1), write(COMPUTE)) == []


def test_every_reader_is_remembered_until_the_next_write() -> None:
    assert found(read(SIDE), read(2), record(2), wait(COMPUTE), write(COMPUTE)) == ["op, other"]


def test_a_thread_reads_pinned_memory_when_it_has_waited() -> None:
    out, look = copy(SIDE, HOST, DEVICE), host(Kind.HOST_READ)
    assert found(out, look) == ["a copy's write, op"]
    assert found(out, synchronized(Kind.SYNC_STREAM, SIDE), look) == []
    assert found(host(Kind.HOST_WRITE), copy(SIDE, DEVICE, HOST)) == [], "it is issued afterwards"


def test_a_copy_to_pageable_memory_is_waited_for() -> None:
    out, look = copy(SIDE, HOST, DEVICE, TARGET_PAGEABLE), host(Kind.HOST_READ)
    assert found(out, look) == []
    assert found(out, read(COMPUTE), write(COMPUTE)) == []
    assert found(copy(SIDE, DEVICE, HOST, SOURCE_PAGEABLE), host(Kind.HOST_WRITE)) == []


def test_threads_are_ordered_by_what_they_hand_to_each_other() -> None:
    out = copy(SIDE, HOST, DEVICE, TARGET_PAGEABLE, thread=HELPER)
    look = host(Kind.HOST_READ)
    assert found(out, look) == ["a copy's write, op"]
    assert found(out, handed(Kind.POST, HELPER), handed(Kind.JOIN, MAIN), look) == []
    assert found(handed(Kind.POST, HELPER), out, handed(Kind.JOIN, MAIN), look) == ["a copy's write, op"]


def test_each_pair_is_told_of_once() -> None:
    assert found(write(SIDE, size=8 * GRANULE), read(COMPUTE, size=8 * GRANULE)) == ["other, op"]
