"""Assigns addresses to blocks of memory: best fit, and adjacent free blocks are merged."""

from __future__ import annotations

from bisect import bisect_left, insort


class Addresses:
    """An unlimited address space that starts at 0; blocks allocated at the same time do not overlap."""

    def __init__(self) -> None:
        self.end = 0  # one more than the highest address used so far
        self._starts: list[int] = []  # sorted start addresses of the free extents; no two extents are adjacent
        self._sizes: dict[int, int] = {}  # start address of a free extent -> its bytes
        self._by_size: list[tuple[int, int]] = []  # sorted (bytes, start address) of the free extents

    def take(self, size: int) -> int:
        """Allocate a block in the smallest free extent that is large enough, else at the end; return its address.

        A free extent at the end of the address space is extended, so that the space grows as little as
        possible. O(free extents).
        """
        place = bisect_left(self._by_size, (size, 0))
        if place < len(self._by_size):
            extent, start = self._by_size[place]
            self._remove(start)
            if extent > size:
                self._add(start + size, extent - size)
            return start
        start = self.end
        if self._starts and self._starts[-1] + self._sizes[self._starts[-1]] == self.end:
            start = self._starts[-1]
            self._remove(start)
        self.end = start + size
        return start

    def give_back(self, start: int, size: int) -> None:
        """Free a block and merge it with adjacent free extents. O(free extents)."""
        after = bisect_left(self._starts, start)
        if after < len(self._starts) and self._starts[after] == start + size:
            neighbour = self._starts[after]
            size += self._sizes[neighbour]
            self._remove(neighbour)
        if after > 0 and (before := self._starts[after - 1]) + self._sizes[before] == start:
            size += start - before
            self._remove(before)
            start = before
        self._add(start, size)

    def _add(self, start: int, size: int) -> None:
        insort(self._starts, start)
        self._sizes[start] = size
        insort(self._by_size, (size, start))

    def _remove(self, start: int) -> None:
        size = self._sizes.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_size[bisect_left(self._by_size, (size, start))]
