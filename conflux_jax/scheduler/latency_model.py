"""How long an iteration takes, from its shape."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from conflux_jax.plan import Bucket


class IterationShape(NamedTuple):
    """What an iteration's time depends on.

    context_tokens: KV tokens that the decodes of one group read, of the group with most.
    all_context_tokens: of all groups. longest_context: of one decode. chunks and their tokens are
    those of the iteration; prefill_work: pairs of a query and a key that it may see, over all
    chunks: see `prefill_work`.
    """

    bucket: Bucket
    context_tokens: int = 0
    all_context_tokens: int = 0
    longest_context: int = 0
    num_chunks: int = 0
    prefill_tokens: int = 0
    prefill_work: int = 0


def prefill_work(start: int, length: int) -> int:
    """Query-key pairs of a chunk of `length` tokens after `start` others: each token sees those
    before it and itself.

    >>> prefill_work(0, 4), prefill_work(100, 4)
    (10, 410)
    """
    return length * start + length * (length + 1) // 2


class LatencyPredictor(Protocol):
    """Seconds of an iteration; monotone in every number of its shape."""

    def predict_s(self, shape: IterationShape) -> float: ...
