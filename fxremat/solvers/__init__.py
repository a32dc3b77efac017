"""Solvers: pure functions from a chain and a budget in bytes to a schedule. None imports torch.

    keep_all     everything is kept                              the fastest, the largest
    periodic     checkpoints at equal distances                  what checkpoint_sequential does
    persistent   optimal where a stored value stays              dynamic program
    input_drop   saved blocks may also lose their input          dynamic program; what "auto" means

`solve` is the front: it judges what solvers propose by `simulate`, which they themselves never see.
"""

from collections.abc import Callable
from types import MappingProxyType

from fxremat.chain import Chain
from fxremat.errors import BudgetTooSmall, FxrematError, InvalidBudget
from fxremat.platform import Platform
from fxremat.schedule import Schedule
from fxremat.simulate import Timeline, simulate
from fxremat.solvers import input_drop, keep_all, periodic, persistent
from fxremat.solvers.table import Build, grain

LISTS: MappingProxyType[str, Callable[[Chain], list[Schedule]]] = MappingProxyType(
    {"keep_all": keep_all.schedules, "periodic": periodic.schedules}
)
TABLES: MappingProxyType[str, Build] = MappingProxyType(
    {"persistent": persistent.build, "input_drop": input_drop.build}
)
DEFAULT = "input_drop"  # what "auto" means
SOLVERS = ("auto", *LISTS, *TABLES)
_ROUNDS = 4  # bisections of the nominal budget
_QUICK = 5e9  # more work than this is not done several times


def solve(
    chain: Chain,
    mem: int,
    *,
    solver: str = "auto",
    platform: Platform | None = None,
    slots: int = 500,
) -> Schedule:
    """The fastest schedule found that fits in `mem` bytes.

    Args:
        chain: the model, in bytes and seconds.
        mem: bytes; the chain's input counts, parameters do not.
        solver: one of `SOLVERS`; "auto" is input_drop.
        platform: the machine; no solver here moves values to the host, so it changes nothing yet.
        slots: steps of memory in a dynamic program; where they cover every byte the answer is exact.

    Raises:
        BudgetTooSmall: the solver has no schedule that fits; `.minimum` bytes are the least for which it has.

    >>> from fxremat.chain import Block
    >>> block = Block(forward_time=1.0, backward_time=2.0, output_bytes=4, saved_bytes=9)
    >>> print(solve(Chain(blocks=(block, block), input_bytes=4), 25))
    Fck1 Fall2 B2 Fall1 B1
    """
    return best(chain, mem, solver=solver, platform=platform, slots=slots).schedule


def best(
    chain: Chain,
    mem: int,
    *,
    solver: str = "auto",
    platform: Platform | None = None,
    slots: int = 500,
) -> Timeline:
    """`solve`, with the simulation of its answer."""
    if isinstance(mem, bool) or not isinstance(mem, int) or mem < 0:
        raise InvalidBudget(f"mem is {mem!r}; solvers take a whole number of bytes, such as 4294967296")
    if isinstance(slots, bool) or not isinstance(slots, int) or not 1 <= slots <= 100_000:
        raise FxrematError(f"slots is {slots!r}; it is a whole number from 1 to 100000")
    if solver not in SOLVERS:
        raise FxrematError(f"unknown solver {solver!r}; there are {', '.join(SOLVERS)}")
    if solver in LISTS:
        timelines = [simulate(chain, schedule, platform) for schedule in LISTS[solver](chain)]
        fitting = [timeline for timeline in timelines if timeline.peak <= mem]
        if not fitting:
            raise BudgetTooSmall(minimum=min(timeline.peak for timeline in timelines), budget=mem)
        return min(fitting, key=_merit)
    return _by_table(TABLES[DEFAULT if solver == "auto" else solver], chain, mem, slots)


def _by_table(build: Build, chain: Chain, mem: int, slots: int) -> Timeline:
    """Keep everything if that fits; else read a table, or several where sizes had to be rounded."""
    everything = simulate(chain, keep_all.schedules(chain)[0])
    if everything.peak <= mem:
        return everything
    unit = grain(chain)
    if mem // unit <= slots:  # every size is a whole number of slots: nothing is rounded
        steps = max(1, mem // unit)
        return simulate(chain, build(chain, steps * unit, steps).schedule(mem))
    found = [simulate(chain, build(chain, mem, slots).schedule(mem))]
    work = slots * len(chain) * sum(len(block.choices) for block in chain.blocks) ** 2
    sound, hopeful = 1.0, 1.0 + len(chain) / slots
    for _ in range(_ROUNDS if work <= _QUICK else 0):
        nominal = (sound + hopeful) / 2
        table = build(chain, int(mem * nominal), slots)
        trial = simulate(chain, table.schedule(mem, full=mem))
        found.append(trial)
        if trial.time <= (chain.least_time + table.curve[-1]) * (1 + 1e-9):
            sound = nominal  # the table kept its promise although its slots are too large
        else:
            hopeful = nominal
    return min(found, key=_merit)


def _merit(timeline: Timeline) -> tuple[float, int]:
    return timeline.time, timeline.peak
