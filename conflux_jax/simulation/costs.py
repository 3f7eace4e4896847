"""What an iteration takes: this system's, and uniform tensor parallelism's.

Both are put together of the same parts (`model_costs`) on the same hardware, so that they differ in
what runs and in nothing else. A profile of the real engine can stand in for either.
"""

from __future__ import annotations

from conflux_jax.config import ConfigError
from conflux_jax.models.spec import ModelSpec
from conflux_jax.plan import Bucket
from conflux_jax.scheduler.buckets import Ladders
from conflux_jax.scheduler.latency_model import (
    QUERY_BLOCK,
    IterationShape,
    LatencyModel,
    iteration_shape,
    prefill_work,
)
from conflux_jax.simulation.hardware import Hardware
from conflux_jax.simulation.model_costs import ModelOnGpus
from conflux_jax.simulation.operators import Tiles
from conflux_jax.simulation.work import CostModel, Stages, Work


class ConfluxCosts:
    """Satisfies CostModel: `groups` groups of `tp` GPUs. Linear layers of all rows as one batch;
    decode attention on its own group, prefill attention spread over the groups between two
    all-to-alls, both at once.

    Overlapped, decode attention runs on `Hardware.decode_sms` and prefill attention on the rest,
    both slower by `contention`. When decode is done, its SMs take blocks of prefill attention that
    have not begun; `confined` keeps those to their part for as long as they run.

    Ablations: overlap=False runs the paths one after the other. spread=True sends decode rows
    through the all-to-alls too, every GPU attending for all groups with its share of the heads; the
    paths are then not overlapped. batched=False runs the linear layers of decode and prefill rows
    one after the other.
    """

    def __init__(
        self,
        spec: ModelSpec,
        hardware: Hardware,
        groups: int,
        tp: int = 1,
        overlap: bool = True,
        spread: bool = False,
        batched: bool = True,
        confined: bool = False,
    ):
        self.model = ModelOnGpus(spec, hardware)
        self.groups, self.tp = groups, tp
        self.overlap, self.spread, self.batched = overlap and not spread, spread, batched
        self.confined = confined
        self._handoff = (0, 0.0)  # tokens and seconds, as last asked

    def stages(self, work: Work) -> Stages:
        """A hand-off runs beside the linear layers, which last as long as it if that is longer."""
        model, tp, hardware = self.model, self.tp, self.model.hardware
        decodes, share = max(work.decodes, default=0), max(work.shares, default=0)
        if self.batched:
            linear = model.linear_s(work.rows, tp)
        else:
            linear = model.linear_s(decodes, tp) + model.linear_s(share, tp)
        handoff = self._handoff_s(work.handoff_tokens)
        tiles = model.prefill_tiles(work.chunks, self.groups * tp)
        prefill, decode = model.tiles_s(tiles), self._decode_s(work, decodes)
        sent = decodes + share if self.spread else share
        out, back = model.exchange_s(sent, self.groups, tp)
        overhead = hardware.iteration_s
        if decode and prefill and self.overlap:
            attention = self._overlapped(work, decodes, tiles, prefill, out, back)
            overhead += model.spec.num_layers * hardware.fork_s
        else:
            attention = decode + out + prefill + back
        linear, head = max(linear, handoff), model.head_s(work.rows, work.samples, tp)
        return Stages(linear, head, prefill, decode, out + back, attention, overhead)

    def _handoff_s(self, tokens: int) -> float:
        """One number of tokens, for it is static, or none."""
        if not tokens:
            return 0.0
        if tokens != self._handoff[0]:
            self._handoff = tokens, self.model.kv_transfer_s(tokens, self.tp)
        return self._handoff[1]

    def _decode_s(self, work: Work, decodes: int, sms: int | None = None) -> float:
        """Of a group with most decodes and most context, be they those of one group or not."""
        model, tp = self.model, self.tp
        if self.spread:
            ways = self.groups * tp
            return model.decode_attention_s(sum(work.decodes), sum(work.contexts), ways, sms)
        return model.decode_attention_s(decodes, max(work.contexts, default=0), tp, sms)

    def _overlapped(
        self, work: Work, decodes: int, tiles: Tiles, prefill: float, out: float, back: float
    ) -> float:
        """prefill: seconds of its attention on all SMs.

        Worked: decode takes 4 ms on its SMs. The first exchange takes 1, prefill attention 6 on
        the rest and 4 on all. Until 4 ms half of it is done (3 of 6); the rest takes 2 (half of 4):
        6 ms, and the second exchange. Confined: 1 + 6, and the second exchange."""
        hardware = self.model.hardware
        slower, decode_sms = 1 + hardware.contention, hardware.decode_sms
        decode = slower * self._decode_s(work, decodes, decode_sms)
        beside = slower * self.model.tiles_s(tiles, hardware.sms - decode_sms)
        if self.confined or out + beside <= decode:
            return max(decode, out + beside + back)
        done = max(0.0, decode - out) / beside
        return max(decode, out) + (1 - done) * prefill + back


