"""Between protobuf messages and the engine's values. Pure; raises InvalidRequest and its kinds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from conflux_jax.engine import Engine
from conflux_jax.intake import Chat, Prompt
from conflux_jax.model_info import ModelInfo
from conflux_jax.request import (
    FinishReason,
    InvalidRequest,
    Logprobs,
    PromptLogprobs,
    SamplingParams,
)
from conflux_jax.scheduler.estimate import Estimate
from conflux_jax.scheduler.outlook import Load
from conflux_jax.serve.choices import Choices, choices_of
from conflux_jax.serve.errors import ModelNotFound
from conflux_jax.serve.proto.conflux.v1 import inference_pb2 as pb
from conflux_jax.streams import OutputDelta

FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}


def prepare(engine: Engine, message: pb.GenerateRequest, deadline_s: float) -> Choices:
    """Check and tokenise. As slow as the prompt is long: run it off the event loop.

    deadline_s: when the client stops waiting, on the engine's clock."""
    arrival_s = engine.now_s
    _check_model(engine, message)
    request_id = message.request_id if message.HasField("request_id") else None
    params = params_of(message.sampling)
    prompt = prompt_of(message)
    request = engine.prepare(prompt, params, request_id, arrival_s, deadline_s)
    return choices_of(request, message.n if message.HasField("n") else 1)


def prompt_tokens(engine: Engine, message: pb.EstimateRequest) -> int:
    """Of the prompt that the message has or speaks of. As slow as `prepare`."""
    _check_model(engine, message)
    if message.WhichOneof("prompt") == "num_tokens":
        return message.num_tokens
    return len(engine.prepare(prompt_of(message), SamplingParams()).prompt_token_ids)


def tokenize(engine: Engine, message: pb.TokenizeRequest) -> pb.TokenizeResponse:
    """Any length that a message can have; as slow as that."""
    _check_model(engine, message)
    prompt, codec = prompt_of(message), engine.tokenizer
    if isinstance(prompt, Chat):
        if message.HasField("add_special_tokens"):
            raise InvalidRequest("add_special_tokens", "is of a text; a chat's template decides")
        ids = codec.encode_chat(prompt.messages, prompt.add_generation_prompt)
    else:
        assert isinstance(prompt, str)
        explicit = message.HasField("add_special_tokens")
        ids = codec.encode(prompt, message.add_special_tokens if explicit else True)
    return pb.TokenizeResponse(token_ids=ids, max_model_len=engine.info.max_model_len)


def detokenize(engine: Engine, message: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
    """As slow as it has tokens."""
    _check_model(engine, message)
    vocab_size = engine.info.vocab_size
    for token_id in message.token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest("token_ids", f"{token_id} is not between 0 and {vocab_size - 1}")
    skip = message.skip_special_tokens
    text = engine.tokenizer.decode(message.token_ids, skip_special_tokens=skip)
    return pb.DetokenizeResponse(text=text)


def _check_model(engine: Engine, message: Any) -> None:
    served = engine.info.name
    if message.HasField("model") and message.model != served:
        raise ModelNotFound("model", f"{message.model!r} is not served here; {served!r} is")


def prompt_of(message: pb.GenerateRequest | pb.EstimateRequest | pb.TokenizeRequest) -> Prompt:
    given: Any = message
    match message.WhichOneof("prompt"):
        case "text":
            return given.text
        case "token_ids":
            return list(given.token_ids.ids)
        case "chat":
            chat = given.chat
            explicit = chat.HasField("add_generation_prompt")
            return Chat(
                [{"role": m.role, "content": m.content} for m in chat.messages],
                chat.add_generation_prompt if explicit else True,
            )
        case _:
            names = [field.name for field in message.DESCRIPTOR.oneofs_by_name["prompt"].fields]
            known = f"{', '.join(names[:-1])} and {names[-1]}"
            raise InvalidRequest("prompt", f"one of {known} must be given")


def params_of(message: pb.SamplingParams) -> SamplingParams:
    """What is present in the message; for the rest the defaults of SamplingParams. The names are
    the same, by a test."""
    given = {descriptor.name: value for descriptor, value in message.ListFields()}
    for name in ("stop", "stop_token_ids", "bad_token_ids", "bad_words", "allowed_token_ids"):
        if name in given:
            given[name] = tuple(given[name])
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return SamplingParams(**given)


def response_of(
    choices: Choices, index: int, delta: OutputDelta, num_tokens: int
) -> pb.GenerateResponse:
    """`num_tokens`: completion tokens of that choice up to and with this delta."""
    message = pb.GenerateResponse(
        request_id=choices.id,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=[_logprobs_of(entry) for entry in delta.logprobs],
        index=index,
    )
    if delta.prompt_logprobs is not None:
        message.prompt_logprobs.extend(_prompt_logprobs_of(delta.prompt_logprobs))
    if delta.finish_reason is not None:
        message.finish_reason = FINISH_REASONS[delta.finish_reason]
        message.usage.prompt_tokens = len(choices.requests[index].prompt_token_ids)
        message.usage.completion_tokens = num_tokens
    return message


def reply_of(choices: Choices, parts: Sequence[Sequence[OutputDelta]]) -> pb.CompleteResponse:
    """parts: all deltas of each choice, in order."""
    message = pb.CompleteResponse(request_id=choices.id)
    for index, deltas in enumerate(parts):
        choice = message.choices.add(index=index, text="".join(delta.text for delta in deltas))
        for delta in deltas:
            choice.token_ids.extend(delta.token_ids)
            choice.logprobs.extend(_logprobs_of(entry) for entry in delta.logprobs)
            if delta.prompt_logprobs is not None:
                choice.prompt_logprobs.extend(_prompt_logprobs_of(delta.prompt_logprobs))
            if delta.finish_reason is not None:
                choice.finish_reason = FINISH_REASONS[delta.finish_reason]
    message.usage.prompt_tokens = len(choices.requests[0].prompt_token_ids)
    message.usage.completion_tokens = sum(len(choice.token_ids) for choice in message.choices)
    return message


def estimate_of(prompt_tokens: int, estimate: Estimate) -> pb.EstimateResponse:
    message = pb.EstimateResponse(
        prompt_tokens=prompt_tokens,
        ttft_s=estimate.ttft_s,
        queued_s=estimate.queued_s,
        basis=pb.ESTIMATE_BASIS_PACE if estimate.measured else pb.ESTIMATE_BASIS_PROFILE,
    )
    if not estimate.measured:
        message.alone_s = estimate.alone_s
    return message


def _logprobs_of(entry: Logprobs) -> pb.TokenLogprobs:
    top = [pb.TokenLogprob(token_id=token_id, logprob=value) for token_id, value in entry.top]
    return pb.TokenLogprobs(logprob=entry.sampled, top=top)


def _prompt_logprobs_of(scores: PromptLogprobs) -> Iterator[pb.PromptTokenLogprobs]:
    for logprob, rank, ids, values in zip(*(x.tolist() for x in scores.arrays), strict=True):
        pairs = zip(ids, values, strict=True)
        top = [pb.TokenLogprob(token_id=token_id, logprob=value) for token_id, value in pairs]
        yield pb.PromptTokenLogprobs(logprob=logprob, rank=rank, top=top)


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
            kv_usage=1.0 - free_pages / max(info.num_pages, 1),
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
        queued_s=load.queued_s,
    )
