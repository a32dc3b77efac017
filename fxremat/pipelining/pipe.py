"""Implements `fxremat.pipeline`, which trains a model on several devices if it does not fit on one.

    ops     = capture(model and loss)              with the indices at which the graph can be cut
    profile = layers, and costs of runs of layers  measured on rank 0
    plan    = planner(layers, machines, ways)      the same on every rank
    rank    = the stages of this rank, compiled and run
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.pipelining.bandwidth import measured_bandwidth
from fxremat.pipelining.engine import lowered
from fxremat.pipelining.memory import StageMemory, most_bytes
from fxremat.pipelining.profile import Profile, profile
from fxremat.pipelining.run import Rank, held_by
from fxremat.pipelining.stages import Loss, Ops, capture
from fxremat.runtime.sharded import cut_by, is_replicated
from fxremat.solvers.pipeline.model import Layers, Machines, PipelinePlan, Way
from fxremat.solvers.pipeline.on_demand import OnDemandCosts
from fxremat.solvers.pipeline.stage_costs import step_seconds
from fxremat.units import format_bytes, format_count, parse_bytes, shortened

# maximum number of plans made with smaller or larger budgets, until the real memory of one nearly uses up the
# budget
ATTEMPTS = 6
CLOSE = 0.01  # fraction of the budget; smaller changes of the budget are not tried
UNIT = "bytes per device"
BEST = "fxremat.solvers.pipeline.best_plan"  # the module of the planner that is used where none is given

Options = Callable[[int, int], Sequence[Way]]


class Planner(Protocol):
    """A function that finds a pipeline plan, such as `fxremat.solvers.pipeline.best_plan.plan_pipeline`."""

    def __call__(
        self, layers: Layers, machines: Machines, *, options: Options, microbatches: int, effort: float
    ) -> PipelinePlan: ...


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """A pipeline plan with its cuts, memory and time, the same on every rank."""

    plan: PipelinePlan
    cuts: tuple[int, ...]  # index of the first op of each layer, and the number of ops
    memory: tuple[int, ...]  # peak bytes of each device
    seconds: float  # seconds of a step

    @property
    def most(self) -> int:
        """The largest peak bytes of any device."""
        return max(self.memory)


class Pipeline:
    """A training step on several devices; `.plan` tells which device runs what, and `print` shows the plan."""

    def __init__(self, ops: Ops, found: Pipelined, batch: int, rank: Rank | None, model: nn.Module) -> None:
        self.plan = found.plan
        self.memory = found.memory
        self.seconds = found.seconds
        self._batch = batch
        self._rank = rank
        self._named = _named(ops, rank, model)

    def step(self, inputs: Tensor | Sequence[Tensor], target: Tensor) -> tuple[Tensor, ...]:
        """Run forward and backward of one batch; every rank has to call this with the same batch.

        The first rank reads the inputs and the last one the target. Gradients, which are means over the micro-batches,
        are added to the `.grad` of this rank's parameters: call `zero_grad` before each step.

        Returns:
            the loss of each micro-batch on the rank of the last stage, () on others.
        """
        if self._rank is None:
            raise FxrematError(
                f"this pipeline has {self.plan.machines.devices} devices and runs in as many processes; start it with "
                f"torchrun --nproc-per-node {self.plan.machines.devices} your_script.py"
            )
        given = _tensors(inputs)
        for name, tensor in (*(("inputs", tensor) for tensor in given), ("target", target)):
            if tensor.shape[0] != self._batch:
                raise FxrematError(
                    f"{name} has {tensor.shape[0]} rows, and the pipeline was planned for batches of {self._batch}"
                )
        return self._rank.step(given, target)

    @property
    def in_flight(self) -> dict[int, int]:
        """Stage of this rank -> the largest number of micro-batches between forward and backward in the latest step."""
        stages = self._rank.stages if self._rank else []
        return {stage.stage_index: stage.most_in_flight for stage in stages}

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank, for its optimizer.

        Where the plan leaves a rank without a stage, one parameter without elements, as torch's optimizers refuse none.
        """
        own = [parameter for _, parameter in self.named_parameters()]
        yield from own or [nn.Parameter(torch.empty(0))]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank with their names in the model; a tied weight once."""
        seen: set[int] = set()
        for name, tensor in self._named.items():
            if isinstance(tensor, nn.Parameter) and id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's part of the model's state dict; the parts of all ranks together make the full one."""
        return {name: tensor.detach() for name, tensor in self._named.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load this rank's part from a state dict of the model."""
        if missing := sorted(set(self._named) - set(state)):
            raise FxrematError(f"the state dict lacks {', '.join(missing)}")
        with torch.no_grad():
            for name, tensor in self._named.items():
                tensor.copy_(state[name])

    def __str__(self) -> str:
        return "\n".join(_described(self))


def pipeline(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Tensor],
    *,
    mem: int | str,
    devices: int,
    microbatches: int,
    loss_fn: Loss,
    example_target: Tensor,
    **options: Any,
) -> Pipeline:
    """Train a model on several devices, each of which stays inside `mem`.

    Start it in as many processes as there are devices (`torchrun --nproc-per-node 4 train.py`): each takes its stages
    out of the model and runs them. In a single process it plans only.

    Args:
        model: takes tensors, returns what loss_fn expects. Where it may be cut, one tensor crosses. It is not changed;
            delete it after this call, and the memory of what other ranks own is freed.
        example_inputs: a full batch: one tensor or a tuple, split along their first dimension.
        mem: what each device may hold at any time of a step: its parameters, their gradients, activations, buffers.
        devices: how many.
        microbatches: how many parts a batch is split into; divides it.
        loss_fn: (outputs, target) -> the mean loss of a micro-batch. It is a part of the last stage.
        example_target: of the batch; one tensor.
        options: copies (of the parameters on their device: 2, with their gradients; 4 with Adam's state), bandwidth
            (bytes per second between devices; None: measured, or copies take no time where it only plans), effort
            (seconds, about, that the search for a plan takes), refine (seconds, for each run of layers, that its
            programs are improved op by op), scale_grads (False: gradients are sums over the micro-batches), planner.

    Random numbers are each rank's own: give every rank another seed, or dropout in two stages draws equal masks.

    Raises:
        BudgetTooSmall: no plan fits. The same on every rank, as all errors of planning.
        CaptureError: the model cannot be exported as one graph, or cannot be cut.
    """
    _check_options(options)
    _check_model(model)
    _refuse_shared(model)
    settings = Settings(mem=parse_bytes(mem), devices=devices, microbatches=microbatches, **options)
    inputs = _tensors(example_inputs)
    batch = _checked(inputs, example_target, loss_fn, settings)
    alone = not _joined_group(settings)
    first = tuple(torch.tensor_split(value, microbatches)[0] for value in inputs)
    target = torch.tensor_split(example_target, microbatches)[0]
    ops = capture(model, first, target, loss_fn)
    if alone:
        found = make_plan(ops, first, target, settings)
        return Pipeline(ops, found, batch, None, model)
    if settings.bandwidth is None:
        settings = replace(settings, bandwidth=measured_bandwidth(_crossing_bytes(ops), ops.device))
    found = _same_everywhere(lambda: make_plan(ops, first, target, settings))
    mine = Profile(
        ops=ops, inputs=first, target=target, effort=settings.refine, cuts=found.cuts, copies=settings.copies
    )
    rank = Rank.of(
        mine, found.plan, dist.get_rank(), microbatches=microbatches, scale_grads=settings.scale_grads
    )
    found = replace(found, memory=_checked_everywhere(rank, found.plan, settings))
    return Pipeline(ops, found, batch, rank, model)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a pipeline; the docstring of `pipeline` explains them."""

    mem: int  # bytes that each device may use
    devices: int
    microbatches: int
    copies: float = 2.0
    bandwidth: float | None = None  # bytes per second; None: copies take no time
    effort: float = 10.0  # seconds of search for a plan, about
    refine: float = 0.0  # seconds of search, op by op, for each run of layers
    scale_grads: bool = True
    planner: Planner | None = None

    def __post_init__(self) -> None:
        for name in ("devices", "microbatches"):
            if type(getattr(self, name)) is not int:
                raise _wrong(name, getattr(self, name), "a whole number")
        for name in ("copies", "effort", "refine"):
            if not _is_number(number := getattr(self, name)) or not 0 <= number < math.inf:
                raise _wrong(name, number, "a number from 0 on")
        if self.bandwidth is not None and not (_is_number(self.bandwidth) and self.bandwidth > 0):
            raise _wrong("bandwidth", self.bandwidth, "a number above 0, bytes per second, or None")
        if not isinstance(self.scale_grads, bool):
            raise _wrong("scale_grads", self.scale_grads, "True or False")
        if self.planner is not None and not callable(self.planner):
            raise _wrong("planner", self.planner, f"a function, such as {BEST}.plan_pipeline")

    @property
    def machines(self) -> Machines:
        """The devices as the planner's input."""
        return Machines(devices=self.devices, memory=self.mem, bandwidth=self.bandwidth, copies=self.copies)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong(name: str, given: object, expected: str) -> FxrematError:
    return FxrematError(f"fxremat.pipeline: {name}={shortened(given)}: it is {expected}")


