"""What is refused on arrival, and that a refusal leaves nothing behind."""

from dataclasses import replace

import pytest

from conflux_jax.request import InvalidRequest, OutOfRange, QueueFull
from conflux_jax.scheduler.buckets import Ladders
from conflux_jax.scheduler.scheduler import Scheduler
from tests.scheduler.harness import Harness, make_request


def test_output_limit_is_capped_by_context_and_pool():
    limit = Harness(num_pages=64, page_tokens=16, max_model_len=4096).scheduler.output_limit
    assert limit(1000, 10) == 10
    assert limit(1000, None) == limit(1000, 500) == 25  # KV of 1,000 + 24 tokens fills 1,024
    assert limit(1024, None) == 1
    limit = Harness(num_pages=640, page_tokens=16, max_model_len=4096).scheduler.output_limit
    assert limit(4000, None) == 96 and limit(4095, 7) == 1


def test_output_limit_counts_both_layouts_where_kv_is_handed_over():
    # 12 pages, prefill pages of 8 tokens and decode pages of 4: 32 tokens need 4 + 8 pages.
    limit = Harness(groups=2, num_pages=12, page_tokens=4).scheduler.output_limit
    assert limit(32, None) == 1 and limit(30, None) == 3
    with pytest.raises(OutOfRange, match="at most 32 tokens"):
        limit(33, None)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error", "words"),
    [
        (0, 4, InvalidRequest, "prompt: must have at least one token"),
        (4, 0, InvalidRequest, "max_tokens: must be at least 1, got 0"),
        (100, 1, OutOfRange, "prompt: 100 tokens leave no room.*max_model_len is 100"),
        (65, 1, OutOfRange, "prompt: 65 tokens can never fit the KV pool.*64"),
        (64, 2, OutOfRange, "max_tokens: 2 after a prompt of 64 tokens; at most 1"),
    ],
)
def test_refusals_name_field_and_limit_and_change_nothing(prompt, max_tokens, error, words):
    harness = Harness(num_pages=16, page_tokens=4, max_model_len=100)
    before = harness.scheduler.load()
    with pytest.raises(error, match=words):
        harness.scheduler.add(replace(make_request("r", prompt), max_output_tokens=max_tokens))
    assert harness.scheduler.load() == before
    assert not harness.scheduler.has_work and harness.scheduler.schedule(0.0) is None


def test_an_id_is_in_use_until_its_request_ends():
    harness = Harness()
    harness.add("r", 4, 2)
    with pytest.raises(InvalidRequest, match=r"request_id.*'r' is in use"):
        harness.scheduler.add(make_request("r", 4))
    harness.drain()
    harness.add("r", 4, 2)
    harness.drain()


def test_a_full_queue_refuses_new_ones_only():
    harness = Harness(max_waiting=2, max_num_seqs=1)
    harness.add("a", 4, 4)
    harness.turn()  # out of the queue
    harness.add("b", 4, 4)
    harness.add("c", 4, 4)
    with pytest.raises(QueueFull, match="max_waiting: 2"):
        harness.scheduler.add(make_request("d", 4))
    harness.cancel("b")
    harness.add("d", 4, 4)
    harness.drain()


@pytest.mark.parametrize(
    ("max_num_seqs", "max_decodes", "level", "handoff"),
    [(8, 8, 16, False), (8, 8, 32, True), (8, 4, 32, False)],
)
def test_ladders_of_another_engine_are_refused(max_num_seqs, max_decodes, level, handoff):
    harness = Harness(max_num_seqs=max_num_seqs)
    ladders = Ladders.make(max_decodes, level, 2.0, handoff)
    with pytest.raises(ValueError, match=r"ladder|row"):
        Scheduler(harness.config, harness.geometry, ladders, 100)
