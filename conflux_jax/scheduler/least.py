"""The least of numbers that come and go."""

from __future__ import annotations

import heapq
import math

_FEW = 64  # entries of the heap that are never worth clearing


class Least:
    """A number may be put in several times, and is there until it was taken out as often. Adding
    and removing cost the logarithm of how many different ones there are."""

    def __init__(self):
        self._counts: dict[float, int] = {}
        self._heap: list[float] = []  # all of `_counts`, and some that have gone since

    def add(self, number: float) -> None:
        count = self._counts.get(number, 0)
        self._counts[number] = count + 1
        if not count:
            heapq.heappush(self._heap, number)

    def remove(self, number: float) -> None:
        """Raises KeyError where it is not there."""
        count = self._counts[number]
        if count > 1:
            self._counts[number] = count - 1
            return
        del self._counts[number]
        if len(self._heap) > 2 * len(self._counts) + _FEW:
            self._heap = sorted(self._counts)  # a sorted list is a heap

    @property
    def value(self) -> float:
        """Infinite where there is none."""
        heap = self._heap
        while heap and heap[0] not in self._counts:
            heapq.heappop(heap)
        return heap[0] if heap else math.inf
