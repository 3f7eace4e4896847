"""Head layouts: every query head exactly once, beside its own KV head, on every mesh."""

import dataclasses
from collections import Counter

import pytest

from conflux_jax.models.heads import ZERO, HeadLayout
from conflux_jax.models.spec import ModelError, ModelSpec

SPEC = ModelSpec("m", 64, 64, 240, 1, 9, 3, 16, 1e-5, 1e4, 128, True)


def layout(num_heads, num_kv_heads, groups, tp=1):
    spec = dataclasses.replace(SPEC, num_heads=num_heads, num_kv_heads=num_kv_heads)
    return HeadLayout.make(spec, groups, tp)


@pytest.mark.parametrize("heads", [(9, 3), (8, 4), (8, 2), (4, 4), (6, 1), (40, 8)])
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_query_head_has_one_place_beside_its_kv_head(heads, groups, tp):
    num_heads, num_kv_heads = heads
    made = layout(num_heads, num_kv_heads, groups, tp)
    devices = groups * tp
    assert len(made.kv_source) == devices * made.kv_per_device
    assert len(made.q_source) == devices * made.q_per_device
    counted = Counter(q for q in made.q_source if q != ZERO)
    assert counted == Counter(range(num_heads))
    for place, query in enumerate(made.q_source):
        if query != ZERO:
            assert made.kv_source[place // made.q_per_kv] == query // (num_heads // num_kv_heads)
    # Replicas of a KV head are neighbours in a rank, so that decode takes every replicas-th.
    per_rank = groups * made.kv_per_device
    for first in range(0, per_rank, made.replicas):
        assert len(set(made.kv_source[first : first + made.replicas])) == 1
    # A page has the same rows in both layouts.
    prefill_tokens = made.prefill_page_tokens(16)
    assert prefill_tokens * made.kv_per_device == 16 * made.kv_per_rank


def test_worked_layouts():
    assert layout(9, 3, 3).kv_source == (0, 1, 2)
    assert layout(9, 3, 2).kv_source == (0, 1, 2, ZERO)
    scarce = layout(8, 2, 4)
    assert scarce.kv_source == (0, 0, 1, 1)
    assert scarce.q_source == tuple(range(8))
    assert (scarce.kv_per_rank, scarce.prefill_page_tokens(16)) == (2, 32)
    assert layout(9, 3, 1).prefill_page_tokens(16) == 16  # one group: both layouts are the same


def test_what_cannot_be_split_names_the_rule():
    with pytest.raises(ModelError, match="multiple of num_key_value_heads"):
        layout(9, 2, 1)
    with pytest.raises(ModelError, match="tp=7 must divide intermediate_size"):
        layout(8, 2, 1, tp=7)
