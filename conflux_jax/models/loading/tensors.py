"""Which tensors a decoder has, and their shapes: what every source is checked against at opening,
so that a wrong file is refused before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping

from conflux_jax.models.spec import ModelError, ModelSpec

Shape = tuple[int, ...]


def expected_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Hugging Face name -> shape of every tensor, in the order of the layers."""
    hidden, intermediate = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (queries, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, queries),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (intermediate, hidden),
            prefix + "mlp.up_proj.weight": (intermediate, hidden),
            prefix + "mlp.down_proj.weight": (hidden, intermediate),
        }
        if spec.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (spec.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (spec.head_dim,)
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def check_spec(spec: ModelSpec, where: str) -> None:
    """Raises ModelError where sizes contradict each other; `where` names the file."""
    for field in (
        "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
        "num_kv_heads", "head_dim", "max_position_embeddings",
    ):  # fmt: skip
        if getattr(spec, field) < 1:
            raise ModelError(f"{where}: {field}: must be at least 1, got {getattr(spec, field)}")
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(
            f"{where}: num_kv_heads: {spec.num_heads} query heads cannot share "
            f"{spec.num_kv_heads} key-value heads evenly"
        )
    if spec.head_dim % 2:
        raise ModelError(f"{where}: head_dim: rotary positions need pairs, got {spec.head_dim}")
    if not spec.rope_theta > 0 or not spec.rms_norm_eps >= 0:
        raise ModelError(f"{where}: rope_theta and rms_norm_eps: must be positive")
    for token_id in spec.eos_token_ids:
        if not 0 <= token_id < spec.vocab_size:
            raise ModelError(f"{where}: eos_token_id: {token_id} is outside the vocabulary")


def check_shapes(spec: ModelSpec, found: Mapping[str, Shape], where: str) -> dict[str, Shape]:
    """`expected_shapes(spec)`, after comparing with what a file has, under Hugging Face names.

    A tensor too many is refused as well: a bias or an extra norm that is left out would go
    unnoticed and give wrong tokens. Raises ModelError.
    """
    expected = expected_shapes(spec)
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(f"{where}: {name}: this tensor is missing")
        if tuple(found[name]) != shape:
            raise ModelError(
                f"{where}: {name}: has shape {tuple(found[name])}, the configuration says {shape}"
            )
    if extra := sorted(set(found) - set(expected)):
        raise ModelError(f"{where}: {extra[0]}: this architecture has no such tensor")
    return expected
