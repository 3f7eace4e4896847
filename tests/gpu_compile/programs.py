"""The programs that the tests look at, each compiled once."""

from __future__ import annotations

from functools import cache
from typing import Any

from bench.h100.programs import Program, Setup, compile_step
from conflux_jax.config import Config
from conflux_jax.models.known_specs import KNOWN_SPECS
from conflux_jax.plan import Bucket

MODELS = {  # on the meshes (sp, tp) that the paper runs them on
    "llama-3.1-8b": (4, 1),
    "qwen3-14b": (4, 1),
    "qwen3-32b": (4, 2),
}
BUCKET = Bucket(rows=512, decode_rows=64, prefill=True, handoff=True)


@cache
def program(model: str, overlap: str, bucket: Bucket = BUCKET, **settings: Any) -> Program:
    """`settings` go over those that all have in common."""
    sp, tp = MODELS[model]
    common = {
        "sp": sp,
        "tp": tp,
        "overlap": overlap,
        "page_tokens": 16,
        "max_model_len": 32_768,
        "max_num_seqs": 256,
        "max_prefill_segments": 8,
        "handoff_pages": 64,
    }
    config = Config.from_flat(**{**common, **settings})
    return compile_step(Setup.make(KNOWN_SPECS[model], config), bucket)
