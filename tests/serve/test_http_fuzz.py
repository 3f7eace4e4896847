"""Bodies that nobody would write: each is answered, or refused with a clean 4xx that names a field,
and leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conflux_jax.config import Config
from conflux_jax.serve.http_server import HttpServer
from tests.fakes import Fake, make_fake
from tests.scheduler.predictors import Linear

NAMES = (
    "prompt", "messages", "tokens", "n", "max_tokens", "max_completion_tokens", "temperature",
    "top_p", "top_k", "min_p", "seed", "stop", "logprobs", "top_logprobs", "echo", "stream",
    "stream_options", "model", "logit_bias", "min_tokens", "ignore_eos", "ttft_slo_s", "user",
    "add_generation_prompt", "return_token_strs", "nonsense", "presence_penalty",
    "repetition_penalty", "stop_token_ids", "bad_token_ids", "bad_words", "allowed_token_ids",
    "prompt_logprobs",
)  # fmt: skip
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 40)
    | st.floats()
    | st.text(max_size=6)
    | st.characters(categories=["Cs"])
)
MESSAGES = st.fixed_dictionaries(
    {}, optional={"role": st.sampled_from(["user", "x"]), "content": SCALARS | st.lists(SCALARS)}
)
VALUES = st.recursive(
    SCALARS | MESSAGES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
PROMPTS = st.text(max_size=5) | st.lists(st.integers(-1, 310), max_size=5)
SOUND: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/estimate": {"prompt": "ab"},
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [97]},
}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path, and a sound body for it of which a few fields are anything."""
    path = draw(st.sampled_from(sorted(SOUND)))
    wrong = draw(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=2))
    if draw(st.booleans()):
        wrong["prompt"] = draw(PROMPTS | st.lists(PROMPTS, max_size=3))
    return path, json.dumps(SOUND[path] | wrong).encode()


NO_BODIES = st.tuples(st.sampled_from(sorted(SOUND)), st.binary(max_size=30))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served() -> AsyncIterator[tuple[Fake, httpx.AsyncClient]]:
    """The application without a socket: what is sent is what hypothesis makes of it."""
    with make_fake(max_model_len=64, predictor=Linear(base_s=0.01)) as fake:
        server = HttpServer(Config())
        server.use(fake.engine)
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield fake, client


@pytest.mark.asyncio(loop_scope="module")
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sent=bodies() | NO_BODIES)
async def test_any_body_is_answered_or_refused_by_field(
    served: tuple[Fake, httpx.AsyncClient], sent: tuple[str, bytes]
):
    fake, client = served
    path, content = sent
    headers = {"content-type": "application/json"}
    response = await client.post(path, content=content, headers=headers)
    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["param"] and error["message"].startswith(f"{error['param']}: ")
    assert fake.engine.healthy and not fake.engine.num_live
