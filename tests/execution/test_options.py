"""Sampling options through scheduler and runner, on a tiny random model: tokens are chosen by the
rules, worked out in float64, whatever else runs; and how likely prompts were. Nothing compiles."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from conflux_jax.execution.runner import Runner
from conflux_jax.request import PromptLogprobs, Request, SamplingParams
from tests.decoder_float64 import Decoder, adjusted, log_softmax
from tests.execution.conftest import SPOILT
from tests.serving import Serving, make_request, no_compilation, prompt, settings

CLOSE = 1e-3  # in logits of a standard deviation of 2; float32 is off by 1e-4 at most
OPTIONS = {
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.0},
    "repetition": {"repetition_penalty": 1.9},
    "bias": {"logit_bias": {i: 3.0 for i in range(40, 60)} | {7: -50.0}, "min_tokens": 20},
    "few": {"allowed_token_ids": tuple(range(90, 110)), "frequency_penalty": 1.5},
    "all": {
        "presence_penalty": 0.5,
        "repetition_penalty": 0.8,
        "frequency_penalty": 2.0,
        "bad_token_ids": tuple(range(0, 288, 2)),
        "min_tokens": 10,
        "stop_token_ids": tuple(range(1, 100, 2)),
    },
}


@pytest.fixture(scope="module")
def decoder(served_model: Path) -> Decoder:
    return Decoder(served_model, SPOILT)


def requests(temperature: float) -> list[Request]:
    made = []
    for number, (name, options) in enumerate(OPTIONS.items()):
        params = SamplingParams(max_tokens=24, temperature=temperature, logprobs=0, **options)
        made.append(make_request(name, prompt(number, 20 + number), 24, params, frozenset({7})))
    return made


def served(serving: Serving, requests: list[Request], turns_between: int = 0) -> dict:
    with no_compilation():
        for request in requests:
            serving.add(request)
            serving.run(turns_between)
        return dict(serving.drain())


def few_pages(runner: Runner) -> int:
    """For 3 of the requests at a time, so that others are preempted."""
    return 36 if runner.geometry.groups == 1 else 20


def test_each_token_is_the_best_by_the_rules(runner: Runner, decoder: Decoder):
    """Greedily; together, in small chunks and preempted, so that what was seen comes from the
    device in part and in part from the host."""
    short = Serving(runner, settings(runner, max_num_batched_tokens=19), few_pages(runner))
    outputs = served(short, requests(0.0), turns_between=2)
    assert short.scheduler.load().num_preemptions > 0
    mattered = 0
    for request in requests(0.0):
        output = outputs[request.request_id]
        assert len(output) >= 10
        ids = (*request.prompt_token_ids, *output)
        rows = decoder.logits(ids)[len(request.prompt_token_ids) - 1 : -1]
        for index, (row, token_id) in enumerate(zip(rows, output, strict=True)):
            history = request.prompt_token_ids, output[:index], request.eos_token_ids
            values = adjusted(row, request.params, *history)
            assert values[token_id] > values.max() - CLOSE, (request.request_id, index)
            mattered += row[token_id] < row.max() - CLOSE
        # Of the model, whatever was changed.
        expected = log_softmax(rows)[range(len(output)), output]
        found = short.logprobs[request.request_id]
        np.testing.assert_allclose(found, expected, atol=2e-4)
    assert mattered > 30
    assert served(Serving(runner, settings(runner)), requests(0.0)) == outputs


def test_the_same_seed_draws_the_same_whatever_else_runs(runner: Runner):
    made = requests(0.9)
    alone = {}
    for request in made:
        alone |= served(Serving(runner, settings(runner)), [request])
    together = Serving(runner, settings(runner, max_num_batched_tokens=37), few_pages(runner))
    assert served(together, made, turns_between=1) == alone
    assert together.scheduler.load().num_preemptions > 0
    assert len({tuple(output) for output in alone.values()}) == len(made)


def test_stop_tokens_end_an_answer_but_not_too_early(runner: Runner):
    """The greedy answer, cut at its first stop token; and with none among its first ones."""

    def answer(**options) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, **options)
        request = make_request("r", prompt(50, 9), 24, params)
        return served(Serving(runner, settings(runner)), [request])["r"]

    plain = answer()
    stop = plain[5]
    at = plain.index(stop)
    assert answer(stop_token_ids=(stop,)) == plain[: at + 1]
    later = answer(stop_token_ids=(stop,), min_tokens=at + 3)
    assert later[:at] == plain[:at]
    assert stop not in later[: at + 3] and len(later) >= at + 3


def test_bad_phrases_do_not_come(runner: Runner, decoder: Decoder):
    """Phrases of the greedy answer, one after the other, each of an answer without those before;
    then several such, some of them preempted, so that phrases begin on the host in part."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    plain = make_request("r", prompt(60, 20), 24, params)
    made, at = plain, 2
    for length in (2, 3, 1, 5, 2):
        output = served(Serving(runner, settings(runner)), [made])["r"]
        at += length
        phrases = (*made.bad_phrases, tuple(output[at - length : at]))
        made = dataclasses.replace(made, bad_phrases=phrases)
    output = served(Serving(runner, settings(runner)), [made])["r"]
    rows = decoder.logits((*made.prompt_token_ids, *output))[len(made.prompt_token_ids) - 1 : -1]
    mattered = 0
    for index, (row, token_id) in enumerate(zip(rows, output, strict=True)):
        history = made.prompt_token_ids, output[:index], (), made.bad_phrases
        values = adjusted(row, params, *history)
        assert values[token_id] > values.max() - CLOSE, index
        mattered += values.max() < row.max()
    assert mattered >= 3
    short = Serving(runner, settings(runner, max_num_batched_tokens=19), few_pages(runner))
    copies = [dataclasses.replace(made, request_id=f"copy {i}") for i in range(6)]
    outputs = served(short, copies, turns_between=2)
    assert outputs == {copy.request_id: output for copy in copies}
    admissions = [a for plan in short.plans for a in plan.admissions]
    assert any(len(a.token_ids) > len(made.prompt_token_ids) for a in admissions)