def _check_model(model: object) -> None:
    """Raise `FxrematError` for what is no module, or has no parameter to train."""
    if not isinstance(model, nn.Module):
        raise FxrematError(f"a pipeline trains a torch.nn.Module, and this is a {type(model).__name__}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise FxrematError("nothing to train: no parameter requires grad")


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise `FxrematError` for an option that `pipeline` does not take."""
    known = [field.name for field in fields(Settings)][3:]
    if unknown := sorted(set(options) - set(known)):
        raise FxrematError(f"fxremat.pipeline does not take {', '.join(unknown)}; there are {', '.join(known)}")


def _refuse_shared(model: nn.Module) -> None:
    """Raise `FxrematError` for a model whose parameters ranks have cut, or whose gradients they reduce."""
    by = cut_by(model)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        by = "DistributedDataParallel reduces the gradients of this model"
    if is_replicated(model):
        by = "fully_shard(replicate=True) has noted that this model's gradients are reduced"
    if by:
        raise FxrematError(
            f"a pipeline gives each rank the whole parameters of its stages, and {by}: give fxremat.pipeline the model "
            "as it was before; each device then has the parameters of its stages alone"
        )


def make_plan(ops: Ops, inputs: tuple[Tensor, ...], target: Tensor, settings: Settings) -> Pipelined:
    """Measure the layers, and find a plan with which the memory of each device is within the budget.

    The planner counts the memory of each stage separately; here the order of actions is simulated to find the
    memory of all stages of a device together, as PyTorch's engine uses it. The planner then gets a smaller or
    larger budget, until a plan fits and nearly uses up the real one.
    """
    devices, effort, copies = settings.devices, settings.refine, settings.copies
    search = _Search(profile(ops, inputs, target, devices=devices, effort=effort, copies=copies), settings)
    room, too_much, best = float(settings.mem), float("inf"), None
    for _ in range(ATTEMPTS):
        try:
            found = search.within(int(room))
        except BudgetTooSmall as error:
            return best or search.least(error.minimum)
        left = settings.mem - found.most
        if left < 0:
            too_much = room
        elif best is None or found.seconds < best.seconds:
            best = found
        following = max(0.0, room + left)
        if following >= too_much:
            following = (room + too_much) / 2
        if abs(following - room) < CLOSE * settings.mem:
            break
        room = following
    return best or search.least(max(0, int(room)))


class _Search:
    def __init__(self, measured: Profile, settings: Settings) -> None:
        self.measured = measured
        self.settings = settings
        self.layers = measured.layers()
        self.ways = OnDemandCosts(rough=measured.rough, exact=measured.ways, count=measured.count)

    def _planned(self, room: float, effort: float = 0.0) -> PipelinePlan:
        planner = self.settings.planner or import_module(BEST).plan_pipeline
        plan: PipelinePlan = planner(
            self.layers,
            replace(self.settings.machines, memory=room),
            options=self.ways,
            microbatches=self.settings.microbatches,
            effort=effort,
        )
        return plan

    def within(self, room: int) -> Pipelined:
        """Return the plan for devices of `room` bytes, with its simulated memory and time.

        The forward and backward of each of its stages were planned, not only estimated. Raises
        `BudgetTooSmall`.
        """
        self.ways.settle(self._planned, room)
        plan = self._planned(room, self.settings.effort / ATTEMPTS)
        while self.ways.ask(plan.stages, around=False):
            plan = self._planned(room, self.settings.effort / ATTEMPTS)
        held = [held_by(self.measured, plan, number) for number in range(len(plan.stages))]
        memory = most_bytes(plan, held, lowered(plan, self.settings.microbatches))
        seconds = step_seconds(plan, self.settings.microbatches)
        plan = replace(plan, machines=self.settings.machines)
        return Pipelined(plan=plan, cuts=self.measured.cuts, memory=memory, seconds=seconds)

    def least(self, room: int) -> Pipelined:
        """Return the plan with the lowest memory, starting from a budget of `room` bytes.

        Raises `BudgetTooSmall` if it exceeds the real budget.
        """
        while True:
            try:
                found = self.within(room)
                # the error's minimum may come from estimated costs; exact costs may need more
            except BudgetTooSmall as error:
                room = max(room + 1, error.minimum)
                continue
            if found.most <= self.settings.mem:
                return found
            raise BudgetTooSmall(found.most, self.settings.mem, unit=UNIT)


def _crossing_bytes(ops: Ops) -> int:
    """Return the median bytes of the tensors that cross between layers; 0 if there is one layer."""
    sizes = sorted(value.meta["val"].nbytes for value in ops.cuts.values())
    return sizes[len(sizes) // 2] if sizes else 0


def _same_everywhere(make: Callable[[], Pipelined]) -> Pipelined:
    """Run `make` on rank 0 and return its result on all ranks; an error of `make` is raised on all of them."""
    message: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            message[0] = make()
        except FxrematError as error:
            message[0] = error
    dist.broadcast_object_list(message, src=0)
    if isinstance(message[0], FxrematError):
        raise message[0]
    found: Pipelined = message[0]
    return found


def _checked_everywhere(rank: Rank, plan: PipelinePlan, settings: Settings) -> tuple[int, ...]:
    """Return the peak bytes of each device, with the forwards and backwards that each rank chose by measuring itself.

    Raises `BudgetTooSmall` if a device exceeds the budget.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(rank.held))
    known: dict[int, StageMemory] = {number: held for part in everyone for number, held in part.items()}
    held = [known[number] for number in range(len(plan.stages))]
    memory = most_bytes(plan, held, lowered(plan, settings.microbatches))
    if max(memory) > settings.mem:
        note = "a rank measured other costs than rank 0"
        raise BudgetTooSmall(max(memory), settings.mem, unit=UNIT, note=note)
    return memory


