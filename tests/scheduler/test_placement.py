import pytest

from conflux_jax.scheduler.placement import choose_group
from tests.scheduler.harness import Harness

ALL = (True, True, True)


@pytest.mark.parametrize(
    ("context", "can_hold", "tokens", "iterations", "group"),
    [
        ((900, 300, 500), ALL, 700, (1, 1, 1), 1),  # least context
        ((300, 300, 300), ALL, 9, (1, 1, 1), 0),  # ties: lowest index
        ((900, 300, 500), (True, False, True), 700, (1, 1, 1), 2),  # no row or pages in group 1
        ((900, 300, 500), (True, False, False), 9, (1, 1, 1), 0),
        ((900, 300, 500), (False, False, False), 9, (1, 1, 1), -1),
        # Neither group 1 nor 2 would set the pace: where pages arrive first, then least context
        ((900, 300, 500), ALL, 400, (1, 2, 1), 2),
        ((900, 300, 500), ALL, 400, (1, 2, 2), 1),
        ((900, 300, 500), ALL, 401, (1, 2, 1), 1),  # group 2 would, by one token
        ((900, 300, 500), ALL, 601, (1, 3, 1), 1),  # all would
        ((300, 300, 300), ALL, 9, (3, 2, 1), 0),
    ],
)
def test_choice(context, can_hold, tokens, iterations, group):
    assert choose_group(context, can_hold, tokens, iterations) == group


def test_short_of_memory_the_fullest_group_that_can_hold_it():
    free = (40, 9, 12)
    assert choose_group((1, 900, 500), ALL, 50, (1, 1, 1), packed=free) == 1
    assert choose_group((1, 900, 500), (True, False, True), 50, (1, 1, 1), packed=free) == 2
    assert choose_group((1, 900, 500), (False,) * 3, 50, (1, 1, 1), packed=free) == -1


def test_past_the_threshold_free_pages_stay_together():
    """Two groups of 64 pages of 4 tokens. Prompts of 130 tokens take more than half on each. By
    context the next two of 20 tokens would be one on each group; with a threshold of half the pages
    in use, both go to one group, and the other keeps all it had."""
    for threshold, together in ((1.0, False), (0.5, True)):
        harness = Harness(
            groups=2, max_num_batched_tokens=64, packing_threshold=threshold, handoff_pages=64
        )
        for request_id, length in (("a", 130), ("b", 130)):
            harness.add(request_id, length, 30)
        harness.run(8)
        for request_id in ("c", "d"):
            harness.add(request_id, 20, 6)
        harness.run(3)
        a, b, c, d = (p.group for plan in harness.plans for p in plan.placements)
        assert a != b and (c == d) == together
        harness.drain()


def test_requests_spread_by_context():
    harness = Harness(groups=3, max_num_batched_tokens=96)
    for request_id, length in (("long", 20), ("short", 4), ("middle", 9), ("next", 5)):
        harness.add(request_id, length, 8)
    harness.turn()
    groups = {p.slot: p.group for p in harness.plans[0].placements}
    # 20 | - | - then 20 | 4 | - then 20 | 4 | 9 then 20 | 4 + 5 | 9
    assert groups == {0: 0, 1: 1, 2: 2, 3: 1}
    harness.drain()


def test_a_group_without_a_free_row_is_passed_over():
    harness = Harness(groups=2, max_num_batched_tokens=64, max_decodes=1)
    for number in range(4):
        harness.add(f"r{number}", 4, 6)
    harness.turn()
    assert [p.group for p in harness.plans[0].placements] == [0, 1]  # the others wait for a row
    harness.drain()


def test_a_burst_goes_where_pages_arrive_first():
    """One long context sets the pace; three prompts of 4 pages need not queue for one group."""
    harness = Harness(groups=3, max_num_batched_tokens=96, handoff_pages=4)
    harness.add("pace", 90, 30)
    harness.run(8)
    for number in range(3):
        harness.add(f"r{number}", 16, 4)
    harness.turn()
    placed = [p.group for p in harness.plans[-1].placements]
    assert placed == [1, 2, 1]
    assert [h.group for h in harness.plans[-1].handoffs] == [1, 2]
    harness.drain()
