"""From a body of OpenAI's API to the engine's requests. Slow as the prompts are long: run it off
the event loop. Raises InvalidRequest, naming the field.

A call is several requests of the engine: one for each of `n` choices of each prompt. Choice k of a
prompt is decoded with the seed + k, so the first choice is drawn as the prompt alone would be,
whatever else the engine runs.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from conflux_jax.engine import Engine
from conflux_jax.intake import Chat, Prompt
from conflux_jax.request import MAX_LOGPROBS, InvalidRequest, Request, SamplingParams
from conflux_jax.serve.choices import MAX_N, nth_seed
from conflux_jax.serve.http_errors import ModelNotFound, renamed
from conflux_jax.serve.json_fields import Fields, is_integers
from conflux_jax.text import TextCodec

MAX_CHOICES = 1024  # of one call: prompts times n

# Passed on as they are. A field that SamplingParams gets is known here at once.
_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)} - {
    "max_tokens",
    "logprobs",
}
# What this engine cannot do (yet): only the value that changes nothing is taken. A name that
# becomes a field of SamplingParams wins over its line here.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "return_token_ids": (False,),
    "priority": (0,),
    "continue_final_message": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
}
# They say who asks, or how to bill and store it, and change no answer.
_IGNORED = (
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)


@dataclass(frozen=True)
class Call:
    """One body: `requests` in the order of its choices.

    echo: the text that each choice starts with. num_prompts: of them the usage counts the tokens
    once. logprobs: whether they are reported, beside `num_top` alternatives; echo_logprobs: whether
    those of the prompt are in the same lists. prompt_logprobs: whether vLLM's field of that name is
    there, with `prompt_top` alternatives of its own.
    """

    id: str
    model: str
    created: int
    requests: tuple[Request, ...]
    num_prompts: int
    echo: tuple[str, ...]
    logprobs: bool = False
    num_top: int = 0
    echo_logprobs: bool = False
    prompt_logprobs: bool = False
    prompt_top: int = 0
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False

    @property
    def n(self) -> int:
        return len(self.requests) // self.num_prompts

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.requests[:: self.n])


def completion_call(engine: Engine, body: bytes, request_id: str | None = None) -> Call:
    """`/v1/completions`."""
    fields = Fields(body)
    prompts = _prompts(fields.required("prompt"))
    num_top = fields.integer("logprobs", None, 0, MAX_LOGPROBS)
    echo = fields.flag("echo")
    call = _call(
        engine,
        fields,
        "cmpl",
        request_id,
        prompts,
        max_tokens=_max_tokens(fields, "max_tokens", SamplingParams.max_tokens),
        logprobs=num_top,
        echo=echo,
    )
    if not echo:
        return call
    texts = [
        prompt if isinstance(prompt, str) else engine.tokenizer.decode(request.prompt_token_ids)
        for prompt, request in zip(prompts, call.requests[:: call.n], strict=True)
    ]
    return dataclasses.replace(call, echo=tuple(text for text in texts for _ in range(call.n)))


def chat_call(engine: Engine, body: bytes, request_id: str | None = None) -> Call:
    """`/v1/chat/completions`."""
    fields = Fields(body)
    prompt = _conversation(fields)
    wanted = fields.flag("logprobs")
    num_top = fields.integer("top_logprobs", None, 0, MAX_LOGPROBS)
    if num_top is not None and not wanted:
        raise InvalidRequest("top_logprobs", "needs logprobs to be true")
    newer = _max_tokens(fields, "max_completion_tokens", None)
    older = _max_tokens(fields, "max_tokens", None)
    names = {"prompt": "messages"}
    if newer is not None:
        names["max_tokens"] = "max_completion_tokens"
    try:
        return _call(
            engine,
            fields,
            "chatcmpl",
            request_id,
            [prompt],
            max_tokens=older if newer is None else newer,
            logprobs=(num_top or 0) if wanted else None,
        )
    except InvalidRequest as error:
        raise renamed(error, names) from error


def tokenize_request(engine: Engine, body: bytes) -> dict[str, Any]:
    """`/tokenize`: the ids of a prompt or of a conversation; any length that a body can have."""
    fields = Fields(body)
    _check_model(engine, fields)
    with_texts = fields.flag("return_token_strs")
    text = fields.text("prompt")
    if text is None:
        chat = _conversation(fields)
        fields.finish()
        ids = engine.tokenizer.encode_chat(chat.messages, chat.add_generation_prompt)
    else:
        add_special_tokens = fields.flag("add_special_tokens", True)
        fields.finish()
        ids = engine.tokenizer.encode(text, add_special_tokens)
    return {
        "count": len(ids),
        "max_model_len": engine.info.max_model_len,
        "tokens": ids,
        "token_strs": _texts(engine.tokenizer, ids) if with_texts else None,
    }


def _texts(codec: TextCodec, ids: Sequence[int]) -> list[str]:
    """Of each token by itself, special ones written out."""
    return [codec.decode([i], skip_special_tokens=False, continuation=True) for i in ids]


def estimate_request(engine: Engine, body: bytes) -> int:
    """`/v1/estimate`: the tokens of a prompt or of a conversation that could be served."""
    fields = Fields(body)
    _check_model(engine, fields)
    text = fields.text("prompt")
    prompt = _conversation(fields) if text is None else text
    fields.finish()
    return len(engine.prepare(prompt, SamplingParams()).prompt_token_ids)


def detokenize_request(engine: Engine, body: bytes) -> dict[str, Any]:
    """`/detokenize`: the text of ids, special tokens written out."""
    fields = Fields(body)
    _check_model(engine, fields)
    ids = fields.integers("tokens")
    fields.finish()
    vocab_size = engine.info.vocab_size
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest("tokens", f"{token_id} is not between 0 and {vocab_size - 1}")
    return {"prompt": engine.tokenizer.decode(ids, skip_special_tokens=False)}


def _call(
    engine: Engine,
    fields: Fields,
    prefix: Literal["cmpl", "chatcmpl"],
    request_id: str | None,
    prompts: Sequence[Prompt],
    max_tokens: int | None,
    logprobs: int | None,
    echo: bool = False,
) -> Call:
    """What the two endpoints share; takes the fields that are left."""
    arrival_s = engine.now_s
    _check_model(engine, fields)
    n = fields.integer("n", 1, 1, MAX_N) or 1
    if (best_of := fields.integer("best_of", n, 1, MAX_N)) != n:
        raise InvalidRequest("best_of", f"only n of them are made: must be {n}, got {best_of}")
    if len(prompts) * n > MAX_CHOICES:
        raise InvalidRequest(
            "n", f"{len(prompts)} prompts of {n} choices are more than {MAX_CHOICES} choices"
        )
    stream = fields.flag("stream")
    include_usage, continuous_usage = _stream_options(fields, stream)
    params = _sampling_params(fields, max_tokens, logprobs)
    prompt_top = params.prompt_logprobs
    if stream and prompt_top is not None:
        raise InvalidRequest("prompt_logprobs", "needs stream to be false")
    echo_logprobs = echo and logprobs is not None
    if echo and logprobs is not None:
        most = max(logprobs, prompt_top or 0)
        params = dataclasses.replace(params, prompt_logprobs=most)
    fields.finish()
    base = f"{prefix}-{request_id or uuid.uuid4().hex}"
    requests: list[Request] = []
    for number, prompt in enumerate(prompts):
        try:
            first = engine.prepare(prompt, params, base, arrival_s)
        except InvalidRequest as error:
            if len(prompts) == 1:
                raise
            raise renamed(error, {"prompt": f"prompt[{number}]"}) from error
        requests += (dataclasses.replace(first, seed=nth_seed(first.seed, k)) for k in range(n))
    if len(requests) > 1:
        requests = [
            dataclasses.replace(request, request_id=f"{base}-{index}")
            for index, request in enumerate(requests)
        ]
    return Call(
        id=base,
        model=engine.info.name,
        created=int(time.time()),
        requests=tuple(requests),
        num_prompts=len(prompts),
        echo=("",) * len(requests),
        logprobs=logprobs is not None,
        num_top=logprobs or 0,
        echo_logprobs=echo_logprobs,
        prompt_logprobs=prompt_top is not None,
        prompt_top=prompt_top or 0,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
    )


def _sampling_params(
    fields: Fields, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    given = {name: value for name in _SAMPLING if (value := fields.take(name)) is not None}
    if given.get("top_k") == -1:  # what vLLM calls off
        given["top_k"] = 0
    if "logit_bias" in given:
        given["logit_bias"] = _logit_bias(given["logit_bias"])
    for name, neutral in _NEUTRAL.items():
        value = fields.take(name)
        if value is not None and value not in neutral:
            only = f"; only {' or '.join(map(repr, neutral))} is taken" if neutral else ""
            raise InvalidRequest(name, f"is not supported{only}")
    for name in _IGNORED:
        fields.take(name)
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)


def _logit_bias(value: Any) -> dict[int, Any]:
    """With token ids as numbers: as names in JSON they are texts."""
    if not isinstance(value, dict):
        raise InvalidRequest("logit_bias", f"must map token ids to numbers, got {value!r}")
    for name in value:
        if not (name.isascii() and name.isdecimal() and len(name) <= 10):
            raise InvalidRequest("logit_bias", f"token ids are whole numbers, got {name!r}")
    return {int(name): bias for name, bias in value.items()}


def _stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    options = fields.take("stream_options", {})
    if not isinstance(options, dict):
        raise InvalidRequest("stream_options", f"must be an object, got {options!r}")
    if options and not stream:
        raise InvalidRequest("stream_options", "needs stream to be true")
    values = []
    for name in ("include_usage", "continuous_usage_stats"):
        value = options.pop(name, None)
        if not isinstance(value, bool | None):
            raise InvalidRequest(f"stream_options.{name}", f"must be true or false, got {value!r}")
        values.append(bool(value))
    options.pop("include_obfuscation", None)  # padding against eavesdroppers; there is none here
    for name in options:
        raise InvalidRequest(f"stream_options.{name}", "no such parameter")
    return values[0], values[1]


def _check_model(engine: Engine, fields: Fields) -> None:
    model, served = fields.text("model"), engine.info.name
    if model is not None and model != served:
        raise ModelNotFound("model", f"{model!r} is not served here; {served!r} is")


def _max_tokens(fields: Fields, name: str, default: int | None) -> int | None:
    return fields.integer(name, default, 1, 2**31 - 1)


def _prompts(value: Any) -> list[Prompt]:
    """One or several prompts, each a text or token ids."""
    if isinstance(value, str) or is_integers(value):
        value = [value]  # an empty list too: a prompt without a token
    if not isinstance(value, list):
        raise InvalidRequest("prompt", f"must be text, token ids or a list of them, got {value!r}")
    if len(value) > MAX_CHOICES:
        raise InvalidRequest("prompt", f"at most {MAX_CHOICES} prompts, got {len(value)}")
    for number, prompt in enumerate(value):
        if not (isinstance(prompt, str) or is_integers(prompt)):
            raise InvalidRequest(f"prompt[{number}]", "must be text or a list of token ids")
    return value


def _conversation(fields: Fields) -> Chat:
    messages = fields.required("messages")
    if isinstance(messages, list):  # what else it may be, the template's check says
        messages = [_flattened(message, number) for number, message in enumerate(messages)]
    return Chat(messages, fields.flag("add_generation_prompt", True))


def _flattened(message: Any, number: int) -> Any:
    """With the parts of its content as one text; a part that is no text is refused."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    texts = []
    for index, part in enumerate(message["content"]):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            name = f"messages[{number}].content[{index}]"
            raise InvalidRequest(name, "must be a text part; the model reads nothing else")
        texts.append(text)
    return {**message, "content": "\n".join(texts)}