def _joined_group(settings: Settings) -> bool:
    """Tell whether this process is one of several; if torchrun started it, initialize the process group.

    Raises `FxrematError` unless there are as many processes as devices. A single process only plans.
    """
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return False
        dist.init_process_group()
    if dist.get_world_size() != settings.devices:
        raise FxrematError(
            f"devices={settings.devices}, and {dist.get_world_size()} processes are running; "
            f"start as many as there are devices"
        )
    return True


def _checked(inputs: tuple[Tensor, ...], target: Tensor, loss_fn: Loss, settings: Settings) -> int:
    """Return the number of rows of a batch. Raises `FxrematError` if batch, micro-batches and devices are inconsistent.
    """
    if not isinstance(target, Tensor):
        raise FxrematError(f"example_target is a tensor, and this is {shortened(target)}")
    if not callable(loss_fn):
        raise FxrematError(
            f"loss_fn={loss_fn!r}: give a function of the model's outputs and the target, such as F.mse_loss"
        )
    if settings.devices < 2:
        raise FxrematError(
            f"devices={settings.devices}: a pipeline has 2 or more; for one use fxremat.compile"
        )
    if settings.microbatches < 1:
        raise FxrematError(f"microbatches={settings.microbatches}: there has to be 1 or more")
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in (*inputs, target)}
    if len(sizes) != 1:
        raise FxrematError(
            f"inputs and target are split along their first dimension, which has different sizes: {sorted(sizes)}"
        )
    (batch,) = sizes
    if batch == 0 or batch % settings.microbatches:
        raise FxrematError(
            f"microbatches={settings.microbatches} does not divide the batch, which has {batch} rows"
        )
    return batch


