"""The answer whether a model trains on a device: a line, a table whose parts add up, and the call to write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from html import escape
from typing import Any

from fxremat.cost.devices import Device
from fxremat.fitting.calls import OWN_ALLOCATOR, calls
from fxremat.fitting.ledger import Ledger, ledger_of
from fxremat.fitting.loaded import Loaded
from fxremat.fitting.settings import Training
from fxremat.fitting.tensor_parallel import NOTE
from fxremat.fitting.ways import Room, Way
from fxremat.search.floor import floor_of
from fxremat.show.table import Table
from fxremat.units import format_bytes

GIB = 2**30


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Answer:
    """The answer whether a model trains on a device, and with which memory; it prints as text."""

    loaded: Loaded
    training: Training
    device: Device
    room: Room
    way: Way | None  # the fastest way that fits; None: nothing fits
    larger: int | None = None  # a larger batch that would fit too, if one was tried and does
    reason: str = ""  # why weights cannot help either, where nothing fits
    limited: bool = False  # True: the device's memory is what the user gave as `device_mem`

    @property
    def fits(self) -> bool:
        """True if the model trains on the device, with values or weights on the host where it needs that."""
        return self.way is not None

    @cached_property
    def ledger(self) -> Ledger:
        """The memory of the process part by part: of the way that fits; if there is none, of the one that needs least.
        """
        if self.way is not None:
            return self.way.ledger
        least = self.room.frontier.candidates[-1]
        return ledger_of(least, self.room.step.costs.sizes, self.room.resident)

    @property
    def line(self) -> str:
        """The answer in one line."""
        memory = _gib(self.device.memory or 0)
        has = f"device_mem is {memory} on {self.device}" if self.limited else f"{self.device} has {memory}"
        least = f"no: {_gib(self.room.least)} GiB at least, and {has}"
        if self.way is None:
            return f"{least}; {self.reason}" if self.reason else least
        total, slow = _gib(self.way.ledger.total), f"{self.way.slowdown:.2f}x"
        if self.way.how:
            return f"{least}; with offloaded {self.way.how} {total} GiB at {slow}: yes"
        more = f"; batch {self.larger} would fit too" if self.larger else ""
        return f"yes: {total} of {memory} GiB, {slow} of the fastest{more}"

    @property
    def table(self) -> Table:
        """The parts of the memory, which add up to the total."""
        ledger = self.ledger
        rows = [(name, format_bytes(size), str(size)) for name, size in ledger.rows]
        rows.append(("total", format_bytes(ledger.total), str(ledger.total)))
        title = f"{self.device}, at the peak of the {ledger.moment}:"
        if self.way is None:
            title = f"{self.device}, with the least memory, at the peak of the {ledger.moment}:"
        return Table(
            title=(title,),
            heads=("part", "", "bytes"),
            rows=tuple(rows),
            notes=tuple(self._notes()),
            left=frozenset([0]),
            strong=frozenset([len(rows) - 1]),
        )

    def _notes(self) -> list[str]:
        gib, way = _gib, self.way
        least = floor_of(self.room.frontier.candidates[-1].program(), self.room.step.costs)
        sizes = f"without recomputation {gib(self.room.everything)} GiB, at least {gib(self.room.least)} GiB"
        notes = [f"{sizes}: there, {least}"]
        waiting = way.on_host if way else 0
        notes.append(f"host memory for what waits there: {format_bytes(waiting) if waiting else 'none'}")
        notes.append(f"reserve: 5 % of what is allocated, estimated for {OWN_ALLOCATOR}")
        if self.training.shard == "tp":
            notes.append(NOTE)
        elif self.training.shard is not None:
            notes.append(f"{self.training.shard}: by formula of what PyTorch keeps; nothing of it was captured")
        if self.room.step.assumed:
            notes.append(self.room.step.assumed)
        return [*notes, *self.loaded.notes]

    @property
    def calls(self) -> dict[str, str]:
        """The code that trains so, by library; {} where nothing fits."""
        return {} if self.way is None else calls(self.loaded, self.training, self.way)

    def __str__(self) -> str:
        code = [f"{name}:\n{_indented(text)}" for name, text in self.calls.items()]
        return "\n\n".join((self.line, self._what, str(self.table), *code))

    @property
    def _what(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.loaded.sizes.items())
        training = self.training
        how = f"{training.dtype}, {training.train}, {training.optimizer}"
        if training.accumulate > 1:
            how += f", {training.accumulate} backwards a step"
        if training.devices > 1:
            how += f", {training.shard} over {training.devices} devices"
        return f"{self.loaded.name}: {sizes + ', ' if sizes else ''}{how}"

    def __repr__(self) -> str:
        return f"<fxremat answer: {self.line}>"

    def to_json(self) -> dict[str, Any]:
        """Return the answer as data that `json.dumps` takes; sizes in bytes."""
        way, ledger = self.way, self.ledger
        return {
            "answer": self.line,
            "fits": self.fits,
            "model": self.loaded.name,
            "device": self.device.name,
            "device_memory": self.device.memory,  # of it what `device_mem` gives, where that is given
            "training": asdict(self.training) | dict(self.loaded.sizes),
            "moment": ledger.moment,
            "parts": dict(ledger.rows),
            "total": ledger.total,
            "least": self.room.least,
            "without_recomputation": self.room.everything,
            "offloaded": way.how if way else "",
            "slowdown": way.slowdown if way else None,
            "mem": way.budget if way else None,
            "host_memory": way.on_host if way else 0,
            "larger_batch": self.larger,
            "calls": self.calls,
            "notes": self._notes(),
        }

    def to_html(self) -> str:
        """Return the answer as an HTML page."""
        code = "".join(
            f"<h2>{escape(name)}</h2>\n<pre>{escape(text)}</pre>\n" for name, text in self.calls.items()
        )
        title = f"{escape(self.loaded.name)} on {escape(str(self.device))}"
        return (
            f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
            '<body style="font-family: system-ui, sans-serif; max-width: 60em; margin: 2em auto;">\n'
            f"<h1>{title}</h1>\n<p><strong>{escape(self.line)}</strong></p>\n<p>{escape(self._what)}</p>\n"
            f"{self.table.html()}\n{code}</body></html>\n"
        )

    def _repr_html_(self) -> str:
        return f"<p><strong>{escape(self.line)}</strong></p>{self.table.html()}"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Answers(Sequence[Answer]):
    """The answers for one model on several devices; it prints as a table with a row for each."""

    answers: tuple[Answer, ...]  # at least one

    def __getitem__(self, place: Any) -> Any:
        return self.answers[place]

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def table(self) -> Table:
        """A row for each device: the answer, what the process takes there, and what it takes at least."""
        return Table(
            title=(self.answers[0]._what,),
            heads=("device", "memory", "fits", "takes", "at least", "time"),
            rows=tuple(map(_row, self.answers)),
            notes=(
                "takes, at least: bytes of the whole process; at least: with everything on the device",
                "time: of forward and backward, as a multiple of recomputing nothing on that device",
            ),
            left=frozenset([0, 2]),
        )

    def __str__(self) -> str:
        return str(self.table)

    def __repr__(self) -> str:
        return f"<fxremat answers: {'; '.join(f'{each.device}: {each.line}' for each in self.answers)}>"

    def to_json(self) -> list[dict[str, Any]]:
        """Return the answers as data that `json.dumps` takes, in the order of the devices; sizes in bytes."""
        return [answer.to_json() for answer in self.answers]

    def to_html(self) -> str:
        """Return the table as an HTML page."""
        return (
            '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
            f"<title>{escape(self.answers[0].loaded.name)}</title>\n"
            '<body style="font-family: system-ui, sans-serif; max-width: 60em; margin: 2em auto;">\n'
            f"{self.table.html()}\n</body></html>\n"
        )

    def _repr_html_(self) -> str:
        return self.table.html()


def _row(answer: Answer) -> tuple[str, ...]:
    way = answer.way
    how = "no" if way is None else f"yes, {way.how} on the host" if way.how else "yes"
    return (
        str(answer.device),
        f"{_gib(answer.device.memory or 0)} GiB",
        how,
        f"{_gib(way.ledger.total)} GiB" if way else "-",
        f"{_gib(answer.room.least)} GiB",
        f"{way.slowdown:.2f}x" if way else "-",
    )


def _gib(count: int) -> str:
    return f"{count / GIB:.1f}"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())
