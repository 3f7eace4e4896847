"""Many short lives under memory pressure, for paths that the state machine seldom reaches."""

from __future__ import annotations

import random

import pytest

from conflux_jax.request import OutOfRange
from tests.scheduler.harness import Harness


def draw_harness(draw: random.Random, groups: int, shared: bool) -> Harness:
    page_tokens = draw.choice((1, 2, 4))
    return Harness(
        groups=groups,
        num_pages=draw.randint(8, 20),
        page_tokens=page_tokens,
        prefill_page_tokens=page_tokens * draw.randint(1, groups),
        max_model_len=draw.choice((24, 60)),
        max_decodes=draw.randint(2, 8) if groups > 1 else None,
        max_num_seqs=draw.randint(4, 16),
        max_num_batched_tokens=draw.randint(12, 48),
        max_prefill_segments=draw.randint(1, 4),
        handoff_pages=draw.randint(1, 6),
        max_bypass=draw.randint(0, 4),
        shared=shared,
    )


def live(seed: int, groups: int, shared: bool = False) -> Harness:
    """Arrivals in bursts, a few cancels and stops, then everything to its end."""
    draw = random.Random(seed)
    harness = draw_harness(draw, groups, shared)
    ignore_eos, longest = draw.random(), draw.choice((4, 16))
    for number in range(draw.randint(4, 24)):
        length, max_tokens = draw.randint(1, longest), draw.randint(1, 40)
        try:
            allowed = harness.scheduler.output_limit(length, max_tokens)
        except OutOfRange:
            continue
        harness.add(f"r{number}", length, allowed, ignore_eos=draw.random() < ignore_eos)
        if draw.random() < 0.3:
            harness.run(draw.randint(1, 8))
            harness.audit()
        if draw.random() < 0.15:
            harness.cancel(f"r{draw.randint(0, number)}")
        stoppable = [r for r, tokens in harness.tokens.items() if tokens and r not in harness.ends]
        if stoppable and draw.random() < 0.15:
            harness.stop(draw.choice(stoppable))
    harness.drain()
    return harness


@pytest.mark.parametrize(
    ("groups", "shared"), [(1, False), (2, False), (3, False), (4, False), (3, True)]
)
def test_everything_ends_with_its_solo_tokens(groups, shared):
    """shared: decode attention is spread over the groups, which have one free list of pages."""
    lives = (live(seed, groups, shared) for seed in range(80))
    preemptions = sum(life.scheduler.load().num_preemptions for life in lives)
    assert preemptions > 30, "pressure is what this test is about"


@pytest.mark.parametrize("groups", [1, 3])
def test_same_inputs_give_same_plans(groups):
    for seed in range(5):
        assert live(seed, groups).plans == live(seed, groups).plans
