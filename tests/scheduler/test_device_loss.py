"""What is left of the requests when the devices lose what they had."""

from __future__ import annotations

import pytest

from conflux_jax.request import FinishReason
from tests.scheduler.checker import CheckingExecutor
from tests.scheduler.harness import Harness


def lose(harness: Harness) -> list[str]:
    """All memory and what is under way; an empty device goes on."""
    ids = harness.scheduler.lose_device_state()
    for request_id in ids:
        harness.ends[request_id] = FinishReason.ABORT  # what came is a prefix
    fresh = CheckingExecutor(harness.config, harness.geometry, harness.ladders)
    fresh.plans += harness.plans
    fresh._collected = len(fresh.plans)
    harness.executor, harness._previous = fresh, None
    return ids


@pytest.mark.parametrize("groups", [1, 2])
def test_those_of_the_step_end_and_others_begin_again(groups: int):
    """Prompts of 200 and 40 tokens, 32 an iteration and one prompt in each: the shorter one goes
    first as soon as it is there, and the longer one keeps the pages of its first chunk."""
    harness = Harness(groups=groups, num_pages=256, ordering="shortest", max_prefill_segments=1)
    harness.add("long", 200, 4)
    harness.turn()
    harness.add("short", 40, 4)
    harness.add("waits", 300, 4)
    harness.run(2)
    assert {chunk.request_id for chunk in harness.plans[-1].chunks} == {"short"}
    assert harness.scheduler.load().num_prefilling
    assert lose(harness) == ["short"]
    load = harness.scheduler.load()
    assert set(load.free_pages) == {256}
    assert (load.num_waiting, load.num_prefilling, sum(load.num_decodes)) == (2, 0, 0)
    harness.drain()
    assert [len(harness.tokens[name]) for name in ("long", "short", "waits")] == [4, 0, 4]


@pytest.mark.parametrize("groups", [1, 2])
def test_decodes_end_with_what_they_have(groups: int):
    harness = Harness(groups=groups, num_pages=256, max_num_seqs=3)
    for name in ("a", "b", "c", "d"):
        harness.add(name, 20, 12)
    harness.run(6)
    assert sorted(lose(harness)) == ["a", "b", "c"]
    assert set(harness.scheduler.load().free_pages) == {256}
    harness.drain()
    assert 0 < len(harness.tokens["a"]) < 12
    assert len(harness.tokens["d"]) == 12


def test_an_id_that_was_given_again_is_not_lost_with_the_old_one():
    harness = Harness(num_pages=256, max_num_seqs=1)
    harness.add("a", 20, 12)
    harness.run(3)
    harness.cancel("a")
    harness.add("a", 30, 5)
    assert lose(harness) == []
    harness.drain()
    assert len(harness.tokens["a"]) == 5
