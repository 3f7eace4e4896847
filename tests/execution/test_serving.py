"""Scheduler and runner together on a tiny random model: what one request gets does not depend on
memory, on who was cancelled before it, or on what else runs; and nothing compiles meanwhile."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest

from conflux_jax import calibrate as command
from conflux_jax.config import ConfigError
from conflux_jax.execution import sms_search
from conflux_jax.execution.calibration import (
    Effort,
    calibrate,
    draw_workloads,
    profile_identity,
)
from conflux_jax.execution.runner import Runner
from conflux_jax.execution.sms_search import choose_decode_sms, mixed_shapes
from conflux_jax.plan import IterationPlan
from conflux_jax.request import FinishReason, Request, SamplingParams
from conflux_jax.scheduler.latency_model import IterationShape, LatencyModel
from tests.execution.conftest import SPOILT
from tests.serving import (
    GREEDY,
    SETTINGS,
    Serving,
    make_request,
    no_compilation,
    prompt,
    settings,
)


def alone(runner: Runner, *request) -> list[int]:
    serving = Serving(runner, settings(runner))
    serving.add(make_request(*request))
    return serving.drain()[request[0]]


@pytest.mark.parametrize("turns", range(1, 5))
def test_the_next_may_have_the_pages_of_one_cancelled_in_its_handoff(runner: Runner, turns: int):
    """The first, of 100 tokens in three chunks, is cancelled after some of its plans, the last of
    which has not been waited for; the second, as long, gets its pages with the very next plan."""
    expected = alone(runner, "b", prompt(2, 100), 12)
    serving = Serving(runner, settings(runner))
    serving.add(make_request("a", prompt(1, 100), 12))
    serving.run(turns)
    assert bool(serving.plans[-1].handoffs) == runner.geometry.needs_handoff
    held, told = pages_held(serving, "a"), len(serving.tokens["a"])
    assert serving.scheduler.cancel("a")
    serving.add(make_request("b", prompt(2, 100), 12))
    serving.turn()
    taken = pages_held(serving, "b")
    assert all(own and own <= others for own, others in zip(taken, held, strict=True))
    assert serving.drain() == {"a": serving.tokens["a"][:told], "b": expected}


def pages_held(serving: Serving, request_id: str) -> list[set[int]]:
    """By group, by the plans."""
    held: list[set[int]] = [set() for _ in range(serving.runner.geometry.groups)]
    slot = -1
    for plan in serving.plans:
        for admission in plan.admissions:
            if admission.request.request_id == request_id:
                slot = admission.slot
                held = [own | set(p) for own, p in zip(held, admission.prefill_pages, strict=True)]
        for placed in plan.placements:
            if placed.slot == slot:
                held[placed.group] |= set(placed.pages)
    return held


def test_a_late_stop_leaves_nothing_behind(runner: Runner):
    """One slot. "a" ends with its sixth token, seen when a row more is under way; that row's token
    is nobody's, and "b" takes the slot and the pages."""
    tokens = alone(runner, "a", prompt(1, 30), 12)
    end = next(i for i in range(5, 12) if tokens[i] not in tokens[:i])
    expected = alone(runner, "b", prompt(2, 30), 12)
    serving = Serving(runner, settings(runner, max_num_seqs=1))
    params = SamplingParams(temperature=0.0)
    serving.add(make_request("a", prompt(1, 30), 12, params, frozenset({tokens[end]})))
    serving.add(make_request("b", prompt(2, 30), 12))
    assert serving.drain() == {"a": tokens[: end + 1], "b": expected}
    assert serving.ends == {"a": FinishReason.STOP, "b": FinishReason.LENGTH}
    assert sum(plan.samples.count("a") for plan in serving.plans) == end + 2


def test_8_requests_with_memory_for_4_say_what_they_say_without_pressure(runner: Runner):
    """30 in, 32 out: 61 KV tokens, 16 pages of 4. Greedy ones and drawn ones."""
    drawn = SamplingParams(temperature=0.8, top_p=0.9, ignore_eos=True)
    requests = [
        make_request(f"r{i}", prompt(i, 30), 32, drawn if i % 2 else GREEDY) for i in range(8)
    ]
    plenty = Serving(runner, settings(runner))
    short = Serving(
        runner, settings(runner), num_pages=4 * 16 if runner.geometry.groups == 1 else 32
    )
    for serving in (plenty, short):
        for request in requests:
            serving.add(request)
        serving.drain()
        assert set(serving.ends.values()) == {FinishReason.LENGTH}
        assert {len(tokens) for tokens in serving.tokens.values()} == {32}
    assert short.tokens == plenty.tokens
    assert plenty.scheduler.load().num_preemptions == 0 < short.scheduler.load().num_preemptions


