"""A call whose client is gone before it can be told how it ended."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from conflux_jax.request import InvalidRequest, QueueFull
from conflux_jax.serve.errors import answering


@pytest.mark.parametrize("error", [InvalidRequest("a", "b"), QueueFull("full", 1.0), OSError("c")])
@pytest.mark.parametrize("done", [False, True])
async def test_who_is_gone_when_it_is_refused_was_cancelled(error: Exception, done: bool):
    """Its deadline passes between the refusal and its sending: gRPC's batch fails, which it would
    log as an error of the server's. What nobody expected is no less an error then."""

    class Gone:
        def done(self) -> bool:
            return done

        async def abort(self, *_: Any) -> None:
            raise grpc.aio.InternalError("Failed execute_batch")

    @answering
    async def handler(service: Any, request: Any, context: Any) -> None:
        raise error

    unexpected = done and isinstance(error, OSError)
    with pytest.raises(OSError if unexpected else asyncio.CancelledError):
        await handler(None, None, Gone())


async def test_what_does_not_arrive_any_more_ends_its_call_as_cancelled():
    class Gone:
        def done(self) -> bool:
            return True

    @answering
    async def handler(service: Any, request: Any, context: Any) -> None:
        raise grpc.aio.InternalError("Failed execute_batch")

    with pytest.raises(asyncio.CancelledError):
        await handler(None, None, Gone())
