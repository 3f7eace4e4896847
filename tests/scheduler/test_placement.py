import pytest

from conflux_jax.scheduler.placement import choose_group
from tests.scheduler.harness import Harness


@pytest.mark.parametrize(
    ("context", "rows", "free", "pages", "group"),
    [
        ((900, 300, 500), (1, 1, 1), (9, 9, 9), 4, 1),  # least context
        ((300, 300, 300), (1, 1, 1), (9, 9, 9), 4, 0),  # ties: lowest index
        ((900, 300, 500), (1, 8, 1), (9, 9, 9), 4, 2),  # no row in group 1
        ((900, 300, 500), (1, 1, 1), (9, 3, 9), 4, 2),  # no pages in group 1
        ((900, 300, 500), (1, 8, 1), (9, 9, 3), 4, 0),
        ((900, 300, 500), (8, 8, 8), (9, 9, 9), 4, -1),
        ((900, 300, 500), (1, 1, 1), (3, 3, 3), 4, -1),
        ((900, 300, 500), (1, 1, 1), (0, 0, 0), 0, 1),
    ],
)
def test_choice(context, rows, free, pages, group):
    assert choose_group(context, rows, 8, free, pages) == group


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
