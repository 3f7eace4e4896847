"""Logits of every token of a sequence, through the real step's layers: for tests against truth."""

from __future__ import annotations

import numpy as np

from conflux_jax.config import Config
from conflux_jax.execution.inspection import Inspector
from conflux_jax.execution.runner import Runner
from conflux_jax.models.spec import WeightSource


def forward_logits(
    source: WeightSource, token_ids: list[int], sp: int = 1, tp: int = 1, chunk: int = 64
) -> np.ndarray:
    """Float32 logits `[tokens, vocab]` of a prompt that is prefilled chunk by chunk over `sp`
    groups of `tp` devices."""
    config = Config.from_flat(
        sp=sp,
        tp=tp,
        dtype="float32",
        max_num_seqs=1,
        max_num_batched_tokens=chunk,
        rows_ladder=(chunk,),
        max_prefill_segments=1,
        kv_pool_tokens=4 * (len(token_ids) + 64),
        compilation_cache_dir="",
    )
    return Inspector(Runner.create(source, config)).prompt_logits(token_ids)
