"""The attention kernels, and their peers, timed on a Hopper GPU and checked against the oracle."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernel_work import Case, DecodeCase, MixedCase, PrefillCase
from pallas_kernels.building_blocks import SMS
from pallas_kernels.decode_attention import decode_attention, decode_plan
from pallas_kernels.decode_kernel import DecodeShape, HeadRows
from pallas_kernels.mixed_attention import (
    STRETCHES,
    DecodeOperands,
    PrefillOperands,
    mixed_attention,
    num_counters,
)
from pallas_kernels.prefill_attention import num_tickets, prefill_attention
from pallas_kernels.reference import attend

LAYERS = 4  # of the pool, run in turn: between two runs of a layer the others pass the cache
RUNS = 12
MAX_ERROR = 2e-2
CHECKED = 3  # rows of the result
DECODE_SMS = 64  # the engine's default


def measure(case: Case) -> dict[str, float]:
    """Seconds of a launch, by name: the kernel's, those of the peers that can do the case, and of
    mixed the slower side's alone (`slower_s`).

    Raises AssertionError where the kernel's result is not the oracle's."""
    if isinstance(case, MixedCase):
        return _mixed(case)
    side = PrefillSide(case) if isinstance(case, PrefillCase) else DecodeSide(case)
    pool = _pool(side.pages, case.page_tokens * case.heads[1], case.head_dim)
    side.check(np.asarray(side.run(pool, jnp.int32(0))[0], np.float64), pool)
    return {"seconds": _seconds(lambda layer: side.run(pool, layer)), **side.peers()}


def _mixed(case: MixedCase) -> dict[str, float]:
    prefill = PrefillSide(case.prefill)
    decode = DecodeSide(case.decode, first_page=prefill.pages)
    page_rows = case.decode.page_tokens * case.decode.heads[1]
    pool = _pool(prefill.pages + decode.pages, page_rows, case.decode.head_dim)
    stretches = STRETCHES * SMS
    shape = decode.shape(stretches)
    q, k, v = (x.reshape(-1, case.decode.head_dim) for x in decode.rows)
    plan = decode_plan(decode.lens, shape.kv_heads, stretches)
    operands = DecodeOperands(plan, q, k, v, decode.table, decode.lens)
    run = jax.jit(
        partial(mixed_attention, shape, kv_heads=case.prefill.heads[1], decode_sms=DECODE_SMS)
    )
    counters = num_counters(stretches, len(prefill.tickets))
    counters = jnp.zeros(counters, jnp.int32)  # the kernel leaves them so

    def launch(layer):
        other = PrefillOperands(prefill.qkv, prefill.plan)
        return run(operands, other, pool, layer, counters)

    results = launch(jnp.int32(0))
    prefill.check(np.asarray(results.prefill, np.float64), pool)
    decode.check(np.asarray(results.decode, np.float64), pool)
    alone = [_seconds(lambda layer, side=side: side.run(pool, layer)) for side in (prefill, decode)]
    return {"seconds": _seconds(launch), "slower_s": max(alone)}


class PrefillSide:
    """Operands of a prefill launch, and the check of its result. pages: that it has in the pool,
    the first ones."""

    def __init__(self, case: PrefillCase):
        self.case, (q_heads, kv_heads) = case, case.heads
        self.segments: Any = case.segments()
        self.pages = max(1, sum(-(-context // case.page_tokens) for context, _ in case.chunks))
        self.qkv = _normal(1, case.tokens, q_heads + 2 * kv_heads, case.head_dim)
        self.plan = jax.tree.map(jnp.asarray, case.plan())
        self.tickets = jnp.zeros(num_tickets(self.plan, q_heads), jnp.int32)
        self._run = jax.jit(partial(prefill_attention, kv_heads=kv_heads))

    def run(self, pool: jax.Array, layer: jax.Array) -> Any:
        return self._run(self.qkv, pool, layer, self.plan, tickets=self.tickets)

    def check(self, out: np.ndarray, pool: jax.Array) -> None:
        q_heads, kv_heads = self.case.heads
        starts = np.cumsum([0, *(length for _, length in self.case.chunks)])
        host, past = np.asarray(self.qkv, np.float64), _host_pages(pool)
        for index in np.random.default_rng(0).choice(starts[-1], CHECKED, replace=False):
            segment = int(np.searchsorted(starts, index, side="right")) - 1
            own = host[starts[segment] : index + 1, q_heads:]
            context = int(self.segments.context_lens[segment])
            table = self.segments.page_table[segment]
            k, v = (
                np.concatenate(
                    [
                        _sequence(past[kind], table, context, kv_heads),
                        own[:, kind * kv_heads : (kind + 1) * kv_heads],
                    ]
                )
                for kind in (0, 1)
            )
            _check(out[index], attend(host[index, :q_heads], k, v))

    def peers(self) -> dict[str, float]:
        if self.case.chunks[0][0] or len(self.case.chunks) > 1:
            return {}
        q_heads, kv_heads = self.case.heads
        q, k, v = (x[None] for x in jnp.split(self.qkv, (q_heads, q_heads + kv_heads), axis=1))
        return _peers(lambda attention: attention(q, k, v, is_causal=True))


class DecodeSide:
    """Operands of a decode launch, and the check of its result. pages: that it has in the pool,
    from `first_page` on."""

    def __init__(self, case: DecodeCase, first_page: int = 0):
        self.case, (q_heads, kv_heads) = case, case.heads
        rows, dim = len(case.contexts), case.head_dim
        counts = [-(-context // case.page_tokens) for context in case.contexts]
        self.pages, table = sum(counts), np.zeros((rows, max(counts)), np.int32)
        for row, count in enumerate(counts):
            table[row, :count] = first_page + sum(counts[:row]) + np.arange(count)
        self.table, self.lens = jnp.asarray(table), jnp.asarray(case.contexts, jnp.int32)
        self.rows = (
            _normal(1, rows, kv_heads, q_heads // kv_heads, dim),
            _normal(2, rows, kv_heads, dim),
            _normal(3, rows, kv_heads, dim),
        )
        self._run = jax.jit(decode_attention)

    def shape(self, stretches: int) -> DecodeShape:
        q_heads, kv_heads = self.case.heads
        group, own = q_heads // kv_heads, HeadRows(0, kv_heads, 1, inner=kv_heads)
        queries = HeadRows(0, q_heads, group, inner=kv_heads)
        sizes = self.case.head_dim, self.case.page_tokens
        rows = len(self.case.contexts)
        return DecodeShape(rows, kv_heads, 1, group, *sizes, queries, own, own, stretches)

    def run(self, pool: jax.Array, layer: jax.Array) -> Any:
        return self._run(*self.rows, pool, layer, self.table, self.lens)

    def check(self, out: np.ndarray, pool: jax.Array) -> None:
        (q_heads, kv_heads), dim = self.case.heads, self.case.head_dim
        past, table = _host_pages(pool), np.asarray(self.table)
        q, *own = (np.asarray(x, np.float64) for x in self.rows)
        for row in range(min(len(q), CHECKED)):
            k, v = (
                np.concatenate(
                    [
                        _sequence(past[kind], table[row], self.case.contexts[row], kv_heads),
                        own[kind][row][None],
                    ]
                )
                for kind in (0, 1)
            )
            _check(out[row].reshape(q_heads, dim), attend(q[row].reshape(q_heads, dim), k, v))

    def peers(self) -> dict[str, float]:
        if len(set(self.case.contexts)) > 1:
            return {}
        (q_heads, kv_heads), rows = self.case.heads, len(self.case.contexts)
        dense = _normal(4, 2, rows, self.case.contexts[0], kv_heads, self.case.head_dim)
        query = self.rows[0].reshape(rows, 1, q_heads, self.case.head_dim)
        return _peers(lambda attention: attention(query, dense[0], dense[1]))


def _peers(call: Callable[[Callable[..., jax.Array]], jax.Array]) -> dict[str, float]:
    """Of dense attention as others have it, where they are installed and take the case."""
    attentions = {"cudnn_s": partial(jax.nn.dot_product_attention, implementation="cudnn")}
    try:
        import tokamax  # pyright: ignore[reportMissingImports]
    except ImportError:
        pass
    else:
        attentions["tokamax_s"] = partial(tokamax.dot_product_attention, implementation="mosaic")
    seconds = {}
    for name, attention in attentions.items():
        run = jax.jit(partial(call, attention))
        try:
            seconds[name] = _seconds(lambda layer, run=run: run())
        except (NotImplementedError, ValueError, RuntimeError) as error:
            print(f"{name.removesuffix('_s')} cannot: {error}")
    return seconds


def _seconds(run: Callable[[jax.Array], Any]) -> float:
    """Of one launch: the median of rounds over the layers, each waited for at its end."""
    layers = [jnp.int32(layer) for layer in range(LAYERS)]
    times = []
    for _ in range(RUNS + 2):
        begin = time.perf_counter()
        jax.block_until_ready([run(layer) for layer in layers])
        times.append((time.perf_counter() - begin) / LAYERS)
    return statistics.median(times[2:])


def _pool(pages: int, page_rows: int, head_dim: int) -> jax.Array:
    return _normal(0, LAYERS, 2, pages, page_rows, head_dim)


def _normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _host_pages(pool: jax.Array) -> np.ndarray:
    """Of layer 0, `[keys and values, pages, page_rows, head_dim]`."""
    return np.asarray(pool[0], np.float64)


def _sequence(pages: np.ndarray, table: np.ndarray, tokens: int, kv_heads: int) -> np.ndarray:
    """`[tokens, kv_heads, head_dim]` out of pages `[kv_heads, page_tokens]`."""
    page_tokens = pages.shape[1] // kv_heads
    used = pages[table[: -(-tokens // page_tokens)]]
    by_head = used.reshape(len(used), kv_heads, page_tokens, pages.shape[2]).swapaxes(1, 2)
    return by_head.reshape(len(used) * page_tokens, kv_heads, pages.shape[2])[:tokens]


def _check(actual: np.ndarray, expected: np.ndarray) -> None:
    error = np.abs(actual - expected).max()
    assert error <= MAX_ERROR, f"differs from the oracle by {error:.4f}, more than {MAX_ERROR}"
