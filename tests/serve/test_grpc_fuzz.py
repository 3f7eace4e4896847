"""Whatever a message of either contract has in it becomes a request, or is refused by field."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from smg_grpc_proto import vllm_engine_pb2 as vllm

from conflux_jax.engine import Engine
from conflux_jax.request import InvalidRequest
from conflux_jax.serve import messages, vllm_grpc
from conflux_jax.serve.choices import Choices
from conflux_jax.serve.proto.conflux.v1 import inference_pb2 as pb
from tests.fakes import make_fake

FUZZ = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
FLOATS = st.floats(width=32) | st.sampled_from((0.0, 0.5, 1.0))
WIDE = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 40)
NARROW = st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 40)
PLAIN = st.integers(0, 2**32 - 1) | st.integers(0, 40)
STRINGS = st.text(max_size=4)
BY_CPP_TYPE = {"DOUBLE": FLOATS, "FLOAT": FLOATS, "INT64": WIDE, "INT32": NARROW, "UINT32": PLAIN}


def values_of(field: Any) -> st.SearchStrategy[Any] | None:
    """For a scalar field, or a list of strings or numbers; None for others."""
    kinds = {getattr(field, f"CPPTYPE_{name}"): values for name, values in BY_CPP_TYPE.items()}
    kinds |= {field.CPPTYPE_BOOL: st.booleans(), field.CPPTYPE_STRING: STRINGS}
    values = kinds.get(field.cpp_type)
    return st.lists(values, max_size=3) if values is not None and field.is_repeated else values


def fields_of(message: Any, *left_out: str) -> st.SearchStrategy[dict[str, Any]]:
    """Any few of its fields with any value."""
    strategies = {
        field.name: values
        for field in message.DESCRIPTOR.fields
        if field.name not in left_out and (values := values_of(field)) is not None
    }
    chosen = st.sets(st.sampled_from(sorted(strategies)), max_size=2)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({n: strategies[n] for n in names}))


@contextlib.contextmanager
def or_refused() -> Iterator[None]:
    try:
        yield
    except InvalidRequest as error:
        if not str(error).startswith(f"{error.field}: "):
            raise AssertionError("the message does not begin with the field") from error


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with make_fake() as fake:
        yield fake.engine


def check(choices: Choices, n: int) -> None:
    assert len(choices.requests) == n
    for request in choices.requests:
        assert request.max_output_tokens >= 1 and request.prompt_token_ids
        assert -(2**63) <= request.seed < 2**63


@FUZZ
@given(
    own=fields_of(pb.GenerateRequest),
    sampling=fields_of(pb.SamplingParams),
    ids=st.none() | st.lists(NARROW, max_size=3),
)
def test_the_engines_own(engine, own, sampling, ids):
    own.setdefault("text", "abc")
    message = pb.GenerateRequest(sampling=pb.SamplingParams(**sampling), **own)
    if ids is not None:
        message.token_ids.SetInParent()
        message.token_ids.ids.extend(ids)
    with or_refused():
        choices = messages.prepare(engine, message, math.inf)
        check(choices, message.n if message.HasField("n") else 1)


@FUZZ
@given(
    own=fields_of(vllm.GenerateRequest),
    sampling=fields_of(vllm.SamplingParams),
    ids=st.none() | st.lists(PLAIN, max_size=3),
)
def test_vllms(engine, own, sampling, ids):
    own.setdefault("text", "abc")
    message = vllm.GenerateRequest(sampling_params=vllm.SamplingParams(**sampling), **own)
    if ids is not None:
        message.tokenized.SetInParent()
        message.tokenized.input_ids.extend(ids)
    with or_refused():
        choices = vllm_grpc.prepare(engine, message, math.inf)
        check(choices, message.sampling_params.n or 1)


@FUZZ
@given(data=st.binary(max_size=60), chosen=st.integers(0, 3))
def test_bytes(engine, data: bytes, chosen: int):
    kinds: list[tuple[Any, Any]] = [
        (pb.GenerateRequest, lambda message: messages.prepare(engine, message, math.inf)),
        (pb.TokenizeRequest, lambda message: messages.tokenize(engine, message)),
        (pb.DetokenizeRequest, lambda message: messages.detokenize(engine, message)),
        (pb.EstimateRequest, lambda message: messages.prompt_tokens(engine, message)),
    ]
    kind, work = kinds[chosen]
    try:
        message = kind.FromString(data)
    except DecodeError:
        return
    with or_refused():
        work(message)
