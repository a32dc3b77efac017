"""fxremat: train any PyTorch model inside a memory budget, with the same gradients.

>>> import fxremat
>>> model = fxremat.compile(model, mem="4GiB")      # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fxremat.chain import Block, Chain, Join, Option
from fxremat.errors import (
    BudgetTooSmall,
    CaptureError,
    FxrematError,
    InvalidBudget,
    InvalidChain,
    InvalidSchedule,
)
from fxremat.platform import Platform
from fxremat.schedule import Schedule
from fxremat.simulate import Timeline, simulate
from fxremat.solvers import solve

if TYPE_CHECKING:
    from fxremat.api import compile, plan
    from fxremat.plans import Plan

__version__ = "0.1.0"
__all__ = [
    "Block",
    "BudgetTooSmall",
    "CaptureError",
    "Chain",
    "FxrematError",
    "InvalidBudget",
    "InvalidChain",
    "InvalidSchedule",
    "Join",
    "Option",
    "Plan",
    "Platform",
    "Schedule",
    "Timeline",
    "compile",
    "plan",
    "simulate",
    "solve",
]

_NEED_TORCH = {"compile": "fxremat.api", "plan": "fxremat.api", "Plan": "fxremat.plans"}


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for: solving a chain does without."""
    if name in _NEED_TORCH:
        return getattr(import_module(_NEED_TORCH[name]), name)
    raise AttributeError(f"module 'fxremat' has no attribute {name!r}")
