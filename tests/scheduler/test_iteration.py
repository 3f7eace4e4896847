"""What one iteration holds: decodes, budget, chunks, shares, bucket."""

import pytest

from conflux_jax.plan import Bucket
from conflux_jax.request import FinishReason
from tests.scheduler.harness import Harness


def run_until(harness: Harness, done) -> None:
    for _ in range(10_000):
        if done():
            return
        harness.turn()
    raise AssertionError("never")


def loads(harness: Harness) -> list[int]:
    return [len(rows) for rows in harness.plans[-1].decodes]


def test_1140_tokens_over_40_10_10_0():
    """DESIGN's worked example: four groups with 40, 10, 10 and 0 decodes, a level of 300, and a
    prompt of 2,000 tokens."""
    harness = Harness(
        groups=4,
        num_pages=800,
        page_tokens=16,
        max_num_batched_tokens=1200,
        max_num_seqs=64,
        max_prefill_segments=16,
        handoff_pages=64,
    )
    # Large contexts keep the groups behind away from the small requests until it is their turn.
    for group in range(4):
        harness.add(f"block{group}", 900, 1000)
        run_until(harness, lambda group=group: len(harness.plans) and loads(harness)[group] == 1)
    for group, count in ((0, 40), (1, 10), (2, 10)):
        harness.cancel(f"block{group}")
        for number in range(count):
            harness.add(f"small{group}.{number}", 4, 1000)
        run_until(harness, lambda group=group, count=count: loads(harness)[group] == count)
    harness.cancel("block3")
    harness.add("long", 2000, 4)
    harness.turn()

    plan = harness.plans[-1]
    assert loads(harness) == [40, 10, 10, 0]
    assert [chunk.length for chunk in plan.chunks] == [1140]
    assert plan.prefill_shares == (260, 290, 290, 300)
    assert plan.bucket == Bucket(rows=300, decode_rows=64, prefill=True, handoff=True)
    harness.turn()
    plan = harness.plans[-1]
    (chunk,) = plan.chunks
    assert (chunk.start, chunk.length, chunk.is_last) == (1140, 860, True)
    # 860 + 60 rows over four groups: 230 each
    assert plan.prefill_shares == (190, 220, 220, 230)
    for number in range(60):
        group = 0 if number < 40 else 1 if number < 50 else 2
        harness.cancel(f"small{group}.{number - (0, 40, 50)[group]}")
    harness.drain()


def test_total_is_capped_too():
    """Levels alone would leave 12 + 16 tokens: one decode too many for 32 in all."""
    harness = Harness(groups=2, max_num_batched_tokens=31, num_pages=128)
    harness.add("a", 4, 50)
    harness.run(2)
    harness.add("b", 100, 2)
    harness.turn()
    assert loads(harness) == [1, 0] and harness.plans[-1].num_prefill_tokens == 30
    assert harness.plans[-1].prefill_shares == (15, 15)


def test_chunks_run_over_several_prompts():
    harness = Harness(max_num_batched_tokens=32)
    for request_id, length in (("a", 10), ("b", 40), ("c", 5), ("d", 3)):
        harness.add(request_id, length, 6)
    harness.turn()
    chunks = [(c.request_id, c.start, c.length, c.is_last) for c in harness.plans[0].chunks]
    assert chunks == [("a", 0, 10, True), ("b", 0, 22, False)]
    assert harness.plans[0].samples == ("a",)
    harness.turn()
    chunks = [(c.request_id, c.start, c.length, c.is_last) for c in harness.plans[1].chunks]
    # "a" decodes; the partly prefilled one goes first, then the others in order of arrival
    assert chunks == [("b", 22, 18, True), ("c", 0, 5, True), ("d", 0, 3, True)]
    assert harness.plans[1].samples == ("a", "b", "c", "d")
    assert harness.plans[1].bucket == Bucket(rows=32, decode_rows=8, prefill=True, handoff=False)
    harness.turn()
    assert harness.plans[2].bucket == Bucket(rows=4, decode_rows=4, prefill=False, handoff=False)
    harness.drain()


def test_segments_are_limited():
    harness = Harness(max_num_batched_tokens=32, max_prefill_segments=2)
    for number in range(5):
        harness.add(f"r{number}", 3, 2)
    harness.run(3)
    assert [len(plan.chunks) for plan in harness.plans] == [2, 2, 1]
    harness.drain()


def test_prefill_waits_where_decodes_use_the_whole_budget():
    harness = Harness(max_num_batched_tokens=4, max_num_seqs=8)
    for number in range(4):
        harness.add(f"r{number}", 4, 30)
    run_until(harness, lambda: harness.plans and loads(harness) == [4])
    harness.add("late", 4, 2)
    full = len(harness.plans)
    run_until(harness, lambda: loads(harness) == [3])  # the first has ended
    plans = harness.plans[full:]
    assert len(plans) > 3 and not any(plan.chunks for plan in plans[:-1])
    assert [chunk.length for chunk in plans[-1].chunks] == [1]
    harness.drain()


