"""torch's side of the comparison: transformers' Llama with weights that it is given."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import transformers

from conflux_jax.models.spec import ModelSpec

TIMED_STEPS = 6


def llama(
    spec: ModelSpec,
    weights: Mapping[str, np.ndarray],
    dtype: torch.dtype,
    attention: str,
    device: str,
) -> transformers.LlamaForCausalLM:
    """weights: by Hugging Face's names. attention: `eager`, `sdpa` or what else transformers has.
    It stops at no token. Raises ValueError where weights are missing or left over."""
    settings = transformers.LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        max_position_embeddings=spec.max_position_embeddings,
        tie_word_embeddings=spec.tie_word_embeddings,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = transformers.LlamaForCausalLM._from_config(
        settings, dtype=torch.float32, attn_implementation=attention
    )
    state = {name: torch.from_numpy(array) for name, array in weights.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if spec.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise ValueError(f"weights: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.to(device, dtype).eval()


def greedy_along(
    model: transformers.LlamaForCausalLM,
    prompts: Sequence[list[int]],
    continuations: Sequence[list[int]],
) -> list[list[int]]:
    """The best token after each prompt and after every prefix of its continuation, but for the
    whole of it. One forward pass: prompts and continuations are each of one length."""
    known = [ids + made[:-1] for ids, made in zip(prompts, continuations, strict=True)]
    asked = torch.tensor(known, device=model.device)
    return model(asked, logits_to_keep=len(continuations[0])).logits.argmax(-1).tolist()


def decode_step_s(model: transformers.LlamaForCausalLM, prompts: Sequence[list[int]]) -> float:
    """Seconds of a greedy step of all prompts (of one length) with a KV cache: median of
    TIMED_STEPS after one that does not count."""
    out = model(torch.tensor(prompts, device=model.device), use_cache=True)
    times = []
    for _ in range(TIMED_STEPS + 1):
        began_s = time.perf_counter()
        token = out.logits[:, -1:].argmax(-1)
        token.tolist()  # an engine's host wants to know it, too
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
        times.append(time.perf_counter() - began_s)
    return statistics.median(times[1:])