def test_preempted_twice_and_more(runner: Runner):
    draw = random.Random(3)
    requests = [
        make_request(f"r{i}", prompt(i, draw.randint(2, 40)), draw.randint(10, 60))
        for i in range(28)
    ]
    plenty = Serving(runner, settings(runner))
    short = Serving(runner, settings(runner), num_pages=34)  # what the largest needs
    for serving in (plenty, short):
        for request in requests:
            serving.add(request)
        serving.drain()
    admitted = Counter(a.request.request_id for plan in short.plans for a in plan.admissions)
    assert max(admitted.values()) >= 3, "nobody came back twice"
    assert short.tokens == plenty.tokens
    for request in requests:
        assert len(short.tokens[request.request_id]) == request.max_output_tokens


@pytest.mark.parametrize("at", [5, 59], ids="token {}".format)
def test_a_request_that_makes_nan_ends_alone(runner: Runner, at: int):
    """Beside decodes, and between other prompts in the same chunks; then others have its pages,
    and pages that are not full."""
    requests = [make_request(f"r{i}", prompt(i, 20 + i), 30) for i in range(6)]
    expected = {own.request_id: alone_of(runner, own) for own in requests}
    tokens = prompt(9, 60)
    tokens[at] = SPOILT
    serving = Serving(runner, settings(runner), num_pages=80)
    for request in requests[:2]:
        serving.add(request)
    serving.run(4)
    for request in (requests[2], make_request("spoilt", tokens, 30), requests[3]):
        serving.add(request)
    serving.run(8)
    assert serving.ends.pop("spoilt") is FinishReason.ERROR
    assert serving.messages == {
        "spoilt": "request spoilt: the logits after 60 tokens are not finite, so there is no next "
        "token"
    }
    for request in requests[4:]:
        serving.add(request)
    assert serving.drain() == {**expected, "spoilt": []}
    assert set(serving.ends.values()) == {FinishReason.LENGTH}


def test_pages_that_held_nan_are_as_good_as_others(runner: Runner):
    """A spoilt prompt of one token less than memory, then short ones all over it. In the pool only
    keys are no numbers: kernels multiply values that they mask, by 0."""
    requests = [make_request(f"r{i}", prompt(i, 3 + i), 9) for i in range(8)]
    expected = {own.request_id: alone_of(runner, own) for own in requests}
    serving = Serving(runner, settings(runner), num_pages=48)
    serving.add(make_request("spoilt", [SPOILT, *prompt(8, 90)], 1))
    serving.drain()
    assert serving.ends["spoilt"] is FinishReason.ERROR
    keys, values = np.moveaxis(np.asarray(runner.state.pool), 1, 0)
    assert np.isnan(keys).any() and np.isfinite(values).all()
    for request in requests:
        serving.add(request)
    assert serving.drain() == {**expected, "spoilt": []}


def alone_of(runner: Runner, request: Request) -> list[int]:
    serving = Serving(runner, settings(runner))
    serving.add(request)
    return serving.drain()[request.request_id]


def test_a_reset_gives_an_empty_pool_and_the_same_answers(runner: Runner, monkeypatch):
    """A step that takes its buffers and fails; "b" was in it, "a" was not yet."""
    expected = alone(runner, "a", prompt(1, 50), 12)
    config = settings(runner, max_num_seqs=1)
    serving = Serving(runner, config)
    serving.add(make_request("b", prompt(2, 50), 12))
    serving.add(make_request("a", prompt(1, 50), 12))
    serving.run(3)
    broken = {bucket: FailsOnce(step) for bucket, step in runner._compiled.items()}
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_compiled", broken)
        with pytest.raises(MemoryError):
            serving.turn()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(runner._state))
    assert serving.scheduler.lose_device_state() == ["b"]
    runner.reset()
    serving.forget()
    serving.drain()
    assert serving.tokens["a"] == expected


class FailsOnce:
    """A compiled step that runs, and then says that it did not."""

    def __init__(self, step: jax.stages.Compiled):
        self._step = step

    def __call__(self, *args) -> None:
        self._step(*args)
        raise MemoryError("RESOURCE_EXHAUSTED")


def test_nothing_compiles_whatever_is_asked(runner: Runner):
    """All sampling options in one batch, prompts from one token to many chunks, chunks of one
    token where decodes leave no more, and limits that no bucket is aligned with."""
    used, lengths = set(), set()
    with no_compilation():
        for batched_tokens in (9, 37, 48):
            plans = serve_at_random(runner, batched_tokens)
            used |= {plan.bucket for plan in plans}
            lengths |= {chunk.length for plan in plans for chunk in plan.chunks}
    assert used == set(runner.ladders.all())
    assert 1 in lengths


