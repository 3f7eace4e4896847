"""The small operators of a decoder: norm, rotary positions, matrix products."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from conflux_jax.models.spec import ModelSpec


def rms_norm(
    x: Float[Array, "*rows dim"], weight: Float[Array, "*last dim"], eps: float
) -> Float[Array, "*rows dim"]:
    """x / rms(x) * weight over the last axis, computed in float32. `weight` may differ along the
    last of the rows' axes too."""
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale * weight.astype(jnp.float32)).astype(x.dtype)


def linear(
    x: Float[Array, "rows inputs"],
    weight: Float[Array, "outputs inputs"],
    widen_rows: int | None = None,
    dtype: jnp.dtype | None = None,
) -> Float[Array, "rows outputs"]:
    """x @ weight.T, summed in float32 and returned in `dtype` (float32 where None). Float32
    operands are never rounded lower.

    Weights are stored as checkpoints have them, outputs first: XLA's CPU backend multiplies that
    faster, and others do not care. widen_rows: from this many rows on, both operands are made
    float32 first. For CPUs without bfloat16 arithmetic, where XLA would do it again and again.
    """
    if widen_rows is not None and x.shape[0] >= widen_rows:
        x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((1,), (1,)), ((), ()))  # spelled out: of `weight.T` XLA may make a float32 copy
    return lax.dot_general(
        x, weight, dims, precision=precision, preferred_element_type=dtype or jnp.float32
    )


def rope_inv_freq(spec: ModelSpec) -> np.ndarray:
    """Inverse frequencies `[head_dim / 2]` in float32, with Llama-3.1's scaling where asked.

    Llama-3.1: wavelengths past original_context / low_freq_factor are stretched by `factor`, those
    under original_context / high_freq_factor kept, and those between interpolated.
    """
    exponent = np.arange(0, spec.head_dim, 2, dtype=np.float32) / np.float32(spec.head_dim)
    inv_freq = (1.0 / np.float32(spec.rope_theta) ** exponent).astype(np.float32)
    scaling = spec.rope_scaling
    if scaling is None:
        return inv_freq
    context = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    smooth = (context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
    scaled = np.where(
        wavelength > context / scaling.low_freq_factor, inv_freq / scaling.factor, between
    )
    return np.where(wavelength < context / scaling.high_freq_factor, inv_freq, scaled).astype(
        np.float32
    )


def rope_tables(
    positions: Int[Array, " rows"], inv_freq: np.ndarray
) -> tuple[Float[Array, "rows half"], Float[Array, "rows half"]]:
    """(cos, sin) of position * frequency, float32."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(inv_freq)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "rows *heads head_dim"],
    cos: Float[Array, "rows half"],
    sin: Float[Array, "rows half"],
) -> Float[Array, "rows *heads head_dim"]:
    """Rotary embedding in rotate-half order, computed in float32."""
    shape = (cos.shape[0],) + (1,) * (x.ndim - 2) + (cos.shape[1],)
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def silu_product(gate_up: Float[Array, "rows two_ffn"]) -> Float[Array, "rows ffn"]:
    """silu(gate) * up of `[gate | up]`."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up
