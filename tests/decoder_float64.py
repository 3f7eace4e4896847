"""The decoder written out in NumPy, in float64, a whole sequence at once: for tests against truth.

And what requests change in its logits, one token at a time, from the rules and from nothing of the
engine's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conflux_jax.models.loading import open_source
from conflux_jax.request import SamplingParams
from pallas_kernels.reference import causal


class Decoder:
    """Of a checkpoint in the Hugging Face layout, without rotary scaling. vocab: ids from there on
    have no token; None: all have one."""

    def __init__(self, path: Path, vocab: int | None = None):
        self.path, self._vocab = path, vocab
        source = open_source(str(path))
        self.spec = source.spec
        self._weights = {name: np.asarray(source.read(name), np.float64) for name in source.names()}

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """`[tokens, vocab]`."""
        x = self._weight("model.embed_tokens.weight")[list(token_ids)]
        for layer in range(self.spec.num_layers):
            x = self._layer(f"model.layers.{layer}.", x)
        head = self._weight("lm_head.weight")[: self._vocab]
        return self._normed("model.norm.weight", x) @ head.T

    def _layer(self, prefix: str, x: np.ndarray) -> np.ndarray:
        normed = self._normed(prefix + "input_layernorm.weight", x)
        q, k, v = (
            (normed @ self._weight(f"{prefix}self_attn.{name}_proj.weight").T).reshape(
                len(x), -1, self.spec.head_dim
            )
            for name in "qkv"
        )
        attended = causal(self._rotated(q), self._rotated(k), v).reshape(len(x), -1)
        x = x + attended @ self._weight(prefix + "self_attn.o_proj.weight").T
        normed = self._normed(prefix + "post_attention_layernorm.weight", x)
        gate = normed @ self._weight(prefix + "mlp.gate_proj.weight").T
        up = normed @ self._weight(prefix + "mlp.up_proj.weight").T
        hidden = gate / (1 + np.exp(-gate)) * up
        return x + hidden @ self._weight(prefix + "mlp.down_proj.weight").T

    def _rotated(self, x: np.ndarray) -> np.ndarray:
        """Pairs of a head's halves, turned by the position times a falling frequency."""
        half = self.spec.head_dim // 2
        frequencies = self.spec.rope_theta ** (-np.arange(half) / half)
        angles = np.arange(len(x))[:, None, None] * frequencies
        first, second = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)

    def _normed(self, name: str, x: np.ndarray) -> np.ndarray:
        scale = np.sqrt((x**2).mean(axis=1, keepdims=True) + self.spec.rms_norm_eps)
        return x / scale * self._weight(name)

    def _weight(self, name: str) -> np.ndarray:
        return self._weights[name]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def adjusted(
    logits: Any,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos: Collection[int] = (),
    bad_phrases: Collection[Sequence[int]] = (),
) -> np.ndarray:
    """What the next token after `prompt` and `output` is chosen by, `[vocab]`."""
    changed: Any = np.array(logits, np.float64)
    times, seen = Counter(output), {*prompt, *output}
    biases = dict(params.logit_bias)
    for token_id in range(len(changed)):
        value = changed[token_id]
        if params.allowed_token_ids is not None and token_id not in params.allowed_token_ids:
            value = -np.inf
        if token_id in params.bad_token_ids:
            value = -np.inf
        if len(output) < params.min_tokens and token_id in {*eos, *params.stop_token_ids}:
            value = -np.inf
        ended = (list(phrase) == [*output, token_id][-len(phrase) :] for phrase in bad_phrases)
        if any(ended):
            value = -np.inf
        value += biases.get(token_id, 0.0)
        if token_id in seen:
            repetition = params.repetition_penalty
            value = value / repetition if value > 0 else value * repetition
        value -= params.frequency_penalty * times[token_id]
        value -= params.presence_penalty * (token_id in times)
        changed[token_id] = value
    return changed
