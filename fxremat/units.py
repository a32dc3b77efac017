"""Parses and formats numbers of bytes, and parses the forms of a budget.

parse_bytes("4 GiB") == 4 * 2**30      binary units
parse_bytes("300MB") == 300 * 10**6    decimal units
parse_budget("60%")  == Percent(of_keep_all=60.0)
"""

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral

from fxremat.errors import InvalidBudget

_FACTORS = {
    "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+|%)?\s*", re.ASCII)
_MOST = 2**53  # largest number of bytes, 8 PiB; up to this a float is exact
_MOST_DIGITS = 400  # maximum number of digits that are read; Python cannot parse integers of more than 4,300 digits
_FEW = 1024  # bytes; a smaller float is hardly meant as a number of bytes


@dataclass(frozen=True)
class Bytes:
    """A budget of `count` bytes."""

    count: int


@dataclass(frozen=True)
class Percent:
    """A budget in percent of the step's peak without any recomputation; 60.0 means 60 %."""

    of_keep_all: float


@dataclass(frozen=True)
class Auto:
    """A budget equal to the memory that is free on the device when planning begins."""


@dataclass(frozen=True)
class Least:
    """The smallest budget that works."""


Budget = Bytes | Percent | Auto | Least


def parse_bytes(size: int | str) -> int:
    """Parse a size such as "4GiB" into a positive number of bytes, rounded down. Raises `InvalidBudget`."""
    if (whole := integer(size)) is not None:
        return _within_limits(whole, size)
    match = _AMOUNT.fullmatch(size) if isinstance(size, str) else None
    if match is None or match[2] == "%":
        raise _not_a_size(size)
    number, unit = match[1][:_MOST_DIGITS], (match[2] or "").upper()
    if not unit and number.isdigit():
        return _within_limits(int(number), size)
    if unit not in _FACTORS:
        raise _not_a_size(size)
    exact = int(number) * _FACTORS[unit] if number.isdigit() else math.floor(float(number) * _FACTORS[unit])
    return _within_limits(exact, size)


def parse_budget(mem: object) -> Budget:
    """Parse a budget such as "4GiB", "60%" or "auto". Raises `InvalidBudget`, with the valid forms, for anything else.
    """
    if isinstance(mem, str):
        if mem.strip().lower() == "auto":
            return Auto()
        if mem.strip().lower() == "min":
            return Least()
        match = _AMOUNT.fullmatch(mem)
        if match is not None and match[2] == "%":
            share = float(match[1])
            if share <= 0 or math.isinf(share):
                raise _not_a_budget(mem)
            return Percent(share)
    size = mem if isinstance(mem, str) else integer(mem)
    if size is None:
        raise _not_a_budget(mem)
    try:
        return Bytes(parse_bytes(size))
    except InvalidBudget:
        raise _not_a_budget(mem) from None


def format_bytes(count: int) -> str:
    """Format a number of bytes in the largest binary unit that keeps it at 1 or more: "365 B", "112.0 MiB"."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def format_count(count: int, thing: str) -> str:
    """Format a number of things: "1 graph", "3 graphs"."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def format_seconds(seconds: float) -> str:
    """Format seconds with three digits and a suitable unit: "1.03 s", "58.2 ms", "9.11 us".

    >>> [format_seconds(seconds) for seconds in (61.04, 0.9999, 0.0582, 9.113e-6, 0.0)]
    ['61 s', '1 s', '58.2 ms', '9.11 us', '0 s']
    """
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if float(f"{seconds * factor:.3g}") >= 1:
            return f"{seconds * factor:.3g} {unit}" if seconds < 999.5 else f"{seconds:.0f} s"
    return f"{seconds * 1e6:.3g} us" if seconds else "0 s"


def format_ratio(part: float, whole: float, form: str) -> str:
    """Format `part / whole` by `form`, such as ".2f"; the ratio is 1 if both are 0, and "inf" if only `whole` is 0."""
    return format(part / whole if whole else 1.0 if part == whole else math.inf, form)


def integer(given: object) -> int | None:
    """Return `given` as an int if it is an integer, also one of NumPy; None for anything else, and for a bool."""
    if isinstance(given, bool) or not isinstance(given, Integral):
        return None
    return int(given)


def _within_limits(count: int, given: object) -> int:
    if not 0 < count <= _MOST:
        raise _not_a_size(given)
    return count


def _not_a_size(given: object) -> InvalidBudget:
    forms = '"4GiB", "300MB" or 4294967296'
    return InvalidBudget(f"{shortened(given)} is not a number of bytes above 0; write {_meant(given)}{forms}")


def _not_a_budget(given: object) -> InvalidBudget:
    forms = '"4GiB", "300MB", 4294967296 (bytes), "60%", "auto" or "min"'
    share = f'"{given:.6%}'.rstrip("%0").rstrip(".") + '%", ' if _is_share(given) else ""
    return InvalidBudget(f"mem={shortened(given)} is not a budget; write {share or _meant(given)}{forms}")


def _is_share(given: object) -> bool:
    return isinstance(given, float) and 1e-4 <= given <= 1


def _meant(given: object) -> str:
    """Return the start of a hint, such as "int(4e9), ", for a float or text that looks like bytes; else ""."""
    try:
        number = float(given) if isinstance(given, float | str) else math.nan
    except ValueError:
        return ""
    if not _FEW <= number <= _MOST:
        return ""
    short = f"{number:g}".replace("e+0", "e").replace("e+", "e")
    return f"int({short if float(short) == number else repr(number)}), "


def shortened(given: object, most: int = 80) -> str:
    """Return `repr(given)` for an error message in one line, shortened in the middle if it is long."""
    try:
        text = repr(given[: 2 * most] if isinstance(given, str | bytes) else given)
    except Exception:  # `repr` of the object fails
        text = f"a {type(given).__name__}"
    text = " ".join(text.split("\n"))
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-(most // 4) :]}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a clause for an error message that names the known name nearest to an unknown one; "" if none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {near[0]!r}?" if near else ""
