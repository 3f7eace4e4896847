"""Scores of prompts: rows cut into blocks, and what a block of logits says, against NumPy."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from conflux_jax.execution.prompt_scores import SCORED_ROWS, ScoredPrompts, Scores, score
from conflux_jax.execution.runner import make_mesh
from conflux_jax.execution.sampling import VocabShard
from tests.decoder_float64 import log_softmax

VOCAB = 1008


@pytest.mark.parametrize("ranks", [1, 3])
def test_scores_of_tokens(ranks: int):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(40, VOCAB)).astype(np.float32) * 3
    logits[:, 1000:] = -np.inf  # ids without a token, all of some ranks' last
    logits[7] = np.round(logits[7])  # equals
    logits[8, : 2 * VOCAB // 3] = -np.inf  # nothing on some ranks
    tokens = rng.integers(0, 1000, 40)
    tokens[8] = 999
    vocab = VocabShard(VOCAB // ranks, ranks)
    sharded = jax.shard_map(
        lambda x, t: jax.tree.map(lambda y: y[None], score(x, t, vocab)),
        mesh=make_mesh(1, ranks),
        in_specs=(PartitionSpec(None, "tp"), PartitionSpec()),
        out_specs=PartitionSpec("tp"),
        check_vma=False,
    )
    every = jax.tree.map(np.asarray, jax.jit(sharded)(logits, tokens))
    for field in every:
        assert (field == field[0]).all()
    found = Scores(*(field[0] for field in every))
    expected = log_softmax(logits.astype(np.float64))
    own = expected[np.arange(40), tokens]
    np.testing.assert_allclose(found.logprobs, own, atol=1e-5)
    assert (found.ranks == 1 + (logits > logits[np.arange(40), tokens][:, None]).sum(axis=1)).all()
    order = np.argsort(-logits, axis=1, kind="stable")[:, :20]
    assert (found.top_ids == order).all()
    np.testing.assert_allclose(
        found.top_logprobs, np.take_along_axis(expected, order, axis=1), atol=1e-5
    )


def test_rows_of_all_groups_come_back_in_the_order_of_the_prompts():
    """Three prompts over two groups, of more rows than a block has. A row's score tells where it
    was and what was asked of it."""
    sizes = {
        "a": (300, 5, 2),
        "b": (1, 1, 0),
        "c": (180, 64, 20),
    }  # tokens, the first, alternatives
    rng = np.random.default_rng(1)
    parts = []
    for name, (length, first, top) in sizes.items():
        owner = np.sort(rng.integers(0, 2, length))
        row, token = rng.integers(0, 5000, length), rng.integers(0, 5000, length)
        parts.append((name, first, top, owner, row, token))
    scored = ScoredPrompts.of(2, parts)
    most = max(sum((part[3] == group).sum() for part in parts) for group in (0, 1))
    assert len(scored.blocks) == -(-most // SCORED_ROWS) > 1
    scores = []
    for rows, tokens in scored.blocks:
        assert rows.shape == tokens.shape == (2, SCORED_ROWS)
        told = rows + 10_000.0 * np.arange(2)[:, None]
        top = np.broadcast_to(tokens[:, :, None], (2, SCORED_ROWS, 20))
        arrays: Any = told, tokens, top, top + 0.5
        scores.append(Scores(*arrays))
    found = scored.by_request(scores)
    for name, first, top, owner, row, token in parts:
        assert found[name].first == first
        assert (found[name].logprobs == row + 10_000 * owner).all()
        assert (found[name].ranks == token).all()
        assert found[name].top_ids.shape == (len(token), top)
        assert (found[name].top_logprobs == token[:, None] + 0.5).all()


def test_a_prompt_of_one_token_has_nothing_to_score():
    nothing = np.zeros(0, np.int32)
    scored = ScoredPrompts.of(3, [("a", 1, 5, nothing, nothing, nothing)])
    assert scored.blocks == () and scored.by_request(()) == {}
