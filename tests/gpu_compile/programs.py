"""The programs that the tests look at, each compiled once."""

from __future__ import annotations

from functools import cache
from typing import Any

from bench.h100.programs import Program, Setup, compile_step
from bench.variants import VARIANTS
from conflux_jax.config import Config
from conflux_jax.models.attention import AttentionKernels
from conflux_jax.models.known_specs import KNOWN_SPECS
from conflux_jax.plan import Bucket

MODELS = {  # on the meshes (sp, tp) that the paper runs them on
    "llama-3.1-8b": (4, 1),
    "qwen3-14b": (4, 1),
    "qwen3-32b": (4, 2),
}
FIRST = "llama-3.1-8b"
BUCKET = Bucket(rows=512, decode_rows=64, prefill=True, handoff=True)


def program(
    model: str,
    overlap: str,
    bucket: Bucket = BUCKET,
    kernels: AttentionKernels | None = None,
    **settings: Any,
) -> Program:
    """`settings` go over those that all have in common. Attention is a stand-in's by default."""
    sp, tp = MODELS[model]
    mesh = {"sp": sp, "tp": tp}
    return _program(model, overlap, bucket, kernels, tuple(sorted({**mesh, **settings}.items())))


@cache
def _program(
    model: str,
    overlap: str,
    bucket: Bucket,
    kernels: AttentionKernels | None,
    settings: tuple[tuple[str, Any], ...],
) -> Program:
    common = {
        "overlap": overlap,
        "page_tokens": 16,
        "max_model_len": 32_768,
        "max_num_seqs": 256,
        "max_prefill_segments": 8,
        "handoff_pages": 64,
    }
    config = Config.from_flat(**{**common, **dict(settings)})
    return compile_step(Setup.make(KNOWN_SPECS[model], config), bucket, kernels)


def ablation(key: str) -> Program:
    """The first model's program of a variant of `bench.long_prefill`, for an iteration like that of
    `BUCKET` on its four devices: 2,048 rows, 256 of them decodes."""
    (variant,) = (v for v in VARIANTS if v.key == key)
    settings = variant.on(*MODELS[FIRST])
    overlap, sp = settings.pop("overlap"), settings["sp"]
    handoff = sp > 1 and settings.get("decode_attention") != "spread"
    bucket = Bucket(2048 // sp, 256 // sp, prefill=True, handoff=handoff)
    return program(FIRST, overlap, bucket, **settings)


def decode_only(handoff: bool, **settings: Any) -> Program:
    """The first model's program of 64 decodes a group."""
    bucket = Bucket(64, 64, prefill=False, handoff=handoff)
    return program(FIRST, "stream", bucket, **settings)
