"""The definition of a valid schedule of a chain, of its memory and of its time.

    stored    values a_i and A_i on the device, at first {a_0}
    phase k   the gradient d_k is stored; k = n until B_n has run, in the end k = 0

    op        needs               memory while it runs                        afterwards
    Fnone_l   input l             stored + phase + a_l + scratch              a_l stored, a_{l-1} freed
    Fck_l     input l             stored + phase + a_l + scratch              a_l stored
    Fall_l    input l             stored + phase + A_l[o] + its scratch       A_l[o] stored
    B_l       d_l, A_l, input l   stored + phase + d_{l-1} + its scratch      phase l-1; A_l and a_{l-1} freed
    Drop(v)   v                   stored + phase                              v freed
    Off(v)    v                   stored + phase                              v on the host too, and soon only there
    Pre(v)    v on the host       stored + phase                              v on both

"input l" is a_{l-1} or A_{l-1}; the bytes of a phase are in `Chain.phase_sizes`. The peak also counts the end
of the step, when d_0 and all weight gradients are held. Solvers do not import this file, so that none evaluates
itself.

Off(v) and Pre(v) enter the queue of their direction when the op before them has ended; copies run concurrently
with ops. `resolved.py` finds which copy of a value an op reads and how long each stays, `token_clock.py` what
waits for what. A value on the host stays there, and may be fetched again. Drop(v) frees the device's copy, once
no copy reads or writes it; dropping a value that is leaving already has no effect.
"""

from dataclasses import dataclass
from math import inf
from typing import Literal

from fxremat.chains.chain import Chain
from fxremat.chains.platform import Platform
from fxremat.chains.resolved import ResolvedSchedule, read
from fxremat.chains.schedule import Schedule
from fxremat.chains.token_clock import LinkSpeeds, TimedRun, run
from fxremat.errors import FxrematError, InvalidSchedule
from fxremat.units import format_bytes

Accounting = Literal["whole", "fluid"]


@dataclass(frozen=True)
class Timeline:
    """The simulated memory and times of a schedule; `memory[i]`, `starts[i]` and `ends[i]` belong to `schedule.ops[i]`.

    For a copy to or from the host, start and end are those of the copy, and the memory is that of the device
    when the schedule reaches it.
    """

    schedule: Schedule
    peak: int  # peak bytes
    time: float  # seconds until the last op and the last copy have ended
    memory: tuple[int, ...]  # peak bytes during each operation, including all that is stored
    starts: tuple[float, ...]  # seconds from the start of the step
    ends: tuple[float, ...]  # seconds from the start of the step
    idle: float  # seconds of `time` during which no op runs
    sent: int  # bytes copied to the host
    returned: int  # bytes copied back
    hidden: float  # fraction of the seconds of copying during which ops run; 1 if nothing is copied

    def __str__(self) -> str:
        lines = [f"peak {format_bytes(self.peak)}, time {self.time:.6g} s, {len(self.memory)} operations"]
        if self.sent or self.returned:
            lines[0] += (
                f"; {format_bytes(self.sent)} to the host and {format_bytes(self.returned)} back, "
                f"{self.hidden:.0%} of it hidden, {self.idle:.6g} s idle"
            )
        width = max((len(str(op)) for op in self.schedule.ops), default=0)
        for op, start, memory in zip(self.schedule.ops, self.starts, self.memory, strict=True):
            bar = "#" * round(40 * memory / self.peak) if self.peak else ""
            lines.append(f"{start:12.6g} s  {op!s:{width}}  {format_bytes(memory):>10}  {bar}")
        return "\n".join(lines)


