"""PyTorch's caching allocator of CUDA devices as numbers: how many bytes it reserves for a series of allocations.

It asks the driver for segments, cuts blocks from them, and keeps what is freed. Its rules, for one stream and without
settings (`c10/cuda/CUDACachingAllocator.cpp`, torch 2.11 to 2.14):

    sizes       rounded up to 512 bytes
    pools       one of blocks up to 1 MiB, one of larger ones
    a block     the smallest free one that is large enough, at the lowest address
    rest        cut off from 512 bytes on in the small pool, above 1 MiB in the large one: a smaller rest stays unused
    segments    of 2 MiB in the small pool; of 20 MiB in the large one, for 10 MiB or more of the size, up to 2 MiB more
    freed       joins free neighbours in its segment
    no memory   segments that are entirely free go back to the driver, and it is asked again

With expandable segments each pool has one range of addresses, backed by pages of 2 MiB in the small pool and 20 MiB in
the large one, where memory is needed. Every rest is cut off, and where no free block is large enough, pages are added
after the free block at the lowest address that has room behind it. Pages that are entirely free can go back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

BLOCK = 512  # sizes are multiples of this many bytes
SMALL = 2**20  # the largest block of the small pool
SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20
OWN_SEGMENT = 10 * 2**20  # blocks from this size on get a segment of their own
ROUND_SEGMENT = 2 * 2**20  # the sizes of such segments are multiples of this
RANGE = 1 << 50  # bytes of addresses of an expandable range: more than any device has memory


class OutOfMemory(Exception):
    """The driver has no more memory, even without what was cached."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory that a process has of the driver: a segment, or a part of an expandable range that memory backs."""

    address: int
    small: bool  # in the small pool
    expandable: bool
    blocks: tuple[tuple[int, bool], ...]  # bytes of each block by address, and whether it is free


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment: allocated, free, or addresses without memory."""

    address: int
    size: int
    pool: _Pool
    free: bool = False
    mapped: bool = True  # False: addresses of an expandable range without memory
    expandable: bool = False
    before: Block | None = None  # the neighbour in the same segment
    after: Block | None = None

    @property
    def could_be(self) -> int:
        """Bytes that this block has or can get where it is."""
        return self.size + (self.after.size if self.after is not None and not self.after.mapped else 0)

    @property
    def taken(self) -> bool:
        """True if it is allocated."""
        return self.mapped and not self.free


@dataclass(eq=False, slots=True)
class _Pool:
    """The free blocks of one pool, by size and address, and the parts of its range without memory, by address."""

    page: int  # bytes of a page of the range
    keeps: int  # a rest of at most this many bytes is not cut off
    order: list[tuple[int, int]] = field(default_factory=list)  # (size, address) of the free blocks, ascending
    at: dict[int, Block] = field(default_factory=dict)  # address -> free block
    unmapped: list[Block] = field(default_factory=list)
    start: int | None = None  # address of the range

    def add(self, block: Block) -> None:
        block.free = True
        insort(self.order, (block.size, block.address))
        self.at[block.address] = block

    def remove(self, block: Block) -> None:
        block.free = False
        del self.order[bisect_left(self.order, (block.size, block.address))]
        del self.at[block.address]

    def best(self, size: int) -> Block | None:
        """Return the free block for an allocation of this size; None where none is large enough.

        Of blocks in an expandable range the size counts that they can grow to, as long as the next is smaller.
        """
        place = bisect_left(self.order, (size, 0))
        if place == len(self.order):
            return None
        block = self.at[self.order[place][1]]
        while block.expandable and place + 1 < len(self.order):
            place += 1
            larger = self.at[self.order[place][1]]
            if larger.could_be >= block.could_be:
                break
            block = larger
        return block

    def up(self, offset: int) -> int:
        """Round a number of bytes up to pages."""
        return -(-offset // self.page) * self.page


class CachingAllocator:
    """The allocator of one device in one process, for one stream.

    Args:
        expandable: as the setting `expandable_segments`.
        limit: bytes that the driver has; None: any number.
        segments: what the process has at first.
    """

    def __init__(self, *, expandable: bool, limit: int | None = None, segments: Iterable[Segment] = ()) -> None:
        self.expandable, self.limit = expandable, limit
        self.allocated = self.reserved = 0  # bytes of blocks that are not free, and bytes that the driver gave
        self.retries = 0  # how often the driver had no more, and what was cached was given back
        self._small = _Pool(page=SMALL_SEGMENT, keeps=BLOCK - 1)
        self._large = _Pool(page=LARGE_SEGMENT, keeps=BLOCK - 1 if expandable else SMALL)
        self._end = 0  # no segment has been at this address, nor above
        self._last: dict[int, Block] = {}  # the last block of each range, while it is read
        for segment in sorted(segments, key=lambda segment: segment.address):
            self._add(segment)
        for pool in (self._small, self._large):
            self._end_range(pool)

    def allocate(self, size: int) -> Block:
        """Return a block of at least `size` bytes. O(free blocks), of which little: a search and a shift of a list.

        Raises:
            OutOfMemory: the driver has no more.
        """
        size = max(BLOCK, -(-size // BLOCK) * BLOCK)
        pool = self._small if size <= SMALL else self._large
        block = pool.best(size)
        if block is None:
            block = self._grown(pool, size) if self.expandable else self._new(pool, size)
        pool.remove(block)
        if block.size - size > pool.keeps:
            pool.add(self._cut(block, size))
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """Take a block back, and join it with its free neighbours."""
        if not block.taken:
            raise ValueError("the block is free already")
        self.allocated -= block.size
        self._give_back(block)

    def release(self) -> None:
        """Give back to the driver what is entirely free: segments, and pages of ranges; as `torch.cuda.empty_cache`."""
        for pool in (self._small, self._large):
            for block in list(pool.at.values()):
                if block.expandable:
                    self._unmap(pool, block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def _give_back(self, block: Block) -> None:
        """Make a block with memory a free one."""
        pool = block.pool
        if block.after is not None and block.after.free:
            pool.remove(block.after)
            _absorb(block)
        if block.before is not None and block.before.free:
            block = block.before
            pool.remove(block)
            _absorb(block)
        pool.add(block)

    def _cut(self, block: Block, size: int) -> Block:
        """Cut a block after `size` bytes, and return the rest."""
        rest = Block(block.address + size, block.size - size, block.pool, expandable=block.expandable)
        rest.mapped, rest.before, rest.after = block.mapped, block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.size, block.after = size, rest
        return rest

    def _new(self, pool: _Pool, size: int) -> Block:
        """Return a new segment as a free block of at least this size."""
        if pool is self._small:
            segment = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // ROUND_SEGMENT) * ROUND_SEGMENT
        self._take(segment)
        block = Block(self._end, segment, pool)
        self._end += segment
        pool.add(block)
        return block

    def _grown(self, pool: _Pool, size: int) -> Block:
        """Return a free block of at least this size in the range, where pages were added."""
        block = self._with_room(pool, size)
        while not block.mapped or block.size < size:
            there = block.size if block.mapped else 0
            hole = block.after if block.mapped else block
            assert hole is not None
            bytes_more = min(hole.size, pool.up(size - there))
            self._take(bytes_more)
            pool.unmapped.remove(hole)
            if hole.size > bytes_more:
                insort(pool.unmapped, self._cut(hole, bytes_more), key=_address)
            hole.mapped = True
            self._give_back(hole)
            block = block if block.free else hole
        return block

    def _with_room(self, pool: _Pool, size: int) -> Block:
        """Return the first part of the range, free or without memory, from which on so many bytes are not allocated."""
        for hole in pool.unmapped:
            first = hole.before if hole.before is not None and hole.before.free else hole
            room, block = 0, first
            while room < size:
                room += block.size
                if block.after is None or block.after.taken:
                    break
                block = block.after
            if room >= size:
                return first
        raise AssertionError("a range has no end")

    def _unmap(self, pool: _Pool, block: Block) -> None:
        """Give back the pages that a free block covers entirely."""
        assert pool.start is not None
        begin = pool.start + pool.up(block.address - pool.start)
        end = block.address + block.size
        end -= (end - pool.start) % pool.page
        if end <= begin:
            return
        pool.remove(block)
        if begin > block.address:
            hole = self._cut(block, begin - block.address)
            pool.add(block)
        else:
            hole = block
        if hole.address + hole.size > end:
            pool.add(self._cut(hole, end - hole.address))
        hole.mapped = False
        self.reserved -= hole.size
        for first in (hole, hole.before):
            if first is not None and first.after is not None and not first.mapped and not first.after.mapped:
                for gone in (first, first.after):
                    if gone in pool.unmapped:
                        pool.unmapped.remove(gone)
                _absorb(first)
                hole = first
        insort(pool.unmapped, hole, key=_address)

    def _take(self, count: int) -> None:
        """Get this many bytes from the driver; where it has no more, give back what is cached, and ask again."""
        if self.limit is not None and self.reserved + count > self.limit:
            self.retries += 1
            self.release()
            if self.reserved + count > self.limit:
                raise OutOfMemory(f"{count} bytes more than {self.reserved} of {self.limit}")
        self.reserved += count

    def _add(self, segment: Segment) -> None:
        """Add a segment that the process has."""
        pool, address = self._small if segment.small else self._large, segment.address
        last = None
        if segment.expandable:
            last = self._last.get(id(pool))
            pool.start = address if pool.start is None else pool.start
            if last is not None and (end := last.address + last.size) < address:
                last = _after(last, Block(end, address - end, pool, mapped=False, expandable=True))
                pool.unmapped.append(last)
        for size, free in segment.blocks:
            last = _after(last, Block(address, size, pool, expandable=segment.expandable))
            address += size
            self.reserved += size
            if free:
                pool.add(last)
            else:
                self.allocated += size
        if segment.expandable and last is not None:
            self._last[id(pool)] = last
        self._end = max(self._end, address)

    def _end_range(self, pool: _Pool) -> None:
        """Add addresses without memory to the end of a pool's range."""
        last = self._last.pop(id(pool), None)
        if last is None:
            pool.start = self._end + (RANGE if pool is self._large else 0)
        end = pool.start if last is None else last.address + last.size
        assert end is not None
        pool.unmapped.append(_after(last, Block(end, RANGE, pool, mapped=False, expandable=True)))

    def blocks(self) -> Iterator[Block]:
        """Yield the free blocks, for tests."""
        for pool in (self._small, self._large):
            yield from pool.at.values()


def _address(block: Block) -> int:
    return block.address


def _after(last: Block | None, block: Block) -> Block:
    """Put a block behind another one, and return it."""
    block.before = last
    if last is not None:
        last.after = block
    return block


def _absorb(block: Block) -> None:
    """Make a block and the one after it one block."""
    gone = block.after
    assert gone is not None
    block.size += gone.size
    block.after = gone.after
    if gone.after is not None:
        gone.after.before = block
