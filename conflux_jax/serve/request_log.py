"""A line in the log for each request that is over, whichever interface it came through.

The streams that requests are read from count what comes through them, on their reader's side: the
engine's thread has no part in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from conflux_jax.config import ServerConfig
from conflux_jax.engine import Engine
from conflux_jax.request import FinishReason
from conflux_jax.serve.logs import Prompt
from conflux_jax.serve.trace_context import CURRENT_TRACE
from conflux_jax.streams import Mailbox, OutputDelta, OutputStream

LOGGER = logging.getLogger(__name__)
MESSAGE = "request finished"


class RequestLog:
    """Logs the requests of this engine from now on. Their prompts only with `log_prompts`."""

    def __init__(self, config: ServerConfig, engine: Engine):
        self._engine, self._with_prompts = engine, config.log_prompts
        engine.make_stream = self._open

    def _open(self, mailbox: Mailbox, cancel: Callable[[Mailbox], object]) -> OutputStream:
        return _LoggedStream(mailbox, cancel, self)

    def write(self, stream: _LoggedStream, reason: FinishReason, message: str) -> None:
        if not LOGGER.isEnabledFor(logging.INFO):
            return
        request = stream.request
        fields: dict[str, Any] = {
            "request_id": request.request_id,
            "finish_reason": str(reason),
            "prompt_tokens": len(request.prompt_token_ids),
            "output_tokens": stream.num_tokens,
            "e2e_s": round(self._engine.now_s - request.arrival_s, 6),
        }
        if stream.ttft_s is not None:
            fields["ttft_s"] = round(stream.ttft_s, 6)
        if stream.trace is not None:
            fields |= {"trace_id": stream.trace.trace_id, "parent_span_id": stream.trace.span_id}
        if message:
            fields["error"] = message
        if self._with_prompts:
            fields["prompt"] = Prompt(self._engine.tokenizer, request.prompt_token_ids)
        level = logging.ERROR if reason is FinishReason.ERROR else logging.INFO
        LOGGER.log(level, MESSAGE, extra={"fields": fields})


class _LoggedStream(OutputStream):
    """Logs once, when its reader has had the end or wants no more.

    num_tokens, ttft_s: of what was read; seconds from the request's arrival to its first token.
    """

    def __init__(self, mailbox: Mailbox, cancel: Callable[[Mailbox], object], log: RequestLog):
        super().__init__(mailbox, cancel)
        self._log = log
        self.trace = CURRENT_TRACE.get()
        self.num_tokens = 0
        self.ttft_s: float | None = None

    async def __anext__(self) -> OutputDelta:
        return self._noted(await super().__anext__())

    def _read(self) -> OutputDelta:
        return self._noted(super()._read())

    def close(self) -> None:
        was_open = not self._over
        super().close()
        if was_open:
            self._log.write(self, FinishReason.ABORT, "")

    def _noted(self, delta: OutputDelta) -> OutputDelta:
        if self.ttft_s is None and delta.times_s:
            self.ttft_s = delta.times_s[0]
        self.num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._log.write(self, delta.finish_reason, delta.message)
        return delta