LENGTHS = {"one": 1, "two": 2, "short": 30, "long": 150, "other": 90}


def scored(name: str) -> Request:
    top = {"one": 3, "two": 0, "short": 20, "long": 5, "other": 1}[name]
    params = SamplingParams(temperature=0.0, ignore_eos=True, prompt_logprobs=top, logprobs=2)
    return make_request(name, prompt(LENGTHS[name], LENGTHS[name]), 12, params)


def check(request: Request, found: PromptLogprobs, decoder: Decoder) -> None:
    ids, top = request.prompt_token_ids, request.params.prompt_logprobs
    expected = log_softmax(decoder.logits(ids))[:-1]
    assert (found.first, len(found)) == (1, len(ids) - 1)
    if len(ids) == 1:
        return
    own = expected[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(found.logprobs, own, atol=1e-4)
    above = (expected > own[:, None] + 1e-4).sum(axis=1)
    not_below = (expected > own[:, None] - 1e-4).sum(axis=1)
    assert ((above < found.ranks) & (found.ranks <= not_below)).all()
    assert (found.ranks == above + 1).mean() > 0.95
    assert found.top_ids.shape == found.top_logprobs.shape == (len(ids) - 1, top)
    best = -np.sort(-expected, axis=1)[:, :top]
    np.testing.assert_allclose(found.top_logprobs, best, atol=1e-4)
    listed = np.take_along_axis(expected, found.top_ids, axis=1)
    np.testing.assert_allclose(found.top_logprobs, listed, atol=1e-4)


@pytest.mark.parametrize("batched_tokens", [48, 13])
def test_how_likely_prompts_were(runner: Runner, decoder: Decoder, batched_tokens: int):
    """Several in an iteration, and in chunks."""
    plain = make_request("plain", prompt(9, 33), 20)
    made = [plain, *map(scored, LENGTHS)]
    running = Serving(runner, settings(runner, max_num_batched_tokens=batched_tokens))
    outputs = served(running, made)
    assert set(running.prompts) == set(LENGTHS)
    for request in made[1:]:
        (found,) = running.prompts[request.request_id]
        check(request, found, decoder)
    unscored = [make_request(r.request_id, list(r.prompt_token_ids), 12) for r in made[1:]]
    assert served(Serving(runner, settings(runner)), [plain, *unscored]) == outputs


def test_prompts_that_are_preempted_are_scored_once(runner: Runner, decoder: Decoder):
    """In the middle of the prompt; on one group also after its first token."""
    alone = runner.geometry.groups == 1
    pages, batched_tokens = (44, 9) if alone else (46, 7)
    running = Serving(runner, settings(runner, max_num_batched_tokens=batched_tokens), pages)
    growing = [make_request(f"r{i}", prompt(i, 40), 90) for i in range(3)]
    made = [scored(name) for name in ("other", "short")]
    served(running, [*growing, *made], turns_between=1)
    admissions = [a for plan in running.plans for a in plan.admissions]
    lengths = {
        name: [len(a.token_ids) for a in admissions if a.request.request_id == name]
        for name in ("other", "short")
    }
    assert lengths["other"].count(LENGTHS["other"]) > 1, lengths
    assert not alone or max(lengths["short"]) > LENGTHS["short"], lengths
    for request in made:
        (found,) = running.prompts[request.request_id]
        check(request, found, decoder)
