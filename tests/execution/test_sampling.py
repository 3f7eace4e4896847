"""Sampling against distributions worked out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conflux_jax.execution.sampling import SamplingInputs, sample

sample = jax.jit(sample)


def inputs(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=None, position=7, lp=False):
    def full(value, dtype):
        return jnp.full(rows, value, dtype)

    words = np.zeros((rows, 2), np.uint32)
    words[:, 1] = np.arange(rows) if seeds is None else seeds
    return SamplingInputs(
        full(temperature, jnp.float32),
        full(top_k, jnp.int32),
        full(top_p, jnp.float32),
        full(min_p, jnp.float32),
        jnp.asarray(words),
        full(position, jnp.int32),
        jnp.asarray(lp),
    )


def draws(logits, rows=4000, **settings):
    """The frequency of each id over `rows` seeds."""
    stacked = jnp.tile(jnp.asarray(logits, jnp.float32), (rows, 1))
    ids = np.asarray(sample(stacked, inputs(rows, **settings)).token_ids)
    return np.bincount(ids, minlength=len(logits)) / rows


def allowed(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution that the settings mean, by sorting."""
    p = np.exp(np.asarray(logits, np.float64) / temperature)
    p /= p.sum()
    p = np.where(p >= min_p * p.max(), p, 0)
    if top_k:
        p = np.where(p >= np.sort(p)[-top_k], p, 0)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_k": 3},
        {"top_p": 0.5},
        {"top_p": 0.9, "temperature": 1.5},
        {"min_p": 0.2},
        {"top_k": 5, "top_p": 0.7, "min_p": 0.05, "temperature": 1.3},
    ],
)
def test_frequencies_are_the_distributions(settings):
    logits = np.random.default_rng(3).normal(size=11) * 1.5
    expected = allowed(logits, **settings)
    got = draws(logits, **settings)
    assert (got[expected == 0] == 0).all()
    # 5 standard deviations of a frequency over 4,000 draws
    assert (np.abs(got - expected) <= 5 * np.sqrt(expected * (1 - expected) / 4000) + 1e-9).all()


def test_a_large_vocabulary_is_drawn_in_every_block():
    logits = np.full(5000, -30.0)
    wanted = [0, 255, 256, 2559, 4999]
    logits[wanted] = 0.0
    got = draws(logits, rows=2000)
    assert got[wanted].sum() == 1.0
    assert (got[wanted] > 0.15).all()


def test_greedy_takes_the_first_of_equals_and_ignores_minus_infinity():
    logits = jnp.asarray([[0.0, 2.0, 2.0, -jnp.inf], [-jnp.inf, -1.0, -jnp.inf, -jnp.inf]])
    assert sample(logits, inputs(2, temperature=0.0)).token_ids.tolist() == [1, 1]


def test_masked_ids_are_never_drawn():
    logits = np.array([1.0, -np.inf, 1.0, -np.inf])
    got = draws(logits, temperature=100.0)
    assert got[1] == got[3] == 0


def test_a_draw_depends_on_seed_and_position_only():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(1, 300)), jnp.float32)
    alone = [int(sample(logits, inputs(1, seeds=[9], position=p)).token_ids[0]) for p in range(20)]
    assert len(set(alone)) > 5  # the position matters
    others = jnp.asarray(rng.normal(size=(5, 300)), jnp.float32)
    batch = jnp.concatenate([others, logits])
    for position, expected in enumerate(alone):
        got = sample(batch, inputs(6, seeds=[1, 2, 3, 4, 5, 9], position=position)).token_ids
        assert int(got[5]) == expected


def test_logprobs_are_the_models_whatever_the_temperature():
    logits = np.random.default_rng(1).normal(size=(2, 50)).astype(np.float32)
    got = sample(jnp.asarray(logits), inputs(2, temperature=3.0, top_k=2, lp=True))
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    order = np.argsort(-expected, axis=1)
    np.testing.assert_allclose(
        got.logprobs,
        np.take_along_axis(expected, np.asarray(got.token_ids)[:, None], 1)[:, 0],
        atol=1e-5,
    )
    assert (np.asarray(got.top_ids) == order[:, :20]).all()
    np.testing.assert_allclose(
        got.top_logprobs, np.take_along_axis(expected, order[:, :20], 1), atol=1e-5
    )
