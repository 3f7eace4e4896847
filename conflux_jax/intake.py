"""From what a caller sends to a `Request`: checked, tokenised, capped and seeded.

Runs on the caller's thread, so that neither a wrong prompt nor a huge one costs the engine's thread
anything. Everything here raises InvalidRequest or OutOfRange, naming the field and the limit.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conflux_jax.request import InvalidRequest, OutOfRange, Request, SamplingParams
from conflux_jax.text import TextCodec

MAX_REQUEST_ID_CHARS = 256
# A prompt of more than this many characters for each token of context is probably too long; its
# first part is tokenised alone to find out, before the whole is.
SUSPECT_CHARS_PER_TOKEN = 16


@dataclass(frozen=True)
class Chat:
    """A conversation: messages with `role` and `content`, rendered by the model's template."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True


Prompt = str | Sequence[int] | Chat


@dataclass(frozen=True)
class Intake:
    """Makes requests. `output_limit(prompt_tokens, max_tokens)` is the scheduler's: the most tokens
    that a request may produce, or OutOfRange. `clock` is the engine's."""

    tokenizer: TextCodec
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    output_limit: Callable[[int, int | None], int]
    clock: Callable[[], float]

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        arrival_s: float | None = None,
    ) -> Request:
        """A request ready to be queued. `arrival_s`: when its caller came (default: now)."""
        arrival_s = self.clock() if arrival_s is None else arrival_s
        token_ids = self.token_ids(prompt)
        seed = random.SystemRandom().getrandbits(63) if params.seed is None else params.seed
        return Request(
            request_id=_request_id(request_id),
            prompt_token_ids=token_ids,
            params=params,
            max_output_tokens=self.output_limit(len(token_ids), params.max_tokens),
            eos_token_ids=self.eos_token_ids,
            seed=seed,
            arrival_s=arrival_s,
        )

    def token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's tokens: as many as the engine's limits allow, all in the vocabulary."""
        ids: Sequence[Any]
        if isinstance(prompt, Chat):
            text = self.tokenizer.render_chat(prompt.messages, prompt.add_generation_prompt)
            ids = self._encode(text, add_special_tokens=False)  # the template writes them out
        elif isinstance(prompt, str):
            ids = self._encode(prompt)
        elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
            ids = prompt
        else:
            kind = type(prompt).__name__
            raise InvalidRequest("prompt", f"must be text or token ids, got {kind}")
        self.output_limit(len(ids), None)
        if ids is prompt:
            self._check_ids(ids)
        return tuple(int(i) for i in ids)

    def _check_ids(self, ids: Sequence[Any]) -> None:
        for index, token_id in enumerate(ids):
            if isinstance(token_id, bool) or not hasattr(token_id, "__index__"):
                raise InvalidRequest("prompt", f"token {index} must be an integer: {token_id!r}")
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    "prompt",
                    f"token id {token_id} at position {index} is outside the model's vocabulary "
                    f"(0 to {self.vocab_size - 1})",
                )

    def _encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        limit = SUSPECT_CHARS_PER_TOKEN * self.max_model_len
        if len(text) > limit:
            # Cutting a text changes its tokens near the cut only; a factor of two is far from that.
            count = len(self.tokenizer.encode(text[:limit]))
            if count > 2 * self.max_model_len:
                raise OutOfRange(
                    "prompt",
                    f"more than {count} tokens; max_model_len is {self.max_model_len} tokens of "
                    "prompt plus output",
                )
        return self.tokenizer.encode(text, add_special_tokens)


def _request_id(given: str | None) -> str:
    if given is None or given == "":
        return f"req-{uuid.uuid4().hex}"
    if len(given) > MAX_REQUEST_ID_CHARS or not given.isprintable():
        raise InvalidRequest(
            "request_id", f"must be at most {MAX_REQUEST_ID_CHARS} printable characters"
        )
    return given
