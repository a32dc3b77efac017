"""The machine that a schedule runs on: the device's memory, and the speed of copies to and from the host."""

import math
from dataclasses import dataclass
from typing import Literal

from fxremat.errors import FxrematError
from fxremat.units import shortened


@dataclass(frozen=True, kw_only=True)
class Platform:
    """The bytes of a device's memory, and the speeds of its copies to and from the host; None or 0: no copies."""

    memory: int | None = None  # bytes of device memory; None: no limit
    to_host: float | None = None  # bytes per second
    from_host: float | None = None  # bytes per second
    duplex: Literal["full", "half"] = "full"  # "half": both directions share one bus, and copies run one at a time

    def __post_init__(self) -> None:
        for name in ("memory", "to_host", "from_host"):
            value = getattr(self, name)
            least = 1 if name == "memory" else 0
            if value is not None and not (math.isfinite(value) and value >= least):
                raise FxrematError(f"{name} is {shortened(value)}; it is a number from {least} on, or None")
        if self.duplex not in ("full", "half"):
            raise FxrematError(f'duplex is {shortened(self.duplex)}; it is "full" or "half"')

    @property
    def linked(self) -> bool:
        """True if values can be copied to the host and back."""
        return bool(self.to_host and self.from_host)
