"""Too little memory: who waits, who is overtaken, who gives its pages up."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from conflux_jax.plan import StepOutput
from conflux_jax.request import FinishReason
from conflux_jax.scheduler.scheduler import Scheduler
from conflux_jax.scheduler.state import Phase
from tests.scheduler.harness import Harness


def admitted(harness: Harness) -> list[str]:
    return [a.request.request_id for plan in harness.plans for a in plan.admissions]


def states(scheduler: Scheduler):
    return scheduler._requests


def test_light_ones_pass_a_heavy_one_but_not_for_ever():
    harness = Harness(num_pages=64, page_tokens=4, max_bypass=3, max_num_batched_tokens=64)
    harness.add("running", 100, 60)  # 25 pages, 40 at its end
    harness.run(3)
    harness.add("heavy", 160, 8)  # 40 pages: not before "running" ends
    for number in range(8):
        harness.add(f"light{number}", 4, 2)
    harness.drain()
    order = admitted(harness)
    assert order[:5] == ["running", "light0", "light1", "light2", "heavy"]


def test_no_bypass_is_strict_order():
    harness = Harness(num_pages=64, page_tokens=4, max_bypass=0)
    for request_id, length in (("a", 100), ("b", 160), ("c", 4)):
        harness.add(request_id, length, 8)
    harness.drain()
    assert admitted(harness) == ["a", "b", "c"]
    # "c" was in no plan before all of "b" was prefilled
    first = next(i for i, p in enumerate(harness.plans) if "c" in p.samples)
    assert any(
        c.request_id == "b" and c.is_last for p in harness.plans[: first + 1] for c in p.chunks
    )


def test_looking_ahead_is_bounded():
    harness = Harness(num_pages=64, page_tokens=4, max_bypass=4)
    harness.add("running", 200, 30)  # 50 pages
    harness.run(8)
    for number in range(5):
        harness.add(f"heavy{number}", 160, 2)
    harness.add("light", 4, 2)  # the fifth behind the first: beyond the view
    harness.turn()
    assert "light" not in admitted(harness)
    harness.cancel("heavy3")
    harness.turn()
    assert "light" in admitted(harness)
    harness.drain()


def test_admissions_do_not_count_on_the_same_pages():
    """Each needs 3 + 6 pages of one group; with 14 pages the groups can promise two, not three."""
    harness = Harness(groups=2, num_pages=14, page_tokens=4, max_num_batched_tokens=128)
    for number in range(3):
        harness.add(f"r{number}", 23, 2)
    harness.turn()
    assert admitted(harness) == ["r0", "r1"]
    assert len(harness.plans[0].placements) == 2
    harness.drain()
    assert harness.scheduler.load().num_preemptions == 0


def test_the_youngest_gives_way_and_goes_on_token_for_token():
    harness = Harness(num_pages=10, page_tokens=2)
    harness.add("old", 4, 14)
    harness.add("young", 4, 14)
    harness.drain()  # compares with the plain answers
    assert admitted(harness) == ["old", "young", "young"]
    second = [a for plan in harness.plans for a in plan.admissions][-1]
    assert second.token_ids[:4] == harness.requests["young"].prompt_token_ids
    assert len(second.token_ids) > 4 and second.request is harness.requests["young"]
    load = harness.scheduler.load()
    assert load.num_preemptions == 1


def test_preempted_twice():
    harness = Harness(num_pages=10, page_tokens=2, max_bypass=0)
    harness.add("a", 4, 6)
    harness.add("b", 4, 9)
    harness.add("c", 4, 6)
    times = 0
    while harness.scheduler.has_work:
        harness.turn()
        harness.audit()
        if "c" in states(harness.scheduler):
            times = max(times, states(harness.scheduler)["c"].num_preemptions)
    harness.drain()
    assert times == 2 and admitted(harness).count("c") == 3


def test_a_preempted_request_waits_for_its_token_under_way():
    """Even where there would be room: what it has generated is not known before."""
    harness = Harness(num_pages=10, page_tokens=2)
    scheduler = harness.scheduler
    harness.add("old", 4, 14)
    harness.add("young", 4, 14)
    pending = []
    while not scheduler.load().num_preemptions:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        pending.append(plan)
        while len(pending) > 2:  # two under way at least
            plan = pending.pop(0)
            scheduler.commit(plan, StepOutput(np.full(len(plan.samples), 1), 0.0), 0.0)
    young = states(scheduler)["young"]
    assert young.phase is Phase.WAITING and young.in_flight >= 1
    assert "young" not in pending[-1].samples and not pending[-1].admissions
    known = len(young.outputs)
    scheduler.cancel("old")
    plan = scheduler.schedule(0.0)  # the pool is empty, and yet
    assert plan is None and young.in_flight >= 1
    while pending:
        plan = pending.pop(0)
        scheduler.commit(plan, StepOutput(np.full(len(plan.samples), 1), 0.0), 0.0)
    assert young.in_flight == 0 and len(young.outputs) > known
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert len(plan.admissions[0].token_ids) == 4 + len(young.outputs)


def test_a_stop_that_comes_for_a_preempted_request_ends_it():
    harness = Harness(num_pages=10, page_tokens=2)
    for seed in range(40):  # some of them stop with the token that was under way
        harness.add("old", 4, 14)
        harness.add("young", [seed % 13, seed // 13, 3, 1], 14, ignore_eos=False)
        harness.drain()


def test_the_oldest_prompt_takes_decode_pages_from_younger_requests():
    """Hand-off under pressure, two groups of 16 pages. "old" is overtaken by two light requests,
    one in each group; while it is prefilled they grow into the pages that were pledged to it."""
    harness = Harness(
        groups=2, num_pages=16, page_tokens=2, max_num_batched_tokens=4, packing_threshold=1.0
    )
    scheduler = harness.scheduler
    for request_id in ("big0", "big1"):
        harness.add(request_id, 8, 13)
    while min(scheduler.load().num_decodes) == 0:
        harness.turn()
    harness.add("old", 16, 4)
    harness.add("light0", 4, 17)
    harness.add("light1", 4, 17)
    while sum(scheduler.load().num_decodes) < 4 or scheduler.load().num_prefilling:
        harness.turn()
    assert "old" not in admitted(harness)
    for request_id in ("big0", "big1"):
        harness.cancel(request_id)
    while scheduler.has_work and not scheduler.load().num_preemptions:
        harness.turn()
        harness.audit()
    plan = harness.plans[-1]
    (placement,) = plan.placements
    # The plan that frees the light one's pages hands the old one's over to some of them.
    assert states(scheduler)["old"].slot == placement.slot
    assert [(h.slot, h.num_pages) for h in plan.handoffs] == [(placement.slot, 8)]
    lights = {s.phase: s for i, s in states(scheduler).items() if i.startswith("light")}
    assert set(lights) == {Phase.WAITING, Phase.DECODING}
    assert lights[Phase.DECODING].group == 1 - placement.group
    harness.drain()


@pytest.mark.parametrize(("groups", "num_pages"), [(1, 4 * 62), (3, 2 * 62)])
def test_8_requests_with_memory_for_4(groups, num_pages):
    """480 in, 512 out: 991 KV tokens, 62 pages of 16. The four oldest are never preempted; until
    they end, together, nobody who was preempted can come back, and then all who were fit to their
    end: once each. (Three groups of which each has room for two prompts, one of them under way.)"""
    harness = Harness(
        groups=groups,
        num_pages=num_pages,
        page_tokens=16,
        max_num_batched_tokens=512,
        handoff_pages=32,
    )
    for number in range(8):
        harness.add(f"r{number}", 480, 512)
    while harness.scheduler.has_work:
        harness.turn()
    harness.drain()
    times = Counter(admitted(harness))
    assert [times[f"r{number}"] for number in range(4)] == [1] * 4
    assert max(times.values()) == 2
    assert set(harness.ends.values()) == {FinishReason.LENGTH}
    assert harness.scheduler.load().num_preemptions == times.total() - 8


def test_preemptions_stay_few_under_lasting_pressure():
    """24 requests of up to 94 pages, memory for about four. Each preemption doubles the room that
    a return asks for; at the seventh that is a whole life."""
    draw = random.Random(0)
    harness = Harness(num_pages=248, page_tokens=4, max_num_batched_tokens=128, max_num_seqs=24)
    for number in range(24):
        harness.add(f"r{number}", draw.randint(3, 150), draw.randint(3, 225))
    while harness.scheduler.has_work:
        harness.turn()
    harness.drain()
    times = Counter(admitted(harness))
    assert harness.scheduler.load().num_preemptions > 24, "pressure is what this is about"
    assert max(times.values()) <= 1 + 7


def test_a_preempted_request_stays_away_until_another_ends_or_all_of_it_fits():
    """60 pages of a token; each of four needs 30 to its end, so the first two have them all. When
    the third gives up its 20, the fourth could start again with the 16 that it needs."""
    harness = Harness(num_pages=60, page_tokens=1)
    for number in range(4):
        harness.add(f"r{number}", 4, 27)
    free = []
    while "r0" in states(harness.scheduler):
        free.append(harness.scheduler.load().free_pages[0])
        harness.turn()
    # Those that were preempted are back with the iteration after the last rows of the first two.
    assert admitted(harness) == ["r0", "r1", "r2", "r3", "r2", "r3"]
    fourth = [a for plan in harness.plans for a in plan.admissions][-1]
    assert max(free) > len(fourth.token_ids) + 1
    assert harness.plans[-1].admissions
    harness.drain()
    assert harness.scheduler.load().num_preemptions == 2


def test_preempted_while_it_is_handed_over_it_gives_up_both_sides():
    """Two groups. "young" is placed and partly handed over, not yet prefilled, when an older one
    in the same group needs a page."""
    harness = Harness(
        groups=2, num_pages=22, page_tokens=2, max_num_batched_tokens=6, handoff_pages=1
    )
    scheduler = harness.scheduler
    for number in range(4):
        harness.add(f"old{number}", 4, 20)
    harness.run(8)
    harness.add("young", 12, 4)
    young = states(scheduler)["young"]
    partly = False
    while not young.num_preemptions:
        partly = young.phase is Phase.PREFILLING and 0 < young.num_handed < len(young.pages)
        harness.turn()
    assert partly and young.phase is Phase.WAITING
    assert (young.group, young.num_handed, len(young.pages)) == (-1, 0, 0)
    assert not young.prefill_pages
    harness.audit()
    harness.drain()
