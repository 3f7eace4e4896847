"""From the engine's output to the bodies and stream chunks of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from conflux_jax.request import Logprobs
from conflux_jax.serve.openai_requests import Call
from conflux_jax.streams import OutputDelta
from conflux_jax.text import IncrementalDetokenizer, TextCodec

LEAST_LOGPROB = -9999.0  # JSON has no minus infinity


class Answer(Protocol):
    """How an endpoint words the choices of one call; used for a reply or for a stream."""

    object: str
    chunk_object: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a choice's stream begins with."""
        ...

    def chunk(self, index: int, delta: OutputDelta) -> dict[str, Any]: ...

    def whole(self, index: int, output: OutputDelta) -> dict[str, Any]:
        """A choice at once. `output` has all of it."""
        ...


class CompletionAnswer:
    object = chunk_object = "text_completion"

    def __init__(self, codec: TextCodec, call: Call):
        self._call = call
        self._logprobs = [_CompletionLogprobs(codec, call.num_top) for _ in call.requests]

    def opening(self, index: int) -> dict[str, Any] | None:
        echo = self._call.echo[index]
        return _text_choice(index, echo, None, None) if echo else None

    def chunk(self, index: int, delta: OutputDelta) -> dict[str, Any]:
        logprobs = None
        if self._call.logprobs:
            logprobs = self._logprobs[index].add(delta.token_ids, delta.logprobs)
        return _text_choice(index, delta.text, logprobs, delta.finish_reason)

    def whole(self, index: int, output: OutputDelta) -> dict[str, Any]:
        choice = self.chunk(index, output)
        choice["text"] = self._call.echo[index] + choice["text"]
        return choice


class ChatAnswer:
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, codec: TextCodec, call: Call):
        self._codec, self._call = codec, call

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._choice(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def chunk(self, index: int, delta: OutputDelta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text else {}
        return self._choice(index, {"delta": content}, delta)

    def whole(self, index: int, output: OutputDelta) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return self._choice(index, {"message": message}, output)

    def _choice(
        self, index: int, content: dict[str, Any], delta: OutputDelta | None
    ) -> dict[str, Any]:
        logprobs = None
        if delta is not None and self._call.logprobs:
            pairs = zip(delta.token_ids, delta.logprobs, strict=True)
            logprobs = {"content": [self._entry(i, entry) for i, entry in pairs], "refusal": None}
        reason = None if delta is None else delta.finish_reason
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _entry(self, token_id: int, entry: Logprobs) -> dict[str, Any]:
        top = [self._token(i, value) for i, value in entry.top]
        return {**self._token(token_id, entry.sampled), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(self._codec, token_id),
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(self._codec.token_bytes(token_id)),
        }


class _CompletionLogprobs:
    """The four lists of a choice, a piece at a time. An offset counts the characters of the text
    that were complete before the token."""

    def __init__(self, codec: TextCodec, num_top: int):
        self._codec, self._num_top = codec, num_top
        self._detokenizer = IncrementalDetokenizer(codec, continuation=True)
        self._offset = 0

    def add(self, token_ids: Sequence[int], entries: Sequence[Logprobs]) -> dict[str, Any]:
        offsets, tops = [], []
        for token_id, entry in zip(token_ids, entries, strict=True):
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push(token_id))
            likeliest = {token_text(self._codec, i): value for i, value in entry.top}
            likeliest.setdefault(token_text(self._codec, token_id), entry.sampled)
            tops.append({text: max(value, LEAST_LOGPROB) for text, value in likeliest.items()})
        return {
            "tokens": [token_text(self._codec, i) for i in token_ids],
            "token_logprobs": [max(entry.sampled, LEAST_LOGPROB) for entry in entries],
            "top_logprobs": tops if self._num_top else None,
            "text_offset": offsets,
        }


def token_text(codec: TextCodec, token_id: int) -> str:
    """Of one token alone; where it is a piece of a character, its bytes, spelled as OpenAI does."""
    data = codec.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Usage:
    """Counts the tokens of a call while they come."""

    def __init__(self, call: Call):
        self._prompt_tokens = call.prompt_tokens
        self.completion_tokens = 0

    def as_json(self) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self._prompt_tokens + self.completion_tokens,
        }


def envelope(call: Call, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """What a reply and every chunk begin with."""
    return {
        "id": call.id,
        "object": kind,
        "created": call.created,
        "model": call.model,
        "choices": choices,
    }


def joined(deltas: Iterator[OutputDelta] | Sequence[OutputDelta]) -> OutputDelta:
    """All output of a request as one; there is at least one, and the last has the reason."""
    parts = list(deltas)
    return OutputDelta(
        text="".join(part.text for part in parts),
        token_ids=tuple(i for part in parts for i in part.token_ids),
        times_s=tuple(t for part in parts for t in part.times_s),
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
        finish_reason=parts[-1].finish_reason,
        message=parts[-1].message,
    )


def _text_choice(
    index: int, text: str, logprobs: dict[str, Any] | None, reason: Any
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
