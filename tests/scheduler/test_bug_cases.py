"""Reports against other engines (`bug-cases.md`), as far as they are the scheduler's, by number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conflux_jax.request import FinishReason, InvalidRequest, OutOfRange, SamplingParams
from tests.scheduler.checker import solo
from tests.scheduler.harness import Harness, make_request


def turns_to_first_token(harness: Harness, request_id: str) -> int:
    for turns in range(1, 1000):
        if any(event.request_id == request_id for event in harness.turn()):
            return turns
    raise AssertionError("no token")


@pytest.mark.parametrize("groups", [1, 2])
def test_1_a_prompt_larger_than_the_pool_is_refused_and_the_next_is_served(groups):
    harness = Harness(groups=groups, num_pages=64, page_tokens=16, max_num_batched_tokens=512)
    most = harness.geometry.max_request_tokens
    assert most == (1024 if groups == 1 else 672)
    with pytest.raises(OutOfRange, match=f"1500 tokens can never fit.*{most} tokens"):
        harness.scheduler.output_limit(1500, 16)
    with pytest.raises(OutOfRange, match=f"1500 tokens can never fit.*{most} tokens"):
        harness.scheduler.add(make_request("a", 1500, 16))
    harness.add("b", 32, 16)
    harness.add("fills", most, harness.scheduler.output_limit(most, 16))
    harness.drain()
    assert len(harness.tokens["b"]) == 16 and len(harness.tokens["fills"]) == 1
    with pytest.raises(OutOfRange):
        harness.scheduler.output_limit(most + 1, 1)


def test_2_light_requests_pass_a_heavy_one_which_is_served_later():
    harness = Harness(num_pages=1050, page_tokens=1, max_num_batched_tokens=512)
    harness.add("running", 990, 40)
    harness.run(12)
    assert harness.scheduler.load().free_pages[0] <= 50
    harness.add("heavy", 1000, 2)
    harness.add("light", 10, 2)
    harness.add("lighter", 10, 2)
    harness.drain()
    order = [a.request.request_id for plan in harness.plans for a in plan.admissions]
    assert order == ["running", "light", "lighter", "heavy"]


def test_2_the_heavy_one_is_not_starved():
    """Light requests without end; the bound of 5 lets the heavy one in after five of them."""
    harness = Harness(num_pages=100, page_tokens=1, max_bypass=5, max_num_seqs=8)
    harness.add("running", 60, 4)
    harness.run(3)
    harness.add("heavy", 90, 2)
    for number in range(60):
        harness.add(f"light{number}", 4, 2)
    harness.drain()
    order = [a.request.request_id for plan in harness.plans for a in plan.admissions]
    assert order.index("heavy") == 6


@pytest.mark.parametrize("groups", [1, 4])
def test_6_cancel_in_the_third_chunk_of_a_long_prompt(groups):
    harness = Harness(
        groups=groups,
        num_pages=4400,
        page_tokens=16,
        max_model_len=40_000,
        max_num_batched_tokens=512,
    )
    harness.add("long", 32_768, 16)
    harness.add("behind", 32, 4)
    harness.run(3)
    assert harness.plans[2].chunks[0].start == 1024
    assert harness.cancel("long") and not harness.cancel("long")
    assert set(harness.scheduler.load().free_pages) == {4400}
    harness.turn()
    assert [chunk.request_id for chunk in harness.plans[3].chunks] == ["behind"]
    harness.drain()
    assert harness.tokens["long"] == []


def test_6_cancel_between_the_last_chunk_and_the_end_of_its_handoff():
    harness = Harness(groups=4, page_tokens=4, handoff_pages=1, max_num_batched_tokens=16)
    harness.add("r", 32, 16)
    harness.run(4)
    assert harness.plans[1].chunks[0].is_last and harness.plans[3].handoffs
    assert harness.cancel("r")
    assert set(harness.scheduler.load().free_pages) == {64}
    before = len(harness.tokens["r"])
    harness.add("next", 32, 4)
    harness.drain()
    assert len(harness.tokens["r"]) == before


def test_7_a_client_that_goes_after_its_first_token_leaves_nothing():
    settings: dict[str, Any] = {"groups": 2, "num_pages": 9000, "max_model_len": 9000}
    settings["max_num_seqs"] = 1
    idle, harness = Harness(**settings), Harness(**settings)
    idle.add("next", 20, 4)
    expected = turns_to_first_token(idle, "next")
    harness.add("gone", 20, 8192)
    turns_to_first_token(harness, "gone")
    harness.cancel("gone")
    assert set(harness.scheduler.load().free_pages) == {9000}
    harness.add("next", 20, 4)
    assert turns_to_first_token(harness, "next") == expected
    harness.drain()


def test_10_one_token_over_the_limit_leaves_nothing():
    harness = Harness(max_model_len=33)
    before = harness.scheduler.load()
    for _ in range(100):
        with pytest.raises(OutOfRange, match="33 tokens leave no room for output: max_model_len"):
            harness.scheduler.add(make_request("r", 33, 1))
    assert harness.scheduler.load() == before and harness.scheduler.schedule(0.0) is None
    harness.add("r", 32, 1)
    harness.drain()


def test_13_37_running_on_four_groups_equal_alone():
    harness = Harness(
        groups=4, num_pages=512, page_tokens=4, max_num_seqs=64, max_num_batched_tokens=96
    )
    for number in range(37):
        harness.add(f"r{number}", 3 + number % 7, 24)
    most = 0
    while harness.scheduler.has_work:
        harness.turn()
        most = max(most, sum(harness.scheduler.load().num_decodes))
    assert most == 37
    harness.drain()


@pytest.mark.parametrize("groups", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 3, 33])  # 33: a last chunk of one token
def test_13_few_tokens_over_many_groups_equal_alone(groups, length):
    harness = Harness(groups=groups, max_num_batched_tokens=32)
    harness.add("r", length, 12)
    harness.drain()
    assert sum(harness.plans[0].prefill_shares) == min(length, 32)
    if length == 33:
        assert [p.chunks[0].length for p in harness.plans[:2]] == [32, 1]
        assert sorted(harness.plans[1].prefill_shares) == [0] * (groups - 1) + [1]


def test_21_ignore_eos_goes_on_to_max_tokens():
    harness = Harness(num_pages=128)
    request = make_request("r", 6, 200)
    tokens = solo(request)
    eos = frozenset((tokens[9],))
    harness.add("r", request.prompt_token_ids, 200, eos=eos)
    harness.add("stops", request.prompt_token_ids, 200, ignore_eos=False, eos=eos)
    harness.drain()
    assert len(harness.tokens["r"]) == 200 and harness.ends["r"] is FinishReason.LENGTH
    assert tuple(harness.tokens["stops"]) == tokens[: tokens.index(tokens[9]) + 1]
    assert harness.ends["stops"] is FinishReason.STOP


def test_28_empty_zero_and_exact():
    harness = Harness(max_model_len=20)
    with pytest.raises(InvalidRequest, match="prompt"):
        harness.scheduler.add(make_request("r", []))
    with pytest.raises(InvalidRequest, match="max_tokens"):
        SamplingParams(max_tokens=0)
    with pytest.raises(InvalidRequest, match="max_tokens"):
        harness.scheduler.add(replace(make_request("r", 4), max_output_tokens=0))
    with pytest.raises(OutOfRange, match="max_model_len is 20"):
        harness.scheduler.add(make_request("r", 20, 1))
    harness.add("r", 19, 1)
    harness.drain()
