"""The model of the caching allocator: what holds at any time, an allocator that looks at everything, known sizes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxremat.step.caching_allocator import (
    BLOCK,
    LARGE_SEGMENT,
    OWN_SEGMENT,
    ROUND_SEGMENT,
    SMALL,
    SMALL_SEGMENT,
    Block,
    CachingAllocator,
    OutOfMemory,
    Segment,
)
from tests.draws import everyday

MIB = 2**20
SIZES = st.one_of(
    st.integers(1, 3 * BLOCK),
    st.integers(1, 2 * SMALL),
    st.integers(SMALL, OWN_SEGMENT),
    st.integers(OWN_SEGMENT, 5 * LARGE_SEGMENT),
    st.sampled_from([SMALL, SMALL + 1, OWN_SEGMENT - 1, OWN_SEGMENT, LARGE_SEGMENT, LARGE_SEGMENT + 1]),
)
# bytes to allocate; or, negative, which of what is allocated is freed; None: what is cached is given back
PROGRAMS = st.lists(st.one_of(SIZES, SIZES, st.integers(-50, -1), st.integers(-50, -1), st.none()), max_size=120)
WITHOUT_RELEASE = PROGRAMS.map(lambda items: [item for item in items if item is not None])


@dataclass
class Replayed:
    """A program on an allocator: what is allocated, with the bytes that were asked for."""

    allocator: CachingAllocator
    live: list[tuple[Block, int]] = field(default_factory=list)

    def do(self, item: int | None) -> None:
        if item is None:
            self.allocator.release()
        elif item > 0:
            self.live.append((self.allocator.allocate(item), item))
        elif self.live:
            self.allocator.free(self.live.pop(item % len(self.live))[0])


def check(replayed: Replayed, rest: int) -> None:
    """Check the invariants that hold between any two calls."""
    allocator = replayed.allocator
    free = list(allocator.blocks())
    every = sorted([*(block for block, _ in replayed.live), *free], key=lambda block: block.address)
    for one, other in itertools.pairwise(every):
        assert one.address + one.size <= other.address, "blocks overlap"
    assert sum(block.size for block, _ in replayed.live) == allocator.allocated
    assert sum(block.size for block in every) == allocator.reserved
    for block in free:
        assert block.free
        assert block.mapped
        assert not any(beside is not None and beside.free for beside in (block.before, block.after)), "not joined"
    for block, asked in replayed.live:
        assert block.taken
        assert block.size % BLOCK == 0
        assert asked <= block.size < max(asked, 1) + BLOCK + (rest if asked > SMALL else 0)


@settings(max_examples=everyday(300))
@given(program=PROGRAMS, expandable=st.booleans())
def test_blocks_do_not_overlap_are_joined_and_add_up(program: list[int | None], expandable: bool) -> None:
    replayed = Replayed(CachingAllocator(expandable=expandable))
    for item in program:
        replayed.do(item)
        check(replayed, 0 if expandable else SMALL)
    while replayed.live:
        replayed.do(-1)
    check(replayed, 0)
    replayed.allocator.release()
    assert replayed.allocator.reserved == 0, "all that is free goes back"


@dataclass
class Naive:
    """An allocator of the same rules that keeps all parts of all segments in a list, and searches all of it."""

    expandable: bool
    segments: list[list[list[int]]] = field(default_factory=list)  # [key or -1 where it is free, bytes] by address
    small: list[bool] = field(default_factory=list)  # whether a segment is in the small pool

    @property
    def reserved(self) -> int:
        return sum(size for segment in self.segments for _, size in segment)

    @property
    def allocated(self) -> int:
        return sum(size for segment in self.segments for key, size in segment if key >= 0)

    def allocate(self, key: int, asked: int) -> None:
        size = -(-asked // BLOCK) * BLOCK
        small = size <= SMALL
        fitting = [
            (part[1], number, place, part is segment[-1])
            for number, segment in enumerate(self.segments)
            for place, part in enumerate(segment)
            if self.small[number] == small and part[0] < 0 and part[1] >= size
        ]
        if self.expandable:  # the end of a range could be of any size, so that it comes last
            fitting = [each for each in sorted(fitting) if not each[3]] or fitting
        if not fitting:
            self._more(size, small)
            self.allocate(key, asked)
            return
        _, number, place, _ = min(fitting)
        part = self.segments[number][place]
        rest = part[1] - size
        if rest > (SMALL if not small and not self.expandable else 0):
            self.segments[number].insert(place + 1, [-1, rest])
            part[1] = size
        part[0] = key

    def _more(self, size: int, small: bool) -> None:
        if not self.expandable:
            own = -(-size // ROUND_SEGMENT) * ROUND_SEGMENT
            more = SMALL_SEGMENT if small else LARGE_SEGMENT if size < OWN_SEGMENT else own
            self.segments.append([[-1, more]])
            self.small.append(small)
            return
        if small not in self.small:
            self.segments.append([])
            self.small.append(small)
        segment, page = self.segments[self.small.index(small)], SMALL_SEGMENT if small else LARGE_SEGMENT
        there = segment[-1][1] if segment and segment[-1][0] < 0 else 0
        segment.append([-1, -(-(size - there) // page) * page])
        self._join(segment)

    def free(self, key: int) -> None:
        for segment in self.segments:
            for part in segment:
                if part[0] == key:
                    part[0] = -1
            self._join(segment)

    def _join(self, segment: list[list[int]]) -> None:
        joined: list[list[int]] = []
        for part in segment:
            if joined and part[0] < 0 and joined[-1][0] < 0:
                joined[-1][1] += part[1]
            else:
                joined.append(part)
        segment[:] = joined


@settings(max_examples=everyday(300))
@given(program=WITHOUT_RELEASE, expandable=st.booleans())
def test_as_an_allocator_that_looks_at_everything(program: list[int], expandable: bool) -> None:
    allocator, naive = CachingAllocator(expandable=expandable), Naive(expandable)
    live: list[tuple[int, Block]] = []
    for key, item in enumerate(program):
        if item > 0:
            live.append((key, allocator.allocate(item)))
            naive.allocate(key, item)
        elif live:
            gone, block = live.pop(item % len(live))
            allocator.free(block)
            naive.free(gone)
        assert (allocator.allocated, allocator.reserved) == (naive.allocated, naive.reserved)


@pytest.mark.parametrize(
    ("size", "blocks", "expandable"),
    [
        (1, 2, 2),
        (MIB, 2, 2),
        (MIB + 1, 20, 20),
        (10 * MIB - 512, 20, 20),
        (10 * MIB, 10, 20),
        (10 * MIB + 1, 12, 20),
        (21 * MIB, 22, 40),
    ],
)
def test_segments_have_the_sizes_of_pytorch(size: int, blocks: int, expandable: int) -> None:
    for expected, kind in ((blocks, False), (expandable, True)):
        allocator = CachingAllocator(expandable=kind)
        allocator.allocate(size)
        assert allocator.reserved == expected * MIB


def test_a_rest_of_up_to_a_mebibyte_stays_in_a_large_block() -> None:
    for size, allocated in ((11 * MIB, 12), (13 * MIB, 14)):
        allocator = CachingAllocator(expandable=False)
        allocator.allocate(size)
        assert allocator.allocated == allocated * MIB
    allocator = CachingAllocator(expandable=True)
    allocator.allocate(11 * MIB)
    assert allocator.allocated == 11 * MIB


def test_where_the_driver_has_no_more_what_is_cached_goes_back() -> None:
    allocator = CachingAllocator(expandable=False, limit=64 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(40 * MIB)
    assert (allocator.retries, allocator.reserved) == (1, 40 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.allocate(30 * MIB)
    assert allocator.retries == 2


def test_pages_in_the_midst_of_a_range_go_back_and_are_used_first() -> None:
    allocator = CachingAllocator(expandable=True)
    blocks = [allocator.allocate(LARGE_SEGMENT) for _ in range(4)]
    allocator.free(blocks[1])
    allocator.free(blocks[2])
    allocator.release()
    assert allocator.reserved == 2 * LARGE_SEGMENT
    assert allocator.allocate(LARGE_SEGMENT).address == blocks[1].address
    assert allocator.reserved == 3 * LARGE_SEGMENT


def test_it_goes_on_from_the_segments_of_a_process() -> None:
    def segment(address: int, *blocks: tuple[int, bool], expandable: bool = True) -> Segment:
        return Segment(address=address, small=False, expandable=expandable, blocks=blocks)

    first = segment(0, (8 * MIB, False), (12 * MIB, True))
    after_a_hole = segment(60 * MIB, (5 * MIB, False), (15 * MIB, True))
    of_blocks = segment(1000 * MIB, (20 * MIB, True), expandable=False)
    allocator = CachingAllocator(expandable=True, segments=(after_a_hole, of_blocks, first))
    assert (allocator.reserved, allocator.allocated) == (60 * MIB, 13 * MIB)
    allocator.release()
    assert allocator.reserved == 40 * MIB
    # of what is free in the range, the hole behind the first block is shorter than what comes after the last
    assert allocator.allocate(10 * MIB).address == 8 * MIB
    assert allocator.allocate(30 * MIB).address == 18 * MIB
    assert allocator.reserved == 80 * MIB


def test_a_block_is_freed_once() -> None:
    allocator = CachingAllocator(expandable=True)
    block = allocator.allocate(1)
    allocator.free(block)
    with pytest.raises(ValueError, match="free already"):
        allocator.free(block)
