"""fxremat: train any PyTorch model inside a memory budget, with the same gradients.

>>> import fxremat
>>> model = fxremat.compile(model, mem="4GiB")      # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, overload

from fxremat.chains.chain import Block, Chain, Join, Option
from fxremat.chains.join_schedule import JoinSchedule
from fxremat.chains.platform import Platform
from fxremat.chains.schedule import Schedule
from fxremat.chains.simulate import Accounting, Timeline
from fxremat.chains.simulate import simulate as _simulate
from fxremat.chains.simulate_join import JoinTimeline, simulate_join
from fxremat.errors import (
    BudgetTooSmall,
    CaptureError,
    FxrematError,
    InvalidBudget,
    InvalidChain,
    InvalidSchedule,
    PlanMismatch,
)

if TYPE_CHECKING:
    from fxremat.api import capture, compare, compile, plan, profile
    from fxremat.cost.devices import Device
    from fxremat.cost.trace import Trace
    from fxremat.fitting import fits
    from fxremat.host.files import FileTier
    from fxremat.host.pinned import PinnedTier
    from fxremat.host.tier import HostTier
    from fxremat.pipelining.pipe import Pipeline, pipeline
    from fxremat.plan_of_graphs import PlanOfGraphs
    from fxremat.planning.captured_step import CapturedStep
    from fxremat.plans import Plan
    from fxremat.profiles import Profile
    from fxremat.runtime.data_parallel import fully_shard
    from fxremat.settings import Inductor, Loss, Offload, Search, Slices
    from fxremat.solvers import solve
    from fxremat.step.step_graph import StepGraph

__version__ = "0.1.0"
__all__ = [
    "Block",
    "BudgetTooSmall",
    "CaptureError",
    "CapturedStep",
    "Chain",
    "Device",
    "FileTier",
    "FxrematError",
    "HostTier",
    "Inductor",
    "InvalidBudget",
    "InvalidChain",
    "InvalidSchedule",
    "Join",
    "JoinSchedule",
    "JoinTimeline",
    "Loss",
    "Offload",
    "Option",
    "PinnedTier",
    "Pipeline",
    "Plan",
    "PlanMismatch",
    "PlanOfGraphs",
    "Platform",
    "Profile",
    "Schedule",
    "Search",
    "Slices",
    "StepGraph",
    "Timeline",
    "Trace",
    "capture",
    "compare",
    "compile",
    "fits",
    "fully_shard",
    "pipeline",
    "plan",
    "profile",
    "simulate",
    "solve",
]


@overload
def simulate(
    chain: Chain,
    schedule: Schedule,
    platform: Platform | None = None,
    *,
    accounting: Accounting = "whole",
) -> Timeline: ...
@overload
def simulate(chain: Join, schedule: JoinSchedule) -> JoinTimeline: ...
def simulate(
    chain: Chain | Join,
    schedule: Schedule | JoinSchedule,
    platform: Platform | None = None,
    *,
    accounting: Accounting = "whole",
) -> Timeline | JoinTimeline:
    """Simulate a schedule on a chain or a join of chains, and return its seconds, and its bytes during each op.

    `chains.simulate` defines the ops and the accounting for chains, `chains.simulate_join` for joins. `platform` gives
    the speeds of copies to and from the host; None: there are none.

    Raises `InvalidSchedule`, which names the op and what it lacks.

    >>> block = Block(forward_time=1.0, backward_time=2.0, output_bytes=1, saved_bytes=3)
    >>> chain = Chain(blocks=(block,), input_bytes=1)
    >>> simulate(chain, Schedule.parse("Fall1 B1")).memory
    (5, 6)
    >>> simulate(Join(branches=(chain, chain)), JoinSchedule.parse("1:Fall1 2:Fall1 Loss 1:B1 2:B1")).memory
    (5, 8, 10, 11, 7)
    """
    match chain, schedule:
        case Chain(), Schedule():
            return _simulate(chain, schedule, platform, accounting=accounting)
        case Join(), JoinSchedule():
            return simulate_join(chain, schedule)
    raise InvalidSchedule(
        f"a {type(chain).__name__} cannot run a {type(schedule).__name__}: "
        "a Chain runs a Schedule, a Join a JoinSchedule"
    )


_LATER = {  # public names that need torch or numba -> module that each is imported from on first use
    "capture": "fxremat.api",
    "CapturedStep": "fxremat.planning.captured_step",
    "compare": "fxremat.api",
    "compile": "fxremat.api",
    "Device": "fxremat.cost.devices",
    "fits": "fxremat.fitting",
    **dict.fromkeys(("Inductor", "Loss", "Offload", "Search", "Slices"), "fxremat.settings"),
    "fully_shard": "fxremat.runtime.data_parallel",
    "plan": "fxremat.api",
    "profile": "fxremat.api",
    "Pipeline": "fxremat.pipelining.pipe",
    "pipeline": "fxremat.pipelining.pipe",
    "Plan": "fxremat.plans",
    "PlanOfGraphs": "fxremat.plan_of_graphs",
    "Profile": "fxremat.profiles",
    "FileTier": "fxremat.host.files",
    "HostTier": "fxremat.host.tier",
    "PinnedTier": "fxremat.host.pinned",
    "StepGraph": "fxremat.step.step_graph",
    "Trace": "fxremat.cost.trace",
    "solve": "fxremat.solvers",
}

_MODULES = ("integrations", "passes")  # public modules, imported when their name is first used


def __getattr__(name: str) -> Any:
    """Import a name that needs torch or numba when it is first used.

    Chains can be read and simulated without torch and numba installed.
    """
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    if name in _MODULES:
        return import_module(f"fxremat.{name}")
    raise AttributeError(f"module 'fxremat' has no attribute {name!r}")
