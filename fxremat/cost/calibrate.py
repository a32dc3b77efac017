"""The factor from the summed times of ops to the time of a whole step, measured by running the planned graphs.

The graphs are functional (AOTAutograd applies updates outside of them), so they run on the user's own inputs
and parameters without changing the model; missing data is made up. The run needs the memory that the plan
predicts; on CUDA it is skipped if that memory, and that of made-up data, is not free. The factor is cached with
the costs.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import fx

from fxremat.agreement import ALONE, Agreement
from fxremat.budget import free_memory
from fxremat.cost.made_up import value_like, weights_like
from fxremat.cost.measure import UNBOUNDED, fresh_as_known, known_costs, quiet_world
from fxremat.cost.metering import peak_of, peaks_of
from fxremat.cost.remembered import keep, of_ops, recall, remembered
from fxremat.cost.walk import given_inputs
from fxremat.device import Ability, kind_of
from fxremat.graphs.accounting import device_of
from fxremat.graphs.captured import Captured, captured_of
from fxremat.graphs.region import runnable
from fxremat.passes.lower import lower
from fxremat.step.costs import Costs
from fxremat.step.liveness import live_bytes
from fxremat.step.program import Program
from fxremat.step.step_graph import Kind, Origin
from fxremat.torch_private import unprofiled
from fxremat.units import format_bytes

T = TypeVar("T")
log = logging.getLogger(__name__)
# a step is run only if this many times its memory is free, since the allocator's blocks leave gaps
ROOM = 1.05
RUNS = 3  # a step is run this many times, and the fastest run counts
TURNS = 6  # largest number of runs of each program in a comparison
CLOSE = 1.1  # in a comparison of long steps, a program that is slower than the fastest by this factor is not run again
FEWEST = 3  # smallest number of runs of each program in a comparison
TICK = 1e-9  # least seconds of a phase
LONG = 1.0  # seconds of runs of a program after which two runs, or `FEWEST` in a comparison, are enough


def calibration(
    program: Program, costs: Costs, inputs: Sequence[Any] = (), ranks: Agreement = ALONE
) -> float:
    """Return the ratio of measured to predicted seconds of a step; 1 if it cannot be measured.

    A few steps are run, unless the factor is cached for this graph.

    Args:
        inputs: the arguments of the captured graph; data is made up for missing ones.
        ranks: the ranks that run the program together; each gets the largest of their factors.
    """
    joint = captured_of(program.layout.graph)
    device, key = device_of(joint), f"factor {of_ops(joint)}"
    known = recall(device, key, 1)
    if None in ranks.gathered(known, "comparing times"):
        run = partial(_run, program, costs, inputs, ranks)
        seconds = ranks.together("timing a step", lambda: unprofiled(run), meeting=True)
        if seconds is None:
            return 1.0
        known = [seconds / costs.time(program)]
        keep(device, key, known)
    assert known is not None
    return ranks.maximum(known[:1], "comparing times")[0]


def known_calibration(joint: Captured) -> float | None:
    """Return the factor that `calibration` has measured for a graph before; None if it has not."""
    known = recall(device_of(joint), f"factor {of_ops(joint)}", 1)
    return known[0] if known else None


def seconds_of_steps(
    programs: Sequence[Program], costs: Sequence[Costs], inputs: Sequence[Any] = (), tier: str = ""
) -> list[float] | None:
    """Return for each program the seconds of its fastest step; None if they cannot run.

    If the same programs were compared before, the seconds are read from the cache.

    Args:
        tier: the name of the host tier to which programs copy values.
    """
    compare = partial(_compared, programs, costs, inputs, tier)
    return remembered("seconds of steps", programs, len(programs), compare)


def _compared(
    programs: Sequence[Program], costs: Sequence[Costs], inputs: Sequence[Any], tier: str
) -> list[float] | None:
    made = [_Made.of(program, cost, inputs, tier, alone=True) for program, cost in zip(programs, costs, strict=True)]
    steps = [one for one in made if one is not None]
    if len(steps) < len(made):
        return None

    def run() -> list[float]:
        best, given = [math.inf] * len(steps), [one.primals() for one in steps]
        began = time.perf_counter()
        for turn in range(TURNS):
            is_long = time.perf_counter() - began > LONG * len(steps)
            if turn >= FEWEST and is_long:
                break
            for place, one in enumerate(steps):
                if not (is_long and best[place] > CLOSE * min(best)):
                    best[place] = min(best[place], one.seconds(given[place]))
        return best

    return _tried(run, steps[0].device)


def peak_of_step(program: Program, costs: Costs, inputs: Sequence[Any] = (), tier: str = "") -> int | None:
    """Return the measured peak of one step of a program's graphs, in bytes above its start; None if it cannot run.

    It does not include a loss outside the model. If the program was run before, its peak is read from the cache.

    Args:
        tier: the name of the host tier to which the program copies values.
    """
    peak = remembered("peak of one step", [program], 1, partial(_peak, program, costs, inputs, tier))
    return None if peak is None else int(peak[0])


def _peak(program: Program, costs: Costs, inputs: Sequence[Any], tier: str) -> list[float] | None:
    made = _Made.of(program, costs, inputs, tier, alone=True)
    if made is None:
        return None

    def run() -> list[float]:
        primals, tangents = made.primals(), made.tangents()
        return [float(peak_of(partial(made.step, primals, tangents), made.device)[0])]

    return _tried(run, made.device)


def _tried(run: Callable[[], T], device: torch.device) -> T | None:
    """Return the result of `run`, which runs steps; None if it raises, since training will raise the same error."""
    gc.collect()  # what Python freed within the steps would be subtracted from their peak
    try:
        with quiet_world(device):
            return unprofiled(run)
    except Exception as error:
        log.debug("running a step failed: %s: %s", type(error).__name__, error)
        return None


def costs_of_phases(program: Program, inputs: Sequence[Any] = (), *, apart: bool = False) -> Costs:
    """Return the costs of a program whose forward and backward have one compiled region each, measured in its steps.

    Running the steps takes no more memory than training does, whereas measuring a region by itself takes copies of all
    inputs that it frees. The regions get the seconds that are left of their phase's, and the workspaces with which
    `live_bytes` returns the measured peaks, and what autograd allocates beside the graphs. If the program was measured
    before, these are read from the cache. Where it cannot run, the regions get workspaces that fit no budget.

    Args:
        apart: True: the backward's region gets the peak of the backward; False: the peak of the step, if it is larger.
    """
    joint = captured_of(program.layout.graph)
    costs = known_costs(joint, fresh=fresh_as_known(joint))
    found = remembered("phases apart", [program], 5, partial(_phases, program, costs, inputs))
    took, peaks = (found[:2], found[2:]) if found else ((math.inf, math.inf), (UNBOUNDED,) * 3)
    seconds, workspace = [*costs.seconds], [*costs.sizes.workspace]
    during = live_bytes(program, costs.sizes).during
    highest = (peaks[0], peaks[2] if apart else peaks[1])
    for position, step in enumerate(program.steps):
        if step.op is None or joint.ops[step.op].kind is not Kind.REGION:
            continue
        late = position >= program.split
        phase = program.steps[program.split :] if late else program.steps[: program.split]
        others = costs.time_of(one.op for one in phase if one.op is not None)
        seconds[step.op] = max(0.0, took[late] - others)
        beside = workspace[step.op] + (costs.sizes.root if late else 0)  # of autograd: copies of gradients, and a loss
        workspace[step.op] += int(highest[late]) + beside - during[position]
    return replace(costs, seconds=tuple(seconds), sizes=replace(costs.sizes, workspace=tuple(workspace)))


def _phases(program: Program, costs: Costs, inputs: Sequence[Any]) -> list[float] | None:
    """Return the seconds of forward and backward, and the peaks of the forward, of the step, and of the backward.

    None: the program cannot run.
    """
    made = _Made.of(program, costs, inputs, alone=True)
    if made is None:
        return None

    def run() -> list[float]:
        primals = made.primals()
        made.step(primals)  # tunes kernels, which may take more memory and time
        before = peak_of(partial(made.forward, list(primals)), made.device)[0]
        begun, behind = peaks_of(partial(made.between, primals), lambda held: made.backward(held[1]), made.device)
        forward = min(made.forward_seconds(primals) for _ in range(RUNS))
        whole = min(made.seconds(primals) for _ in range(RUNS))
        return [forward, max(whole - forward, TICK), float(before), float(max(begun, behind)), float(behind)]

    return _tried(run, made.device)


def has_room(program: Program, costs: Costs, inputs: Sequence[Any] = ()) -> bool:
    """Tell whether the device has enough free memory for one step and made-up inputs; log if it has not.

    A device that cannot tell its free memory, such as a CPU, counts as having enough.
    """
    joint = captured_of(program.layout.graph)
    device = device_of(joint)
    if not kind_of(device).can(Ability.FREE):
        return True
    given = given_inputs(joint, inputs)
    made = sum(v.bytes for v in joint.values if v.origin is Origin.PRIMAL and v.index not in given)
    needed, free = ROOM * (made + live_bytes(program, costs.sizes).peak), free_memory(device)
    if free < needed:
        there = format_bytes(free)
        log.info("a step is not run before training: it takes %s, and %s are free", format_bytes(int(needed)), there)
    return free >= needed


def _run(program: Program, costs: Costs, inputs: Sequence[Any], ranks: Agreement) -> float | None:
    """Return the seconds of the fastest of a few steps; None if memory is too short, or a step fails.

    Among several ranks a failure raises, since the other ranks would wait forever.
    """
    alone = len(ranks.ranks) == 1
    made = _Made.of(program, costs, inputs, alone=alone)
    if made is None:
        return None
    try:
        with quiet_world(made.device):
            primals = made.primals()
            runs = list[float]()
            while len(runs) < RUNS and (len(runs) < 2 or not alone or sum(runs) < LONG):
                ranks.meet("timing a step")
                runs.append(made.seconds(primals))
    except Exception as error:  # planning works without the factor, and training will raise the same error
        log.debug("calibration failed: %s: %s", type(error).__name__, error)
        if not alone:
            raise
        return None
    return min(runs)


@dataclass(frozen=True)
class _Made:
    """The graphs of a program, ready to run on the user's inputs, and on made-up data where these are missing."""

    joint: Captured
    given: Mapping[int, torch.Tensor]
    forward: Callable[[list[Any]], Any]
    backward: Callable[[list[Any]], Any]

    @classmethod
    def of(
        cls, program: Program, costs: Costs, inputs: Sequence[Any], tier: str = "", *, alone: bool
    ) -> _Made | None:
        """Make the graphs of a program; return None if one step does not fit into the memory that is free.

        Args:
            alone: True: check the free memory; False for several ranks, which must all go on.
        """
        if alone and not has_room(program, costs, inputs):
            return None
        joint = captured_of(program.layout.graph)
        graphs = lower(program, tier, fresh=costs.fresh)
        return cls(joint, given_inputs(joint, inputs), *map(runnable, graphs))

    @property
    def device(self) -> torch.device:
        """The device on which the step runs."""
        return device_of(self.joint)

    def primals(self) -> list[Any]:
        """Return arguments for the forward, made up where no data is given."""
        joint, given = self.joint, self.given
        return [
            given[value].detach() if (value := joint.value_of[node]) in given else weights_like(node)
            for node in joint.primals
        ]

    def tangents(self) -> list[Any]:
        """Return made-up incoming gradients for the backward."""
        return [value_like(node) for node in self.joint.tangent_nodes]

    def step(self, primals: Sequence[Any], tangents: Sequence[Any] | None = None) -> None:
        """Run forward and backward; hold the outputs in between as a caller does, but not new values of buffers.

        Args:
            tangents: the incoming gradients; None: they are made up between the two, so that they are part of the peak.
        """
        held, arguments = self.between(primals, tangents)
        gradients = self.backward(arguments)
        kind_of(self.device).synchronize(self.device)
        del gradients, held

    def between(self, primals: Sequence[Any], tangents: Sequence[Any] | None = None) -> tuple[list[Any], list[Any]]:
        """Run the forward; return the outputs that a caller holds then, and the arguments of the backward."""
        joint = self.joint
        results = list(self.forward(list(primals)))
        returned = joint.forward_outputs
        arguments = results[len(returned) :]
        arguments += self.tangents() if tangents is None else tangents
        held = [
            result
            for node, result in zip(returned, results, strict=False)
            if not (isinstance(node, fx.Node) and joint.value_of.get(node) in joint.updates)
        ]
        return held, arguments

    def seconds(self, primals: Sequence[Any]) -> float:
        """Return the seconds of one step.

        The incoming gradients are made up after the forward, which then takes no more memory than in training; the
        seconds of that do not count.
        """
        start = time.perf_counter()
        held, arguments = self.between(primals, ())
        kind_of(self.device).synchronize(self.device)
        paused = time.perf_counter()
        arguments += self.tangents()
        kind_of(self.device).synchronize(self.device)
        start += time.perf_counter() - paused
        gradients = self.backward(arguments)
        kind_of(self.device).synchronize(self.device)
        del gradients, held
        return time.perf_counter() - start

    def forward_seconds(self, primals: Sequence[Any]) -> float:
        """Return the seconds of one forward."""
        start = time.perf_counter()
        results = self.forward(list(primals))
        kind_of(self.device).synchronize(self.device)
        del results
        return time.perf_counter() - start
