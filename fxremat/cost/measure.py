"""Seconds and workspace of each distinct op, measured on the step's real values on the model's own device.

    walk      the step runs once, op by op, on the user's own inputs and parameters (`cost.walk`); ops whose cost is
              not known yet are timed, and their memory is measured, when their inputs exist
    alone     ops that the walk could not reach (fake inputs; an op that fails) are run on made-up data
    estimate  ops that cannot run at all are estimated, with a generous workspace and one warning

Ops with equal keys (op, constants, shapes, strides, dtypes) are measured once on a machine: see `cost.cache`.
Time is the median of a few runs after a warm-up. The workspace is the allocator's peak during the op beyond the
storages that it leaves, from the allocator's own events.

The walk also finds the real layouts. A backward op that may overwrite its operand (`passes.in_place`) has to
allocate a new result ("fresh", `Costs.fresh`) if the layouts of operand and result differ; and if a traced view
is impossible, the step has to be traced again (`LayoutsDiffer`). The joint graph is never changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx

from fxremat.agreement import ALONE, Agreement
from fxremat.cost.cache import CostCache
from fxremat.cost.devices import Device
from fxremat.cost.estimate import cost_of
from fxremat.cost.layouts import (
    CHANNELS_LAST,
    LayoutsDiffer,
    Strides,
    key_of,
    lies_in_two_layouts,
    otherwise_than_shown,
)
from fxremat.cost.made_up import Call, call_of
from fxremat.cost.made_up_results import MadeUpResults
from fxremat.cost.metering import cost_of_call, peak_of, seconds_of
from fxremat.cost.region_costs import RegionCosts, RegionRaises
from fxremat.cost.walk import Walk, given_inputs
from fxremat.device import KINDS, Ability, accelerates, kind_of
from fxremat.errors import FxrematError
from fxremat.graphs.accounting import costs_from, device_of, op_keys, rounded
from fxremat.graphs.batch_norm import STATISTICS
from fxremat.graphs.captured import Captured
from fxremat.graphs.collectives import is_collective
from fxremat.graphs.handed_in import laid_out_by_others
from fxremat.graphs.op_key import op_key
from fxremat.graphs.overwriting import PLACE, overwriting, overwritten
from fxremat.graphs.region import Region
from fxremat.ops.random import GeneratorStates
from fxremat.progress import progress
from fxremat.step.costs import Costs, OpCost
from fxremat.step.step_graph import Kind, Op
from fxremat.torch_private import is_real, not_compiling, real_tensors, unprofiled

aten = torch.ops.aten
log = logging.getLogger(__name__)

RISE_SECONDS = 0.5  # this many seconds of work raise the clock rate of an idle GPU
# bytes assumed for a compiled region that could not be measured, so that no plan with it fits any budget
UNBOUNDED = 1 << 50


def measure(
    joint: Captured,
    inputs: Sequence[Any] = (),
    *,
    order: Callable[[], Sequence[int]] | None = None,
    ranks: Agreement = ALONE,
    limit: int | None = None,
    like: Captured | None = None,
) -> Costs:
    """Return the costs of the ops of a joint graph; each distinct op is measured once, or read from the cache.

    Takes a few seconds for a GPT of 12 layers, almost none from the cache.

    Args:
        inputs: the arguments of the captured graph, in order.
        order: returns the ops to run, in an order in which the step fits into memory; None: each once, as captured.
        ranks: the ranks that measure the same graph. An op that one of them has not measured is measured by all; its
            seconds and bytes are the largest over the ranks.
        limit: bytes within which compiled regions are measured (`cost.region_costs`), as far as the order allows; None:
            any number.
        like: a graph that was measured before, of which this one is a rewrite that leaves layouts as they are: no step
            runs then, and each op that it adds is measured by itself.

    Raises:
        LayoutsDiffer: the step was traced with views that real layouts do not allow.
    """
    device = device_of(joint)
    if not (kind := kind_of(device)).metered:
        kind.require(Ability.STATISTICS, 'ops cannot be measured there; costs="estimate" plans without')
    cache = CostCache.of_device(device)
    layouts = f"layouts {_digest(joint)}"
    refused = _refused(cache, layouts)
    if refused is None and like is not None and (seen := _refused(cache, f"layouts {_digest(like)}")) is not None:
        _keep_refused(cache, layouts, refused := _refused_alike(joint, like, seen))
    unchecked = any(ranks.gathered(refused is None, "comparing layouts"))
    fresh = frozenset[int]() if unchecked else frozenset(_of_all(ranks, refused or ()))
    missing = _of_all(ranks, _missing(joint, cache, fresh))
    if missing and like is not None and not unchecked:
        each = partial(_each_alone, joint, missing, device, cache, fresh)
        ranks.together("measuring", lambda: unprofiled(each), meeting=True)
        missing = _of_all(ranks, _missing(joint, cache, fresh))
    if unchecked or missing:
        walk = partial(_measure, joint, inputs, order, device, cache, layouts, missing, fresh, ranks, limit)
        differing, fresh = ranks.together("measuring", lambda: unprofiled(walk), meeting=True)
        cache.save()
        _check_views(ranks.gathered(differing, "comparing layouts"))
        fresh = frozenset(_of_all(ranks, sorted(fresh)))
    by_op = _agreed(ranks, [*map(cache.op, op_keys(joint, fresh))])
    by_op = [
        cost or (OpCost(0.0, UNBOUNDED) if op.kind is Kind.REGION else None)
        for op, cost in zip(joint.ops, by_op, strict=True)
    ]
    if unknown := [op for op, cost in zip(joint.ops, by_op, strict=True) if cost is None]:
        _warn_of_estimates(op.target for op in unknown)
        rough = Device.like(device)
        by_op = [
            cost or cost_of(op, joint, rough, safe=True) for op, cost in zip(joint.ops, by_op, strict=True)
        ]
    return costs_from(joint, [cost for cost in by_op if cost is not None], device, fresh)


def known_costs(joint: Captured, rate: float = 1.0, fresh: frozenset[int] = frozenset()) -> Costs:
    """Return the costs of ops that were measured before, and estimates for all other ops; nothing is run.

    A compiled region that was not measured counts 0 seconds, and no workspace besides its outputs.

    Args:
        rate: the seconds of estimates are multiplied by it.
        fresh: ops that must not overwrite an operand.
    """
    device = device_of(joint)
    cache, rough = CostCache.of_device(device), Device.like(device)

    def estimated(op: Op) -> OpCost:
        if op.kind is Kind.REGION:
            return OpCost(0.0, sum(rounded(joint.values[value].bytes, device) for value in op.writes))
        cost = cost_of(op, joint, rough)
        return replace(cost, seconds=rate * cost.seconds)

    return costs_from(joint, [cache.op(op.key) or estimated(op) for op in joint.ops], device, fresh)


def fresh_as_known(joint: Captured) -> frozenset[int]:
    """Return the ops that must not overwrite an operand, since real layouts differ or were not compared yet.

    An earlier measurement has compared them; without one, all ops that might overwrite are returned. Nothing is
    run.
    """
    refused = _refused(CostCache.of_device(device_of(joint)), f"layouts {_digest(joint)}")
    return _overwriting(joint, range(len(joint.ops)) if refused is None else refused)


def _refused(cache: CostCache, layouts: str) -> list[int] | None:
    """Return the ops that an earlier walk found to need a new result; None if there was no such walk.

    Args:
        layouts: the cache key of that result.
    """
    numbers = cache.numbers(layouts)
    return None if numbers is None else [int(number) - 1 for number in numbers[1:]]


def _refused_alike(joint: Captured, like: Captured, refused: Collection[int]) -> list[int]:
    """Return the ops of a graph that need a new result, from those of another that has most of its ops.

    Of what the other one lacks, all that might overwrite an operand do.
    """
    bear_it = {
        (node.name, node.target)
        for op, node in zip(like.ops, like.nodes, strict=True)
        if op.overwrites is not None and op.index not in refused
    }
    named = [(node.name, node.target) for node in joint.nodes]
    return [index for index in _overwriting(joint, range(len(named))) if named[index] not in bear_it]


def _keep_refused(cache: CostCache, layouts: str, refused: Iterable[int]) -> None:
    # one is added since stored numbers must be above 0
    cache.keep(layouts, [1.0, *(float(index + 1) for index in sorted(refused))])


def _missing(joint: Captured, cache: CostCache, fresh: Set[int]) -> list[int]:
    """Return the ops to measure: for each key with unknown cost, the first op that has this key.

    Collectives are measured in every process, since all their ranks have to take part.
    """
    first: dict[str, int] = {}
    for op, key in zip(joint.ops, op_keys(joint, fresh), strict=True):
        if _is_unknown(op, key, cache):
            first.setdefault(key, op.index)
    return list(first.values())


_measured_here: set[str] = set()  # keys of collectives that this process has measured together with the other ranks


def _is_unknown(op: Op, key: str, cache: CostCache) -> bool:
    return key not in _measured_here if op.communicates else cache.op(key) is None


def _of_all(ranks: Agreement, ops: Sequence[int]) -> list[int]:
    """Return the union of the ops (by number) that the ranks pass."""
    return sorted(set().union(*map(set, ranks.gathered(list(ops), "comparing what is to be measured"))))


def _overwriting(joint: Captured, ops: Iterable[int]) -> frozenset[int]:
    """Return the ops among `ops` that may overwrite an operand."""
    return frozenset(index for index in ops if joint.ops[index].overwrites is not None)


def _agreed(ranks: Agreement, costs: Sequence[OpCost | None]) -> list[OpCost | None]:
    """Return for each op the largest seconds and bytes over all ranks; None if one of them has no cost for it."""
    if len(ranks.ranks) == 1:
        return list(costs)
    rows = ranks.gathered(list(costs), "comparing costs")
    return [_slowest(mine, others) for mine, others in zip(costs, zip(*rows, strict=True), strict=True)]


def _slowest(mine: OpCost | None, others: Sequence[OpCost | None]) -> OpCost | None:
    known = [cost for cost in others if cost is not None]
    if mine is None or len(known) < len(others):
        return None
    outputs = tuple(max(sizes) for sizes in zip(*(cost.outputs for cost in known), strict=True))
    return OpCost(max(cost.seconds for cost in known), max(cost.workspace for cost in known), outputs)


def _digest(joint: Captured) -> str:
    """Return a hash of a graph's ops and the layouts that they read; graphs with equal hashes have equal real layouts.
    """
    ops = "\n".join(f"{op.target} {op.reads} {op.key}" for op in joint.ops)
    return hashlib.sha256(ops.encode()).hexdigest()


def _warn_of_estimates(targets: Iterable[str]) -> None:
    names = sorted(set(targets))
    warnings.warn(
        f"fxremat could not run {', '.join(names)} by itself to measure what it takes: its cost is estimated",
        stacklevel=2,
    )


@contextlib.contextmanager
def quiet_world(device: torch.device) -> Iterator[None]:
    """Within this context, run ops on real tensors on this device, without autograd, autocast and fake modes.

    The states of the random generators are restored afterwards.
    """
    kind = kind_of(device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(real_tensors())
        stack.enter_context(not_compiling())
        stack.enter_context(torch.no_grad())
        stack.enter_context(GeneratorStates({device}).kept())
        for computing in {"cpu", device.type} & KINDS.keys():
            stack.enter_context(torch.autocast(computing, enabled=False))
        stack.enter_context(kind.current(device))
        yield


def _measure(
    joint: Captured,
    inputs: Sequence[Any],
    order: Callable[[], Sequence[int]] | None,
    device: torch.device,
    cache: CostCache,
    layouts: str,
    missing: Sequence[int],
    fresh: frozenset[int],
    ranks: Agreement,
    limit: int | None,
) -> tuple[dict[str, tuple[str, Strides]], frozenset[int]]:
    """Measure the missing ops, and put their costs into the cache.

    Args:
        order: see `measure`.
        layouts: the cache key for the list of ops that must allocate new results.
        missing: numbers of the ops whose cost is not known.
        fresh: ops that are known to need new results.
        limit: see `measure`.

    Returns:
        real strides that make a traced view impossible, as `key_of` a call -> (op's name, strides), or {}; and all
            ops that
        have to allocate new results.
    """
    keys = op_keys(joint, fresh)
    wanted = {keys[index]: joint.ops[index] for index in missing}
    todo = range(len(wanted))
    with contextlib.closing(progress(todo, "measuring ops", total=len(todo))) as bar, quiet_world(device):
        if not any(isinstance(value, torch.Tensor) and not is_real(value) for value in inputs):
            raise_clocks(device)
            ops = range(len(joint.ops)) if order is None else order()
            walk = Walk(joint, given_inputs(joint, inputs), ops)
            alone = len(ranks.ranks) == 1
            regions = RegionCosts(device, limit if alone else None)  # all ranks walk equally often
            for may_make_up in (True, False):
                visitor = _Visitor(
                    joint, walk, device, cache, bar, wanted, fresh, ranks, regions, may_make_up=may_make_up
                )
                ended = _walked(visitor, alone=alone)
                if ended or not visitor.made_up.count:  # else an op may have raised for data that the walk made up
                    break
            if visitor.differing and (walk.impossible_views or not ended):
                return visitor.differing, fresh
            fresh = frozenset(visitor.fresh)
            if ended:
                _keep_refused(cache, layouts, fresh)
        for _ in _measure_alone(joint, _missing(joint, cache, fresh), device, cache, fresh):
            next(bar, None)
    return {}, fresh


def _each_alone(
    joint: Captured, missing: Sequence[int], device: torch.device, cache: CostCache, fresh: frozenset[int]
) -> None:
    """Measure ops one by one on made-up data; those that cannot run so stay unknown, as do collectives."""
    some = [index for index in missing if not joint.ops[index].communicates]
    with quiet_world(device):
        raise_clocks(device)
        for _ in progress(_measure_alone(joint, some, device, cache, fresh), "measuring ops", total=len(some)):
            pass
    cache.save()


def _measure_alone(
    joint: Captured, ops: Sequence[int], device: torch.device, cache: CostCache, fresh: frozenset[int]
) -> Iterator[int]:
    keys = op_keys(joint, fresh)
    for index in ops:
        _alone(keys[index], joint.nodes[index], device, cache, fresh=index in fresh)
        yield index


def raise_clocks(device: torch.device, seconds: float = RISE_SECONDS) -> None:
    """Multiply matrices on an accelerator for a while before ops are timed: an idle GPU runs at 1/5 of its clock rate.
    """
    if not (kind := kind_of(device)).accelerator:
        return
    matrix = torch.ones(1024, 1024, device=device)  # 4 MiB each
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.mm(matrix, matrix)
        kind.synchronize(device)


def _check_views(differing: Iterable[Mapping[str, tuple[str, Strides]]]) -> None:
    """Raise `LayoutsDiffer` if the walk of any rank found a view that a real layout does not allow."""
    found = {key: seen for of_rank in differing for key, seen in of_rank.items()}
    if found:
        names = dict.fromkeys(name for name, _ in found.values())
        raise LayoutsDiffer({key: strides for key, (_, strides) in found.items()}, names)


def _walked(visitor: _Visitor, *, alone: bool) -> bool:
    """Run the walk through the step; return False if an op raised, so that it ended early.

    Args:
        alone: False: raise the error instead, since other ranks would wait forever.
    """
    try:
        while _again(visitor, alone=alone):
            pass
    except FxrematError:
        raise
    except Exception as error:  # the error is reported better when the op is measured alone, or in training
        log.debug("measuring walk ended early: %s: %s", type(error).__name__, error)
        if not alone:
            raise
        return False
    return True


def _again(visitor: _Visitor, *, alone: bool) -> bool:
    """Walk through the step; return whether another walk is needed for the costs of its regions."""
    visitor.measures_again = False
    try:
        visitor.walk.run(visitor, visitor.made_up.may_replace)
    except RegionRaises:
        if not alone:
            raise
        return True
    return visitor.measures_again


class _Visitor:
    """Called for each op while a step runs op by op: it runs the op, measures it, and compares layouts."""

    def __init__(
        self,
        joint: Captured,
        walk: Walk,
        device: torch.device,
        cache: CostCache,
        bar: Any,
        wanted: dict[str, Op],
        fresh: Set[int],
        ranks: Agreement,
        regions: RegionCosts,
        *,
        may_make_up: bool,
    ) -> None:
        self.made_up = MadeUpResults(joint, cache, allowed=may_make_up and len(ranks.ranks) == 1)
        self.joint, self.walk, self.device, self.cache, self.bar = joint, walk, device, cache, bar
        self.ranks, self.regions = ranks, regions
        self.wanted = wanted  # key -> op, for the ops that are still to be measured
        self.fresh = set(fresh)  # ops that must allocate a new result although they might overwrite an operand
        self.measures_again = False  # True: another walk is needed for the costs of regions
        self.checked: set[int] = set()  # ops that may overwrite an operand, after a comparison of layouts
        # key of a call -> (op's name, real strides), where fake tensors have other strides
        self.differing: dict[str, tuple[str, Strides]] = {}

    def __call__(self, op: Op, call: Call) -> Any:
        if op.communicates:
            self.ranks.meet("measuring")
        if op.overwrites is not None and op.index not in self.fresh:
            call = self._overwriting(op, call)
        if isinstance(region := self.joint.nodes[op.index].target, Region):
            result = self._result_of_region(op, region, call)
        else:
            result = self._result(op, call)
        strides = None if op.overwrites is not None else otherwise_than_shown(self.joint.nodes[op.index], result)
        if strides is not None:
            self.differing[key_of(call.target, call.args, call.kwargs)] = (op.target, strides)
        return result

    def _result(self, op: Op, call: Call) -> Any:
        fresh = op.index in self.fresh
        key = op_key(self.joint.nodes[op.index], fresh=fresh)
        if self.wanted.pop(key, None) is None and not _is_unknown(op, key, self.cache):
            self._note_other_layouts(op, key, call)
            result = call()
            self.made_up.note(op, key, call, result)
            return result
        cost, result = measured(self.joint.nodes[op.index], call, self.device, fresh=fresh)
        self.cache.keep_op(key, cost)
        self._note_other_layouts(op, key, call)
        if op.communicates:
            _measured_here.add(key)
        self.made_up.note(op, key, call, result)
        next(self.bar, None)
        return result

    def _result_of_region(self, op: Op, region: Region, call: Call) -> Any:
        """Run a region, to which the call hands over the inputs that die; keep its cost once it is known."""
        self._check_alone(op, region, call)
        key, inputs = op_key(self.joint.nodes[op.index], fresh=False), call.args
        assert isinstance(inputs, list), "a walk gives a region a list, which it empties"
        if key not in self.wanted and not _is_unknown(op, key, self.cache):
            return self.regions.run(region, inputs)
        cost, result = self.regions.measured(key, region, inputs, self.walk.allocated(inputs))
        if cost is None:
            self.measures_again = True
            return result
        self.cache.keep_op(key, cost)
        self.wanted.pop(key, None)
        next(self.bar, None)
        return result

    def _note_other_layouts(self, op: Op, key: str, call: Call) -> None:
        """Raise the workspace of a convolution to what it needs in the layout of this call, unless that was measured.

        Calls with equal keys may differ in it (`in_other_layouts`). Where gradients are handed in by a loss outside of
        the model, they may have any.
        """
        if not (places := _in_two_layouts(call)):
            return
        read = self.joint.nodes[op.index].all_input_nodes
        handed_in = not self._laid_out_by_others.isdisjoint(read)
        for each in (call, *(in_other_layouts(call) if handed_in else ())):
            here = f"{key} with strides {[each.args[place].stride() for place in places]}"
            known, cost = self.cache.op(key), self.cache.op(here)
            if cost is None:
                peak, result = peak_of(each, self.device)
                cost = cost_of_call(known.seconds if known else 0.0, peak, result, self.device, new=True)
                self.cache.keep_op(here, cost)
            if known is not None and known.workspace < cost.workspace:
                self.cache.keep_op(key, replace(known, workspace=cost.workspace))

    @cached_property
    def _laid_out_by_others(self) -> set[fx.Node]:
        return laid_out_by_others(self.joint.module.graph)

    def _check_alone(self, op: Op, region: Region, call: Call) -> None:
        """Make a region run op by op from now on if an input that it overwrites shares its storage with other values.
        """
        inputs = [node for node in self.joint.nodes[op.index].args if isinstance(node, fx.Node)]
        for place in region.donated:
            if self.walk.shares(call.args[place], besides=self.joint.value_of[inputs[place]]):
                region.give_up("an input that it may overwrite shares its storage")

    def _overwriting(self, op: Op, call: Call) -> Call:
        """Return a call of the op that overwrites its operand, or the unchanged call if the op needs a new result."""
        if op.index not in self.checked and not self._bears_it(op, call):
            self.fresh.add(op.index)
            return call
        self.checked.add(op.index)
        return Call(*overwriting(call.target, self.joint.nodes[op.index].meta[PLACE], tuple(call.args), call.kwargs))

    def _bears_it(self, op: Op, call: Call) -> bool:
        """Tell whether an op may overwrite its operand.

        It may if the operand fills a storage that nothing else uses, in the layout of a new result.
        """
        operand, made = call.args[self.joint.nodes[op.index].meta[PLACE]], call()
        whole = operand.untyped_storage().nbytes() == operand.nbytes
        alike = (operand.shape, operand.stride(), operand.dtype) == (made.shape, made.stride(), made.dtype)
        assert op.overwrites is not None
        return whole and alike and not self.walk.shares(operand, besides=op.overwrites)


def measured(node: fx.Node, call: Call, device: torch.device, *, fresh: bool = False) -> tuple[OpCost, Any]:
    """Measure a call; return its cost and its result.

    The call runs five times or more. A call that overwrites its operand runs once; its cost is measured on a
    copy.

    Args:
        node: the node of the op.
        fresh: the call allocates a new result although it might overwrite an operand.
    """
    fixed = is_collective(node)
    if fresh or overwritten(node) is None:
        seconds = seconds_of(_in_step(call), device, fixed=fixed)
        largest = fullest(node, call)
        peak, result = peak_of(largest, device)
        cost = cost_of_call(seconds, peak, result, device, new=True)
        return cost, result if largest is call else call()
    seconds, peak = _on_a_copy(call, device, fixed=fixed)
    result = call()
    return cost_of_call(seconds, peak, result, device, new=False), result


def _in_step(call: Call) -> Call:
    """Return the call whose time is measured; for the statistics of a BatchNorm, one that computes nothing else.

    By itself the exact op computes the whole BatchNorm, but in a step statistics and normalization run as one
    op.
    """
    return Call(STATISTICS, (*call.args[:-1], False), {}) if call.target is STATISTICS else call


def _on_a_copy(call: Call, device: torch.device, *, fixed: bool) -> tuple[float, int]:
    """Return the seconds and the peak of a call that overwrites its operand, measured on a copy of the operand."""
    scratch = torch.empty_like(call.args[0]).copy_(call.args[0])
    trial = _on(scratch, call)
    # on accelerators the numbers do not matter for the time
    anew = None if accelerates(device) else partial(scratch.copy_, call.args[0])
    seconds = seconds_of(trial, device, prepare=anew, fixed=fixed)
    return seconds, peak_of(trial, device)[0]


def _on(operand: torch.Tensor, call: Call) -> Call:
    """Return a call like `call` that overwrites `operand` instead of its first argument."""
    options = {key: operand if value is call.args[0] else value for key, value in call.kwargs.items()}
    return Call(call.target, (operand, *call.args[1:]), options)


def fullest(node: fx.Node, call: Call) -> Call:
    """Return the call with the data for which it allocates most, if its workspace depends on data.

    `EmbeddingBag` in mode max gathers the bags that are not empty; it allocates most if all of them are not.
    """
    if node.target not in (aten._embedding_bag_backward.default, aten._embedding_bag_dense_backward.default):
        return call
    assert isinstance(node.target, torch._ops.OpOverload)
    place = next(k for k, a in enumerate(node.target._schema.arguments) if a.name == "bag_size")
    args = [torch.ones_like(value) if k == place else value for k, value in enumerate(call.args)]
    return Call(call.target, tuple(args), call.kwargs)


def in_other_layouts(call: Call) -> Iterator[Call]:
    """Yield a convolution on its values in the other layouts that they may have in a step, which take other kernels.

    Where all dimensions beside batch and channels are 1, or there is one channel, values are contiguous and in
    channels_last at once. Which of the two a convolution works in, it then reads from the strides of dimensions of size
    1, which depend on the kernels before it.
    """
    values = [call.args[place] for place in _in_two_layouts(call)]
    here = tuple(value.stride() for value in values)
    for strides in itertools.product(*map(_strides_of_both, values)) if values else ():
        if strides != here:
            laid = dict(zip(map(id, values), strides, strict=True))
            args = [x.as_strided(x.shape, laid[id(x)]) if id(x) in laid else x for x in call.args]
            yield Call(call.target, tuple(args), call.kwargs)


def _in_two_layouts(call: Call) -> list[int]:
    """Return the places of those values of a convolution that are contiguous and in channels_last at once."""
    count = {aten.convolution.default: 1, aten.convolution_backward.default: 2}.get(call.target, 0)
    return [place for place in range(count) if lies_in_two_layouts(call.args[place])]


def _strides_of_both(value: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the strides that a value would have as a contiguous one, and as one in channels_last."""
    like = torch.empty_like(value, device="meta", memory_format=torch.contiguous_format)
    return [like.stride(), torch.empty_like(like, memory_format=CHANNELS_LAST[value.dim()]).stride()]


def _alone(key: str, node: fx.Node, device: torch.device, cache: CostCache, *, fresh: bool) -> None:
    """Measure an op on made-up data and cache its cost; do nothing if it cannot run on such data."""
    cost = alone(node, device, fresh=fresh)
    if cost is not None:
        cache.keep_op(key, cost)


def alone(node: fx.Node, device: torch.device, *, timed: bool = True, fresh: bool = False) -> OpCost | None:
    """Return the cost of an op, run on made-up data within `quiet_world`; None if it cannot run on such data.

    Args:
        timed: True: measure the time too, in several runs; False: run it once, and count 0 seconds.
        fresh: True: let it allocate a new result although it might overwrite an operand.
    """
    try:
        call = call_of(node, fresh=fresh)
        seconds = seconds_of(_in_step(call), device, fixed=is_collective(node)) if timed else 0.0
        peak, result = peak_of(call, device)
        peak = max([peak, *(peak_of(other, device)[0] for other in in_other_layouts(call))])
    except FxrematError:
        raise
    except torch.OutOfMemoryError as error:
        said = str(error).partition(". ")[0]
        log.warning("there is no memory on the device to measure %s by itself: %s", node.target, said)
        return None
    except Exception as error:
        log.debug("%s cannot be measured alone: %s: %s", node.target, type(error).__name__, error)
        return None
    new = (fresh or overwritten(node) is None) and not isinstance(node.target, Region)
    return cost_of_call(seconds, peak, result, device, new=new)
