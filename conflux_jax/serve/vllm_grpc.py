"""`vllm.grpc.engine.VllmEngine`, the contract by which gateways drive vLLM, on this engine.

https://github.com/smg-project/smg; its messages are those of the package `smg-grpc-proto`. Tokens
go out as they are: clients of this contract make their text themselves, so that what only concerns
text (`skip_special_tokens`, ...) changes nothing here. Its plain scalars cannot tell zero from
absent, and zero means the default wherever it is no value of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import hashlib
import importlib.metadata
import io
import time
import zipfile
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc
from smg_grpc_proto.generated import common_pb2 as common

from conflux_jax.endings import check_end
from conflux_jax.engine import Engine
from conflux_jax.intake import Prompt
from conflux_jax.model_info import ModelInfo
from conflux_jax.request import InvalidRequest, Request, SamplingParams
from conflux_jax.scheduler.outlook import Load
from conflux_jax.serve.choices import Choices, choices_of
from conflux_jax.serve.errors import Unsupported, answering
from conflux_jax.serve.inference_service import EngineHolder, deadline_of
from conflux_jax.streams import OutputDelta

SERVICE = vllm.DESCRIPTOR.services_by_name["VllmEngine"].full_name
SERVER_TYPE = "vllm-grpc"
TOKENIZER_CHUNK_BYTES = 64 * 1024
MAX_ABORT_IDS = 4096

# Passed on as they are. A field that SamplingParams gets is known here at once.
_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)}
# Zero is no value of these but their absence.
_ZERO_IS_DEFAULT = ("top_p", "repetition_penalty", "n")
# They concern text, or a constraint that is refused by its own name.
_IGNORED = (
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "grammar_from_first_token",
)
_TAKEN = ("request_id", "tokenized", "text", "sampling_params", "stream")


def add_to_server(holder: EngineHolder, server: grpc.aio.Server) -> str:
    """Serve it too; returns its name."""
    vllm_grpc.add_VllmEngineServicer_to_server(VllmService(holder), server)
    return SERVICE


class VllmService(vllm_grpc.VllmEngineServicer):
    """Errors and deadlines as in `InferenceService`."""

    def __init__(self, holder: EngineHolder):
        self._holder = holder
        self._started_s = time.monotonic()
        self._last_request_s = 0.0  # seconds since the epoch

    @answering
    async def Generate(self, request: vllm.GenerateRequest, context: Any) -> None:
        """With `stream` a chunk for what is new, and after each choice's last one its completion,
        with the tokens of that chunk again; else the completions alone, in order, with all."""
        engine = self._holder.ready()
        self._last_request_s = time.time()
        deadline_s = deadline_of(context, engine)
        choices = await asyncio.to_thread(prepare, engine, request, deadline_s)
        parts: list[list[OutputDelta]] = [[] for _ in choices.requests]
        with self._holder.writing(context) as write:
            async with self._holder.calls.open(engine, choices) as outputs:
                async for index, delta in outputs:
                    check_end(delta)
                    if not request.stream:
                        parts[index].append(delta)
                        continue
                    await write(chunk_of(choices, index, delta))
                    if delta.finish_reason is not None:
                        await write(completion_of(choices, index, [delta]))
            if not request.stream:
                for index, deltas in enumerate(parts):
                    await write(completion_of(choices, index, deltas))

    @answering
    async def Embed(self, request: vllm.EmbedRequest, context: Any) -> None:
        raise Unsupported("Embed: the model generates, and makes no embeddings")

    @answering
    async def HealthCheck(self, request: Any, context: Any) -> vllm.HealthCheckResponse:
        engine = self._holder.engine
        if engine is None:
            return vllm.HealthCheckResponse(healthy=False, message="the model is still loading")
        problem = engine.state_message
        if not engine.healthy:
            problem = problem or "the engine makes no progress"
        return vllm.HealthCheckResponse(healthy=not problem, message=problem or "ok")

    @answering
    async def Abort(self, request: vllm.AbortRequest, context: Any) -> vllm.AbortResponse:
        """Ids that are not known are over already, and that is what was asked for."""
        engine, ids = self._holder.ready(), request.request_ids
        if len(ids) > MAX_ABORT_IDS:
            raise InvalidRequest("request_ids", f"at most {MAX_ABORT_IDS} at once, got {len(ids)}")
        await asyncio.gather(*(self._holder.calls.abort(engine, name) for name in ids))
        return vllm.AbortResponse()

    @answering
    async def GetModelInfo(self, request: Any, context: Any) -> vllm.GetModelInfoResponse:
        engine = self._holder.ready()
        return model_info_of(engine.info, engine.tokenizer.bos_token_id)

    @answering
    async def GetServerInfo(self, request: Any, context: Any) -> vllm.GetServerInfoResponse:
        engine = self._holder.ready()
        info = engine.info
        return vllm.GetServerInfoResponse(
            active_requests=engine.num_live,
            is_paused=bool(engine.state_message),
            last_receive_timestamp=self._last_request_s,
            uptime_seconds=time.monotonic() - self._started_s,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            kv_cache_dtype="auto",  # the model's own
            block_size=info.page_tokens,
            model_dtype=f"torch.{info.dtype}",
            max_num_seqs=info.max_num_seqs,
        )

    @answering
    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Any) -> vllm.GetLoadsResponse:
        engine = self._holder.ready()
        if request.HasField("dp_rank") and request.dp_rank != 0:
            raise InvalidRequest("dp_rank", f"must be 0, the only rank, got {request.dp_rank}")
        load = await asyncio.wrap_future(engine.load())
        return vllm.GetLoadsResponse(
            timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
            version=importlib.metadata.version("conflux-jax"),
            dp_rank_count=1,
            loads=[load_of(load, engine.info, engine.num_live)],
        )

    @answering
    async def GetTokenizer(self, request: Any, context: Any) -> None:
        for chunk in await asyncio.to_thread(tokenizer_chunks, self._holder.ready()):
            await context.write(chunk)

    @answering
    async def FlushCache(self, request: Any, context: Any) -> None:
        raise Unsupported("FlushCache: there is no prefix cache")

    @answering
    async def SubscribeKvEvents(self, request: Any, context: Any) -> None:
        raise Unsupported("SubscribeKvEvents: there is no prefix cache to tell of")

    @answering
    async def StartProfile(self, request: Any, context: Any) -> None:
        raise Unsupported("StartProfile: the server takes no profiles")

    @answering
    async def StopProfile(self, request: Any, context: Any) -> None:
        raise Unsupported("StopProfile: the server takes no profiles")


# From its messages


def prepare(engine: Engine, message: vllm.GenerateRequest, deadline_s: float) -> Choices:
    """Check and tokenise; slow as the prompt is long. Raises InvalidRequest, naming the field."""
    arrival_s = engine.now_s
    for field, value in message.ListFields():
        if field.name not in _TAKEN and not (field.name == "data_parallel_rank" and value == 0):
            raise InvalidRequest(field.name, "is not supported")
    params, n = params_of(message.sampling_params)
    request_id = message.request_id or None
    prompt = prompt_of(message)
    return choices_of(engine.prepare(prompt, params, request_id, arrival_s, deadline_s), n)


def prompt_of(message: vllm.GenerateRequest) -> Prompt:
    match message.WhichOneof("input"):
        case "tokenized":
            return list(message.tokenized.input_ids)
        case "text":
            return message.text
        case _:
            raise InvalidRequest("input", "one of tokenized and text must be given")


def params_of(message: vllm.SamplingParams) -> tuple[SamplingParams, int]:
    """And how many choices. What is not given has vLLM's default, which is ours but for
    `max_tokens`: as many as the context holds."""
    given: dict[str, Any] = {"max_tokens": None}
    n = 1
    for field, value in message.ListFields():
        name = field.name
        if name in _IGNORED or (name in _ZERO_IS_DEFAULT and value == 0):
            continue
        if name == "n":
            n = value
        elif name in _SAMPLING:
            given[name] = _plain(value)
        else:
            raise InvalidRequest(name, "is not supported")
    return SamplingParams(**given), n


def _plain(value: Any) -> Any:
    """Of a field: a number, a string, a tuple or a dict."""
    if isinstance(value, bool | int | float | str):
        return value
    return dict(value) if hasattr(value, "items") else tuple(value)


# To its messages


def chunk_of(choices: Choices, index: int, delta: OutputDelta) -> vllm.GenerateResponse:
    chunk = vllm.GenerateStreamChunk(
        token_ids=delta.token_ids,
        prompt_tokens=len(choices.requests[index].prompt_token_ids),
        completion_tokens=len(delta.token_ids),
        output_logprobs=logprobs_of([delta]),
        input_logprobs=input_logprobs_of(choices.requests[index], [delta]),
        index=index,
    )
    return vllm.GenerateResponse(chunk=chunk)


def completion_of(choices: Choices, index: int, deltas: list[OutputDelta]) -> vllm.GenerateResponse:
    """Of a choice that ends with the last of `deltas`. Which stop string it was is not known."""
    reason = deltas[-1].finish_reason
    assert reason is not None
    ids = [token_id for delta in deltas for token_id in delta.token_ids]
    completion = vllm.GenerateComplete(
        output_ids=ids,
        finish_reason=reason.value,
        prompt_tokens=len(choices.requests[index].prompt_token_ids),
        completion_tokens=len(ids),
        output_logprobs=logprobs_of(deltas),
        input_logprobs=input_logprobs_of(choices.requests[index], deltas),
        index=index,
    )
    return vllm.GenerateResponse(complete=completion)


def logprobs_of(deltas: list[OutputDelta]) -> vllm.OutputLogProbs | None:
    """None where the request did not ask."""
    message = vllm.OutputLogProbs()
    for delta in deltas:
        for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=False):
            message.token_ids.append(token_id)
            message.token_logprobs.append(entry.sampled)
            if entry.top:
                ids, values = zip(*entry.top, strict=True)
                message.top_logprobs.add(token_ids=ids, values=values)
    return message if message.token_ids else None


def input_logprobs_of(request: Request, deltas: list[OutputDelta]) -> vllm.InputLogProbs | None:
    """Of the whole prompt, whose first token has no value and no alternatives; None where the
    request did not ask, or not with these deltas."""
    scores = next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), None)
    if scores is None:
        return None
    message = vllm.InputLogProbs(token_ids=request.prompt_token_ids)
    message.token_logprobs.add()
    message.top_logprobs.add()
    logprobs, _, top_ids, top_values = (array.tolist() for array in scores.arrays)
    for value, ids, values in zip(logprobs, top_ids, top_values, strict=True):
        message.token_logprobs.add(value=value)
        message.top_logprobs.add(token_ids=ids, values=values)
    return message


def model_info_of(info: ModelInfo, bos_token_id: int | None) -> vllm.GetModelInfoResponse:
    return vllm.GetModelInfoResponse(
        model_path=info.name,
        served_model_name=info.name,
        tokenizer_path=info.name,
        is_generation=True,
        max_context_length=info.max_model_len,
        max_req_input_len=info.max_model_len - 1,  # one token of output must fit
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        bos_token_id=bos_token_id or 0,
    )


def load_of(load: Load, info: ModelInfo, num_live: int) -> vllm.SchedulerLoad:
    """All groups are one rank: it is one engine that spreads requests over them itself."""
    pages = len(load.free_pages) * info.num_pages
    used = pages - sum(load.free_pages)
    running = max(0, num_live - load.num_waiting)
    return vllm.SchedulerLoad(
        num_running_reqs=running,
        num_waiting_reqs=load.num_waiting,
        num_total_reqs=running + load.num_waiting,
        num_used_tokens=used * info.page_tokens,
        max_total_num_tokens=pages * info.page_tokens,
        token_usage=used / pages if pages else 0.0,
        utilization=running / info.max_num_seqs if info.max_num_seqs else 0.0,
        max_running_requests=info.max_num_seqs,
        num_waiting_uncached_tokens=load.prefill_tokens,
    )


def tokenizer_chunks(engine: Engine) -> list[common.GetTokenizerChunk]:
    """A zip of the tokenizer's files, in pieces; the last one has its SHA-256 in hexadecimal."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in engine.tokenizer.as_files().items():
            # Always the same date, so that equal tokenizers have equal sums.
            archive.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)
    data = buffer.getvalue()
    starts = range(0, len(data), TOKENIZER_CHUNK_BYTES)
    pieces = [data[start : start + TOKENIZER_CHUNK_BYTES] for start in starts]
    chunks = [common.GetTokenizerChunk(data=piece) for piece in pieces]
    chunks[-1].sha256 = hashlib.sha256(data).hexdigest()
    return chunks