def test_lowest_free_slot_first():
    harness = Harness(max_num_seqs=3)
    for number in range(4):
        harness.add(f"r{number}", 4, 20)
    harness.turn()
    assert [a.slot for a in harness.plans[0].admissions] == [0, 1, 2]
    harness.cancel("r1")
    harness.turn()
    (admission,) = harness.plans[1].admissions
    assert admission.slot == 1 and admission.request.request_id == "r3"
    harness.drain()


def test_one_output_token_needs_neither_placement_nor_handoff():
    for groups in (1, 3):
        harness = Harness(groups=groups)
        harness.add("r", 40, 1)
        harness.drain()
        assert len(harness.plans) == 2
        assert not any(plan.placements or plan.handoffs for plan in harness.plans)
        assert len(harness.tokens["r"]) == 1


def test_one_group_changes_pages_over_without_a_copy():
    harness = Harness(page_tokens=4)
    harness.add("r", 8, 6)
    harness.run(2)
    first, second = harness.plans
    pages = first.placements[0].pages
    assert pages == first.admissions[0].prefill_pages[0] and list(pages) == [0, 1]
    assert not first.handoffs
    (row,) = second.decodes[0]  # in the very next iteration; token 8 opens a page
    assert (row.position, row.new_page) == (8, 2)
    harness.drain()


def test_pages_open_when_a_decode_reaches_them():
    harness = Harness(page_tokens=4)
    harness.add("r", 6, 8)
    harness.drain()
    rows = [row for plan in harness.plans for row in plan.decodes[0]]
    assert [(row.position, row.new_page) for row in rows] == [
        (6, -1), (7, -1), (8, 2), (9, -1), (10, -1), (11, -1), (12, 3),
    ]  # fmt: skip


def test_a_length_finish_wastes_no_row_and_gives_its_slot_to_the_next():
    harness = Harness(max_num_seqs=1)
    harness.add("a", 4, 3)
    harness.add("b", 4, 3)
    harness.drain()
    assert [plan.samples for plan in harness.plans] == [("a",)] * 3 + [("b",)] * 3


def test_a_late_stop_costs_one_row_and_no_event():
    harness = Harness()
    request = harness.add("r", 5, 60, ignore_eos=False)
    harness.drain()
    tokens = harness.tokens["r"]
    assert tokens[-1] in request.eos_token_ids and harness.ends["r"] is FinishReason.STOP
    assert sum(plan.samples.count("r") for plan in harness.plans) == len(tokens) + 1


def test_an_id_may_come_again_while_its_last_result_is_on_its_way():
    harness = Harness()
    harness.add("r", 5, 9)
    harness.run(3)
    harness.cancel("r")  # a row of it is on the device
    harness.add("r", 7, 9)
    harness.drain()
    assert len(harness.tokens["r"]) == 9


def test_load_counts_what_there_is():
    harness = Harness(groups=2, num_pages=32, max_num_batched_tokens=16)
    harness.add("a", 10, 9)
    harness.add("b", 20, 9)
    harness.add("c", 5, 9)
    harness.turn()
    load = harness.scheduler.load()
    # "a" was prefilled, "b" has 6 of its tokens, and with one chunk to come it has its group.
    assert load.num_decodes == (1, 1) and load.context_tokens == (10, 20)
    assert load.num_prefilling == 1 and load.num_waiting == 1
    assert load.prefill_tokens == 20 - 6 + 5
    # "a" was handed over, and gave back 2 of each; "b" has 3 of each, and 5 of its group.
    assert load.free_pages == (32 - 3 - 3, 32 - 3 - 5)
    harness.drain()


def test_a_commit_out_of_order_is_refused():
    harness = Harness()
    harness.add("r", 4, 4)
    plans = [plan for _ in range(2) if (plan := harness.scheduler.schedule(0.0)) is not None]
    outputs = [harness.executor.collect(harness.executor.launch(plan)) for plan in plans]
    with pytest.raises(ValueError, match="iteration 1 committed, 0 is the oldest"):
        harness.scheduler.commit(plans[1], outputs[1], 0.0)
    with pytest.raises(ValueError, match="0 tokens came back for 1 samples"):
        harness.scheduler.commit(plans[0], type(outputs[0])(outputs[0].token_ids[:0], 0.0), 0.0)
    for plan, output in zip(plans, outputs, strict=True):
        assert len(harness.scheduler.commit(plan, output, 0.0)) == 1
