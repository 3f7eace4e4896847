"""What is fuzzed: the way from the bytes of a request to a request that could be queued, of both
interfaces. All that may come of any bytes is a request, or an error that is the client's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

from google.protobuf.message import DecodeError

from conflux_jax.engine import Engine
from conflux_jax.request import InvalidRequest
from conflux_jax.serve import messages
from conflux_jax.serve.http_errors import error_response, kind_of
from conflux_jax.serve.openai_requests import (
    chat_call,
    completion_call,
    detokenize_request,
    tokenize_request,
)
from conflux_jax.serve.proto.conflux.v1 import inference_pb2 as pb

Target = Callable[[Engine, bytes], None]


def grpc(engine: Engine, data: bytes) -> None:
    try:
        message = pb.GenerateRequest.FromString(data)
    except DecodeError:
        return
    try:
        messages.prepare(engine, message, math.inf)
    except InvalidRequest as error:
        names_its_field(error, str(error))


def names_its_field(error: InvalidRequest, message: str) -> None:
    assert 400 <= kind_of(error).status < 500
    assert error.field and message.startswith(f"{error.field}: ")


HTTP: tuple[Callable[[Engine, bytes], object], ...] = (
    lambda engine, body: completion_call(engine, body, None),
    lambda engine, body: chat_call(engine, body, None),
    tokenize_request,
    detokenize_request,
)


def http(engine: Engine, data: bytes) -> None:
    """The first byte says which endpoint."""
    if not data:
        return
    try:
        HTTP[data[0] % len(HTTP)](engine, data[1:])
    except InvalidRequest as error:
        names_its_field(error, json.loads(bytes(error_response(error).body))["error"]["message"])


TARGETS: dict[str, Target] = {"grpc": grpc, "http": http}
SOUND = pb.GenerateRequest(
    text="ab", sampling=pb.SamplingParams(max_tokens=3, temperature=0.5, stop=["x"], seed=1)
)
CHAT = pb.GenerateRequest(
    chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")]), model="fake"
)
BODIES = (
    {"prompt": ["ab", "c"], "max_tokens": 3, "stop": ["x"], "n": 2, "stream": True},
    {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2},
    {"prompt": "ab", "add_special_tokens": False},
    {"tokens": [97, 98]},
)
SEEDS: dict[str, tuple[bytes, ...]] = {
    "grpc": (SOUND.SerializeToString(), CHAT.SerializeToString()),
    "http": tuple(bytes([i]) + json.dumps(body).encode() for i, body in enumerate(BODIES)),
}
