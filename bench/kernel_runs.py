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

from bench.kernel_work import DecodeCase, PrefillCase
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.reference import attend

LAYERS = 4  # of the pool, run in turn: between two runs of a layer the others pass the cache
RUNS = 12
MAX_ERROR = 2e-2
CHECKED = 3  # rows of the result


def measure(case: PrefillCase | DecodeCase) -> dict[str, float]:
    """Seconds of a launch, by name: the kernel's, and those of the peers that can do the case.

    Raises AssertionError where the kernel's result is not the oracle's."""
    return _prefill(case) if isinstance(case, PrefillCase) else _decode(case)


def _prefill(case: PrefillCase) -> dict[str, float]:
    q_heads, kv_heads = case.heads
    segments: Any = case.segments()
    pages = max(1, int(sum(-(-context // case.page_tokens) for context, _ in case.chunks)))
    pool = _pool(pages, case.page_tokens * kv_heads, case.head_dim)
    qkv = _normal(1, case.tokens, q_heads + 2 * kv_heads, case.head_dim)
    plan = jax.tree.map(jnp.asarray, case.plan())
    run = jax.jit(partial(prefill_attention, kv_heads=kv_heads))
    out = np.asarray(run(qkv, pool, jnp.int32(0), plan)[0], np.float64)
    starts = np.cumsum([0, *(length for _, length in case.chunks)])
    host, past = np.asarray(qkv, np.float64), _host_pages(pool)
    for index in np.random.default_rng(0).choice(starts[-1], CHECKED, replace=False):
        segment = int(np.searchsorted(starts, index, side="right")) - 1
        own = host[starts[segment] : index + 1, q_heads:]
        context = int(segments.context_lens[segment])
        table = segments.page_table[segment]
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
    seconds = {"seconds": _seconds(lambda layer: run(qkv, pool, layer, plan))}
    if case.chunks[0][0] == 0 and len(case.chunks) == 1:
        q, k, v = (x[None] for x in jnp.split(qkv, (q_heads, q_heads + kv_heads), axis=1))
        seconds |= _peers(lambda attention: attention(q, k, v, is_causal=True))
    return seconds


def _decode(case: DecodeCase) -> dict[str, float]:
    q_heads, kv_heads = case.heads
    rows, dim = len(case.contexts), case.head_dim
    counts = [-(-context // case.page_tokens) for context in case.contexts]
    pool = _pool(sum(counts), case.page_tokens * kv_heads, dim)
    table = np.zeros((rows, max(counts)), np.int32)
    for row, count in enumerate(counts):
        table[row, :count] = sum(counts[:row]) + np.arange(count)
    q = _normal(1, rows, kv_heads, q_heads // kv_heads, dim)
    new_k, new_v = _normal(2, rows, kv_heads, dim), _normal(3, rows, kv_heads, dim)
    lens, pages = jnp.asarray(case.contexts, jnp.int32), jnp.asarray(table)
    run = jax.jit(decode_attention)
    out = np.asarray(run(q, new_k, new_v, pool, jnp.int32(0), pages, lens)[0], np.float64)
    past = _host_pages(pool)
    for row in range(min(rows, CHECKED)):
        k, v = (
            np.concatenate(
                [
                    _sequence(past[kind], table[row], case.contexts[row], kv_heads),
                    np.asarray(new[row], np.float64)[None],
                ]
            )
            for kind, new in enumerate((new_k, new_v))
        )
        expected = attend(np.asarray(q[row], np.float64).reshape(q_heads, dim), k, v)
        _check(out[row].reshape(q_heads, dim), expected)
    seconds = {
        "seconds": _seconds(lambda layer: run(q, new_k, new_v, pool, layer, pages, lens)),
    }
    if len(set(case.contexts)) == 1:
        dense = _normal(4, 2, rows, case.contexts[0], kv_heads, dim)
        query = q.reshape(rows, 1, q_heads, dim)
        seconds |= _peers(lambda attention: attention(query, dense[0], dense[1]))
    return seconds


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
