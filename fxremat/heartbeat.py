"""The heartbeat of this process, which tells the other ranks of a job what it is doing, and access to the job's store.

Each process has one thread, the messenger, which alone talks to the key-value store of the job: a store that does not
answer blocks no other thread, and the heartbeat continues while others work. It has a connection of its own if the
store is a TCPStore: torch waits for other ranks under the lock of the first connection.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist

from fxremat.errors import FxrematError
from fxremat.torch_private import own_connection, store_of_job

T = TypeVar("T")
Store: TypeAlias = Any  # torch.distributed.Store, which type checkers do not find

SILENT = 15.0  # seconds without a new heartbeat after which a rank counts as gone
BEAT = 2.0  # seconds between two heartbeats
ROOM = "fxremat"  # prefix of every key in the store




@dataclass
class Status:
    """The state of training in this process.

    The code that runs steps sets it, and the heartbeat sends it to other ranks.

    `step` is the number of the latest forward, set before that forward is planned. `inside` is True while the
    planned forward or backward of that step runs. `failed` is set from an error of the step until the next step
    begins.
    """

    step: int = 0
    inside: bool = False
    failed: str = ""  # first line of the error that ended the latest step; "": no error
    failures: int = 0  # the number of steps that have failed so far


status = Status()


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The message that a rank writes every `BEAT` seconds.

    >>> beat = Heartbeat(number=7, step=3, inside=True, call="", waits_for=())
    >>> Heartbeat.parse(str(beat)) == beat
    True
    """

    number: int
    step: int
    inside: bool
    call: str  # name of the `Agreement` call that this rank is in; "": it is in none
    waits_for: tuple[int, ...]  # ranks that this rank waits for in that call; empty while it does work of its own
    failed: str = ""  # first line of the error that ended the rank's latest step, until its next step begins

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str | bytes) -> Heartbeat:
        fields = json.loads(text)
        return cls(**{**fields, "waits_for": tuple(fields["waits_for"])})


@dataclass
class Call:
    """A running call of a method of an `Agreement`, in which ranks of the job wait for each other."""

    name: str  # the same on all ranks
    waits_for: tuple[int, ...] = ()  # ranks that have not come to the call yet


calls: list[Call] = []  # the calls that this process is in, innermost last


def _heartbeat(number: int) -> Heartbeat:
    call = calls[-1] if calls else Call("")
    inside = status.inside and not call.name
    return Heartbeat(
        number=number,
        step=status.step,
        inside=inside,
        call=call.name,
        waits_for=call.waits_for,
        failed="" if call.name else status.failed,
    )


def heartbeat_of(store: Store, rank: int) -> Heartbeat | None:
    key = _pulse(rank)
    return Heartbeat.parse(store.get(key)) if store.check([key]) else None


def _pulse(rank: int) -> str:
    return f"{ROOM}/heartbeat/{rank}"




class StoreGone(Exception):
    """Error: the store cannot be reached. The message says how that was noticed."""


