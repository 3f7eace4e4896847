"""Groups for a prompt, decodes by Little's law, room beside them, and the verdict, by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from conflux_jax.scheduler.latency_model import prefill_work
from conflux_jax.simulation.demand import Demand, measure
from conflux_jax.simulation.premise import (
    MAX_GROUPS,
    Engine,
    Filled,
    decodes_in_memory,
    decoding,
    examine,
    filled,
    groups_needed,
    prefill_s,
)
from conflux_jax.simulation.traces import TraceRequest
from conflux_jax.simulation.verdict import Answer, Finding, judge
from tests.scheduler.predictors import Linear


def engine_of(linear: Linear, **settings: Any) -> Engine:
    """One group of 1,000 rows unless said otherwise; TTFT 1 s and TBT 0.1 s."""
    defaults: dict[str, Any] = {"groups": 1, "gpus_per_group": 1, "max_rows": 1000}
    targets: dict[str, Any] = {"ttft_slo_s": 1.0, "tbt_slo_s": 0.1}
    return Engine(predictor=lambda groups: linear, **(defaults | targets | settings))


def demand_of(prompts: Sequence[int], output: int, hashes: Any = None) -> Demand:
    """A request a second."""
    return measure(
        TraceRequest(float(index), prompt, output, tuple(hashes(index)) if hashes else ())
        for index, prompt in enumerate(prompts)
    )


def test_a_prompt_runs_in_chunks_of_what_the_groups_take():
    # 1,000 tokens on 2 groups of 200 rows: chunks of 400, 400 and 200.
    engine = engine_of(Linear(base_s=1.0, per_row_s=0.01), max_rows=200)
    assert prefill_s(engine, 2, 1000) == pytest.approx(3 * 1.0 + 0.01 * (200 + 200 + 100))
    # A cached start costs attention, but no rows.
    engine = engine_of(Linear(per_pair_s=1.0), max_rows=200)
    pairs = prefill_work(300, 400) + prefill_work(700, 100)
    assert prefill_s(engine, 2, 500, start=300) == pairs


def test_the_fewest_groups_that_meet_ttft():
    # 1,000 tokens at 1 ms a row: 334 ms on 3 groups, 250 on 4.
    engine = engine_of(Linear(per_row_s=0.001), ttft_slo_s=0.3)
    assert groups_needed(engine, 1000) == 4
    assert groups_needed(engine, 300) == 1
    # A thousandth of a second a row, and MAX_GROUPS rows in each of MAX_GROUPS groups.
    engine = engine_of(Linear(per_row_s=1.0), ttft_slo_s=MAX_GROUPS)
    assert groups_needed(engine, MAX_GROUPS**2) == MAX_GROUPS
    assert groups_needed(engine, MAX_GROUPS**2 + 1) is None


@pytest.mark.parametrize(
    ("groups", "concurrency"),
    [
        (1, 3),  # n = 200 * (0.010 + 0.001 n): 2.5 of them, so 3
        (2, 2),  # n = 100 * (0.010 + 0.001 n): 1.1 of them, so 2
    ],
)
def test_littles_law(groups: int, concurrency: int):
    """Two requests a second of 100 tokens each; an iteration of n decodes takes 10 + n ms."""
    engine = engine_of(Linear(base_s=0.010, per_row_s=0.001), groups=groups)
    found = decoding(demand_of([50, 50], 100), engine, rate_per_s=2.0)
    assert (found.concurrency, found.steady) == (concurrency, True)
    assert found.iteration_s == pytest.approx(0.010 + 0.001 * concurrency)


def test_decodes_that_never_catch_up():
    # 200 tokens a second at 6 ms each is 1.2 s of work in every second.
    engine = engine_of(Linear(base_s=0.001, per_row_s=0.006))
    assert not decoding(demand_of([50, 50], 100), engine, rate_per_s=2.0).steady
    # At 4 ms it is 0.8 s: n = 200 * (0.001 + 0.004 n) = 0.2 + 0.8 n, which is 1.
    engine = engine_of(Linear(base_s=0.001, per_row_s=0.004))
    assert decoding(demand_of([50, 50], 100), engine, rate_per_s=2.0).concurrency == 1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # 8 tokens a second for half a second: 4 decodes; 1/8 + (4 + p) / 64 = 1/2 where p = 20.
        ({}, Filled(0.5, 4, 1 / 8 + 4 / 64, 20, 40.0)),
        # 16 rows are 4 and 12, and take 1/8 + 16/64 s.
        ({"max_rows": 16}, Filled(0.5, 4, 1 / 8 + 4 / 64, 12, 12 / 0.375)),
        # Each of 2 groups has 2 decodes and 22 rows beside them.
        ({"groups": 2}, Filled(0.5, 2, 1 / 8 + 2 / 64, 44, 88.0)),
        # Memory for 2 decodes of 104 tokens: iterations of 2 / 8 s; 1/8 + (2 + p) / 64 = 1/4.
        ({"kv_tokens": 250}, Filled(0.25, 2, 1 / 8 + 2 / 64, 6, 24.0)),
        # At 1/8 s it is missed by decodes alone.
        ({"tbt_slo_s": 0.125}, Filled(0.125, 1, 1 / 8 + 1 / 64, 0, 0.0)),
    ],
)
def test_the_room_beside_decodes(settings: dict[str, Any], expected: Filled):
    engine = engine_of(Linear(1 / 8, 1 / 64), **({"tbt_slo_s": 0.5} | settings))
    demand = demand_of([100, 100], 8)
    assert filled(demand, demand.prompts, engine, rate_per_s=1.0) == expected


def test_memory_for_decodes():
    # 100 tokens and half of 8: a context of 104 on average.
    demand = demand_of([100, 100], 8)
    assert decodes_in_memory(demand, engine_of(Linear(), kv_tokens=311)) == 2
    assert decodes_in_memory(demand, engine_of(Linear())) is None


# 10 ms an iteration and 1 ms a row: 2,000 tokens take 2.02 s on one group, 1.01 s on two, 0.677 on
# three. Four groups have 89 rows each beside one decode in 100 ms: 3,560 tokens a second.
LINEAR = Linear(base_s=0.010, per_row_s=0.001)
LONG = [2000] * 20


def findings(
    demand: Demand, linear: Linear = LINEAR, rate_per_s: float = 1.0, **settings: Any
) -> tuple[str, str, dict[str, Finding]]:
    premise = examine(demand, engine_of(linear, **({"groups": 4} | settings)), rate_per_s)
    verdict = judge(premise)
    return verdict.word, verdict.line, {item.topic: item for item in verdict.findings}


def test_it_holds():
    word, line, found = findings(demand_of(LONG, 10))
    assert word == "holds"
    assert line.startswith("The premise holds: long prompts need several groups")
    assert set(found) == {"Long prompts", "Decode slack", "Offered load"}
    assert (
        "2.02 s on one group and 0.51 s on all 4; the target is 1 s" in found["Long prompts"].text
    )
    assert "needs 3 groups" in found["Long prompts"].text
    assert "takes 11.0 ms" in found["Decode slack"].text and "89%" in found["Decode slack"].text
    assert "2,000 prompt tokens a second" in found["Offered load"].text


def test_requests_that_the_model_cannot_take():
    # 90 + 10 tokens are all of 100; 91 + 10 and 200 + 10 are more.
    demand = demand_of([90, 91, 200, 5], 10)
    assert examine(demand, engine_of(LINEAR, max_model_len=100), 1.0).too_long == 0.5
    assert examine(demand, engine_of(LINEAR), 1.0).too_long is None


def sharing(blocks: int, of: int) -> Any:
    """Hashes of prompts of `of` blocks that all begin with the same `blocks`."""
    return lambda index: [
        *range(blocks),
        *range(1000 * (index + 1), 1000 * (index + 1) + of - blocks),
    ]


@pytest.mark.parametrize(
    ("case", "topic", "reason"),
    [
        # 5 of 100 are rank 96 and up: p95 is short, p99 long.
        ({"demand": demand_of([500] * 95 + [2000] * 5, 10)}, "Long prompts", "only the longest"),
        (
            {"demand": demand_of(LONG, 10), "groups": 2},
            "Long prompts",
            "needs 3 groups, the engine has 2",
        ),
        (
            {"demand": demand_of(LONG, 10), "ttft_slo_s": 0.005},
            "Long prompts",
            "no number of groups meets TTFT at 0.005 s",
        ),
        # 12 ms at most leaves 1 of 12 beside the 11 of one decode.
        ({"demand": demand_of(LONG, 10), "tbt_slo_s": 0.012}, "Decode slack", "only 8% of TBT"),
        ({"demand": demand_of(LONG, 10), "kv_tokens": 2000}, "Decode slack", "KV .* not fit"),
        ({"demand": demand_of(LONG, 10), "rate_per_s": 2.0}, "Offered load", "more is offered"),
        # 3 of 4 blocks leave 464 tokens: 0.474 s on one group.
        (
            {"demand": demand_of(LONG, 10, sharing(3, 4))},
            "Prefix reuse",
            r"cache \(73% reuse\) one group",  # 19 times 1,536 of 40,000
        ),
        # 12 of 16 blocks leave 2,048 of 8,192 tokens for three groups: 0.693 s.
        (
            {"demand": demand_of([8192] * 20, 10, sharing(12, 16)), "groups": 16},
            "Prefix reuse",
            "saves up to 71%",  # 19 times 12 of 320 blocks
        ),
    ],
)
def test_what_it_holds_in_part_for(case: dict[str, Any], topic: str, reason: str):
    word, line, found = findings(**case)
    assert word == "holds in part"
    assert found[topic].answer is Answer.PARTLY
    assert re.search(reason, found[topic].reason)
    assert found[topic].reason in line


@pytest.mark.parametrize(
    ("case", "topic", "reason"),
    [
        ({"demand": demand_of([500] * 20, 10)}, "Long prompts", "prompts are short"),
        ({"demand": demand_of(LONG, 10), "tbt_slo_s": 0.011}, "Decode slack", "miss TBT"),
        # 1 ms a token of 5,000 a second on 4 groups: 1.25 s of work in every second.
        ({"demand": demand_of(LONG, 5000)}, "Decode slack", "more than the GPUs can serve"),
    ],
)
def test_what_it_does_not_hold_for(case: dict[str, Any], topic: str, reason: str):
    word, line, found = findings(**case)
    assert word == "does not hold"
    assert found[topic].answer is Answer.NO
    assert reason in found[topic].reason
    assert line.startswith(f"The premise does not hold: {found[topic].reason}")


def test_a_load_that_only_a_cache_makes_bearable():
    # 8,192 tokens a second are over 3,560; what is left of them is not.
    demand = demand_of([8192] * 20, 10, sharing(12, 16))
    _, _, found = findings(demand, rate_per_s=1.0)
    assert found["Offered load"].answer is Answer.PARTLY
    # 8,192 less 12 * 512 * 19 / 20.
    assert "with every seen prefix cached 2,355 are left" in found["Offered load"].text
