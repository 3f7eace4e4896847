"""How much prefill an iteration takes beside its decodes.

The level C is the number of rows that a group may have. It is chosen so that the iteration, with
the very chunks that would run at it, is predicted to end within the tightest target of the running
decodes; where none is set or no latency model is there, it is `max_num_batched_tokens` over the
groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from conflux_jax.plan import Bucket, PoolGeometry
from conflux_jax.scheduler.buckets import Ladders
from conflux_jax.scheduler.correction import Correction
from conflux_jax.scheduler.latency_model import (
    IterationShape,
    LatencyModel,
    LatencyPredictor,
    Parts,
    iteration_shape,
)
from conflux_jax.scheduler.state import Running
from conflux_jax.scheduler.waterfill import waterfill


class Decodes(NamedTuple):
    """The decode side of an iteration. loads: rows of each group. contexts: KV tokens that they
    read. longest: of one row. target_s: the tightest TBT target of them; infinite where none is."""

    loads: Sequence[int]
    contexts: Sequence[int]
    longest: int = 0
    target_s: float = math.inf


NO_DECODES = Decodes((), ())
_TBT_SLO_S = attrgetter("tbt_slo_s")


class Chosen(NamedTuple):
    """lengths: tokens of each prompt. tokens: that the level has room for. With a latency model,
    what was looked at: the groups' shares of the tokens, the shape of the iteration, and its
    seconds, corrected."""

    level: int
    tokens: int
    lengths: list[int]
    shares: Sequence[int] = ()
    shape: IterationShape | None = None
    predicted_s: float = 0.0


NO_PREFILL = Chosen(0, 0, [])


class Budget:
    """predictor: None where no profile is given; then targets are not looked at."""

    def __init__(
        self,
        geometry: PoolGeometry,
        ladders: Ladders,
        max_num_batched_tokens: int,
        predictor: LatencyPredictor | None = None,
    ):
        self.max_level = -(-max_num_batched_tokens // geometry.groups)
        self.predictor = predictor
        self.corrections = {False: Correction(), True: Correction()}  # with prefill: True
        self._geometry, self._ladders = geometry, ladders
        self._most = max_num_batched_tokens
        rungs = [rows for rows in ladders.rows if rows < self.max_level]
        self._levels = [*rungs, self.max_level]
        self.idle = Decodes((0,) * geometry.groups, (0,) * geometry.groups)
        self._last = 0  # rung that was chosen last: where the next search begins

    @property
    def levels(self) -> Sequence[int]:
        """Those that can be chosen, rising."""
        return self._levels

    def decodes_of(self, running: Running) -> Decodes:
        """Of the next iteration."""
        table, longest, target_s = running.decoding, 0, math.inf
        if self.predictor is not None:
            handing = map(_TBT_SLO_S, running.handing.values())
            target_s = min(table.tbt_slo_s, min(handing, default=math.inf))
            longest = table.longest_context
        return Decodes(table.num_rows, list(table.context_tokens), longest, target_s)

    def room(self, level: int, loads: Sequence[int]) -> int:
        """Prefill tokens that fit beside `loads` decodes: up to the level in each group, and up to
        max_num_batched_tokens in all. Where decodes alone use that, prefill waits for some to end.

        Worked: decodes 40, 10, 10, 0 and 1,200 batched tokens: a level of 300 leaves 260 + 290 +
        290 + 300 = 1,140, which is also 1,200 - 60. Decodes 400, 10, 10, 0 leave 0 + 290 + 290 +
        300 = 880 by the levels, but 1,200 - 420 = 780 in all.
        """
        under = sum([level - load for load in loads if load < level])
        return max(0, min(under, self._most - sum(loads)))

    def most_room(self, loads: Sequence[int]) -> int:
        """Prefill tokens that any level leaves room for."""
        return self.room(self.max_level, loads)

    def choose(self, decodes: Decodes, prompts: Sequence[tuple[int, int]]) -> Chosen:
        """The level for an iteration. prompts: (tokens done, tokens left) of those that would have
        a chunk, first served first.

        With a target: the highest rung of the ladder that is predicted to meet it; predictions rise
        with the rung, so it is found by bisection. None meets it: no prefill now, unless the
        decodes alone miss it or there are none (the target is then of one whose KV is on its way);
        then prefill goes on at the lowest rung, since to hold it back would save nothing and could
        last for ever. Without a target: the highest rung; where nothing decodes, that of most
        tokens a second.
        """
        no_target = math.isinf(decodes.target_s)
        if self.predictor is None or not prompts or (no_target and any(decodes.loads)):
            return self._fill(self.max_level, decodes, prompts)
        if no_target:
            options = [self._predicted(level, decodes, prompts) for level in self._levels]
            return max(options, key=lambda c: sum(c.lengths) / c.predicted_s)
        low, high = -1, len(self._levels) - 1  # rungs: `low` meets the target, all above `high` not
        best = Chosen(0, 0, [0] * len(prompts))
        probe = min(self._last, high)  # it mostly stays, and then two looks are enough
        while low < high:
            chosen = self._predicted(self._levels[probe], decodes, prompts)
            if chosen.predicted_s <= decodes.target_s:
                low, best = probe, chosen
                probe = low + 1 if low == self._last else (low + high + 1) // 2
            else:
                high = probe - 1
                probe = high if probe == self._last else (low + high + 1) // 2
        self._last = max(low, 0)
        if low < 0 and (not any(decodes.loads) or self._alone_s(decodes) > decodes.target_s):
            return self._lowest(decodes, prompts)
        if low < 0 or not any(best.lengths):
            self.corrections[True].relax()
        return best

    def predict_s(self, shape: IterationShape) -> float:
        """Corrected, with the margin that holds targets; 0 without a model."""
        if self.predictor is None:
            return 0.0
        factor = self.corrections[shape.bucket.prefill].factor
        return self.predictor.predict_s(shape) * factor

    def expect_s(self, shape: IterationShape) -> float:
        """Corrected, without a margin: the mean, not what a target is held against."""
        if self.predictor is None:
            return 0.0
        return self.predictor.predict_s(shape) * self.corrections[shape.bucket.prefill].ratio

    def parts(self, shape: IterationShape) -> Parts | None:
        """Corrected, without the margin; None where the predictor has no parts."""
        if not isinstance(self.predictor, LatencyModel):
            return None
        ratio = self.corrections[shape.bucket.prefill].ratio
        return Parts(*[ratio * seconds for seconds in self.predictor.parts(shape)])

    def observe(self, shape: IterationShape, elapsed_s: float) -> None:
        """What an iteration of that shape took."""
        if self.predictor is not None:
            predicted_s = self.predictor.predict_s(shape)
            self.corrections[shape.bucket.prefill].observe(predicted_s, elapsed_s)

    def shape(
        self, decodes: Decodes, chunks: Sequence[tuple[int, int]], bucket: Bucket
    ) -> IterationShape:
        """chunks: (start, length)."""
        shared = self._geometry.shared
        return iteration_shape(bucket, decodes.contexts, decodes.longest, chunks, shared)

    def _alone_s(self, decodes: Decodes) -> float:
        """Of an iteration without prefill."""
        return self.predict_s(self.shape(decodes, (), self.bucket(0, 0, decodes)))

    def _lowest(self, decodes: Decodes, prompts: Sequence[tuple[int, int]]) -> Chosen:
        """At the lowest rung that has room."""
        for level in self._levels:
            if self.room(level, decodes.loads):
                return self._predicted(level, decodes, prompts)
        return Chosen(0, 0, [0] * len(prompts))

    def _predicted(
        self, level: int, decodes: Decodes, prompts: Sequence[tuple[int, int]]
    ) -> Chosen:
        chosen = self._fill(level, decodes, prompts)
        chunks = [
            (start, length)
            for (start, _), length in zip(prompts, chosen.lengths, strict=True)
            if length
        ]
        shares = self._shares(level, sum(chosen.lengths), decodes)
        shape = self.shape(decodes, chunks, self._bucket(shares, decodes))
        predicted_s = max(self.predict_s(shape), 1e-9)
        return chosen._replace(shares=shares, shape=shape, predicted_s=predicted_s)

    def _fill(self, level: int, decodes: Decodes, prompts: Sequence[tuple[int, int]]) -> Chosen:
        tokens = left = self.room(level, decodes.loads)
        lengths = []
        for _, wanted in prompts:
            lengths.append(min(wanted, left))
            left -= lengths[-1]
        return Chosen(level, tokens, lengths)

    def bucket(self, level: int, tokens: int, decodes: Decodes) -> Bucket:
        """What so many prefill tokens run in, up to the level beside the decodes."""
        return self._bucket(self._shares(level, tokens, decodes), decodes)

    def _shares(self, level: int, tokens: int, decodes: Decodes) -> Sequence[int]:
        return waterfill(decodes.loads, max(level, 1), tokens)

    def _bucket(self, shares: Sequence[int], decodes: Decodes) -> Bucket:
        return self._ladders.fit(decodes.loads, shares, self._geometry.needs_handoff)