def serve_at_random(runner: Runner, batched_tokens: int) -> list[IterationPlan]:
    draw = random.Random(batched_tokens)
    serving = Serving(runner, settings(runner, max_num_batched_tokens=batched_tokens))
    for number in range(14):
        params = SamplingParams(
            temperature=draw.choice((0.0, 0.7, 1.3)),
            top_k=draw.choice((0, 1, 17)),
            top_p=draw.choice((1.0, 0.83)),
            min_p=draw.choice((0.0, 0.05)),
            logprobs=draw.choice((None, 0, 5)),
            ignore_eos=draw.random() < 0.5,
            prompt_logprobs=draw.choice((None, 0, 5)),
            presence_penalty=draw.choice((0.0, 0.5)),
            repetition_penalty=draw.choice((1.0, 1.2)),
            logit_bias=draw.choice(((), {7: 1.0})),
            min_tokens=draw.choice((0, 5)),
        )
        tokens = prompt(number, draw.choice((1, 2, 11, 48, 49, 101)))
        output = draw.randint(1, 20)
        serving.add(make_request(f"r{number}", tokens, output, params, frozenset({7})))
        serving.run(draw.randint(0, 3))
        if number % 5 == 4:
            serving.scheduler.cancel(f"r{number - 1}")
    serving.drain()
    return serving.plans


def test_the_listener_hears_a_compilation():
    with pytest.raises(AssertionError), no_compilation():
        jax.jit(lambda x: x + 3)(np.arange(5))


def test_calibration_runs_every_bucket_and_compiles_nothing(runner: Runner):
    """On the steps that serve, hand-off included; what is served later is what was before."""
    expected = alone(runner, "a", prompt(3, 60), 8)
    with no_compilation():
        found = calibrate(runner, 48, Effort(shapes=12, repeats=1))
    measured = [*found.fitted, *found.held_out]
    assert {m.workload.bucket for m in measured} == set(runner.ladders.all())
    assert all(m.seconds > 0 for m in measured) and all(m.again_s > 0 for m in found.held_out)
    assert found.model.handoff_s == 0.0 or runner.geometry.needs_handoff
    assert alone(runner, "a", prompt(3, 60), 8) == expected


def test_multiprocessors_are_divided_by_the_steps_that_serve(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
):
    """On a CPU there are none, so only who is told what is seen here."""
    mixed = mixed_shapes(draw_workloads(runner, 48, Effort(shapes=12), seed=0))
    assert {workload.kind for workload in mixed} == {"mixed"}
    told: list[int] = []
    monkeypatch.setattr(runner, "divide_sms", told.append, raising=False)
    monkeypatch.setattr(sms_search, "SMS", 40)
    with no_compilation():
        found = choose_decode_sms(runner, mixed[:2], repeats=1)
    assert found.shapes == 2 and {16, 32} <= set(found.slowdowns) <= {8, 16, 24, 32}
    assert told[:2] == [16, 32] and told[-1] == found.decode_sms


def test_the_calibrate_command_writes_a_profile_for_its_engine(
    runner: Runner, tmp_path: Path, capsys
):
    profile, summary = tmp_path / "profile.json", tmp_path / "summary.json"
    options = [f"--out={profile}", f"--json={summary}", "--quick", "--max-num-batched-tokens=48"]
    assert command.main(options, lambda config, progress: (runner, None)) == 0
    printed = capsys.readouterr().out
    assert printed.endswith(f"Wrote {profile}\n")
    names = [line.split("  ")[0] for line in printed.splitlines()]
    assert [names.count(name) for name in ("fit", "held out", "noise")] == [4, 4, 4]
    assert "decode_sms: not looked for: no GPU runs the steps" in printed.splitlines()

    values = json.loads(summary.read_text())
    assert list(values) == ["heldout_mean_error", "heldout_p95_error", "noise_floor"]
    assert all(0 < value < float("inf") for value in values.values())

    identity = profile_identity(runner)
    model = LatencyModel.load(profile, identity)
    groups, buckets = runner.geometry.groups, runner.ladders.all()
    full = IterationShape(buckets[-1], 700, 700 * groups, 100, 2, 24 * groups, 10**6)
    assert 0 < model.predict_s(full._replace(bucket=buckets[0])) < model.predict_s(full) < 60
    others = identity | {"sp": groups + 1, "page_tokens": 8, "rows_ladder": [8, 48]}
    with pytest.raises(ConfigError) as refused:
        LatencyModel.load(profile, others)
    for difference in (f"sp is {groups + 1}, the profile's {groups}", "page_tokens is 8, the"):
        assert difference in str(refused.value)
    assert "rows_ladder is [8, 48]" in str(refused.value)
    assert "dtype" not in str(refused.value)


def test_what_a_profile_belongs_to(runner: Runner):
    """Every setting that changes a step's time or shape, by its name."""
    identity = profile_identity(runner)
    for name in ("dtype", "max_model_len", "page_tokens", "decode_rows_ladder"):
        value = SETTINGS[name]
        assert identity[name] == (list(value) if isinstance(value, tuple) else value)
    assert (identity["sp"], identity["tp"]) == (runner.geometry.groups, 1)
    assert identity["handoff_pages"] == (6 if runner.geometry.needs_handoff else 0)
    assert identity["device_kind"] == "cpu" and identity["jax"] == jax.__version__
    assert identity["conflux_jax"] and identity["model"] == runner.dims.spec.name