def _tensors(inputs: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    given = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    for value in given:
        if not isinstance(value, Tensor):
            raise FxrematError(f"a pipeline's inputs are tensors, and one is a {type(value).__name__}")
    return given


def _named(ops: Ops, rank: Rank | None, model: nn.Module) -> dict[str, Tensor]:
    """Return the entries of the model's state dict that this rank owns; all entries if `rank` is None.

    Entries that no op reads belong to the rank of the first stage.
    """
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    if rank is None:
        wanted = {id(tensor) for tensor in tensors.values()}
    else:
        wanted = {id(tensor) for _, tensor in rank.tensors()}
        if rank.is_first:
            read = {id(value) for value in ops.read}
            wanted |= {id(tensor) for tensor in tensors.values()} - read
    return {
        name: tensors[name] for name in model.state_dict() if name in tensors and id(tensors[name]) in wanted
    }


def _described(pipe: Pipeline) -> Iterator[str]:
    plan, speed = pipe.plan, pipe.plan.machines.bandwidth
    yield (
        f"fxremat plan for {plan.machines.devices} devices: {format_count(len(plan.stages), 'stage')}, "
        f"{pipe.seconds * 1e3:.3g} ms a step"
    )
    yield f"  copies {'take no time' if speed is None else f'at {format_bytes(int(speed))}/s'}"
    yield (
        f"  a micro-batch every {plan.period * 1e3:.3g} ms; no plan takes less than {plan.bound * 1e3:.3g} ms "
        f"(found by {plan.by})"
    )
    for number, (stage, in_flight) in enumerate(zip(plan.stages, plan.in_flight)):
        names = plan.layers.layers[stage.first].name, plan.layers.layers[stage.last].name
        seconds = stage.way.forward_time + stage.way.backward_time
        yield (
            f"  stage {number} on device {stage.device}: layers {stage.first}..{stage.last} "
            f"(to {names[1]}), {seconds * 1e3:.3g} ms, {in_flight} in flight, each keeps "
            f"{format_bytes(int(stage.way.kept_bytes))}"
        )
    used = {stage.device for stage in plan.stages}
    for device, most in enumerate(pipe.memory):
        idle = "" if device in used else ", without a stage: with more, copies would take longer than they save"
        yield f"  device {device}: {format_bytes(most)} of {format_bytes(int(plan.machines.memory))}{idle}"
