"""Sampling options over a scripted executor: what ends an answer, what is refused before it starts,
and that what is said of a prompt is said once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conflux_jax.request import (
    FinishReason,
    InvalidRequest,
    PromptLogprobs,
    Request,
    SamplingParams,
)
from tests.fakes import EOS, Fake, make_fake, open_stream, run, spell


def test_a_stop_token_ends_an_answer_also_where_eos_does_not():
    with make_fake() as fake:
        for ignore_eos in (False, True):
            options: Any = {"stop_token_ids": [7, ord("c")], "ignore_eos": ignore_eos}
            delta = run(fake, "abc", max_tokens=50, **options)
            assert (delta.text, delta.finish_reason) == ("ab", FinishReason.STOP)
            assert delta.token_ids == tuple(b"abc")
        fake.wait_free()


@pytest.mark.parametrize(("min_tokens", "count"), [(0, 3), (2, 3), (3, 4), (9, 10)])
def test_nothing_ends_an_answer_before_its_least(min_tokens: int, count: int):
    """It says two letters and then EOS for ever, which the device would not before."""
    with make_fake(spell("ab")) as fake:
        delta = run(fake, max_tokens=20, min_tokens=min_tokens)
        assert (len(delta.token_ids), delta.finish_reason) == (count, FinishReason.STOP)
        assert delta.token_ids[-1] == EOS


def test_stop_strings_count_from_the_least_number_of_tokens_on():
    with make_fake() as fake:
        for min_tokens, text in ((0, "ab"), (2, "ab"), (3, "abcab"), (5, "abcab"), (6, "abcabcab")):
            delta = run(fake, "abc", max_tokens=30, stop="c", min_tokens=min_tokens)
            assert (delta.text, delta.finish_reason) == (text, FinishReason.STOP), min_tokens
        across = run(fake, "abc", max_tokens=30, stop="ca", min_tokens=3)
        assert across.text == "abcab"  # its first character came too early


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"logit_bias": {299: 1.0, 300: 1.0}}, "logit_bias", "token id 300 is outside"),
    ({"stop_token_ids": [300]}, "stop_token_ids", "(0 to 299)"),
    ({"bad_token_ids": [5, 2**31 - 1]}, "bad_token_ids", "(0 to 299)"),
    ({"allowed_token_ids": [1000]}, "allowed_token_ids", "(0 to 299)"),
    ({"bad_words": ["a", "x" * 17]}, "bad_words", "1 to 16 tokens, got 17 of 'xxxxx"),
    ({"bad_words": [f"a{i}" for i in range(65)]}, "bad_words", "at most 64 words of several"),
    ({"bad_words": ["xa"], "allowed_token_ids": [ord("a")]}, "allowed_token_ids", "leaves no"),
    ({"bad_words": "\ud800"}, "bad_words", "is not valid Unicode"),
    ({"allowed_token_ids": [5], "bad_token_ids": [4, 5]}, "allowed_token_ids", "leaves no token"),
    ({"allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids", "leaves no token"),
    ({"bad_token_ids": list(range(300))}, "bad_token_ids", "leaves no token"),
]


@pytest.mark.parametrize(("given", "field", "words"), REFUSED)
def test_what_this_vocabulary_does_not_have_is_refused(given: dict, field: str, words: str):
    with make_fake() as fake:
        with pytest.raises(InvalidRequest) as error:
            fake.engine.prepare("abc", SamplingParams(**given))
        assert error.value.field == field and words in str(error.value)
        assert not fake.executor.plans


def test_too_many_tokens_that_end_an_answer_are_refused():
    with make_fake() as fake:  # of a model with many EOS tokens
        many = frozenset(range(65))
        object.__setattr__(fake.engine._intake, "eos_token_ids", many)
        stops = tuple(range(100, 228))
        fake.engine.prepare("abc", SamplingParams(stop_token_ids=stops))
        with pytest.raises(InvalidRequest, match=r"min_tokens: takes at most 192 .* got 193"):
            fake.engine.prepare("abc", SamplingParams(stop_token_ids=stops, min_tokens=1))


def test_bad_words_become_token_ids():
    with make_fake() as fake:
        params = SamplingParams(bad_words=("a", "b"), bad_token_ids=(ord("a"), 9))
        settled = fake.engine.prepare("abc", params).params
        assert settled.bad_token_ids == (ord("a"), 9, ord("b")) and settled.bad_words == ()
        words = [chr(ord("a") + i) for i in range(26)]
        full = SamplingParams(bad_words=tuple(words), bad_token_ids=tuple(range(100, 300)))
        assert len(fake.engine.prepare("abc", full).params.bad_token_ids) < 226


def test_a_word_is_bad_with_a_space_in_front_too(smollm2_path):
    from conflux_jax.text import open_text

    codec = open_text(str(smollm2_path))
    with make_fake() as fake:
        intake = fake.engine._intake
        object.__setattr__(intake, "tokenizer", codec)
        object.__setattr__(intake, "vocab_size", codec.vocab_size)
        ids = intake._settled(SamplingParams(bad_words=("cat",)))[0].bad_token_ids
        assert [codec.decode([i], continuation=True) for i in ids] == ["cat", " cat"]
        texts = (codec.decode([i], continuation=True) for i in range(1000, 20_000))
        words = [text for text in texts if text.isascii() and text.isalpha()][:512]
        with pytest.raises(InvalidRequest, match=r"bad_words: at most 512 tokens, .* got \d{3}"):
            intake._settled(SamplingParams(bad_words=tuple(words)))


def test_bad_words_of_several_tokens_are_phrases(smollm2_path):
    """With a space in front too, unless that ends as the word alone does; a word that begins with
    white space as it is. Those of one token stay tokens."""
    from conflux_jax.text import open_text

    with make_fake() as fake:
        words = SamplingParams(bad_words=("ab", "\ncd", "e", " ", "ab"))
        made = fake.engine.prepare("abc", words)
        assert made.bad_phrases == ((97, 98), (10, 99, 100))  # by byte: 32 97 98 ends so too
        assert made.params.bad_token_ids == (101, 32) and made.params.bad_words == ()
        intake, codec = fake.engine._intake, open_text(str(smollm2_path))
        object.__setattr__(intake, "tokenizer", codec)
        object.__setattr__(intake, "vocab_size", codec.vocab_size)
        _, phrases = intake._settled(SamplingParams(bad_words=("quokkas", "New York")))
        texts = [codec.decode(list(phrase), continuation=True) for phrase in phrases]
        assert texts == ["quokkas", " quokkas", "New York", " New York"]


# Prompts


def scores(first: int, values: list[float]) -> PromptLogprobs:
    own = np.array(values, np.float32)
    ids = np.arange(len(values), dtype=np.int32)
    return PromptLogprobs(first, own, ids + 1, ids[:, None], own[:, None])


def test_pieces_follow_one_another_and_what_came_first_counts():
    pieces = [scores(1, [1, 2, 3]), scores(1, [8, 8]), scores(3, [8, 4, 5]), scores(6, [6])]
    joined = PromptLogprobs.joined(pieces)
    assert (joined.first, len(joined)) == (1, 6)
    assert joined.logprobs.tolist() == [1, 2, 3, 4, 5, 6]
    assert joined.ranks.tolist() == [1, 2, 3, 2, 3, 1]
    assert joined.top_ids.tolist() == [[0], [1], [2], [1], [2], [0]]
    assert [len(PromptLogprobs.joined(some)) for some in ([], [scores(1, [])])] == [0, 0]


@pytest.mark.parametrize("groups", [1, 3])
def test_a_prompt_is_reported_once_with_its_first_token(groups: int):
    """In chunks of 64, beside others that are scored, and that are not."""

    def stream(fake: Fake, length: int, top: int | None):
        params = SamplingParams(max_tokens=30, ignore_eos=True, prompt_logprobs=top)
        return open_stream(fake, "x" * length, params)

    with make_fake(groups=groups) as fake:
        asked = [(200, 2), (1, 1), (64, 0), (65, None), (30, 20)]
        streams = [stream(fake, length, top) for length, top in asked]
        for (length, top), deltas in zip(asked, map(list, streams), strict=True):
            found = [d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None]
            if top is None:
                assert not found
                continue
            assert [d.prompt_logprobs is not None for d in deltas].index(True) == 0
            (report,) = found
            assert report.logprobs.tolist() == [-i / 4 for i in range(1, length)]
            if length > 1:
                assert report.top_ids.shape == (length - 1, top)
        fake.wait_free()


def test_a_cancelled_prompt_leaves_nothing_to_the_next_of_its_name():
    with make_fake(max_num_batched_tokens=16) as fake:
        params = SamplingParams(max_tokens=2, prompt_logprobs=0)
        fake.executor.pause_at(lambda plan: len(fake.executor.plans) == 2)
        first = open_stream(fake, "x" * 90, params, "same")
        fake.executor.wait_paused()
        first.close()
        fake.executor.resume()
        fake.wait_free()
        (report,) = [
            d.prompt_logprobs
            for d in open_stream(fake, "y" * 40, params, "same")
            if d.prompt_logprobs is not None
        ]
        assert report.logprobs.tolist() == [-i / 4 for i in range(1, 40)]


def test_params_with_lists_are_frozen_values():
    given: Any = {"logit_bias": {5: 1, 3: -2.5}, "bad_token_ids": [3, 1, 3], "bad_words": "x"}
    params = SamplingParams(**given)
    assert params.logit_bias == params.bias_pairs == ((3, -2.5), (5, 1.0))
    assert (params.bad_token_ids, params.bad_words) == ((3, 1), ("x",))
    assert {Request("r", (1,), params, 4): 1}[Request("r", (1,), params, 4)] == 1
