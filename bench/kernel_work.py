"""What the attention kernels do for a batch, counted from the plans by which they run.

FLOPs and bytes are those of the kernels' own loops, padding and masked parts of tiles included;
what an ideal kernel would need stands beside them. A floor is what an H100 cannot beat: the SM with
the most work at the tensor cores' peak, or all bytes at the memory's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.blockwise import Segments, max_prefill_blocks, prefill_block_queries
from pallas_kernels.building_blocks import SMS, TILE_ROWS
from pallas_kernels.decode_attention import num_blocks
from pallas_kernels.decode_kernel import BLOCK_KEYS as DECODE_KEYS
from pallas_kernels.prefill_plan import (
    BLOCK_KEYS,
    BLOCK_QUERIES,
    PARTS,
    ROW_GRAIN,
    TILES,
    PrefillPlan,
    divide_keys,
    plan_prefill,
)

PEAK_FLOPS_S = 989.4e12  # of an H100 SXM in bfloat16, dense
MEMORY_BYTES_S = 3.35e12
BYTES, FLOAT32_BYTES = 2, 4  # of a bfloat16 number, of a partial result's
PRODUCTS = 2  # queries by keys, weights by values
PAGE_TOKENS = 16  # in decode layout


@dataclass(frozen=True)
class Heads:
    """Of one device: queries' and keys', in prefill (its share) and in decode (its rank's)."""

    prefill: tuple[int, int]
    decode: tuple[int, int]
    head_dim: int = 128


HEADS = {  # on the meshes (sp, tp) that the paper runs them on
    "llama-3.1-8b": Heads((8, 2), (32, 8)),  # (4, 1)
    "qwen3-14b": Heads((10, 2), (40, 8)),  # (4, 1)
    "qwen3-32b": Heads((8, 1), (32, 4)),  # (4, 2)
}


@dataclass(frozen=True)
class PrefillCase:
    """chunks: (context, tokens) of each, end to end on the token axis."""

    label: str
    model: str
    chunks: tuple[tuple[int, int], ...]

    @property
    def heads(self) -> tuple[int, int]:
        return HEADS[self.model].prefill

    @property
    def head_dim(self) -> int:
        return HEADS[self.model].head_dim

    @property
    def tokens(self) -> int:
        return -(-sum(length for _, length in self.chunks) // ROW_GRAIN) * ROW_GRAIN

    @property
    def page_tokens(self) -> int:
        """Of a page in prefill layout: as many rows as one of decode layout."""
        return PAGE_TOKENS * HEADS[self.model].decode[1] // self.heads[1]

    def segments(self) -> Segments:
        """In NumPy, with pages in order of their use."""
        step, at, starts, blocks = prefill_block_queries(self.tokens), 0, [], []
        counts = [-(-context // self.page_tokens) for context, _ in self.chunks]
        table = np.zeros((len(counts), max(1, *counts)), np.int32)
        for index, (_, length) in enumerate(self.chunks):
            starts.append(at)
            blocks += [(index, first, at + length) for first in range(at, at + length, step)]
            table[index, : counts[index]] = sum(counts[:index]) + np.arange(counts[index])
            at += length
        padding = max_prefill_blocks(self.tokens, len(counts)) - len(blocks)
        fields: tuple[Any, ...] = (
            np.array(starts, np.int32),
            np.array([context for context, _ in self.chunks], np.int32),
            table,
            np.array(blocks + [(0, 0, 0)] * padding, np.int32),
            np.int32(len(blocks)),
        )
        return Segments(*fields)

    def plan(self) -> PrefillPlan:
        plan = plan_prefill(self.segments(), np.arange(self.tokens, dtype=np.int32))
        return divide_keys(plan, self.heads[0], SMS)


@dataclass(frozen=True)
class DecodeCase:
    """contexts: tokens that each row has in the pool."""

    label: str
    model: str
    contexts: tuple[int, ...]

    @property
    def heads(self) -> tuple[int, int]:
        return HEADS[self.model].decode

    @property
    def head_dim(self) -> int:
        return HEADS[self.model].head_dim

    @property
    def page_tokens(self) -> int:
        return PAGE_TOKENS


@dataclass(frozen=True)
class MixedCase:
    """Both sides in one launch, on one pool."""

    label: str
    prefill: PrefillCase
    decode: DecodeCase

    @property
    def model(self) -> str:
        return self.prefill.model


Case = PrefillCase | DecodeCase | MixedCase


@dataclass(frozen=True)
class Work:
    """flops: that the kernel multiplies. needed_flops: of the pairs that attend. busiest: share of
    `flops` of the program that has the most. loaded_bytes: into shared memory, from caches mostly
    in prefill, and of prefill's partial results into registers. memory_bytes: that pass through
    memory at least, each once; partial results stay in the cache."""

    flops: int
    needed_flops: int
    busiest: float
    loaded_bytes: int
    memory_bytes: int

    @property
    def floor_s(self) -> float:
        compute = self.flops * self.busiest * SMS / PEAK_FLOPS_S
        return max(compute, self.memory_bytes / MEMORY_BYTES_S)

    @property
    def limit(self) -> str:
        compute = self.flops * self.busiest * SMS / PEAK_FLOPS_S
        return "tensor cores" if compute >= self.memory_bytes / MEMORY_BYTES_S else "memory"


def prefill_work(case: PrefillCase) -> Work:
    """Of one launch. The loops of `prefill_kernel`: units are (item, query head), dealt in rounds
    that turn around; a unit multiplies its queries with all of its tiles. Where keys are divided,
    the program that comes last reads all parts of a block again, to merge them."""
    q_heads, kv_heads = case.heads
    plan = case.plan()
    items = np.asarray(plan.items[: int(plan.num_items)], np.int64)
    tiles, partial_results = items[:, TILES], q_heads * int((items[:, PARTS] > 1).sum())
    units = np.repeat(tiles, q_heads)
    rounds = np.pad(units, (0, -len(units) % SMS)).reshape(-1, SMS)
    rounds[1::2] = rounds[1::2, ::-1].copy()
    busiest = rounds.sum(axis=0).max()
    row_bytes = case.head_dim * BYTES
    tile_flops = PRODUCTS * 2 * BLOCK_QUERIES * BLOCK_KEYS * case.head_dim
    pairs = sum(n * context + n * (n + 1) // 2 for context, n in case.chunks)
    tokens = sum(n for _, n in case.chunks)
    contexts = sum(context for context, _ in case.chunks)
    merged_bytes = partial_results * BLOCK_QUERIES * (case.head_dim + 1) * FLOAT32_BYTES
    loaded_rows = int(units.sum()) * 2 * BLOCK_KEYS + len(units) * BLOCK_QUERIES
    return Work(
        flops=int(units.sum()) * tile_flops,
        needed_flops=PRODUCTS * 2 * case.head_dim * q_heads * pairs,
        busiest=float(busiest / units.sum()),
        loaded_bytes=loaded_rows * row_bytes + merged_bytes,
        memory_bytes=row_bytes * (2 * kv_heads * (contexts + tokens) + 2 * q_heads * tokens),
    )


def decode_work(case: DecodeCase) -> Work:
    """Of one launch. The loops of `decode_kernel`: items are blocks of keys of a (row, KV head),
    each multiplied with a whole tile of queries and dealt in equal stretches."""
    q_heads, kv_heads = case.heads
    items = int(num_blocks(jnp.asarray(case.contexts, jnp.int32)).sum()) * kv_heads
    row_bytes, rows = case.head_dim * BYTES, len(case.contexts)
    kv_rows = 2 * kv_heads * (sum(case.contexts) + rows)
    return Work(
        flops=items * PRODUCTS * 2 * TILE_ROWS * DECODE_KEYS * case.head_dim,
        needed_flops=PRODUCTS * 2 * case.head_dim * q_heads * (sum(case.contexts) + rows),
        busiest=-(-items // SMS) / items,
        loaded_bytes=(items * 2 * DECODE_KEYS + rows * (q_heads + 2 * kv_heads)) * row_bytes,
        memory_bytes=(kv_rows + 2 * rows * q_heads) * row_bytes,
    )


def mixed_work(case: MixedCase) -> Work:
    """Of one launch: that of both sides, which end together, since programs without work of their
    own side take the other's."""
    prefill, decode = prefill_work(case.prefill), decode_work(case.decode)
    return Work(
        flops=prefill.flops + decode.flops,
        needed_flops=prefill.needed_flops + decode.needed_flops,
        busiest=1 / SMS,
        loaded_bytes=prefill.loaded_bytes + decode.loaded_bytes,
        memory_bytes=prefill.memory_bytes + decode.memory_bytes,
    )


def work_of(case: Case) -> Work:
    if isinstance(case, MixedCase):
        return mixed_work(case)
    return prefill_work(case) if isinstance(case, PrefillCase) else decode_work(case)


def _cases() -> tuple[Case, ...]:
    cases: list[Case] = []
    for model in HEADS:
        cases += [
            PrefillCase("16K tokens", model, ((0, 16_384),)),
            PrefillCase("8,064 after 24,576", model, ((24_576, 8064),)),
            PrefillCase("4 x 2,000 after up to 30,000", model, _spread(4, 2000, 30_000)),
            PrefillCase("512 after 100,000", model, ((100_000, 512),)),
            DecodeCase("24 rows of 8K", model, (8192,) * 24),
            DecodeCase("128 rows of 2K", model, (2048,) * 128),
            DecodeCase("one row of 100,000", model, (100_000,)),
        ]
        sides = PrefillCase("", model, ((24_576, 8064),)), DecodeCase("", model, (8192,) * 24)
        cases.append(MixedCase("8,064 after 24,576, 24 of 8K", *sides))
    return tuple(cases)


def _spread(count: int, length: int, furthest: int) -> tuple[tuple[int, int], ...]:
    return tuple((furthest * i // (count - 1), length) for i in range(count))


CASES = _cases()