def simulate(
    chain: Chain,
    schedule: Schedule,
    platform: Platform | None = None,
    *,
    accounting: Accounting = "whole",
) -> Timeline:
    """Simulate `schedule`: memory at every op, and times.

    Args:
        platform: if it has a `memory`, ops and copies wait until they fit, and the peak does not exceed it; otherwise
            nothing waits for memory. Copies need `to_host` and `from_host`.
        accounting: "whole": a value occupies all of its memory until its copy out ends, and from the start of its
            copy back; "fluid": it does so in proportion to the bytes that are still to be copied.

    Raises:
        InvalidSchedule: the schedule is invalid, with the op and what it lacks; or copies cause a deadlock.

    >>> from fxremat.chains.chain import Block
    >>> block = Block(forward_time=1.0, backward_time=2.0, output_bytes=4, saved_bytes=9)
    >>> chain = Chain(blocks=(block, block), input_bytes=4)
    >>> timeline = simulate(chain, Schedule.parse("Fck1 Fall2 B2 Fall1 B1"))
    >>> timeline.peak, timeline.time, timeline.memory
    (25, 7.0, (12, 21, 25, 17, 21))

    A copy to the host during Fall2, and one back for which B2 waits:

    >>> chain = Chain(blocks=(block, block, block), input_bytes=4)
    >>> machine = Platform(memory=30, to_host=9.0, from_host=9.0)
    >>> timeline = simulate(chain, Schedule.parse("Fall1 Off(A1) Fall2 Fall3 B3 Pre(A1) B2 B1"), machine)
    >>> timeline.peak, timeline.time, timeline.idle, timeline.hidden
    (30, 10.0, 1.0, 0.5)
    """
    if accounting not in ("whole", "fluid"):
        raise FxrematError(f'accounting is {accounting!r}; it is "whole" or "fluid"')
    script = read(chain, schedule)
    limit = platform.memory if platform else None
    if limit is not None:
        _check_room(script, schedule, limit)
    timed = (
        run(script, schedule, limit, _link(script, schedule, platform), fluid=accounting == "fluid")
        if script.copies
        else _straight(script)
    )
    return Timeline(
        schedule=schedule,
        peak=timed.peak,
        time=timed.time,
        memory=tuple(timed.memory),
        starts=tuple(timed.starts),
        ends=tuple(timed.ends),
        idle=timed.idle,
        sent=sum(copy.stored.size for copy in script.copies if copy.outward),
        returned=sum(copy.stored.size for copy in script.copies if not copy.outward),
        hidden=timed.hidden,
    )


def _straight(script: ResolvedSchedule) -> TimedRun:
    """Return the start and end times of a schedule without copies, in which ops run one after the other."""
    memory: list[int] = []
    starts: list[float] = []
    ends: list[float] = []
    time = 0.0
    for slot, tokens in enumerate(script.slots):
        now = script.base[3 * slot]
        for token in tokens:
            memory.append(now)
            starts.append(time)
            ends.append(time)
            now -= token.freed
        if slot < len(script.steps):
            memory.append(script.base[3 * slot + 2])
            starts.append(time)
            time += script.steps[slot].seconds
            ends.append(time)
    return TimedRun(
        time=time, idle=0.0, peak=max(script.base), memory=memory, starts=starts, ends=ends, hidden=1.0
    )


def _link(script: ResolvedSchedule, schedule: Schedule, platform: Platform | None) -> LinkSpeeds:
    for copy in script.copies:
        speed = "to_host" if copy.outward else "from_host"
        if platform is None or not getattr(platform, speed):
            raise InvalidSchedule(
                f"op {copy.token + 1}, {schedule.ops[copy.token]}: the platform has no {speed} bandwidth"
            )
    assert platform is not None
    return LinkSpeeds(
        # infinite if no speed is given, since there are then no copies in this direction
        to_host=platform.to_host or inf,
        from_host=platform.from_host or inf,
        shared=platform.duplex == "half",
    )


def _check_room(script: ResolvedSchedule, schedule: Schedule, limit: int) -> None:
    """Raise `InvalidSchedule` if the schedule needs more than `limit` bytes.

    Copies to the host are taken to be instant, and copies back to run as late as possible.
    """
    for place, need in enumerate(script.base):
        if need > limit:
            # the last moment never needs more than the one before, so that op is named
            token = script.steps[max(place - 1, 0) // 3].token
            where = f"op {token + 1}, {schedule.ops[token]}"
            why = "deadlock: even when no copy is left to wait for, " if script.copies else ""
            raise InvalidSchedule(f"{where}: {why}it needs {need} bytes, {need - limit} more than there are")