class Messenger(threading.Thread):
    """The thread that writes the heartbeat of this rank, and accesses the store for other threads.

    It does not keep the default store alive: a FileStore deletes its file when the last process has released it, and
    the next process group may use the same path.
    """

    def __init__(self, store: Store, rank: int) -> None:
        super().__init__(name="fxremat heartbeat", daemon=True)
        self._default = weakref.ref(store)
        self._connection: Store | None = None
        self._rank = rank
        self._asked: queue.SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None]
        self._asked = queue.SimpleQueue()
        self._gone = ""  # why the messenger thread has stopped; "": it is running
        self._beats = itertools.count()

    def serves(self, store: Store) -> bool:
        return self.is_alive() and not self._gone and self._default() is store

    def ask(self, work: Callable[[Store], T]) -> T:
        """Run `work(store)` on the messenger's thread and return its result.

        `work` must wait for nothing but the store. Raises `StoreGone` if the store fails, or does not answer
        within `SILENT` seconds.
        """
        answer: Future[T] = Future()
        self._asked.put((work, answer))
        if self._gone:  # the thread may have ended before it could see this request
            self._refuse_all()
        try:
            return answer.result(timeout=SILENT)
        except TimeoutError:
            raise StoreGone(f"it has not answered for {SILENT:g} s") from None

    def get(self, key: str) -> bytes:
        value: bytes = self.ask(lambda store: store.get(key))
        return value

    def set(self, key: str, value: bytes) -> None:
        self.ask(lambda store: store.set(key, value))

    def tell(self) -> None:
        """Send a heartbeat at once, without waiting until it is sent."""
        self._asked.put((self._beat, Future()))

    def end(self) -> None:
        """End the thread after its pending work; wait at most two seconds for that."""
        self._asked.put(None)
        if self.is_alive():
            self.join(timeout=2)

    def run(self) -> None:
        try:
            self._connection = own_connection(self._store())
            self._serve()
            self._gone = "the heartbeat was stopped"
        except Exception as error:  # an error of the store, so other ranks cannot be told about it
            self._gone = first_line(error)
        self._connection = None
        self._refuse_all()

    def _serve(self) -> None:
        while True:
            self._beat(self._store())
            due = time.monotonic() + BEAT
            while (left := due - time.monotonic()) > 0:
                try:
                    asked = self._asked.get(timeout=left)
                except queue.Empty:
                    break
                if asked is None:
                    return
                self._do(*asked)

    def _beat(self, store: Store) -> None:
        store.set(_pulse(self._rank), str(_heartbeat(next(self._beats))))

    def _do(self, work: Callable[[Store], Any], answer: Future[Any]) -> None:
        try:
            answer.set_result(work(self._store()))
        except Exception as error:
            answer.set_exception(StoreGone(first_line(error)))
            raise

    def _store(self) -> Store:
        default = store_of_job()
        if default is None or default is not self._default():
            raise StoreGone("the process group was destroyed")
        return self._connection or default

    def _refuse_all(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if (asked := self._asked.get_nowait()) is not None:
                    asked[1].set_exception(StoreGone(self._gone))


_messenger: Messenger | None = None
_starting = threading.Lock()


def watch() -> None:
    """Start the heartbeat, which shows the other ranks that this one is alive, and what it is doing.

    Nothing happens without a process group, or if the heartbeat was started already.
    """
    store = store_of_job()
    if store is not None:
        messenger_of(store)


def stop() -> None:
    """End the heartbeat that `watch` started; also called when the process exits.

    A thread that is inside of the store's code while the interpreter is finalized would abort the process.
    """
    if _messenger is not None:
        _messenger.end()


def messenger_of(store: Store) -> Messenger:
    global _messenger
    with _starting:
        if _messenger is None:
            atexit.register(stop)
        elif _messenger.serves(store):
            return _messenger
        else:
            _messenger.end()
        _messenger = Messenger(store, dist.get_rank())
        _messenger.start()
        return _messenger


def begin_step() -> None:
    """Record that this process begins another training step, with a forward."""
    status.step += 1
    status.failed = ""


def note_failure(error: BaseException) -> None:
    """Tell the other ranks, which may be waiting for this one, that the present step has failed on this rank."""
    status.failed = first_line(error)
    status.failures += 1
    if _messenger is not None and _messenger.is_alive():
        _messenger.tell()


def first_line(error: BaseException) -> str:
    """Return the first line of an error, preceded by its type unless fxremat raised it.

    >>> first_line(FxrematError("no plan")), first_line(KeyError("x"))
    ('no plan', "KeyError: 'x'")
    """
    text = (str(error).strip().splitlines() or [""])[0]
    return (
        text
        if isinstance(error, FxrematError | StoreGone)
        else f"{type(error).__name__}: {text}".removesuffix(": ")
    )



LOST = ("connection", "peer", "socket", "timed out", "timeout", "nccl", "gloo", "broken pipe")


@contextlib.contextmanager
def inside_step(what: str) -> Iterator[None]:
    """Within this context, a planned forward or backward runs, whose collectives the other ranks have to join.

    Raises `FxrematError` with a short message if another process of the job has ended or hangs.
    """
    status.inside = True
    try:
        yield
    except RuntimeError as error:
        if (text := lost_peer(error)) is None:
            raise
        raise FxrematError(
            f"rank {dist.get_rank()} cannot finish the {what} of step {status.step}: another process of the job has "
            f"ended or does not answer ({text}); end the job and start it again from its last checkpoint"
        ) from error
    finally:
        status.inside = False


def lost_peer(error: BaseException) -> str | None:
    """Return the first line of an error that a lost connection to another process raises; None for other errors.

    gloo raises a RuntimeError ("Connection closed by peer", "Timed out waiting"), NCCL a DistBackendError.
    """
    text = (str(error).strip().splitlines() or [""])[0]
    known = isinstance(error, RuntimeError) and any(word in text.lower() for word in LOST)
    if not known and not isinstance(error, dist.DistError):
        return None
    return re.sub(r"^\[[^]]*\]\s*", "", text).split(". ")[0]
