"""Sampling against distributions worked out in NumPy, with the vocabulary whole and split."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from conflux_jax.execution import sampling
from conflux_jax.execution.runner import make_mesh
from conflux_jax.execution.sampling import Sampled, SamplingInputs, VocabShard

ROWS, VOCAB = 500, 1008  # what all cases are padded to: one program for each number of ranks
SPLIT = pytest.mark.parametrize("ranks", [1, 3])


def sample(logits, inputs, ranks=1):
    """The result, which every one of `ranks` devices must have, with logits split over them.

    Fewer columns than VOCAB are spread over it, so that each rank has some; the rest is -inf."""
    places = np.linspace(0, VOCAB - 1, logits.shape[1]).astype(int)
    out = []
    for first in range(0, len(logits), ROWS):
        span = np.minimum(np.arange(first, first + ROWS), len(logits) - 1)
        part = np.full((ROWS, VOCAB), -np.inf, np.float32)
        part[:, places] = np.asarray(logits)[span]
        settings = jax.tree.map(lambda x, span=span: x[span] if x.ndim else x, inputs)
        out.append(sampler(ranks)(part, settings))
    whole = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1)[:, : len(logits)], *out)
    for field in whole:
        assert (field == field[0]).all()
    token_ids, logprobs, top_ids, top_logprobs = (field[0] for field in whole)
    column = jnp.full(VOCAB, -1).at[places].set(jnp.arange(len(places)))
    return Sampled(column[token_ids], logprobs, column[top_ids], top_logprobs)


@cache
def sampler(ranks):
    vocab = VocabShard(VOCAB // ranks, ranks)
    specs = {
        "in_specs": (PartitionSpec(None, vocab.axis), PartitionSpec()),
        "out_specs": PartitionSpec(vocab.axis),
    }

    def step(logits, inputs):
        return jax.tree.map(lambda x: x[None], sampling.sample(logits, inputs, vocab))

    return jax.jit(jax.shard_map(step, mesh=make_mesh(1, ranks), check_vma=False, **specs))


def inputs(
    rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=None, position: Any = 7, lp=False
):
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


def draws(logits, rows=4000, ranks=1, **settings):
    """The frequency of each id over `rows` seeds."""
    stacked = np.tile(np.asarray(logits, np.float32), (rows, 1))
    ids = np.asarray(sample(stacked, inputs(rows, **settings), ranks).token_ids)
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


@SPLIT
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
def test_frequencies_are_the_distributions(settings, ranks):
    logits = np.random.default_rng(3).normal(size=11) * 1.5
    expected = allowed(logits, **settings)
    got = draws(logits, ranks=ranks, **settings)
    assert (got[expected == 0] == 0).all()
    # 5 standard deviations of a frequency over 4,000 draws
    assert (np.abs(got - expected) <= 5 * np.sqrt(expected * (1 - expected) / 4000) + 1e-9).all()


@SPLIT
def test_a_large_vocabulary_is_drawn_in_every_block(ranks):
    logits = np.full(VOCAB, -30.0)
    wanted = [0, 255, 256, 700, VOCAB - 1]
    logits[wanted] = 0.0
    got = draws(logits, rows=2000, ranks=ranks)
    assert got[wanted].sum() == 1.0
    assert (got[wanted] > 0.15).all()


@SPLIT
def test_greedy_takes_the_first_of_equals_and_ignores_minus_infinity(ranks):
    low = -np.inf
    logits = np.array([[0, 2, 2, low], [low, -1, low, low], [1, 0, 1, 1], [low, 0, 0, 3]])
    got = sample(logits.astype(np.float32), inputs(4, temperature=0.0), ranks)
    assert got.token_ids.tolist() == [1, 1, 0, 3]


@SPLIT
def test_masked_ids_are_never_drawn(ranks):
    for masked in (range(1, VOCAB, 2), range(500), range(500, VOCAB)):  # all that some ranks have
        logits = np.ones(VOCAB)
        logits[masked] = -np.inf
        got = draws(logits, rows=ROWS, ranks=ranks, temperature=100.0)
        assert (got[masked] == 0).all()


@pytest.mark.parametrize("distinct", [VOCAB, 20], ids=["all differ", "many are equal"])
def test_a_split_vocabulary_draws_the_same_tokens(distinct):
    """Each row with cut-offs of its own, top-k at every place: the same seed draws the same token.
    No sum has rounding that could differ, because every weight is 0 or exactly 1."""
    rng = np.random.default_rng(5)
    rows = 400
    ranking = rng.permuted(np.tile(np.arange(VOCAB), (rows, 1)), axis=1) % distinct
    logits = -1e-12 * ranking
    assert (np.exp(logits.astype(np.float32) / 0.7) == 1).all()
    logits[rng.random(logits.shape) < 0.7] = -np.inf
    settings = inputs(rows)._replace(
        temperature=jnp.asarray(rng.choice([0.0, 0.7, 1.0, 3.0], rows), jnp.float32),
        top_p=jnp.asarray(rng.choice([0.25, 0.5, 1.0], rows), jnp.float32),
        top_k=jnp.asarray(rng.permutation(rows), jnp.int32),  # some more than the row has
    )
    whole, split = (sample(logits, settings, n) for n in (1, 3))
    assert len(set(whole.token_ids.tolist())) > rows // 3
    np.testing.assert_array_equal(split.token_ids, whole.token_ids)


def test_a_draw_depends_on_seed_and_position_only():
    rng = np.random.default_rng(0)
    logits, others = rng.normal(size=(1, 300)), rng.normal(size=(50, 300))
    positions = np.arange(20)
    alone = sample(np.tile(logits, (20, 1)), inputs(20, seeds=9, position=positions)).token_ids
    assert len(set(alone.tolist())) > 5  # the position matters
    mixed = np.concatenate([others, np.tile(logits, (20, 1))])
    seeds = np.concatenate([np.arange(50), np.full(20, 9)])
    at = np.concatenate([np.arange(50) % 3, positions])
    together = sample(mixed, inputs(70, seeds=seeds, position=at)).token_ids
    assert together[50:].tolist() == alone.tolist()
    assert len(set(sample(np.tile(logits, (20, 1)), inputs(20)).token_ids.tolist())) > 5


@SPLIT
def test_logprobs_are_the_models_whatever_the_temperature(ranks):
    logits = np.random.default_rng(1).normal(size=(2, 50)).astype(np.float32)
    got = sample(logits, inputs(2, temperature=3.0, top_k=2, lp=True), ranks)
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


@SPLIT
def test_alternatives_of_equal_probability_come_in_the_order_of_their_ids(ranks):
    logits = np.zeros((1, 48), np.float32)
    logits[0, [3, 20, 47]] = 1.0
    got = sample(logits, inputs(1, temperature=0.0, lp=True), ranks)
    others = [i for i in range(48) if i not in (3, 20, 47)]
    assert got.top_ids[0].tolist() == [3, 20, 47, *others[:17]]
    assert got.token_ids.tolist() == [3]
