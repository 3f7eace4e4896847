"""What clients may know of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelInfo:
    """What clients may know of the model, and of the mesh and the KV pool that it runs in."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    sp: int = 1
    tp: int = 1
    page_tokens: int = 0
    num_pages: int = 0  # per group
    max_num_seqs: int = 0  # requests that run at once
