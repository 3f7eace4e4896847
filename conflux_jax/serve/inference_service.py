"""`conflux.v1.Inference`, the engine's own gRPC service.

Handlers write with `context.write` and are no generators: a cancelled call then raises inside the
handler, which closes its streams there and then, and so frees its requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from conflux_jax.config import ServerConfig
from conflux_jax.endings import ReadTooSlowly, check_end
from conflux_jax.engine import Engine
from conflux_jax.inbox import Unavailable
from conflux_jax.request import InvalidRequest
from conflux_jax.serve import messages
from conflux_jax.serve.aside import Aside
from conflux_jax.serve.choices import Calls, Choices
from conflux_jax.serve.errors import answering, checked_estimate
from conflux_jax.serve.patience import Patience
from conflux_jax.serve.proto.conflux.v1 import inference_pb2 as pb
from conflux_jax.serve.proto.conflux.v1 import inference_pb2_grpc as pb_grpc
from conflux_jax.streams import OutputDelta


class EngineHolder:
    """What the services of one server share. `engine` is None while the model is loading."""

    def __init__(self, config: ServerConfig) -> None:
        self.engine: Engine | None = None
        self.calls = Calls(config.max_unread_tokens)
        self._write_timeout_s = config.write_timeout_s
        self.aside = Aside()

    def close(self) -> None:
        self.aside.close()

    def ready(self) -> Engine:
        if self.engine is None:
            raise Unavailable("the model is still loading")
        return self.engine

    @contextlib.contextmanager
    def writing(self, context: Any) -> Iterator[Callable[[Any], Awaitable[None]]]:
        """What writes a call's messages: it waits while the network holds as much as it will, and
        raises ReadTooSlowly where that is for too long."""
        limit_s = self._write_timeout_s
        patience = Patience(limit_s)

        async def write(message: Any) -> None:
            try:
                await patience.wait(context.write(message))
            except TimeoutError as error:
                why = f"write_timeout_s: nothing was read for {limit_s:g} s"
                raise ReadTooSlowly(why) from error

        try:
            yield write
        finally:
            patience.close()


class InferenceService(pb_grpc.InferenceServicer):
    """One method a call, as the .proto describes them."""

    def __init__(self, holder: EngineHolder):
        self._holder = holder

    @answering
    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        engine, choices = await self._prepare(request, context)
        async with self._holder.calls.open(engine, choices) as outputs:
            await _send_id(context, choices)
            counts = [0] * len(choices.requests)
            with self._holder.writing(context) as write:
                async for index, delta in outputs:
                    counts[index] += len(delta.token_ids)
                    await write(messages.response_of(choices, index, delta, counts[index]))
                    check_end(delta)

    @answering
    async def Complete(self, request: pb.GenerateRequest, context: Any) -> pb.CompleteResponse:
        engine, choices = await self._prepare(request, context)
        parts: list[list[OutputDelta]] = [[] for _ in choices.requests]
        async with self._holder.calls.open(engine, choices) as outputs:
            await _send_id(context, choices)
            async for index, delta in outputs:
                check_end(delta)
                parts[index].append(delta)
        return messages.reply_of(choices, parts)

    @answering
    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        if not request.request_id:
            raise InvalidRequest("request_id", "must be given")
        found = await self._holder.calls.abort(self._holder.ready(), request.request_id)
        return pb.AbortResponse(found=found)

    @answering
    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> Any:
        return messages.model_info_of(self._holder.ready().info)

    @answering
    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        engine = self._holder.ready()
        load = await asyncio.wrap_future(engine.load())
        return messages.load_of(load, engine.info, accepting=not engine.state_message)

    @answering
    async def Estimate(self, request: pb.EstimateRequest, context: Any) -> pb.EstimateResponse:
        engine = self._holder.ready()
        tokens = await asyncio.to_thread(messages.prompt_tokens, engine, request)
        estimate = checked_estimate(await asyncio.wrap_future(engine.estimate(tokens)))
        return messages.estimate_of(tokens, estimate)

    @answering
    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        return await self._holder.aside.run(messages.tokenize, self._holder.ready(), request)

    @answering
    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Any
    ) -> pb.DetokenizeResponse:
        return await self._holder.aside.run(messages.detokenize, self._holder.ready(), request)

    async def _prepare(self, request: pb.GenerateRequest, context: Any) -> tuple[Engine, Choices]:
        engine = self._holder.ready()
        deadline_s = deadline_of(context, engine)
        return engine, await asyncio.to_thread(messages.prepare, engine, request, deadline_s)


def deadline_of(context: Any, engine: Engine) -> float:
    """When the client stops waiting, on the engine's clock; gRPC then cancels the call itself."""
    left_s = context.time_remaining()
    return math.inf if left_s is None else engine.now_s + left_s


async def _send_id(context: Any, choices: Choices) -> None:
    """At once, so that a call that waits can be aborted."""
    await context.send_initial_metadata((("x-request-id", _header(choices.id)),))


def _header(text: str) -> str:
    """As metadata may carry it: printable ASCII."""
    return text.encode("ascii", "backslashreplace").decode()
