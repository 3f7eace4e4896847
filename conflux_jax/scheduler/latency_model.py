"""How long an iteration takes, from its shape: linear layers, then the slower of two paths.

`t = linear + max(prefill + k_d * decode, decode + k_p * prefill)`. What is static in a compiled
program is priced by its bucket, used or not, because that is what runs. `execution.calibration`
fits the numbers to measured iterations; without JAX or a clock here, scheduler and simulator read
them alike.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from conflux_jax.config import ConfigError
from conflux_jax.plan import Bucket

FORMAT = 2  # of the JSON file
# What attention computes at once: see `prefill_work` and `padded_context`.
QUERY_BLOCK, KEY_BLOCK = 128, 256
CONTEXT_BLOCK = 128
FEW_BLOCKS = 0.8  # of the lanes: where fewer blocks than that run, their keys are shared out

Identity = dict[str, Any]  # JSON values by name: what a profile belongs to


class IterationShape(NamedTuple):
    """What an iteration's time depends on.

    context_tokens: KV tokens that the decodes of one group read, of the group with most.
    all_context_tokens: of all groups. longest_context: of one decode. chunks and their tokens are
    those of the iteration; prefill_work: pairs of a query and a key that attention computes, over
    all chunks: see `prefill_work`. prefill_blocks: blocks of queries of all chunks. block_keys:
    keys of the block with most.
    """

    bucket: Bucket
    context_tokens: int = 0
    all_context_tokens: int = 0
    longest_context: int = 0
    num_chunks: int = 0
    prefill_tokens: int = 0
    prefill_work: int = 0
    prefill_blocks: int = 0
    block_keys: int = 0


def prefill_work(start: int, length: int) -> int:
    """Query-key pairs that are computed for a chunk of `length` tokens after `start` others.

    Kernels go in blocks: QUERY_BLOCK queries at once, a chunk's last ones as if they were as many,
    each block against the context and its own chunk so far in blocks of KEY_BLOCK keys. So ten
    tokens after a long context cost as much as a whole block of queries, not a thirteenth of it.

    Worked: 130 tokens after 1,000 are two blocks of queries against 1,024 and 256 keys each. Ten
    are one block:

    >>> prefill_work(1000, 130) == 2 * 128 * (1024 + 256)
    True
    >>> prefill_work(1000, 10) == prefill_work(1000, 128) == 128 * (1024 + 256)
    True
    """
    blocks = -(-length // QUERY_BLOCK)
    context = -(-start // KEY_BLOCK) * blocks
    own = (blocks + 1) ** 2 // 4  # block i sees ceil(i / 2) blocks of twice its size
    return (context + own) * QUERY_BLOCK * KEY_BLOCK


def prefill_span(shape: IterationShape, lanes: float) -> float:
    """Of `prefill_work`, how many pairs are computed one after the other, where so many blocks of
    queries run at once (a GPU's SMs over the heads that it has; 1: nothing does).

    As long as the lanes' mean work, or as the block with most keys. Keys of a block are shared out
    where there are far fewer blocks than lanes.

    Worked, 13 lanes: 860 tokens after 60,000 are 7 blocks of about 60,860 keys each, which run side
    by side: a block's 128 * 60,860 pairs, though the mean is about half of that.

    >>> shape = iteration_shape(Bucket(256, 0, True, False), (0,), 0, [(60_000, 860)], False)
    >>> prefill_span(shape, 13.0) == 128 * 60_860
    True
    >>> prefill_span(shape, 1.0) == shape.prefill_work
    True
    """
    blocks = shape.prefill_blocks
    chain = QUERY_BLOCK * shape.block_keys
    if 0 < blocks <= FEW_BLOCKS * lanes:
        chain /= lanes // blocks
    return max(shape.prefill_work / lanes, chain) if lanes > 1 else float(shape.prefill_work)


def iteration_shape(
    bucket: Bucket,
    contexts: Sequence[int],
    longest_context: int,
    chunks: Sequence[tuple[int, int]],
    shared: bool,
) -> IterationShape:
    """contexts: KV tokens that the decodes of each group read. chunks: (start, length). shared:
    decode attention is spread over the groups (`PoolGeometry.shared`), each with its part of all.
    """
    total = sum(contexts)
    tokens = work = blocks = keys = 0
    for start, length in chunks:
        tokens += length
        work += prefill_work(start, length)
        blocks += -(-length // QUERY_BLOCK)
        keys = max(keys, start + length)
    return IterationShape(
        bucket=bucket,
        context_tokens=-(-total // len(contexts)) if shared else max(contexts),
        all_context_tokens=total,
        longest_context=longest_context,
        num_chunks=len(chunks),
        prefill_tokens=tokens,
        prefill_work=work,
        prefill_blocks=blocks,
        block_keys=keys,
    )


class LatencyPredictor(Protocol):
    """Seconds of an iteration; monotone in every number of its shape."""

    def predict_s(self, shape: IterationShape) -> float: ...


class Curve(NamedTuple):
    """Seconds by size: straight lines between knots, in proportion to the size past the last one,
    the first value below the first. Sizes rise, and seconds do not fall."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, size: int) -> float:
        """
        >>> curve = Curve((8, 16), (1.0, 3.0))
        >>> [curve.at(size) for size in (1, 8, 12, 16, 32)]
        [1.0, 1.0, 2.0, 3.0, 6.0]
        """
        right = bisect.bisect_left(self.sizes, size)
        if right == 0:
            return self.seconds[0]
        if right == len(self.sizes):
            return self.seconds[-1] * size / self.sizes[-1]
        low, high = self.sizes[right - 1], self.sizes[right]
        share = (size - low) / (high - low)
        return self.seconds[right - 1] + share * (self.seconds[right] - self.seconds[right - 1])


class Parts(NamedTuple):
    """Seconds of an iteration's parts. `linear` holds all that is in neither path: embedding, head,
    sampling, the host's share; `head` is its part that depends on how many rows may sample.
    `communication` is the static part of `prefill`: what it sends over the groups."""

    linear: float
    head: float
    handoff: float
    prefill: float
    decode: float
    stage: float  # both paths together
    communication: float

    @property
    def total(self) -> float:
        return self.linear + self.head + self.handoff + self.stage


@dataclass(frozen=True)
class LatencyModel:
    """Satisfies LatencyPredictor; every part is a sum of non-negative terms, so none is negative
    and none falls when a number of the shape rises. Raises ValueError that names the field where a
    number breaks that.

    groups: among which prefill attention divides its work. segments: rows of a program with prefill
    that may sample beside its decodes. lanes: blocks of queries that run at once: see
    `prefill_span`.

    linear: by the bucket's rows. head: by the rows that may sample. handoff_s: of a program that
    hands KV over. communication: the prefill path's static part, by the bucket's rows (the largest
    shard). work_s: of a query-key pair of one group's `prefill_span`. read_s: of a key that a block
    of queries reads there, however few queries it has. chunk_s and token_s: of a chunk, of a token
    of it. decode_rows: the decode path's static part, by the bucket's decode rows. context_s: of a
    KV token of the group with most. all_context_s: of one of any group, where groups share a
    processor. padded_context_s: of one that is read because rows run as long as the longest: see
    `padded_context`.

    k_d, k_p: the share of the other path's time that the prefill and the decode path lose to it. 1
    and 1: they run one after the other. 0 and 0: the shorter one is hidden.

    decode_sms: how a GPU's multiprocessors were divided between the phases when it was measured;
    None where they are not. An engine whose config leaves it open divides them so.
    """

    identity: Identity
    groups: int
    segments: int
    linear: Curve
    head: Curve
    handoff_s: float
    communication: Curve
    work_s: float
    read_s: float
    chunk_s: float
    token_s: float
    decode_rows: Curve
    context_s: float
    all_context_s: float
    padded_context_s: float
    k_d: float = 1.0
    k_p: float = 1.0
    lanes: float = 1.0
    decode_sms: int | None = None
    _static: dict[Bucket, tuple[float, float, float, float, float]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __post_init__(self):
        for item in _stored_fields():
            _check(item.name, getattr(self, item.name))

    def predict_s(self, shape: IterationShape) -> float:
        fixed, prefill, decode = self._paths(shape)
        return fixed + max(prefill + self.k_d * decode, decode + self.k_p * prefill)

    def parts(self, shape: IterationShape) -> Parts:
        """What `predict_s` adds up, by name."""
        bucket = shape.bucket
        _, prefill, decode = self._paths(shape)
        return Parts(
            linear=self.linear.at(bucket.rows),
            head=self.head.at(num_samples(bucket, self.segments)),
            handoff=self.handoff_s if bucket.handoff else 0.0,
            prefill=prefill,
            decode=decode,
            stage=max(prefill + self.k_d * decode, decode + self.k_p * prefill),
            communication=self.communication.at(bucket.rows) if bucket.prefill else 0.0,
        )

    def _paths(self, shape: IterationShape) -> tuple[float, float, float]:
        """Seconds outside both paths, of prefill's alone, of decode's alone."""
        bucket = shape.bucket
        static = self._static.get(bucket)
        if static is None:
            static = self._static[bucket] = self._price(bucket)
        fixed, prefill, decode, pair_s, read_s = static
        if bucket.prefill:
            prefill += (
                pair_s * prefill_span(shape, self.lanes)
                + read_s * shape.prefill_work
                + self.chunk_s * shape.num_chunks
                + self.token_s * shape.prefill_tokens
            )
        if bucket.decode_rows:
            context = self.context_s * shape.context_tokens
            context += self.all_context_s * shape.all_context_tokens
            if self.padded_context_s:
                context += self.padded_context_s * padded_context(shape)
            decode += context
        return fixed, prefill, decode

    def _price(self, bucket: Bucket) -> tuple[float, float, float, float, float]:
        """What a bucket costs whatever is in it: as `_paths`; and seconds of a pair, computed and
        read."""
        head = self.head.at(num_samples(bucket, self.segments))
        fixed = self.linear.at(bucket.rows) + head + (self.handoff_s if bucket.handoff else 0.0)
        prefill = self.communication.at(bucket.rows) if bucket.prefill else 0.0
        decode = self.decode_rows.at(bucket.decode_rows) if bucket.decode_rows else 0.0
        pair_s = self.work_s * work_share(bucket, self.groups)
        return fixed, prefill, decode, pair_s, self.read_s * read_share(self.groups)

    def to_json(self) -> str:
        model = {item.name: getattr(self, item.name) for item in _stored_fields()}
        for name, value in model.items():
            if isinstance(value, Curve):
                model[name] = value._asdict()
        document = {"format": FORMAT, "identity": self.identity, "model": model}
        if self.decode_sms is not None:
            document["decode_sms"] = self.decode_sms
        return json.dumps(document, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> LatencyModel:
        """Raises ConfigError that names what is missing or wrong."""
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"not JSON: {error}") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ConfigError(f"format: must be {FORMAT}, as calibrate writes it")
        identity, model = document.get("identity"), document.get("model")
        if not isinstance(identity, dict) or not isinstance(model, dict):
            raise ConfigError("identity and model: must be objects")
        names = {item.name for item in _stored_fields()}
        if wrong := sorted(names ^ set(model)):
            problem = "missing" if wrong[0] in names else "no such number"
            raise ConfigError(f"model.{wrong[0]}: {problem}")
        decode_sms = document.get("decode_sms")
        if decode_sms is not None and (type(decode_sms) is not int or decode_sms < 1):
            raise ConfigError(f"decode_sms: must be an integer of at least 1, got {decode_sms!r}")
        try:
            numbers = {name: _parsed(name, value) for name, value in model.items()}
            return cls(identity, **numbers, decode_sms=decode_sms)
        except ValueError as error:
            raise ConfigError(f"model.{error}") from error

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> LatencyModel:
        """The model in a file, whatever engine it is of. Raises ConfigError that names the file."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            raise ConfigError(f"latency profile {path}: {error}") from error

    @classmethod
    def load(cls, path: str | Path, identity: Identity) -> LatencyModel:
        """The model in a file, for an engine of that identity. Raises ConfigError that names the
        file, and every field of the identity that differs."""
        model = cls.read(path)
        own = json.loads(json.dumps(identity))  # tuples are lists in a file
        differing = [
            f"{name} is {json.dumps(own.get(name))}, the profile's {json.dumps(value)}"
            for name, value in (dict.fromkeys(own) | model.identity).items()
            if own.get(name) != value
        ]
        if differing:
            raise ConfigError(
                f"latency profile {path} belongs to another engine: {'; '.join(differing)}. "
                "Run calibrate with these settings"
            )
        return model


def num_samples(bucket: Bucket, segments: int) -> int:
    """Rows of a group that may sample: its decodes, and the last token of every chunk."""
    return bucket.decode_rows + (segments if bucket.prefill else 0)


def padded_context(shape: IterationShape) -> int:
    """KV tokens that are read for one group where all its rows, used or not, run as long as the
    longest context, in whole blocks.

    Worked: contexts of up to 300 tokens in a bucket of 16 rows: 16 * 384.
    """
    return shape.bucket.decode_rows * (-(-shape.longest_context // CONTEXT_BLOCK) * CONTEXT_BLOCK)


def work_share(bucket: Bucket, groups: int) -> float:
    """Of `prefill_work`, what one group's devices compute: they share the heads, and a program with
    fewer rows in all than QUERY_BLOCK has blocks of that many queries."""
    return min(1.0, groups * bucket.rows / QUERY_BLOCK) / groups


def read_share(groups: int) -> float:
    """Of `prefill_work`, the keys that one group's devices read: all of a block's queries use what
    is read once, and the groups share the heads."""
    return 1.0 / (QUERY_BLOCK * groups)


def _stored_fields() -> list[Any]:
    """The fields of a LatencyModel that seconds are made of."""
    others = "identity", "decode_sms"
    return [item for item in fields(LatencyModel) if item.init and item.name not in others]


def _parsed(name: str, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    sizes, seconds = value.get("sizes"), value.get("seconds")
    if not isinstance(sizes, list) or not isinstance(seconds, list):
        raise ValueError(f"{name}: must have lists of sizes and seconds")
    return Curve(tuple(sizes), tuple(seconds))


def _check(name: str, value: Any) -> None:
    """Raises ValueError that names the field, if no such part can be monotone and non-negative."""
    if name in ("groups", "segments"):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}: must be an integer of at least 1, got {value!r}")
    elif name in ("linear", "head", "communication", "decode_rows"):
        if not isinstance(value, Curve):
            raise ValueError(f"{name}: must be a curve, got {value!r}")
        sizes, seconds = value
        if not sizes or len(sizes) != len(seconds):
            raise ValueError(f"{name}: must have as many sizes as seconds, at least one")
        if any(type(size) is not int or size < 1 for size in sizes) or _falls(sizes, strictly=True):
            raise ValueError(f"{name}.sizes: must be rising integers of at least 1")
        if not all(map(_is_amount, seconds)) or _falls(seconds):
            raise ValueError(f"{name}.seconds: must not be negative and must not fall")
    elif not _is_amount(value):
        raise ValueError(f"{name}: must be a number of at least 0, got {value!r}")
    elif name == "lanes" and value < 1:
        raise ValueError(f"lanes: must be at least 1, got {value!r}")
    elif name in ("k_d", "k_p") and value > 1:
        raise ValueError(f"{name}: must be at most 1, got {value!r}")


def _is_amount(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _falls(numbers: Sequence[float], strictly: bool = False) -> bool:
    """Whether one is below the one before it (strictly: or as large)."""
    return any(b < a or (strictly and b == a) for a, b in itertools.pairwise(numbers))
