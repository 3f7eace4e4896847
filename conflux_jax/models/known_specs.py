"""The paper's models as specs, without their weights: for compiling and pricing their steps.

Figures are those of config.json and generation_config.json of the repositories named beside each
on huggingface.co; a checkpoint that is loaded states its own.
"""

from __future__ import annotations

from conflux_jax.models.spec import ModelSpec, RopeScaling

LLAMA_3_1_8B = ModelSpec(  # meta-llama/Llama-3.1-8B-Instruct
    name="Llama-3.1-8B-Instruct",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    max_position_embeddings=131_072,
    tie_word_embeddings=False,
    rope_scaling=RopeScaling(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    eos_token_ids=(128_001, 128_008, 128_009),
)
QWEN3_14B = ModelSpec(  # Qwen/Qwen3-14B
    name="Qwen3-14B",
    vocab_size=151_936,
    hidden_size=5120,
    intermediate_size=17_408,
    num_layers=40,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1_000_000.0,
    max_position_embeddings=40_960,
    tie_word_embeddings=False,
    qk_norm=True,
    eos_token_ids=(151_645, 151_643),
)
QWEN3_32B = ModelSpec(  # Qwen/Qwen3-32B
    name="Qwen3-32B",
    vocab_size=151_936,
    hidden_size=5120,
    intermediate_size=25_600,
    num_layers=64,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1_000_000.0,
    max_position_embeddings=40_960,
    tie_word_embeddings=False,
    qk_norm=True,
    eos_token_ids=(151_645, 151_643),
)

KNOWN_SPECS = {
    "llama-3.1-8b": LLAMA_3_1_8B,
    "qwen3-14b": QWEN3_14B,
    "qwen3-32b": QWEN3_32B,
}
