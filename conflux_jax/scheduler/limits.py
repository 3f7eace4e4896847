"""What one request may ask of this engine. Only constants: any thread may call it."""

from __future__ import annotations

from conflux_jax.plan import PoolGeometry
from conflux_jax.request import InvalidRequest, OutOfRange, Request


class RequestLimits:
    """max_model_len: most tokens of prompt plus output. The pool's limit counts KV tokens, of which
    a request has `prompt + outputs - 1`: its last token is never fed back."""

    def __init__(self, max_model_len: int, geometry: PoolGeometry):
        self.max_model_len = max_model_len
        self.max_kv_tokens = geometry.max_request_tokens

    def output_limit(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """The most tokens that a prompt may produce: `max_tokens`, capped by context and pool.

        Raises InvalidRequest for an empty prompt or max_tokens below 1, OutOfRange for a prompt
        that leaves no room for one output token.

        Worked: a pool of 1,024 KV tokens and a context of 4,096. A prompt of 1,024 fills the pool
        and gets its first token, which needs no KV: 1. A prompt of 1,000 gets at most 25: the KV of
        24 of them fills the pool. A prompt of 1,025 is refused.
        """
        if prompt_tokens < 1:
            raise InvalidRequest("prompt", "must have at least one token, got none")
        if max_tokens is not None and max_tokens < 1:
            raise InvalidRequest("max_tokens", f"must be at least 1, got {max_tokens}")
        if prompt_tokens >= self.max_model_len:
            raise OutOfRange(
                "prompt",
                f"{prompt_tokens} tokens leave no room for output: max_model_len is "
                f"{self.max_model_len} tokens of prompt plus output",
            )
        if prompt_tokens > self.max_kv_tokens:
            raise OutOfRange(
                "prompt",
                f"{prompt_tokens} tokens can never fit the KV pool, which holds at most "
                f"{self.max_kv_tokens} tokens of one request",
            )
        room = min(self.max_model_len - prompt_tokens, self.max_kv_tokens - prompt_tokens + 1)
        return room if max_tokens is None else min(max_tokens, room)

    def check(self, request: Request) -> None:
        """Raises InvalidRequest or OutOfRange where `request` could never be served in full."""
        asked = request.max_output_tokens
        limit = self.output_limit(len(request.prompt_token_ids), asked)
        if asked > limit:
            raise OutOfRange(
                "max_tokens",
                f"{asked} after a prompt of {len(request.prompt_token_ids)} tokens; at most "
                f"{limit}: max_model_len is {self.max_model_len}, and the KV pool holds "
                f"{self.max_kv_tokens} tokens of one request",
            )
