"""KV on its way from all groups to one."""

import pytest

from conflux_jax.request import FinishReason
from tests.scheduler.harness import Harness


def handoffs(harness: Harness) -> list[list[tuple[int, int, int, int]]]:
    return [
        [(h.slot, h.group, h.first_page, h.num_pages) for h in p.handoffs] for p in harness.plans
    ]


def test_a_short_prompt_is_handed_over_with_its_last_chunk_and_decodes_next():
    harness = Harness(groups=2, page_tokens=4)
    harness.add("r", 13, 5)
    harness.run(2)
    first, second = harness.plans
    assert first.chunks[0].is_last and first.placements[0].pages == (2, 3, 4, 5)
    assert handoffs(harness) == [[(0, 0, 0, 4)], []]
    assert first.handoffs[0].num_tokens == 13
    assert [row.position for row in second.decodes[0]] == [13]
    assert harness.scheduler.load().free_pages == (60, 64)  # prefill pages went back at once
    harness.drain()


def test_a_long_one_takes_several_iterations():
    harness = Harness(groups=2, page_tokens=4, handoff_pages=3, max_num_batched_tokens=64)
    harness.add("r", 30, 4)
    harness.drain()
    assert handoffs(harness)[:4] == [[(0, 0, 0, 3)], [(0, 0, 3, 3)], [(0, 0, 6, 2)], []]
    assert [plan.bucket.handoff for plan in harness.plans[:4]] == [True, True, True, False]
    assert [plan.samples for plan in harness.plans] == [("r",), (), (), *[("r",)] * 3]


def test_the_limit_is_per_destination():
    harness = Harness(groups=2, page_tokens=4, handoff_pages=3, max_num_batched_tokens=64)
    for number in range(4):
        harness.add(f"r{number}", 8, 4)
    harness.drain()
    assert handoffs(harness)[:2] == [
        [(0, 0, 0, 2), (1, 1, 0, 2), (2, 0, 0, 1), (3, 1, 0, 1)],
        [(2, 0, 1, 1), (3, 1, 1, 1)],
    ]


@pytest.mark.parametrize("when", range(5))
def test_cancel_at_any_point_frees_all(when):
    harness = Harness(groups=3, page_tokens=4, handoff_pages=1, max_num_batched_tokens=12)
    harness.add("r", 20, 8)
    harness.run(when)
    harness.cancel("r")
    harness.audit()
    assert set(harness.scheduler.load().free_pages) == {64}
    harness.add("next", 20, 4)
    harness.drain()


def test_pages_on_their_way_are_not_given_to_the_same_plan():
    """Prefill pages are freed after the plan that hands the last of them over, not within it."""
    harness = Harness(groups=2, num_pages=9, page_tokens=4, max_num_batched_tokens=64)
    harness.add("a", 16, 4)  # 2 prefill pages, 4 decode pages
    harness.add("b", 16, 4)  # another 2 + 4 pages are not there on one group, but are on the other
    harness.add("c", 16, 4)  # and these are nowhere, before "a" and "b" give their 4 back
    harness.turn()
    assert [a.request.request_id for a in harness.plans[0].admissions] == ["a", "b"]
    harness.turn()
    harness.drain()
    assert {reason for reason in harness.ends.values()} == {FinishReason.LENGTH}
