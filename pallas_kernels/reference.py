"""The oracle: attention written out, one query at a time over its whole context, in NumPy.

For tests. Any float type, float64 by default; slow on purpose.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float


def attend(
    q: Float[np.ndarray, "heads head_dim"],
    k: Float[np.ndarray, "tokens kv_heads head_dim"],
    v: Float[np.ndarray, "tokens kv_heads head_dim"],
) -> Float[np.ndarray, "heads head_dim"]:
    """softmax(q k / sqrt(head_dim)) v of one query token; query heads in KV-head order."""
    per_kv = q.shape[0] // k.shape[1]
    out = np.empty_like(q)
    for head in range(q.shape[0]):
        scores = k[:, head // per_kv] @ q[head] / math.sqrt(q.shape[1])
        weights = np.exp(scores - scores.max())
        out[head] = weights @ v[:, head // per_kv] / weights.sum()
    return out


def causal(
    q: Float[np.ndarray, "tokens heads head_dim"],
    k: Float[np.ndarray, "keys kv_heads head_dim"],
    v: Float[np.ndarray, "keys kv_heads head_dim"],
) -> Float[np.ndarray, "tokens heads head_dim"]:
    """The last `tokens` of a sequence of `keys` attend to it, each up to itself."""
    context = k.shape[0] - q.shape[0]
    return np.stack(
        [attend(q[i], k[: context + i + 1], v[: context + i + 1]) for i in range(q.shape[0])]
    )


def page_rows_of(
    sequence: Float[np.ndarray, "tokens heads head_dim"], page_tokens: int
) -> Float[np.ndarray, "pages page_rows head_dim"]:
    """A sequence cut into pages `[heads, page_tokens]`, flattened to rows; the tail is zero."""
    tokens, heads, head_dim = sequence.shape
    pages = -(-tokens // page_tokens)
    padded = np.zeros((pages * page_tokens, heads, head_dim), sequence.dtype)
    padded[:tokens] = sequence
    paged = padded.reshape(pages, page_tokens, heads, head_dim).transpose(0, 2, 1, 3)
    return paged.reshape(pages, heads * page_tokens, head_dim)