class UniformTPCosts:
    """Satisfies CostModel: one tensor-parallel group of `tp` GPUs, which splits all heads; prefill
    and decode are one batch in linear layers, and their attention runs one after the other. `Work`
    has one group."""

    def __init__(self, spec: ModelSpec, hardware: Hardware, tp: int):
        self.model = ModelOnGpus(spec, hardware)
        self.tp = tp

    def stages(self, work: Work) -> Stages:
        model, tp = self.model, self.tp
        prefill = model.prefill_attention_s(work.chunks, tp) if work.chunks else 0.0
        decode = model.decode_attention_s(sum(work.decodes), sum(work.contexts), tp)
        return Stages(
            linear=model.linear_s(work.rows, tp),
            head=model.head_s(work.rows, work.samples, tp),
            prefill_attention=prefill,
            decode_attention=decode,
            attention=prefill + decode,
            overhead=model.hardware.iteration_s,
        )


class ProfiledCosts:
    """Satisfies CostModel: a latency profile of a real engine (`python -m conflux_jax.calibrate`),
    for the groups that it was measured with. The bucket is the one that this engine would run, of
    the ladders that the profile names. Raises ConfigError where it names none, and ValueError for
    more rows than they have."""

    def __init__(self, model: LatencyModel):
        identity = model.identity
        for name in ("rows_ladder", "decode_rows_ladder"):
            if not identity.get(name):
                raise ConfigError(f"latency profile: identity.{name}: must be a list, not empty")
        rows, decode_rows = tuple(identity["rows_ladder"]), tuple(identity["decode_rows_ladder"])
        self.model = model
        self.ladders = Ladders.make(
            max_decodes=decode_rows[-1],
            level=rows[-1],
            growth=1.0,
            handoff=model.groups > 1,
            rows=rows,
            decode_rows=decode_rows,
        )

    def stages(self, work: Work) -> Stages:
        decodes = max(work.decodes, default=0)
        most = self.ladders.rows[-1] if work.chunks else self.ladders.max_decodes
        if work.rows > most:
            raise ValueError(f"rows: at most {most} in the profile's ladders, got {work.rows}")
        bucket = self.ladders.pick(
            decodes, work.rows, bool(work.chunks), handoff=bool(work.handoff_tokens)
        )
        contexts = work.contexts or (0,)
        shape = iteration_shape(bucket, contexts, work.longest, work.chunks, shared=False)
        parts = self.model.parts(shape)
        return Stages(
            linear=parts.linear + parts.handoff,
            head=parts.head,
            prefill_attention=parts.prefill,
            decode_attention=parts.decode,
            attention=parts.stage,
        )


class CostPredictor:
    """A cost model as a LatencyPredictor that knows the truth: what an oracle would schedule by.

    A shape has less than `Work`: all groups are taken as the fullest, and chunks as one of the same
    length and work, which is exact for one but for its start, known to blocks of keys.
    """

    def __init__(self, costs: CostModel, groups: int, segments: int = 1):
        self.costs, self.groups, self.segments = costs, groups, segments

    def predict_s(self, shape: IterationShape) -> float:
        return self.costs.stages(self._work(shape)).total

    def _work(self, shape: IterationShape) -> Work:
        bucket: Bucket = shape.bucket
        length = shape.prefill_tokens
        before = _start(shape.prefill_work, length) if length else 0
        return Work(
            rows=bucket.rows,
            decodes=(bucket.decode_rows,) * self.groups,
            contexts=(shape.context_tokens,) * self.groups,
            longest=shape.longest_context,
            chunks=((before, length),) if length else (),
            shares=(-(-length // self.groups),) * self.groups if length else (),
            samples=bucket.decode_rows + (self.segments if bucket.prefill else 0),
        )


def _start(work: int, length: int) -> int:
    """Tokens before a chunk of `length` that has so much `prefill_work`.

    >>> _start(prefill_work(1000, 130), 130), _start(prefill_work(1024, 3), 3)
    (1024, 1024)
    """
    blocks = -(-length // QUERY_BLOCK)
    own = prefill_work(0, length)
    return max(0, round((work - own) / (blocks * QUERY_BLOCK)))
