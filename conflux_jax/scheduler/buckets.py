"""The ladders of static shapes: the scheduler picks a bucket, warm-up compiles all of them.

Decode iterations come in rungs of `decode_rows`; iterations with prefill in rungs of `rows`, each
with a few sizes of decode side (0 and a coarse ladder: a padded decode row costs next to nothing
beside hundreds of prefill rows).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from conflux_jax.plan import Bucket

MIN_PREFILL_ROWS = 16
COARSE_GROWTH = 4.0


def ladder(low: int, high: int, growth: float) -> tuple[int, ...]:
    """Rising sizes from `low` to exactly `high`, neighbours at most `growth` apart (or 8 rows,
    or one doubling below 8); multiples of 8 where above 8.

    >>> ladder(1, 32, 2.0)
    (1, 2, 4, 8, 16, 32)
    >>> ladder(16, 100, 1.5)
    (16, 24, 32, 48, 72, 100)
    """
    sizes, size = [], min(low, high)
    while size < high:
        sizes.append(size)
        step = max(int(size * growth), size + 1)
        size = min(2 * size, 8) if size < 8 else max(step // 8 * 8, (size // 8 + 1) * 8)
    return (*sizes, high)


@dataclass(frozen=True)
class Ladders:
    """`rows` for iterations with prefill, `decode_rows` for those without, `mixed_decode_rows` for
    the decode side of the former. All rising; the last entries are the limits per group.

    apart: both phases have a static part of the rows each (`linear: apart`), so that `rows` counts
    prefill rows only, and those come after all `decode_rows` of the bucket, used or not."""

    rows: tuple[int, ...]
    decode_rows: tuple[int, ...]
    mixed_decode_rows: tuple[int, ...]
    handoff: bool
    apart: bool = False

    @classmethod
    def make(
        cls,
        max_decodes: int,
        level: int,
        growth: float,
        handoff: bool,
        rows: tuple[int, ...] | None = None,
        decode_rows: tuple[int, ...] | None = None,
        apart: bool = False,
    ) -> Ladders:
        """max_decodes: most decode rows of one group. level: most rows of one group in an iteration
        with prefill (raised where a group's decodes alone exceed it)."""
        top = max(level, max_decodes)
        decode = decode_rows or ladder(1, max_decodes, growth)
        return cls(
            rows=_reaching(rows or ladder(min(MIN_PREFILL_ROWS, top), top, growth), top),
            decode_rows=_reaching(decode, max_decodes),
            mixed_decode_rows=(0, *ladder(min(8, max_decodes), max_decodes, COARSE_GROWTH)),
            handoff=handoff,
            apart=apart,
        )

    @property
    def max_decodes(self) -> int:
        return self.decode_rows[-1]

    def fit(self, loads: Sequence[int], shares: Sequence[int], handoff: bool) -> Bucket:
        """The smallest bucket for the groups' decodes and their shares of prefill tokens."""
        parts = shares if self.apart else map(sum, zip(loads, shares, strict=True))
        return self.pick(max(loads), max(parts), any(shares), handoff)

    def pick(self, num_decodes: int, num_rows: int, prefill: bool, handoff: bool) -> Bucket:
        """The smallest bucket for groups of at most `num_decodes` decodes and `num_rows` rows
        (`apart`: prefill rows)."""
        if not prefill:
            rows = _at_least(self.decode_rows, num_decodes)
            return Bucket(rows, rows, prefill=False, handoff=handoff)
        decode_rows = _at_least(self.mixed_decode_rows, num_decodes)
        if self.apart:
            rows = decode_rows + _at_least(self.rows, num_rows)
            return Bucket(rows, decode_rows, prefill=True, handoff=self.handoff)
        rows = _at_least(self.rows, max(num_rows, decode_rows))
        return Bucket(rows, decode_rows, prefill=True, handoff=self.handoff)

    def all(self) -> tuple[Bucket, ...]:
        """Every bucket that `pick` can return."""
        kinds = (False, True) if self.handoff else (False,)
        decode = [Bucket(n, n, False, kind) for n in self.decode_rows for kind in kinds]
        mixed = {
            self.pick(d, r, prefill=True, handoff=False)
            for r in self.rows
            for d in self.mixed_decode_rows
        }
        return (*decode, *sorted(mixed))


def _reaching(sizes: tuple[int, ...], top: int) -> tuple[int, ...]:
    """`sizes` up to `top`, with `top` as the last."""
    return (*(s for s in sizes if s < top), top)


def _at_least(sizes: tuple[int, ...], need: int) -> int:
    return sizes[bisect.bisect_left(sizes, need)]
