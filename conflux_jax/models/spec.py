"""What a decoder is, apart from its weights: the numbers that every checkpoint format states."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

Part = tuple[slice, ...]  # of a tensor: a slice for each leading axis, `()` is all of it


class ModelError(ValueError):
    """A model that cannot be loaded or run; the message names the file and field, or the rule."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3.1's frequency scaling (`rope_type` "llama3" in Hugging Face configs)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelSpec:
    """A decoder of the Llama family: RMSNorm, rotary positions (rotate-half), grouped-query
    attention, SwiGLU, no biases. `head_dim` need not be hidden_size / num_heads."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()


@runtime_checkable
class WeightSource(Protocol):
    """A checkpoint that is read one tensor at a time.

    Names and layouts are Hugging Face's: linear weights `[out_features, in_features]`, query and
    key rows in rotate-half order; `model.embed_tokens.weight`, `model.layers.{i}.input_layernorm.
    weight`, `.self_attn.{q,k,v,o}_proj.weight`, `.self_attn.{q,k}_norm.weight`,
    `.post_attention_layernorm.weight`, `.mlp.{gate,up,down}_proj.weight`, `model.norm.weight`,
    `lm_head.weight` (absent where tied).
    """

    spec: ModelSpec

    def names(self) -> Iterable[str]: ...

    def read(self, name: str, part: Part = ()) -> np.ndarray:
        """One tensor, or that part of it, float32, float16 or bfloat16 (ml_dtypes). Reads no more
        than it must, so that each device's share can be asked for. Raises ModelError if absent."""
        ...
