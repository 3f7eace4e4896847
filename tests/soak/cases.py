"""What the storm asks for: requests whose answers are known from a run of each of them alone, and
requests that must be refused."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from conflux_jax.serve.proto.conflux.v1 import inference_pb2 as pb

MAX_MODEL_LEN = 384
NUM_CASES = 48


@dataclass(frozen=True)
class Case:
    """One sound request, under both APIs. prompt: token ids (bytes)."""

    number: int
    prompt: tuple[int, ...]
    sampling: dict[str, Any]  # the names are the same in both APIs

    def message(self, request_id: str | None = None, **changes: Any) -> pb.GenerateRequest:
        sampling = pb.SamplingParams(**{**self.sampling, **changes})
        request = pb.GenerateRequest(sampling=sampling)
        request.token_ids.ids.extend(self.prompt)
        if request_id is not None:
            request.request_id = request_id
        return request

    def body(self, **changes: Any) -> bytes:
        return json.dumps({"prompt": list(self.prompt), **self.sampling, **changes}).encode()


@dataclass(frozen=True)
class Answer:
    """What a case says alone."""

    token_ids: tuple[int, ...]
    text: str


def make_cases(seed: int) -> list[Case]:
    """Prompts of one token to many chunks, greedy and drawn, with every cut-off."""
    draw = random.Random(seed)
    cases = []
    for number in range(NUM_CASES):
        length = draw.choice((1, 2, 7, 16, 33, 90, 200))
        sampling: dict[str, Any] = {
            "max_tokens": draw.choice((1, 2, 5, 12, 24)),
            "temperature": draw.choice((0.0, 0.0, 0.7, 1.2)),
            "top_k": draw.choice((0, 0, 5)),
            "top_p": draw.choice((1.0, 0.8)),
            "seed": draw.getrandbits(40),
            "ignore_eos": draw.random() < 0.7,
        }
        prompt = tuple(draw.randrange(32, 127) for _ in range(length))
        cases.append(Case(number, prompt, sampling))
    return cases


BAD_SAMPLING: tuple[dict[str, Any], ...] = (
    {"max_tokens": 0},
    {"max_tokens": -(2**40)},
    {"temperature": -1.0},
    {"temperature": float("nan")},
    {"top_p": 0.0},
    {"top_k": -3},
    {"min_p": 2.0},
    {"logprobs": 10**9},
    {"stop": ["x"] * 100},
    {"ttft_slo_s": 0.0},
)
BAD_BODIES: tuple[bytes, ...] = (
    b"",
    b"{",
    b"[]",
    b"\xff\xfe",
    b'{"prompt": []}',
    b'{"prompt": [1, "a"]}',
    b'{"prompt": [99999999999999999999]}',
    b'{"prompt": "x", "max_tokens": "many"}',
    b'{"prompt": "x", "max_tokens": -1}',
    b'{"prompt": "x", "n": 0}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "nonsense": 1}',
    b'{"prompt": "x", "model": "another"}',
    json.dumps({"prompt": "x" * (MAX_MODEL_LEN + 1)}).encode(),
)
NOT_MESSAGES: tuple[bytes, ...] = (
    b"\xff",
    b"\x1a\x05ab",  # a text that ends too early
    b"\x1a\x02\xff\xfe",  # a text that is not UTF-8
    b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
)
