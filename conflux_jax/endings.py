"""What a client is told of a request that ended by none of its own doing: an error for each way."""

from __future__ import annotations

from conflux_jax.engine import EngineFailed
from conflux_jax.inbox import Unavailable
from conflux_jax.request import FinishReason
from conflux_jax.streams import OutputDelta


class ReadTooSlowly(RuntimeError):
    """An accepted request ended because its client left too much of its output unread."""


def check_end(delta: OutputDelta) -> None:
    """Raises EngineFailed, ReadTooSlowly or Unavailable where the delta ends a request, and neither
    the request itself nor its client's abort was the reason."""
    if delta.finish_reason is FinishReason.ERROR:
        raise EngineFailed(delta.message)
    if delta.overflowed:
        raise ReadTooSlowly(delta.message)
    if delta.finish_reason is FinishReason.ABORT and delta.message:
        raise Unavailable(delta.message)
