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
    assert first.chunks[0].is_last and list(first.placements[0].pages) == [2, 3, 4, 5]
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


def in_chunks(length: int, chunk: int, handoff_pages: int) -> Harness:
    """A prompt alone on two groups, pages of 4 tokens; served to its end."""
    harness = Harness(
        groups=2, num_pages=99, max_num_batched_tokens=chunk, handoff_pages=handoff_pages
    )
    harness.add("r", length, 3)
    harness.drain()
    return harness


def pages_handed(harness: Harness) -> list[int]:
    return [sum(h.num_pages for h in plan.handoffs) for plan in harness.plans]


def last_chunk(harness: Harness) -> int:
    return next(i for i, p in enumerate(harness.plans) if any(c.is_last for c in p.chunks))


def test_it_starts_one_chunk_before_the_last():
    """30 tokens in chunks of 8: full pages go with the third chunk, and the fourth, of 6 tokens,
    takes the last two; the prompt decodes in the next iteration."""
    harness = in_chunks(length=30, chunk=8, handoff_pages=8)
    assert [len(plan.placements) for plan in harness.plans[:4]] == [0, 0, 1, 0]
    assert handoffs(harness)[:5] == [[], [], [(0, 0, 0, 6)], [(0, 0, 6, 2)], []]
    assert [len(plan.decodes[0]) for plan in harness.plans] == [0, 0, 0, 0, 1, 1]


def test_a_page_waits_for_its_last_token():
    """Chunks of 6 cut pages of 4: after 6 and 12 tokens one and three pages are full."""
    harness = in_chunks(length=17, chunk=6, handoff_pages=8)
    assert pages_handed(harness)[:3] == [0, 3, 2]  # placed with the second of three chunks
    harness = in_chunks(length=11, chunk=6, handoff_pages=8)
    assert pages_handed(harness)[:2] == [1, 2]


@pytest.mark.parametrize(
    ("length", "chunk", "handoff_pages"),
    [(80, 8, 3), (80, 8, 2), (200, 8, 2), (201, 9, 3), (79, 16, 4), (33, 32, 8), (4, 1, 1)],
)
def test_a_long_prompt_starts_so_early_that_its_last_chunk_completes_it(
    length, chunk, handoff_pages
):
    """An iteration can carry a chunk's pages, and so a prompt of any length decodes right after
    its last chunk; and its group is bound only as early as that needs, and one chunk for slack."""
    harness = in_chunks(length, chunk, handoff_pages)
    last, moved = last_chunk(harness), pages_handed(harness)
    assert sum(moved) == sum(moved[: last + 1]) == -(-length // 4)
    assert harness.plans[last + 1].samples == ("r",)
    (placed,) = [i for i, plan in enumerate(harness.plans) if plan.placements]
    needed = -(-sum(moved) // handoff_pages)
    assert placed == max(0, last - needed)


@pytest.mark.parametrize(("length", "chunk", "handoff_pages"), [(96, 32, 3), (100, 48, 2)])
def test_where_chunks_outrun_the_handoff_it_starts_at_once_and_never_pauses(
    length, chunk, handoff_pages
):
    moved = pages_handed(in_chunks(length, chunk, handoff_pages))
    full, rest = divmod(length // 4, handoff_pages)
    assert moved[: full + (rest > 0)] == [handoff_pages] * full + [rest] * (rest > 0)
    assert not any(moved[full + (rest > 0) :])


def test_one_that_waits_to_decode_goes_before_one_that_is_prefilled():
    """Both in the group that does not set the pace, two pages an iteration, chunks of 15 tokens:
    "second" is placed with its first chunk, and its three full pages wait for "first"."""
    harness = Harness(groups=2, num_pages=99, max_num_batched_tokens=16, handoff_pages=2)
    harness.add("pace", 90, 40)
    while not sum(len(rows) for plan in harness.plans for rows in plan.decodes):
        harness.turn()
    start = len(harness.plans)
    harness.add("first", 15, 9)
    harness.add("second", 40, 9)
    harness.run(3)
    slots = {a.slot: a.request.request_id for a in harness.plans[start].admissions}
    slots |= {a.slot: a.request.request_id for a in harness.plans[start + 1].admissions}
    plans = harness.plans[start:]
    moved = [[(slots[h.slot], h.group, h.num_pages) for h in plan.handoffs] for plan in plans]
    assert moved == [[("first", 1, 2)], [("first", 1, 2)], [("second", 1, 2)]]
    assert [len(plan.placements) for plan in plans] == [1, 1, 0]
    harness.drain()


def test_one_output_token_is_never_placed_early():
    harness = Harness(groups=2, max_num_batched_tokens=8)
    harness.add("r", 40, 1)
    harness.drain()
    assert not any(plan.placements or plan.handoffs for plan in harness.plans)
