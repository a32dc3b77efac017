"""Allocations of programs, in order: as many bytes as liveness counts, and all of it is freed but for what stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxremat.step.caching_allocator import LARGE_SEGMENT, SMALL_SEGMENT
from fxremat.step.costs import Costs
from fxremat.step.liveness import live_bytes
from fxremat.step.program import Program
from fxremat.step.reserved import AllocatorState, Event, allocations
from tests.saved_steps import NAMES, saved, surveyed

EXPANDABLE, IN_BLOCKS = AllocatorState(expandable=True), AllocatorState(expandable=False)


def bytes_over_time(events: list[Event]) -> list[int]:
    """The bytes that are allocated after each event."""
    live: dict[int, int] = {}
    found = []
    for event in events:
        if event.of is not None:
            live[event.key] = live.pop(event.of)
        elif event.bytes:
            assert event.key not in live
            live[event.key] = event.bytes
        else:
            del live[event.key]
        found.append(sum(live.values()))
    return found


def programs(name: str) -> list[Program]:
    return [candidate.program() for candidate in surveyed(name).spread(4)]


def without_seeds(costs: Costs) -> Costs:
    """The states of the generators of CUDA devices are on the host."""
    return replace(costs, sizes=replace(costs.sizes, seed=0))


@pytest.mark.parametrize("name", NAMES)
def test_events_add_up_to_what_liveness_counts(name: str) -> None:
    costs = without_seeds(saved(name).costs)
    for program in programs(name):
        found = allocations(program, costs)
        assert found is not None
        over_time, memory = bytes_over_time(found), live_bytes(program, costs.sizes)
        assert max(over_time) == memory.peak
        assert over_time[-1] == memory.end


@pytest.mark.parametrize("name", ["gpt", "resnet", "unet"])
def test_at_least_what_is_allocated_is_reserved_and_hardly_more_in_expandable_segments(name: str) -> None:
    costs = without_seeds(saved(name).costs)
    for program in programs(name):
        peak = live_bytes(program, costs.sizes).peak
        in_range = EXPANDABLE.reserved_by(program, costs)
        in_blocks = IN_BLOCKS.reserved_by(program, costs)
        assert in_range is not None
        assert in_blocks is not None
        assert in_range >= peak
        assert in_blocks >= peak
        assert in_range <= 1.25 * peak + LARGE_SEGMENT + SMALL_SEGMENT


def test_a_replay_ends_where_too_much_is_reserved() -> None:
    costs, program = saved("gpt").costs, programs("gpt")[0]
    whole = EXPANDABLE.reserved_by(program, costs)
    assert whole is not None
    part = EXPANDABLE.reserved_by(program, costs, at_most=whole // 2)
    assert part is not None
    assert whole // 2 < part <= whole
    assert EXPANDABLE.reserved_by(program, costs, at_most=whole) == whole


def test_what_is_counted_for_unsplit_blocks_is_not_asked_for() -> None:
    costs, program = saved("gpt").costs, programs("gpt")[0]
    rest = 2**20
    sizes = costs.sizes
    counted = replace(
        costs,
        sizes=replace(
            sizes,
            values=tuple(size + rest * (size > rest) for size in sizes.values),
            workspace=tuple(size + rest * (size > rest) for size in sizes.workspace),
            unsplit=rest,
        ),
    )
    assert IN_BLOCKS.reserved_by(program, counted) == IN_BLOCKS.reserved_by(program, costs)
