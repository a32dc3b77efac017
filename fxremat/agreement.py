"""Joint work of some ranks of a job, through the key-value store of the job; no rank waits for ever.

    agreement = Agreement("ranks 0, 1", (0, 1))
    agreement.gathered(digest)                          the values of all ranks
    agreement.together("measuring", measure)            all succeed, or all raise
    agreement.from_first("planning", plan)              the first rank works, all get its result or its error

No collective of a process group is used: a rank may be stuck in an earlier collective. Every call has one key per rank
that writes something, and one that counts the ranks that have left the call; the last to leave deletes them all. An
error that ends the agreement is stored under a key of the agreement, which every waiting rank checks.

A rank that waits for others polls, and watches their heartbeats. It raises FxrematError when
    a rank reports that it has failed                                         at once
    the store is gone, or does not answer                                     at once, or after SILENT seconds
    the heartbeat of an awaited rank stands still                             for SILENT seconds
    an awaited rank is inside of a step that this rank has to plan first      for SILENT seconds
    an awaited rank has failed in the present step, and not begun another     for SILENT seconds
    an awaited rank waits for this one in another call                        for SILENT seconds
    an awaited rank neither comes nor works in a call of an agreement         within the agreement's patience
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch.distributed as dist

from fxremat import heartbeat
from fxremat.errors import FxrematError
from fxremat.heartbeat import (
    ROOM,
    Call,
    Heartbeat,
    Store,
    StoreGone,
    first_line,
    heartbeat_of,
    messenger_of,
    status,
)
from fxremat.torch_private import store_of_job

T = TypeVar("T")

PAUSES = 0.001, 0.05  # seconds between two checks whether a key exists: at first, and at most
WATCHED = 16  # number of awaited ranks whose heartbeats are read at a time
PART = 1 << 20  # maximum bytes stored under one key; TCPStore allows 8 MiB


@dataclass
class _Call(Call):
    what: str = ""  # what the ranks do in this call, such as "planning together"; error messages say "while ..."
    keys: list[str] = field(default_factory=list)  # keys under which this rank wrote or read the parts of large data

    def key(self, rank: int) -> str:
        return f"{self.name}/{rank}"

    @property
    def failed(self) -> str:
        return f"{self.name}/failed"

    @property
    def left(self) -> str:
        return f"{self.name}/left"




@dataclass
class _Seen:
    """The last heartbeat of an awaited rank and what it shows; times are in seconds since the wait began."""

    beat: Heartbeat | None = None
    heard: float = 0.0  # time at which the heartbeat last changed
    # error message for a state in which the rank cannot come, raised if the state lasts; "": no such state
    hindrance: str = ""
    since: float = 0.0  # time at which `hindrance` was first seen
    idle: float = 0.0  # seconds in which the rank has neither come to the call nor worked in another one


class _Lookout:
    """Watch the heartbeats of the ranks that `call` waits for, and tell whether they can still come.

    Only the time in which this rank checks is counted: if this process was stopped for a while, other ranks do
    not count as silent.
    """

    def __init__(self, call: _Call, rank: int, step: int, patience: float) -> None:
        self._call, self._rank, self._step, self._patience = call, rank, step, patience
        self._clock = 0.0
        self._seen: dict[int, _Seen] = {}

    def look(self, seconds: float, beats: Mapping[int, Heartbeat | None]) -> None:
        """Record the ranks' heartbeats `seconds` after the previous ones.

        Raise `FxrematError` if a rank cannot come any more.
        """
        self._clock += seconds
        for rank, beat in beats.items():
            self._note(self._seen.setdefault(rank, _Seen(since=self._clock)), rank, beat, seconds)
        seen = {rank: self._seen[rank] for rank in beats}
        for one in seen.values():
            if (
                one.hindrance
                and self._clock - one.since > heartbeat.SILENT
                and self._clock - one.heard <= heartbeat.SILENT
            ):
                raise FxrematError(one.hindrance)
        silent = {r: self._clock - one.heard for r, one in seen.items() if one.beat is not None}
        silent = {rank: ago for rank, ago in silent.items() if ago > heartbeat.SILENT}
        if silent:
            ago = f"{min(silent.values()):.0f} s ago, while {self._call.what}"
            if len(silent) == 1:
                raise FxrematError(f"{_named(silent)} has ended or hangs: it was last heard from {ago}")
            raise FxrematError(f"{_named(silent)} have ended or hang: they were last heard from {ago}")
        late = [rank for rank, one in seen.items() if one.idle > self._patience]
        if late:
            has = "has" if len(late) == 1 else "have"
            raise FxrematError(
                f"{_named(late)} {has} not come within {self._patience:g} s, while {self._call.what}"
            )

    def _note(self, seen: _Seen, rank: int, beat: Heartbeat | None, seconds: float) -> None:
        if beat is not None and beat != seen.beat:
            seen.beat, seen.heard = beat, self._clock
        working = beat is not None and beat.call and not beat.waits_for
        seen.idle += 0.0 if working else seconds
        hindrance = self._hindrance(rank, beat) if beat is not None else ""
        if hindrance != seen.hindrance:
            seen.hindrance, seen.since = hindrance, self._clock

    def _hindrance(self, rank: int, beat: Heartbeat) -> str:
        if beat.inside and beat.step >= self._step:  # a rank that is still in an earlier step can come later
            return (
                f"rank {rank} trains on with an earlier plan while rank {self._rank} has to plan for new shapes: "
                "give every rank inputs of the same shapes (pad, or drop_last)"
            )
        if beat.failed and beat.step >= self._step:
            return f"rank {rank} has failed in step {beat.step}, for which the others wait: {beat.failed}"
        if self._rank in beat.waits_for and beat.call != self._call.name:
            return (
                f"rank {rank} waits for rank {self._rank} in {beat.call} while that one waits in {self._call.name}: "
                "every rank has to plan the same models in the same order"
            )
        return ""


def _named(ranks: Iterable[int]) -> str:
    """Name the ranks by number.

    >>> _named([1]), _named([1, 2, 5])
    ('rank 1', 'ranks 1, 2 and 5')
    """
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"




_agreements: Counter[str] = Counter()  # name -> number of agreements of that name begun in this process
_failures: Counter[str] = Counter()  # name -> `status.failures` when the latest agreement of that name began


class Agreement:
    """Joint work of some ranks of the job; every method is called by all of them in the same order.

    `ranks` are global ranks, this one included, in an order that is equal on all of them. So is `name`; agreements that
    follow one another may have the same name; a rank that failed before it came to one begins with the next one that
    has not ended. `patience` is the number of seconds that a rank has to come; by default the timeout of the process
    group.

    Every method raises FxrematError, on all ranks, if one has failed, is gone, or does not come. The agreement has then
    ended, and later calls raise the same. Errors of the functions that `together` and `from_first` run do not end it,
    unless ranks meet inside of them. With only one rank no store is used.
    """

    def __init__(self, name: str, ranks: Sequence[int], *, patience: float | None = None) -> None:
        self.ranks = tuple(ranks)
        self.rank = self.ranks[0] if len(self.ranks) == 1 else dist.get_rank()
        if self.rank not in self.ranks or len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"rank {self.rank} cannot agree with ranks {self.ranks}")
        _agreements[name] += 1
        self._calls = itertools.count(1)
        if len(self.ranks) > 1:
            store = store_of_job()
            self._messenger = messenger_of(store)
            self._patience = store.timeout.total_seconds() if patience is None else patience
            _agreements[name] += self._missed(name)
        self._name = f"{ROOM}/{name}#{_agreements[name]}"

    def _missed(self, name: str) -> int:
        """Count the agreements of this name that other ranks began, and that failed, before this rank came.

        Return 0 if no step has failed on this rank since its last agreement of this name: then it has missed
        none, and it must see the errors of the other ranks.
        """
        before, _failures[name] = _failures[name], status.failures
        if before == status.failures:
            return 0

        def count(store: Store) -> int:
            ended = (store.check([f"{ROOM}/{name}#{number}/failed"]) for number in itertools.count(_agreements[name]))
            return sum(1 for _ in itertools.takewhile(bool, ended))

        # if the store cannot be reached, the first call of a method raises an error
        with contextlib.suppress(StoreGone):
            return self._messenger.ask(count)
        return 0

    def gathered(self, value: T, what: str = "planning together") -> list[T]:
        """Return every rank's value, in the order of the ranks; values are pickled.

        `what` completes "while ..." in the messages of errors.
        """
        if len(self.ranks) == 1:
            return [value]
        with self._call("gathered", what) as call:
            self._write(call, pickle.dumps(value))
            others = {rank: pickle.loads(self._read(call, rank)) for rank in self.ranks if rank != self.rank}
        return [value if rank == self.rank else others[rank] for rank in self.ranks]

    def meet(self, what: str) -> None:
        """Wait until all ranks have come, before a collective that would wait for ever for a failed rank."""
        self.gathered(None, what)

    def maximum(self, numbers: Sequence[float], what: str = "planning together") -> list[float]:
        """Return the elementwise maximum of the lists that the ranks pass.

        `what` completes "while ..." in error messages. Raises `FxrematError` if the lists differ in length.
        """
        rows = self.gathered(list(numbers), what)
        if len({len(row) for row in rows}) > 1:
            counts = ", ".join(f"{len(row)} on rank {rank}" for rank, row in zip(self.ranks, rows))
            raise FxrematError(f"the ranks have different counts of numbers to agree on: {counts}")
        return [max(column) for column in zip(*rows)]

    def together(self, what: str, function: Callable[[], T], *, meeting: bool = False) -> T:
        """Run a function on every rank, and return its result once it has succeeded on all of them.

        If it fails on a rank, that rank raises its own error, and the others an FxrematError with the first line of it,
        as soon as they have run the function themselves.

        Args:
            meeting: the ranks call `meet` inside of the function; an error in it ends the agreement, so that no rank
                waits there for one that has failed.
        """
        if len(self.ranks) == 1:
            return function()
        with self._call("together", what) as call:
            result, error = _tried(function)
            if meeting and error is not None:
                raise error
            if error is None:
                self._write(call, b"")
                error = self._failure_of_another(call)
            else:
                self._messenger.set(call.failed, pickle.dumps(self._summary(error, what)))
        if error is not None:
            raise error
        return result[0]

    def from_first(self, what: str, function: Callable[[], T]) -> T:
        """Run a function on the first rank, and return its result on every rank; it is pickled.

        If it fails with an FxrematError, every rank raises that; for any other error the others raise an FxrematError
        with the first line of it. They wait for as long as the first rank's heartbeat continues.
        """
        if len(self.ranks) == 1:
            return function()
        error: BaseException | None
        with self._call("from_first", what) as call:
            if self.rank == self.ranks[0]:
                made, error = _tried(lambda: _with_pickle(function()))
                result = [value for value, _ in made]
                told = (None, self._for_others(error, what)) if error is not None else None
                self._write(call, pickle.dumps(told) if told else made[0][1])
            else:
                value, error = pickle.loads(self._read(call, self.ranks[0]))
                result = [value]
        if error is not None:
            raise error
        return result[0]

    def fail(self, error: BaseException, what: str = "planning together") -> None:
        """End the agreement with this rank's error, which every waiting rank raises; the first error counts.

        An FxrematError is raised as it is, any other error as an FxrematError with the first line of it.
        """
        if len(self.ranks) == 1:
            return
        failure = pickle.dumps(self._for_others(error, what))
        with contextlib.suppress(StoreGone):  # without a store the other ranks end with an error of their own
            self._messenger.ask(lambda store: _set_once(store, self._failed, failure))


    @property
    def _failed(self) -> str:
        return f"{self._name}/failed"

    @contextlib.contextmanager
    def _call(self, method: str, what: str) -> Iterator[_Call]:
        """Enter one call of a method on this rank; an error inside of the context ends the agreement on all ranks."""
        call = _Call(f"{self._name}/{next(self._calls)}/{method}", what=what)
        heartbeat.calls.append(call)
        try:
            self._raise(self._messenger.ask(lambda store: _get(store, self._failed)))
            yield call
            self._leave(call)
        except StoreGone as error:
            raise FxrematError(
                f"rank 0, or what else holds the store of the job, has ended or hangs ({error}), while {what}"
            ) from None
        except BaseException as error:
            self.fail(error, what)
            raise
        finally:
            heartbeat.calls.remove(call)

    def _leave(self, call: _Call) -> None:
        """Record that this rank has read all it needs of a call; the last rank deletes the keys of the call."""
        keys = {*call.keys, *map(call.key, self.ranks), call.failed, call.left}

        def leave(store: Store) -> None:
            if store.add(call.left, 1) == len(self.ranks):
                for key in keys:
                    store.delete_key(key)

        # this call is complete; the next call raises an error if the store is gone
        with contextlib.suppress(StoreGone):
            self._messenger.ask(leave)

    def _write(self, call: _Call, data: bytes) -> None:
        """Write data under this rank's key of a call; data of more than `PART` bytes is split over several keys."""
        key = call.key(self.rank)
        if len(data) <= PART:
            self._messenger.set(key, b"whole " + data)
            return
        parts = [data[start : start + PART] for start in range(0, len(data), PART)]
        call.keys += _part_keys(key, len(parts))
        for name, part in zip(_part_keys(key, len(parts)), parts):
            self._messenger.set(name, part)
        self._messenger.set(key, b"parts %d" % len(parts))

    def _read(self, call: _Call, rank: int) -> bytes:
        """Wait until a rank has come to a call, and return the data that it has written."""
        self._await(call, rank)
        key = call.key(rank)
        kind, _, data = self._messenger.get(key).partition(b" ")
        if kind == b"whole":
            return data
        names = _part_keys(key, int(data))
        call.keys += names
        return b"".join(map(self._messenger.get, names))

    def _failure_of_another(self, call: _Call) -> BaseException | None:
        """Wait for all ranks, and return the error of one that failed in this call; None if all have succeeded."""
        if all(self._await(call, rank) for rank in self.ranks):
            return None
        failure: BaseException = pickle.loads(self._messenger.get(call.failed))
        return failure

    def _await(self, call: _Call, rank: int) -> bool:
        """Wait until the rank has written its key, and return True; or return False if the call failed on some rank."""
        key, awaited = call.key(rank), self.ranks[self.ranks.index(rank) :]
        lookout = _Lookout(call, self.rank, status.step, self._patience)
        interval, pause = min(heartbeat.BEAT, heartbeat.SILENT / 10), PAUSES[0]
        looked = time.monotonic()

        def look(store: Store) -> tuple[bool, bool, bytes | None]:
            if store.check([key]):
                return True, False, None
            return False, store.check([call.failed]), _get(store, self._failed)

        while True:
            there, call_failed, failure = self._messenger.ask(look)
            if there or call_failed:
                call.waits_for = ()
                return there
            self._raise(failure)
            if (elapsed := time.monotonic() - looked) > interval:
                beats = self._messenger.ask(lambda store: _missing(store, call, awaited))
                call.waits_for = tuple(beats)
                lookout.look(min(elapsed, 2 * interval), beats)
                looked = time.monotonic()
            time.sleep(pause)
            pause = min(1.5 * pause, PAUSES[1])

    def _raise(self, failure: bytes | None) -> None:
        if failure is not None:
            raise pickle.loads(failure)


    def _for_others(self, error: BaseException, what: str) -> BaseException:
        """Return this rank's error as other ranks raise it: an FxrematError that names the rank.

        An FxrematError that can be pickled is copied, with a note of the rank; any other error becomes one line.
        """
        if isinstance(error, FxrematError):
            with contextlib.suppress(Exception):
                copy: FxrematError = pickle.loads(pickle.dumps(error))
                copy.add_note(f"raised on rank {self.rank}")
                return copy
        return self._summary(error, what)

    def _summary(self, error: BaseException, what: str) -> FxrematError:
        return FxrematError(f"rank {self.rank} failed while {what}: {first_line(error)}")


def _tried(function: Callable[[], T]) -> tuple[list[T], BaseException | None]:
    """Run a function; return ([its result], None) if it succeeds, ([], the error) if it fails."""
    try:
        return [function()], None
    except BaseException as error:  # also KeyboardInterrupt, which is reported to the other ranks
        return [], error


def _with_pickle(value: T) -> tuple[T, bytes]:
    return value, pickle.dumps((value, None))


def _part_keys(key: str, count: int) -> list[str]:
    return [f"{key}/{number}" for number in range(count)]


def _get(store: Store, key: str) -> bytes | None:
    return store.get(key) if store.check([key]) else None


def _set_once(store: Store, key: str, value: bytes) -> None:
    if not store.check([key]):
        store.set(key, value)


def _missing(store: Store, call: _Call, ranks: Sequence[int]) -> dict[int, Heartbeat | None]:
    """Return the heartbeats of the next `WATCHED` ranks that have not come to the call; None for a rank without one."""
    missing = (rank for rank in ranks if not store.check([call.key(rank)]))
    return {rank: heartbeat_of(store, rank) for rank in itertools.islice(missing, WATCHED)}


ALONE = Agreement("alone", (0,))  # the agreement of a process that plans by itself
