"""Sampling parameters refuse what cannot be served, naming field and limit."""

from __future__ import annotations

import dataclasses
import math

import pytest

from conflux_jax.request import (
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    FinishReason,
    InvalidRequest,
    OutOfRange,
    Request,
    SamplingParams,
    TokenEvent,
)

WRONG = [
    ("max_tokens", 0, "must be between 1 and 2147483647, got 0"),
    ("max_tokens", 2**31, "must be between 1"),
    ("max_tokens", 1.0, "must be an integer, got 1.0"),
    ("max_tokens", True, "must be an integer, got True"),
    ("temperature", -0.1, "must be at least 0.0 and at most 100.0, got -0.1"),
    ("temperature", math.nan, "must be a number, got nan"),
    ("temperature", math.inf, "must be at least 0.0 and at most 100.0, got inf"),
    ("temperature", 10**400, "must be at least 0.0 and at most 100.0"),
    ("temperature", None, "must be a number, got None"),
    ("temperature", "hot", "must be a number, got 'hot'"),
    ("temperature", False, "must be a number, got False"),
    ("top_k", -1, "must be between 0"),
    ("top_p", 0.0, "must be above 0.0 and at most 1.0, got 0.0"),
    ("top_p", 1.01, "must be above 0.0 and at most 1.0"),
    ("min_p", -0.5, "must be at least 0.0 and at most 1.0"),
    ("min_p", 2, "must be at least 0.0 and at most 1.0"),
    ("seed", 2**63, "must be between"),
    ("seed", "7", "must be an integer, got '7'"),
    ("logprobs", 21, "must be between 0 and 20, got 21"),
    ("logprobs", -1, "must be between 0 and 20"),
    ("prompt_logprobs", 21, "must be between 0 and 20, got 21"),
    ("presence_penalty", 2.1, "must be at least -2.0 and at most 2.0, got 2.1"),
    ("frequency_penalty", -2.5, "must be at least -2.0"),
    ("frequency_penalty", None, "must be a number, got None"),
    ("repetition_penalty", 0.0, "must be at least 0.01 and at most 100.0, got 0.0"),
    ("repetition_penalty", math.inf, "at most 100.0"),
    ("min_tokens", -1, "must be between 0"),
    ("min_tokens", 17, "must be at most max_tokens (16), got 17"),
    ("logit_bias", 5, "must map token ids to numbers, got 5"),
    ("logit_bias", "ab", "must map token ids to numbers"),
    ("logit_bias", {"5": 1.0}, "token ids must be integers, got '5'"),
    ("logit_bias", {-1: 1.0}, "token ids are at least 0 and below 2^31, got -1"),
    ("logit_bias", {3: 100.5}, "that of 3 must be a number from -100 to 100, got 100.5"),
    ("logit_bias", {3: math.nan}, "that of 3 must be a number"),
    ("logit_bias", {3: True}, "that of 3 must be a number"),
    ("logit_bias", dict.fromkeys(range(513), 1.0), "at most 512 token ids, got 513"),
    ("stop_token_ids", 5, "must be a list of token ids, got 5"),
    ("stop_token_ids", [True], "token ids must be integers, got True"),
    ("stop_token_ids", range(3), "must be a list of token ids"),
    ("stop_token_ids", [1] * 129, "at most 128 token ids, got 129"),
    ("bad_token_ids", [2**31], "token ids are at least 0 and below 2^31"),
    ("bad_token_ids", [1] * 513, "at most 512 token ids, got 513"),
    ("bad_words", ["ok", 3], "each must be a string of 1 to"),
    ("bad_words", {"a": 1}, "must be a string or a list of them"),
    ("allowed_token_ids", [], "must have at least one token id"),
    ("allowed_token_ids", [1] * 1025, "at most 1024 token ids, got 1025"),
    ("ttft_slo_s", 0.0, "must be above 0.0"),
    ("tbt_slo_s", -1.0, "must be above 0.0"),
    ("tbt_slo_s", math.nan, "must be a number"),
    ("ignore_eos", 1, "must be true or false, got 1"),
    ("stop", 5, "must be a string or a list of them, got 5"),
    ("stop", {"a": 1}, "must be a string or a list of them"),
    ("stop", [""], "each must be a string of 1 to"),
    ("stop", ["ok", 3], "each must be a string of 1 to"),
    ("stop", ["x" * (MAX_STOP_STRING_CHARS + 1)], "each must be a string of 1 to"),
    ("stop", ["x"] * (MAX_STOP_STRINGS + 1), f"at most {MAX_STOP_STRINGS} strings, got 17"),
]


@pytest.mark.parametrize(("field", "value", "words"), WRONG)
def test_wrong_values_name_field_and_limit(field, value, words):
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(**{field: value})
    assert error.value.field == field
    assert str(error.value).startswith(f"{field}: ") and words in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", None),
        ("max_tokens", 1),
        ("max_tokens", 2**31 - 1),
        ("temperature", 0),
        ("temperature", 100.0),
        ("top_k", 0),
        ("top_p", 1e-9),
        ("top_p", 1),
        ("min_p", 1.0),
        ("seed", -(2**63)),
        ("seed", 2**63 - 1),
        ("logprobs", 0),
        ("logprobs", 20),
        ("prompt_logprobs", 20),
        ("presence_penalty", -2),
        ("frequency_penalty", 2.0),
        ("repetition_penalty", 0.01),
        ("repetition_penalty", 100),
        ("min_tokens", 16),
        ("allowed_token_ids", (2**31 - 1,)),
        ("ttft_slo_s", 0.5),
        ("ignore_eos", True),
    ],
)
def test_values_at_the_limits_are_taken(field, value):
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("given", "kept"),
    [("END", ("END",)), (["a", "b"], ("a", "b")), ((), ()), (None, ())],
)
def test_stop_may_be_one_string_or_several(given, kept):
    assert SamplingParams(stop=given).stop == kept


def test_values_are_frozen_and_comparable():
    params = SamplingParams(stop=["x"], seed=3)  # pyright: ignore[reportArgumentType]
    assert params == SamplingParams(stop=("x",), seed=3)
    assert hash(params) == hash(SamplingParams(stop=("x",), seed=3))
    assert dataclasses.replace(params, temperature=0.0).stop == ("x",)
    request = Request("r", (1, 2), params, 16)
    assert {request: 1}[Request("r", (1, 2), params, 16)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.seed = 4  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(InvalidRequest):
        dataclasses.replace(params, temperature=-1.0)


def test_errors_and_events():
    assert issubclass(OutOfRange, InvalidRequest) and issubclass(InvalidRequest, ValueError)
    assert str(FinishReason.LENGTH) == "length"
    event = TokenEvent("r", None, FinishReason.ERROR, message="a")
    assert event == TokenEvent("r", None, FinishReason.ERROR, message="a")
    assert (event.token_id, event.logprobs) == (None, None)
    with pytest.raises(AttributeError):
        event.token_id = 4  # pyright: ignore[reportAttributeAccessIssue]
