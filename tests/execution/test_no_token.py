"""Rows whose logits are not finite have no token, and leave the others theirs."""

from __future__ import annotations

import numpy as np
import pytest

from conflux_jax.plan import NO_TOKEN
from tests.execution.test_sampling import ROWS, SPLIT, VOCAB, inputs, sampler

ONE_IS = {0: np.nan, 3: np.nan, 7: np.inf, 8: np.inf}  # by row
ALL_ARE = {4: np.nan, 6: -np.inf}


@SPLIT
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_k": 5, "top_p": 0.9}], ids=str)
def test_a_broken_row_has_no_token_and_others_have_theirs(ranks: int, settings: dict):
    logits = np.random.default_rng(1).normal(0, 2, (ROWS, VOCAB)).astype(np.float32)
    logits[5, 1:] = -np.inf  # one token is possible: that is no fault
    spoilt = logits.copy()
    for row, value in ONE_IS.items():
        spoilt[row, (row * 331) % VOCAB] = value
    for row, value in ALL_ARE.items():
        spoilt[row] = value
    broken = [*ONE_IS, *ALL_ARE]
    asked = inputs(ROWS, lp=True, **settings)
    sound, found = (sampler(ranks)(x, asked) for x in (logits, spoilt))
    assert (found.token_ids[:, broken] == NO_TOKEN).all()
    kept = np.setdiff1d(np.arange(ROWS), broken)
    for expected, got in zip(sound, found, strict=True):
        np.testing.assert_array_equal(expected[:, kept], got[:, kept])
    assert (sound.token_ids >= 0).all() and sound.token_ids[0, 5] == 0
