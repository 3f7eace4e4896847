"""Seconds of one operator on one GPU, in forms that follow from how its kernels work.

Each form is a start-up and the slower of two or three things that run at once, blended by a p-norm:
near where they are equal, neither hides the other entirely. Every form is monotone in every size.
Sizes may be numbers or arrays alike: `hardware_fit` fits the figures to tables of measurements,
`hardware` asks for one iteration at a time. `sms` is how many SMs the kernel may use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Size = Any  # an int, a float, or an array of them; all of a call's arrays have one shape

BYTES = 2  # of a weight, an activation, a KV number: bfloat16
TILES = ((64, 128), (128, 128), (128, 256), (256, 128))  # rows x columns that one SM computes
FEW_ROWS = 8  # up to which products run as matrix times vector
SPLIT_DEPTH = 1024  # of the inner size: what a product is cut into where it has few tiles
BLOCK = 128  # queries, and keys, that prefill attention takes at once
HEAD_DIM = 128  # that attention was measured at
SPLIT_BELOW = 0.8  # of the SMs having a block of queries: then its keys are shared out
KNEE = 4.0  # of the memory's share of bandwidth: how sharply it bends where memory saturates


@dataclass(frozen=True)
class Gemm:
    """[m, k] x [k, n]. Tiles fill the SMs in waves, the last one partly empty; with fewer tiles
    than SMs the inner size is cut. Weights stream from memory meanwhile.

    flops_s: of all SMs, inside a tile. tile_s: of a tile's beginning and end, at 128 x 256.
    throttled: what a product loses that lasts, half of it at throttle_s: the power limit lowers the
    clock. memory_bytes_s, few_rows_bytes_s: of reading. reread: how often inputs and outputs pass.
    """

    start_s: float
    flops_s: float
    tile_s: float
    throttled: float
    throttle_s: float
    memory_bytes_s: float
    few_rows_bytes_s: float
    reread: float
    sharpness: float

    def seconds(self, m: Size, n: Size, k: Size, sms: Size, all_sms: int, memory: float = 1.0):
        """memory: share of the bandwidth that these SMs can draw."""
        depth_flops_s = self.flops_s / all_sms  # of one SM
        compute: Any = None
        for rows, columns in TILES:
            tiles = parts(m, rows) * parts(n, columns)
            cut = smaller(larger(sms // tiles, 1), larger(k / SPLIT_DEPTH, 1))
            area = rows * columns
            tile = 2 * area * (k / cut) / depth_flops_s + self.tile_s * area / (128 * 256)
            waves = parts(tiles, sms) * tile
            compute = waves if compute is None else smaller(compute, waves)
        compute = compute * (1 + self.throttled * compute / (compute + self.throttle_s))
        rate = where(m <= FEW_ROWS, self.few_rows_bytes_s, self.memory_bytes_s) * memory
        reading = BYTES * (n * k + self.reread * (m * k + m * n)) / rate
        return self.start_s + blend(compute, reading, self.sharpness)


@dataclass(frozen=True)
class PrefillAttention:
    """Causal, of blocks of BLOCK queries of one head: each goes through its keys tile by tile.
    Blocks are dealt to SMs, longest first, so it lasts as long as the SMs' mean work, or as the
    longest block alone.

    tile_s: BLOCK queries against as many keys on one SM. block_s: of a block's beginning and end.
    """

    start_s: float
    tile_s: float
    block_s: float
    sharpness: float

    def seconds(self, tiles: Size, blocks: Size, longest: Size, sms: Size, head_dim: int = 128):
        """tiles, blocks: of all chunks and heads. longest: tiles of the longest block."""
        tile_s = self.tile_s * head_dim / HEAD_DIM
        mean = (tile_s * tiles + self.block_s * blocks) / sms
        if isinstance(blocks, np.ndarray):
            shared = where(blocks <= SPLIT_BELOW * sms, sms // larger(blocks, 1), 1)
        else:
            shared = sms // blocks if 0 < blocks <= SPLIT_BELOW * sms else 1
        chain = tile_s * longest / shared + self.block_s
        return self.start_s + blend(mean, chain, self.sharpness)


@dataclass(frozen=True)
class DecodeAttention:
    """One query a row against its KV. Each row's KV head is a piece of work of piece_s at least,
    dealt to the SMs; KV streams from memory meanwhile.

    cold_s: what a read from memory takes longer to be up to speed, once KV is beyond cached_bytes.
    Measured tables read the same KV again and again, so that up to there it comes from the cache;
    in a model every layer's weights pass in between, so nothing does.
    """

    start_s: float
    memory_bytes_s: float
    cold_s: float
    cached_bytes: float
    cached_bytes_s: float
    piece_s: float
    sharpness: float

    def seconds(
        self, rows: Size, kv_bytes: Size, kv_heads: Size, sms: Size, memory=1.0, cached=False
    ):
        """kv_bytes: of all rows. cached: KV was read just before."""
        cold = kv_bytes / (self.memory_bytes_s * memory)
        reading = cold + self.cold_s * kv_bytes / (kv_bytes + self.cached_bytes)
        if cached:
            share = 1 / (1 + (kv_bytes / self.cached_bytes) ** 8)
            reading = share * kv_bytes / self.cached_bytes_s + (1 - share) * reading
        pieces = self.piece_s * rows * kv_heads / sms
        return self.start_s + blend(reading, pieces, self.sharpness)


@dataclass(frozen=True)
class Collective:
    """start_s: of the smallest message. switch_s: what larger ones pay more, half of it at
    switch_bytes, where the library goes over to protocols of higher start-up and bandwidth.
    bytes_s: of the buffer as the library counts it: see `Hardware.collective_s`."""

    start_s: float
    switch_s: float
    switch_bytes: float
    bytes_s: float

    def seconds(self, num_bytes: Size):
        switched = self.switch_s * num_bytes / (num_bytes + self.switch_bytes)
        return self.start_s + switched + num_bytes / self.bytes_s


class Tiles(NamedTuple):
    """Of prefill attention: all of them, blocks of queries, tiles of the longest block."""

    tiles: Size
    blocks: Size
    longest: Size


def chunk_tiles(start: Size, length: Size, heads: Size) -> Tiles:
    """Of a chunk after `start` tokens.

    Worked: 300 tokens after 200 are 3 blocks of queries against 2 blocks of keys each, and against
    1, 2 and 3 of their own: 12 tiles a head; the last has 5.

    >>> tuple(chunk_tiles(200, 300, 1)), tuple(chunk_tiles(0, 128, 40))
    ((12.0, 3, 5), (40.0, 40, 1))
    """
    blocks, before = parts(length, BLOCK), parts(start, BLOCK)
    tiles = blocks * before + blocks * (blocks + 1) / 2
    return Tiles(heads * tiles, heads * blocks, before + blocks)


def prefill_tiles(chunks: Iterable[tuple[int, int]], heads: int) -> Tiles:
    """Of chunks (start, length) in one launch, `heads` query heads each."""
    tiles, blocks, longest = 0.0, 0, 0
    for start, length in chunks:
        queries, before = -(-length // BLOCK), -(-start // BLOCK)
        tiles += queries * (before + (queries + 1) / 2)
        blocks += queries
        longest = max(longest, before + queries)
    return Tiles(heads * tiles, heads * blocks, longest)


def memory_share(sms: float, sm_bytes_s: float, memory_bytes_s: float) -> float:
    """Of the memory's bandwidth that `sms` SMs draw, each up to sm_bytes_s: it bends from rising
    with them to flat.

    >>> round(memory_share(10, 1.0, 100.0), 3), round(memory_share(1000, 1.0, 100.0), 3)
    (0.1, 1.0)
    """
    return (1 + (memory_bytes_s / (sms * sm_bytes_s)) ** KNEE) ** (-1 / KNEE)


def blend(a: Size, b: Size, sharpness: float) -> Size:
    """The larger, and up to 2 ** (1 / sharpness) times as much where they are equal."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        low, high = np.minimum(a, b), np.maximum(a, b)
    else:
        low, high = (a, b) if a < b else (b, a)
    return high * (1.0 + (low / high) ** sharpness) ** (1 / sharpness)


def parts(size: Size, of: Size) -> Size:
    """How many pieces `of` so many cover it: rounded up."""
    return -(-size // of)


def larger(a: Size, b: Size) -> Size:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.maximum(a, b)
    return a if a > b else b


def smaller(a: Size, b: Size) -> Size:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.minimum(a, b)
    return a if a < b else b


def where(condition: Size, yes: Size, no: Size) -> Size:
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    return yes if condition else no
