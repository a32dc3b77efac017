"""Planning a step that stores what the backward reads in fewer bytes: see `passes.compress`.

    masks       bool tensors, indices, and tensors of which only the shape is read
    signs       these, and tensors of which only the sign is read
    rounded     these, and tensors of numbers as int8 or fp8, if the user allows that: first what takes longest to
                recompute for its bytes, then more, then all

What a way promises is known before anything is searched for: it takes less memory by so many bytes, and the ops that
store and bring back take so many seconds; the frontier of the step as captured has what such bytes are worth. Ways that
promise to be faster, and all that round, are surveyed as the step itself is, and the fastest that fits is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import inf

from fxremat.cost.devices import Device
from fxremat.cost.estimate import cost_of
from fxremat.graphs.accounting import device_of
from fxremat.graphs.captured import Captured
from fxremat.options import Options
from fxremat.passes.compress import Compression, packable, roundable
from fxremat.planning.facts import assumed_facts, facts_of
from fxremat.planning.step import Step
from fxremat.planning.surveys import Survey, keep_all_of, surveyed
from fxremat.search.survey import kept
from fxremat.step.costs import Costs

WORTHWHILE = 0.05  # nothing is compressed unless that saves this fraction of the peak without recomputation
FASTER = 0.98  # a way is surveyed if it promises at most this times the seconds of the best so far
SAMPLE = 50  # ops whose seconds are compared with estimates
SHARES = (0.5, 1.0)  # fractions of the bytes that may be rounded


@dataclass(frozen=True, kw_only=True)
class _Way:
    """A way to compress values, with what it promises."""

    compression: Compression
    seconds: float  # of a step within the budget; infinite if it does not fit, as far as is known
    bytes: int  # by which the peak without recomputation is lower


def in_fewer_bytes(captured: Survey, options: Options) -> Iterator[Survey]:
    """Yield surveys of a step that stores tensors in fewer bytes, where that promises to be faster, or to fit at all.
    """
    if not _allowed(captured.step, options) or not _alike(captured.step):
        return
    budget, everything = captured.limit.bytes, captured.frontier.keep_all.time
    best = _seconds(captured, budget)

    @cache
    def rewritten(compression: Compression) -> Step:
        return replace(captured.step, graph=compression.of(captured.step.graph))

    ways: Iterable[_Way] = captured.step.ranks.from_first(
        "compressing", lambda: tuple(_ways(captured, options, rewritten)) if best * FASTER > everything else ()
    )
    too_much = list[Compression]()  # ways that take all of the budget, or more; what packs fewer values takes more
    for way in sorted(ways, key=lambda way: (way.seconds if best < inf else inf, -way.bytes)):
        if any(way.compression.is_part_of(other) for other in too_much):
            continue
        slow = everything < FASTER * best < inf
        if best == inf or (slow and (way.compression.rounded or way.seconds <= FASTER * best)):
            one = surveyed(rewritten(way.compression), options, captured.limit, like=captured.step.graph)
            one = replace(one, compression=way.compression)
            too_much += [way.compression] if one.frontier.minimum >= budget else []
            best = min(best, _seconds(one, budget))
            yield one


def may_compress(captured: Survey, options: Options) -> bool:
    """Tell whether a step could store tensors in fewer bytes, so that it might need less memory."""
    if not _allowed(captured.step, options) or len(captured.step.ranks.ranks) > 1:
        return False
    graph = captured.step.graph
    saved = packable(graph) | (roundable(graph, options.compress) if isinstance(options.compress, str) else {})
    return sum(saved.values()) >= WORTHWHILE * captured.keep_all


def _allowed(step: Step, options: Options) -> bool:
    """Tell whether a step may store values in fewer bytes: where single ops run, and weights stay on the device."""
    chosen = options.solver == "auto" or options.compress is not None
    return options.compress is not False and not options.compiles and chosen and step.trained is None


def _alike(step: Step) -> bool:
    """Tell whether all ranks have the same ops, so that the numbers of values mean the same to all."""
    if len(step.ranks.ranks) == 1:
        return True
    mine = [op.target for op in step.graph.ops]
    return all(other == mine for other in step.ranks.gathered(mine, "comparing ops"))


def _seconds(survey: Survey, budget: int) -> float:
    """Return the seconds of the fastest candidate within a budget; infinite if there is none."""
    return survey.seconds_within(budget) if survey.frontier.minimum <= budget else inf


def ways_to_pack(graph: Captured, peak: int, options: Options) -> Iterator[Captured]:
    """Yield a graph that stores tensors in fewer bytes without loss, if that is allowed and worthwhile.

    Args:
        peak: the bytes that it needs if nothing is packed or recomputed.
    """
    saved = packable(graph) if options.compress is not False else {}
    if sum(saved.values()) >= WORTHWHILE * peak > 0:
        yield Compression(packed=tuple(saved)).of(graph)


def _ways(captured: Survey, options: Options, rewritten: Callable[[Compression], Step]) -> Iterator[_Way]:
    """Yield the ways to compress the values of a step, each with what it promises."""
    graph = captured.step.graph
    saved, peak = packable(graph), captured.frontier.keep_all.peak
    masks = tuple(value for value in saved if not graph.values[value].type.startswith(("float", "bfloat")))
    every = tuple(saved) if sum(saved.values()) >= WORTHWHILE * peak else ()
    packed = [masks, every] if 0 < len(masks) < len(every) else [every] if every else []
    found = [Compression(packed=values) for values in packed]
    if isinstance(options.compress, str):
        rounded = _rounded(graph, captured.costs, options.compress)
        found += [Compression(packed=every, rounded=values, dtype=options.compress) for values in rounded]
    rate = _rate(graph, captured.costs) if found and options.measures else 1.0
    promised = (_promised(captured, each, rewritten(each), options, rate) for each in found)
    yield from (way for way in promised if way.bytes >= WORTHWHILE * captured.keep_all)


def _rate(graph: Captured, costs: Costs) -> float:
    """Return measured / estimated seconds of some of a graph's ops."""
    some = graph.ops[:: max(1, len(graph.ops) // SAMPLE)]
    rough = Device.named(device_of(graph).type)
    return costs.time_of(op.index for op in some) / max(1e-12, sum(cost_of(op, graph, rough).seconds for op in some))


def _promised(captured: Survey, compression: Compression, step: Step, options: Options, rate: float) -> _Way:
    """Estimate what compressing some values gives; nothing runs, or is searched for.

    Args:
        step: the step with these values compressed.
        rate: measured / estimated seconds of the step's ops.
    """
    costs = assumed_facts(step.graph, options, rate) if options.measures else facts_of(step, options)
    frontier = kept(step.graph, costs)
    less = captured.keep_all - keep_all_of(step, costs, frontier)
    more = frontier.keep_all.time - captured.frontier.keep_all.time
    return _Way(compression=compression, seconds=_seconds(captured, captured.limit.bytes + less) + more, bytes=less)


def _rounded(graph: Captured, costs: Costs, dtype: str) -> Iterator[tuple[int, ...]]:
    """Yield the values that may be rounded: those that take longest to recompute for their bytes first, then more."""
    saved = roundable(graph, dtype)

    def seconds_per_byte(value: int) -> float:
        producer = graph.values[value].producer
        return 0.0 if producer is None else costs.seconds[producer] / saved[value]

    ordered = sorted(saved, key=seconds_per_byte, reverse=True)
    sums = [*accumulate(saved[value] for value in ordered)]
    counts = {sum(each <= share * sums[-1] for each in sums) for share in SHARES} if sums else set()
    yield from (tuple(sorted(ordered[:count])) for count in sorted(counts - {0}))
