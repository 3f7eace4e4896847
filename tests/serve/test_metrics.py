"""Metrics: what the tallies count, by hand; and what `/metrics` says of requests that ran."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any

import pytest
from fastapi.routing import APIRoute

from conflux_jax.config import Config, SchedulerConfig
from conflux_jax.plan import Admission, Bucket, DecodeRow, DecodeRows, IterationPlan, PrefillChunk
from conflux_jax.request import FinishReason, Request, SamplingParams
from conflux_jax.scheduler.latency_model import Parts
from conflux_jax.serve.http_errors import KINDS
from conflux_jax.serve.http_server import HttpServer
from conflux_jax.serve.metrics import FAMILIES, Metrics
from conflux_jax.serve.tallies import Histogram, Tallies
from tests.fakes import LONG, make_fake, run
from tests.serve.harness import ROOT
from tests.serve.http_harness import http_serving

DOCUMENT = (ROOT / "docs" / "operations.md").read_text()


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def request(request_id: str, num_prompt: int = 3, **params: Any) -> Request:
    return Request(request_id, (1,) * num_prompt, SamplingParams(**params), 9, arrival_s=10.0)


def admits(*requests: Request) -> IterationPlan:
    admissions = tuple(
        Admission(slot, r, r.prompt_token_ids, ()) for slot, r in enumerate(requests)
    )
    return IterationPlan(0, Bucket(8, 0, True, False), (), admissions=admissions)


def counted(histogram: Histogram) -> tuple[int, Any]:
    return sum(histogram.counts), pytest.approx(histogram.total)


def test_a_histogram_counts_what_is_at_most_its_bound():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == 8.0


def test_the_times_of_a_request():
    """It arrives at 10, is admitted at 11, preempted and admitted again at 15.5; its tokens come
    at 13, 14 and 17."""
    clock = Clock(11.0)
    tallies = Tallies(SchedulerConfig(), 1, clock)
    one = request("a", num_prompt=7)
    tallies.launched(admits(one))
    tallies.delivered([one], [None], 13.0)
    tallies.delivered([one], [None], 14.0)
    clock.now_s = 15.5
    tallies.launched(admits(one))
    tallies.delivered([one], [FinishReason.STOP], 17.0)
    assert counted(tallies.queue) == (1, 1.0)
    assert counted(tallies.ttft) == (1, 3.0)
    assert counted(tallies.prefill) == (1, 2.0)
    assert counted(tallies.gaps) == (2, 1.0 + 3.0)
    assert counted(tallies.decode) == (1, 4.0)
    assert counted(tallies.inference) == (1, 6.0)
    assert counted(tallies.e2e) == (1, 7.0)
    assert counted(tallies.prompt_sizes) == (1, 7.0)
    assert counted(tallies.output_sizes) == (1, 3.0)
    assert counted(tallies.output_limits) == (1, 9.0)
    assert counted(tallies.mean_gaps) == (1, (17.0 - 13.0) / 2)
    assert (tallies.prompt_tokens, tallies.generated_tokens) == (7, 3)
    assert tallies.ended_by == {FinishReason.STOP: 1}


def test_an_id_that_comes_again_is_another_request():
    clock = Clock(11.0)
    tallies = Tallies(SchedulerConfig(), 1, clock)
    for now_s in (11.0, 20.0):
        clock.now_s = now_s
        one = request("a")
        tallies.launched(admits(one))
        tallies.delivered([one], [FinishReason.STOP], now_s + 1.0)
    assert counted(tallies.queue) == (2, 1.0 + 10.0)
    assert counted(tallies.ttft) == (2, 2.0 + 11.0)
    assert counted(tallies.gaps) == (0, 0.0)


def test_a_request_that_never_ran_has_an_end_and_no_more():
    tallies = Tallies(SchedulerConfig(), 1, Clock(12.0))
    tallies.ended(request("a"), FinishReason.ABORT)
    assert tallies.ended_by == {FinishReason.ABORT: 1}
    assert counted(tallies.e2e) == (1, 2.0)
    assert counted(tallies.ttft) == counted(tallies.queue) == counted(tallies.decode) == (0, 0.0)
    assert tallies.prompt_tokens == 0


def test_who_was_on_time():
    """Targets are a request's own or the config's. Tokens come 2 s and 5 s after the arrival."""
    tallies = Tallies(SchedulerConfig(ttft_slo_s=1.0), 1, Clock(10.0))
    cases = {
        "late first": request("late first"),
        "in time": request("in time", ttft_slo_s=2.0, tbt_slo_s=3.0),
        "late later": request("late later", ttft_slo_s=2.5, tbt_slo_s=2.9),
        "left": request("left", ttft_slo_s=2.5),
    }
    requests = list(cases.values())
    tallies.launched(admits(*requests))
    tallies.delivered(requests, [None] * 4, 12.0)
    tallies.delivered(requests[:3], [FinishReason.LENGTH] * 3, 15.0)
    tallies.ended(cases["left"], FinishReason.ABORT)
    assert tallies.with_target == {"ttft": 3, "tbt": 2, "all": 3}
    assert tallies.on_time == {"ttft": 2, "tbt": 1, "all": 1}


def test_without_targets_nobody_is_judged():
    tallies = Tallies(SchedulerConfig(), 1, Clock(10.0))
    one = request("a")
    tallies.launched(admits(one))
    tallies.delivered([one], [FinishReason.STOP], 99.0)
    assert not tallies.with_target


def test_the_rows_and_seconds_of_iterations():
    tallies = Tallies(SchedulerConfig(), 2, Clock())
    row = DecodeRow("a", 0, 5)
    chunk = PrefillChunk("b", 1, 0, 5, True)
    bucket = Bucket(4, 2, True, False)
    decodes = DecodeRows.of([row]), DecodeRows.of()
    alone = IterationPlan(0, bucket, decodes, prefill_shares=(0, 0), predicted_s=0.02)
    mixed = IterationPlan(1, bucket, decodes, (chunk,), (2, 3), predicted_s=0.1)
    empty = DecodeRows.of(), DecodeRows.of()
    prompts = IterationPlan(2, bucket, empty, (chunk,), (3, 2))
    moves = IterationPlan(3, Bucket(4, 0, False, True), empty, prefill_shares=(0, 0))
    for plan, elapsed_s in ((alone, 0.03), (mixed, 0.05), (prompts, 0.7), (moves, 0.01)):
        tallies.collected(plan, elapsed_s)
    assert tallies.rows[0] == {"decode": 2, "prefill": 5, "padding": 9}
    assert tallies.rows[1] == {"decode": 0, "prefill": 5, "padding": 11}
    steps = {kind: counted(histogram) for kind, histogram in tallies.step_s.items()}
    assert steps == {
        "decode": (1, 0.03),
        "mixed": (1, 0.05),
        "prefill": (1, 0.7),
        "handoff": (1, 0.01),
    }
    assert counted(tallies.iteration_tokens) == (4, 1.0 + 6.0 + 5.0)
    assert (tallies.predicted_s, tallies.measured_s) == pytest.approx((0.12, 0.08))
    assert counted(tallies.ratio) == (2, 1.5 + 0.5)


def test_an_iteration_is_divided_as_the_latency_model_divides_it():
    """The model expects 4 + 1 + 2 + 3 s, where the stage hides a second of decode attention. 20 s
    are measured: the parts are twice as long. The next, of which nothing is known, counts not."""
    parts = Parts(4.0, 1.0, 2.0, prefill=3.0, decode=1.0, stage=3.0, communication=1.0)
    known = IterationPlan(0, Bucket(4, 2, True, True), (), level=4, prefill_room=9)
    unknown = IterationPlan(1, Bucket(4, 2, True, True), (), level=3, prefill_room=2)
    modelled = {0: parts, 1: None}
    tallies = Tallies(SchedulerConfig(), 0, Clock(), lambda plan: modelled[plan.iteration])
    tallies.collected(known, 20.0)
    tallies.collected(unknown, 5.0)
    assert tallies.part_s == {
        "linear": 8.0,
        "head": 2.0,
        "prefill_attention": 4.0,
        "all_to_all": 2.0,
        "decode_attention": 2.0,
        "handoff": 4.0,
    }
    assert (tallies.modelled_s, tallies.model_error_s) == (10.0, 10.0)
    tallies.collected(known, 7.0)
    assert (tallies.modelled_s, tallies.model_error_s) == (20.0, 13.0)
    assert (tallies.level, tallies.room) == (4, 9 + 2 + 9)


async def test_the_numbers_of_a_scrape_add_up():
    """Over every interface: the engine is watched, not the server."""
    with make_fake(groups=2) as fake:
        async with http_serving(fake, served_model_name="fake") as client:
            await client.complete(prompt=["abc", "abcde"], n=2, max_tokens=6)
            run(fake, "ab", max_tokens=3)
            run(fake, "abcd", max_tokens=50, stop=("d",))
            seen = await client.metrics()
            reasons = {r: seen[f'vllm:request_success_total{{finished_reason="{r}"}}'] for r in
                       ("stop", "length", "abort", "error")}  # fmt: skip
            assert reasons == {"stop": 1, "length": 5, "abort": 0, "error": 0}
            assert seen["vllm:prompt_tokens_total"] == 2 * (3 + 5) + 2 + 4
            assert seen["vllm:generation_tokens_total"] == 4 * 6 + 3 + 4
            for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds",
                         "request_queue_time_seconds", "request_prefill_time_seconds",
                         "request_decode_time_seconds"):  # fmt: skip
                assert seen[f"vllm:{name}_count"] == seen[f'vllm:{name}_bucket{{le="+Inf"}}'] == 6
            assert seen["vllm:inter_token_latency_seconds_count"] == 31 - 6
            parts = [seen[f"vllm:request_{part}_time_seconds_sum"] for part in
                     ("queue", "prefill", "decode")]  # fmt: skip
            assert seen["vllm:e2e_request_latency_seconds_sum"] == pytest.approx(sum(parts))
            assert seen["vllm:num_requests_running"] == seen["vllm:num_requests_waiting"] == 0
            assert seen["vllm:kv_cache_usage_perc"] == 0
            rows = [seen[f'conflux:group_rows_total{{group="{group}",phase="prefill"}}'] for group
                    in (0, 1)]  # fmt: skip
            assert sum(rows) == 2 * (3 + 5) + 2 + 4
            assert seen["conflux:iteration_level_rows"] == 32  # 64 batched tokens, two groups
            assert seen["conflux:prefill_room_tokens_total"] >= sum(rows)
            assert seen["vllm:request_params_max_tokens_sum"] == 4 * 6 + 3 + 50


async def test_a_scrape_shows_what_runs_and_waits():
    with make_fake(max_num_seqs=2, pool_tokens=1024, step_s=0.01) as fake:
        async with http_serving(fake, metrics_prefix="mine_") as client:
            fake.executor.pause_at(lambda plan: len(plan.decodes[0]) == 2)
            prompts = [fake.engine.prepare("x" * 30, LONG) for _ in range(5)]
            streams = fake.engine.submit_many(prompts)
            await asyncio.to_thread(fake.executor.wait_paused)
            scrape = asyncio.create_task(client.metrics())
            await asyncio.sleep(0.05)
            assert not scrape.done()  # it is of a moment between two iterations
            fake.executor.resume()
            seen = await scrape
            assert (seen["mine_num_requests_running"], seen["mine_num_requests_waiting"]) == (2, 3)
            assert seen['conflux:group_decodes{group="0"}'] == 2
            assert 4 / 64 <= seen["mine_kv_cache_usage_perc"] < 1
            assert (
                seen["mine_kv_cache_usage_perc"]
                == seen['conflux:group_kv_cache_usage_perc{group="0"}']
            )
            for stream in streams:
                stream.close()
            await asyncio.to_thread(fake.wait_free)
            seen = await client.metrics()
            assert seen['mine_request_success_total{finished_reason="abort"}'] == 5
            assert seen["mine_e2e_request_latency_seconds_count"] == 5


async def test_an_engine_that_is_over_still_has_its_numbers():
    with make_fake() as fake:
        async with http_serving(fake) as client:
            await client.complete(prompt="ab", max_tokens=3)
            fake.executor.fail_with = RuntimeError("out of memory")
            status, _ = await client.error("/v1/completions", prompt="ab")
            assert status == 500
            seen = await client.metrics()
            assert (seen["conflux:healthy"], seen["conflux:accepting"]) == (0, 0)
            assert seen['vllm:request_success_total{finished_reason="error"}'] == 1
            assert seen['vllm:request_success_total{finished_reason="length"}'] == 1


def test_the_document_lists_every_metric():
    rows = re.findall(
        r"^\| `((?:vllm|conflux):\w+)` \| (\w+) \| ([^|]*) \|", DOCUMENT, re.MULTILINE
    )
    listed = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert len(listed) == len(rows)
    families = {f.full_name("vllm:"): (f.type_name, set(f.labels)) for f in FAMILIES}
    assert listed == families
    with make_fake() as fake:
        metrics = Metrics(Config(), fake.engine)
        names = {name.removesuffix("_total") for name in families}
        assert {m.name.removesuffix("_total") for m in metrics.registry.collect()} == names


def test_the_document_lists_every_endpoint():
    listed = set(re.findall(r"^\| `(GET|POST) (/\S+)` \|", DOCUMENT, re.MULTILINE))
    routes = [route for route in HttpServer(Config()).app.routes if isinstance(route, APIRoute)]
    served = {(method, route.path) for route in routes for method in route.methods or ()}
    heads = {path for method, path in served if method == "HEAD"}
    assert heads == {path for method, path in served if method == "GET"} - {
        "/dashboard/events",
        "/dashboard/timeline",
    }
    served = {(method, path) for method, path in served if method != "HEAD"}
    assert listed == {(method, path.replace(":path", "")) for method, path in served}


def test_the_document_lists_every_status():
    rows = re.findall(r"^\| (\d{3}) \|[^|]*\|([^|]*)\|", DOCUMENT, re.MULTILINE)
    listed = {(int(status), (re.findall(r"`(\w+)`", code) or [None])[0]) for status, code in rows}
    assert len(listed) == len(rows)
    assert listed == {(kind.status, kind.code) for _, kind in KINDS} | {(405, None)}
