import doctest
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conflux_jax.scheduler import buckets, memory, page_pool, placement, waterfill
from conflux_jax.scheduler.buckets import Ladders, ladder


@pytest.mark.parametrize("module", [buckets, memory, page_pool, placement, waterfill])
def test_docstrings(module):
    assert doctest.testmod(module).failed == 0


@given(st.integers(1, 40), st.integers(1, 5000), st.sampled_from((1.01, 1.125, 1.5, 2.0, 8.0)))
def test_ladder_rises_to_its_top_in_bounded_steps(low, high, growth):
    sizes = ladder(low, high, growth)
    assert sizes[0] == min(low, high) and sizes[-1] == high
    for small, large in itertools.pairwise(sizes):
        assert small < large <= max(small * growth, small + 8, 8)
        assert large == high or large % 8 == 0 or large < 8


sizes = st.none() | st.sets(st.integers(1, 900), min_size=1).map(lambda s: tuple(sorted(s)))
choices = st.fixed_dictionaries(
    {
        "max_decodes": st.integers(1, 300),
        "level": st.integers(1, 600),
        "growth": st.sampled_from((1.125, 1.5, 2.0)),
        "handoff": st.booleans(),
        "rows": sizes,
        "decode_rows": sizes,
    }
)


@given(choices, st.data())
def test_every_pick_is_compiled_and_holds_what_it_must(given_settings, data):
    made = Ladders.make(**given_settings)
    decodes = data.draw(st.integers(0, made.max_decodes))
    rows = data.draw(st.integers(max(1, decodes), made.rows[-1]))
    prefill, handoff = data.draw(st.booleans()), made.handoff and data.draw(st.booleans())
    bucket = made.pick(decodes, rows, prefill, handoff)
    assert bucket in made.all()
    assert bucket.prefill == prefill and bucket.handoff >= handoff
    assert decodes <= bucket.decode_rows <= bucket.rows
    assert bucket.rows >= (rows if prefill else decodes)


@given(st.integers(1, 300), st.integers(1, 600), st.sampled_from((1.125, 1.5, 2.0)), st.data())
def test_waste_is_bounded(max_decodes, level, growth, data):
    """A decode iteration runs at most `growth` times its rows (or 8 more, or twice below 8)."""
    made = Ladders.make(max_decodes, level, growth, handoff=False)
    decodes = data.draw(st.integers(1, max_decodes))
    rows = made.pick(decodes, 0, prefill=False, handoff=False).rows
    assert rows <= max(decodes * growth, decodes + 8) or rows <= min(8, 2 * decodes)
    total = data.draw(st.integers(buckets.MIN_PREFILL_ROWS, max(buckets.MIN_PREFILL_ROWS, level)))
    if total <= made.rows[-1]:
        rows = made.pick(0, total, prefill=True, handoff=False).rows
        assert rows <= max(total * growth, total + 8)


def test_all_has_no_repeats_and_few_variants():
    made = Ladders.make(max_decodes=32, level=171, growth=2.0, handoff=True)
    assert len(set(made.all())) == len(made.all()) <= 40
