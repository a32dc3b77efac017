"""Keeps the figures of a profile as JSON, and compares two profiles: before and after a change of the model.

    figures = ProfileFigures.from_json(Path("memory.json").read_text())
    print(figures.compare(profile))               which modules have more bytes at the peak, which have fewer

All bytes at the peak belong to a module, "" being the model's own ops, and to a purpose; either adds up to the peak.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from html import escape
from typing import Any

import torch

from fxremat.errors import FxrematError, InvalidBudget
from fxremat.planned_step import PlannedStep
from fxremat.show.difference import signed_bytes
from fxremat.show.growth import Growth
from fxremat.show.labels import printable, source_of
from fxremat.show.moments import Moments
from fxremat.show.page_data import KINDS
from fxremat.step.kinds import MemoryKind
from fxremat.units import format_bytes, format_seconds, integer, parse_bytes, shortened

FORMAT = 1
TOLERANCE = "1%"  # growth of the peak that counts as none
_WORDS = {kind.value: text for kind, text in KINDS.items()}


@dataclass(frozen=True, kw_only=True)
class ProfileFigures:
    """The figures of a profile: its peak, and the bytes at the peak by module and by purpose."""

    model: str  # the name of the model's class
    device: str  # the device, and how times were obtained: "AMD EPYC (measured times)"
    torch: str  # the version of PyTorch
    peak: int  # bytes
    time: float  # seconds of one forward and backward
    modules: Mapping[str, int]  # path of a module -> bytes that its own ops have at the peak
    kinds: Mapping[str, int]  # purpose (the values of `MemoryKind`) -> bytes at the peak

    @classmethod
    def of(cls, plan: PlannedStep) -> ProfileFigures:
        """Return the figures of a plan at its peak. O(steps)."""
        modules, kinds = {"": 0}, {kind.value: 0 for kind in MemoryKind}
        for (module, kind), size in bytes_at_peak(plan).items():
            modules[module] = modules.get(module, 0) + size
            kinds[kind.value] += size
        return cls(
            model=plan.graph.model,
            device=f"{plan.device} ({plan.timed} times)",
            torch=str(torch.__version__),
            peak=plan.predicted_peak,
            time=plan.predicted_time,
            modules={path: size for path, size in modules.items() if size},
            kinds={kind: size for kind, size in kinds.items() if size},
        )

    def to_json(self) -> str:
        """Return JSON text from which `from_json` makes these figures."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, source: str | Mapping[str, Any]) -> ProfileFigures:
        """Return the figures that `to_json` wrote, from its text or from the object in it.

        Raises `FxrematError` if it is not a profile.
        """
        try:
            data = json.loads(source) if isinstance(source, str) else dict(source)
        except (TypeError, ValueError) as error:
            raise _no_profile(f"it is not JSON: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            known = data.get("format") if isinstance(data, dict) else None
            raise _no_profile(f'its "format" is {shortened(known)}, and this fxremat reads {FORMAT}')
        for name, kind in (("model", str), ("device", str), ("torch", str), ("modules", dict), ("kinds", dict)):
            if not isinstance(data.get(name), kind):
                raise _no_profile(f"its {name!r} is {shortened(data.get(name))}")
        if isinstance(data.get("time"), bool) or not isinstance(data.get("time"), int | float):
            raise _no_profile(f"its 'time' is {shortened(data.get('time'))}")
        sizes = [data.get("peak"), *data["modules"].values(), *data["kinds"].values()]
        for size in sizes:
            if integer(size) is None:
                raise _no_profile(f"{shortened(size)} is not a number of bytes")
        for name in ("modules", "kinds"):
            if sum(data[name].values()) != data["peak"]:
                raise _no_profile(f"its {name} have {sum(data[name].values())} bytes, and its peak is {data['peak']}")
        return cls(**{field.name: data[field.name] for field in fields(cls)})

    def compare(self, after: Any) -> ProfileComparison:
        """Compare with a later profile, or its figures: of another version of the model, or of other inputs.

        Raises `FxrematError` if `after` is neither.
        """
        figures = getattr(after, "figures", after)
        if not isinstance(figures, ProfileFigures):
            raise FxrematError(f"{shortened(after)} is no profile; fxremat.profile and Profile.from_json return them")
        return ProfileComparison(before=self, after=figures)


def bytes_at_peak(plan: PlannedStep) -> dict[tuple[str, MemoryKind], int]:
    """Return the bytes of a plan's peak by module and purpose; they add up to the predicted peak. O(steps)."""
    moments = Moments.of(plan.running.chosen, plan.running.costs)
    highest = max(range(len(moments.bytes)), key=moments.bytes.__getitem__, default=0)
    found: dict[tuple[str, MemoryKind], int] = {}
    for life in moments.lives_at(highest):
        place = source_of(plan.running.graph, life).module, life.kind
        found[place] = found.get(place, 0) + life.bytes
    # where the peak is between two moments, the loss outside the model has it
    outside = "", MemoryKind.OUTSIDE
    found[outside] = found.get(outside, 0) + plan.predicted_peak - sum(found.values())
    return found


def _no_profile(why: str) -> FxrematError:
    return FxrematError(f"no profile: {why}; `fxremat profile ... --save` and Profile.to_json() write them")


@dataclass(frozen=True, kw_only=True, repr=False)
class ProfileComparison:
    """The changes from one profile to another: of the peak, and of each module's bytes at the peak."""

    before: ProfileFigures
    after: ProfileFigures

    @cached_property
    def growth(self) -> Growth:
        """The changes of the bytes that modules have at the peak; `.grown` and `.shrunk` are lists of them."""
        return Growth.of(self.before.modules, self.after.modules, model=self.after.model)

    @property
    def bytes(self) -> int:
        """The bytes by which the peak grew; negative where it shrank."""
        return self.after.peak - self.before.peak

    def exceeds(self, tolerance: int | str = TOLERANCE) -> bool:
        """Tell whether the peak grew by more than `tolerance`: bytes, "10MiB", or "1%" of the peak before.

        Raises `InvalidBudget` if it is neither.
        """
        return self.bytes > allowed(tolerance, self.before.peak)

    def to_json(self) -> str:
        """Return the comparison as JSON text: both peaks, and the change of each module with more or fewer bytes."""
        changes = self.growth.changes
        rows = [{"module": each.name, "count": each.count, "bytes": each.share.saved} for each in changes]
        peaks = {"before": self.before.peak, "after": self.after.peak, "bytes": self.bytes}
        return json.dumps(peaks | {"modules": rows, "gone": self.growth.only_before, "new": self.growth.only_after})

    @property
    def headline(self) -> str:
        """The change of the peak in a line."""
        a, b = self.before.peak, self.after.peak
        share = f", {100 * self.bytes / a:+.1f} %" if a and self.bytes else ""
        change = f"{signed_bytes(self.bytes)}{share}" if self.bytes else "no change"
        return f"the peak of {printable(self.after.model)}: {format_bytes(a)} -> {format_bytes(b)} ({change})"

    def _facts(self) -> Iterator[str]:
        a, b = self.before, self.after
        for label, first, second in (
            ("model", a.model, b.model),
            ("device", a.device, b.device),
            ("torch", a.torch, b.torch),
        ):
            if first != second:
                yield f"  {label:8}{printable(first)} -> {printable(second)}"
        yield f"  {'time':8}{format_seconds(a.time)} -> {format_seconds(b.time)}"
        for kind, text in _WORDS.items():
            if change := b.kinds.get(kind, 0) - a.kinds.get(kind, 0):
                yield f"  {signed_bytes(change):>12}  {text}"

    def __str__(self) -> str:
        return "\n".join([self.headline, *self._facts(), "", str(self.growth)])

    def __repr__(self) -> str:
        return f"<fxremat comparison: {self.headline}>"

    def _repr_html_(self) -> str:
        return f"<p>{escape(self.headline)}</p>{self.growth.table.html()}"


def allowed(tolerance: int | str, of: int) -> int:
    """Return the bytes that a tolerance means: bytes, a size such as "10MiB", or a share such as "1%" of `of`.

    >>> allowed("1%", 5000), allowed("10MiB", 5000), allowed(0, 5000), allowed("0", 5000)
    (50, 10485760, 0, 0)
    """
    if isinstance(tolerance, str) and (share := re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", tolerance)):
        return int(of * float(share[1]) / 100)
    if integer(tolerance) == 0 or (isinstance(tolerance, str) and tolerance.strip() == "0"):
        return 0
    try:
        return parse_bytes(tolerance)
    except InvalidBudget:
        text = f'tolerance is {shortened(tolerance)}; it is a share of the peak such as "1%", or bytes such as "10MiB"'
        raise InvalidBudget(text) from None
