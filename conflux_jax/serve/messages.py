"""Between protobuf messages and the engine's values. Pure; raises InvalidRequest or OutOfRange."""

from __future__ import annotations

from conflux_jax.engine import Engine, ModelInfo
from conflux_jax.intake import Chat, Prompt
from conflux_jax.request import FinishReason, InvalidRequest, Logprobs, Request, SamplingParams
from conflux_jax.scheduler.scheduler import Load
from conflux_jax.serve.proto.conflux.v1 import inference_pb2 as pb
from conflux_jax.streams import OutputDelta

FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}


def prepare(engine: Engine, message: pb.GenerateRequest) -> Request:
    """Check and tokenise. As slow as the prompt is long: run it off the event loop."""
    served = engine.info.name
    if message.HasField("model") and message.model != served:
        raise InvalidRequest("model", f"{message.model!r} is not served here; {served!r} is")
    request_id = message.request_id if message.HasField("request_id") else None
    return engine.prepare(prompt_of(message), params_of(message.sampling), request_id)


def prompt_of(message: pb.GenerateRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return list(message.token_ids.ids)
        case "chat":
            chat = message.chat
            explicit = chat.HasField("add_generation_prompt")
            return Chat(
                [{"role": m.role, "content": m.content} for m in chat.messages],
                chat.add_generation_prompt if explicit else True,
            )
        case _:
            raise InvalidRequest("prompt", "one of text, token_ids and chat must be given")


def params_of(message: pb.SamplingParams) -> SamplingParams:
    """What is present in the message; for the rest the defaults of SamplingParams. The names are
    the same, by a test."""
    given = {descriptor.name: value for descriptor, value in message.ListFields()}
    if "stop" in given:
        given["stop"] = tuple(given["stop"])
    return SamplingParams(**given)


def response_of(request: Request, delta: OutputDelta, num_tokens: int) -> pb.GenerateResponse:
    """`num_tokens`: completion tokens up to and with this delta."""
    message = pb.GenerateResponse(
        request_id=request.request_id,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=[_logprobs_of(entry) for entry in delta.logprobs],
    )
    if delta.finish_reason is not None:
        message.finish_reason = FINISH_REASONS[delta.finish_reason]
        message.usage.prompt_tokens = len(request.prompt_token_ids)
        message.usage.completion_tokens = num_tokens
    return message


def _logprobs_of(entry: Logprobs) -> pb.TokenLogprobs:
    top = [pb.TokenLogprob(token_id=token_id, logprob=value) for token_id, value in entry.top]
    return pb.TokenLogprobs(logprob=entry.sampled, top=top)


def model_info_of(info: ModelInfo) -> pb.GetModelInfoResponse:
    return pb.GetModelInfoResponse(
        model=info.name,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        dtype=info.dtype,
        sp=info.sp,
        tp=info.tp,
        page_tokens=info.page_tokens,
        num_pages=info.num_pages,
    )


def load_of(load: Load, info: ModelInfo, accepting: bool) -> pb.GetLoadResponse:
    groups = [
        pb.GroupLoad(
            num_decodes=num_decodes,
            context_tokens=context_tokens,
            free_pages=free_pages,
            num_pages=info.num_pages,
        )
        for num_decodes, context_tokens, free_pages in zip(
            load.num_decodes, load.context_tokens, load.free_pages, strict=True
        )
    ]
    return pb.GetLoadResponse(
        groups=groups,
        num_waiting=load.num_waiting,
        num_prefilling=load.num_prefilling,
        prefill_tokens=load.prefill_tokens,
        num_preemptions=load.num_preemptions,
        decode_latency_correction=load.latency_corrections[0],
        prefill_latency_correction=load.latency_corrections[1],
        accepting=accepting,
    )
