"""From the engine's output to the bodies and stream chunks of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from conflux_jax.request import Logprobs, PromptLogprobs
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

    def beside(self, outputs: Sequence[OutputDelta]) -> dict[str, Any]:
        """What a reply has beside its choices."""
        ...


class CompletionAnswer:
    object = chunk_object = "text_completion"

    def __init__(self, codec: TextCodec, call: Call):
        self._codec, self._call = codec, call
        self._logprobs = [_CompletionLogprobs(codec, call.num_top) for _ in call.requests]

    def opening(self, index: int) -> dict[str, Any] | None:
        echo = self._call.echo[index]
        if not echo or self._call.echo_logprobs:  # then it comes with the first token
            return None
        return _text_choice(index, echo, None, None)

    def chunk(self, index: int, delta: OutputDelta) -> dict[str, Any]:
        call, lists, scores = self._call, self._logprobs[index], delta.prompt_logprobs
        text, logprobs = delta.text, None
        if call.echo_logprobs and scores is not None:
            echo, token_ids = call.echo[index], call.requests[index].prompt_token_ids
            text, logprobs = echo + text, lists.add_prompt(token_ids, scores, echo)
        if call.logprobs:
            added = lists.add(delta.token_ids, delta.logprobs)
            logprobs = added if logprobs is None else _side_by_side(logprobs, added)
        return _text_choice(index, text, logprobs, delta.finish_reason)

    def whole(self, index: int, output: OutputDelta) -> dict[str, Any]:
        call = self._call
        choice = self.chunk(index, output)
        if not call.echo_logprobs:
            choice["text"] = call.echo[index] + choice["text"]
        if call.prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs_json(self._codec, call, index, output)
        return choice

    def beside(self, outputs: Sequence[OutputDelta]) -> dict[str, Any]:
        return {}


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

    def beside(self, outputs: Sequence[OutputDelta]) -> dict[str, Any]:
        if not self._call.prompt_logprobs:
            return {}
        first = prompt_logprobs_json(self._codec, self._call, 0, outputs[0])
        return {"prompt_logprobs": first}

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
            tops.append(self._likeliest(token_id, entry.sampled, entry.top))
        return {
            "tokens": [token_text(self._codec, i) for i in token_ids],
            "token_logprobs": [max(entry.sampled, LEAST_LOGPROB) for entry in entries],
            "top_logprobs": tops if self._num_top else None,
            "text_offset": offsets,
        }

    def add_prompt(
        self, token_ids: Sequence[int], scores: PromptLogprobs, text: str
    ) -> dict[str, Any]:
        """Of an echoed prompt: its first token has none, for nothing is before it."""
        detokenizer = IncrementalDetokenizer(self._codec)
        offsets, at = [], 0
        for token_id in token_ids:
            offsets.append(min(at, len(text)))
            at += len(detokenizer.push(token_id))
        self._offset = len(text)
        values = scores.logprobs.tolist()
        ids = scores.top_ids[:, : self._num_top].tolist()
        tops = scores.top_logprobs[:, : self._num_top].tolist()
        likeliest = [
            self._likeliest(token_id, own, list(zip(*top, strict=True)))
            for token_id, own, *top in zip(token_ids[1:], values, ids, tops, strict=True)
        ]
        return {
            "tokens": [token_text(self._codec, i) for i in token_ids],
            "token_logprobs": [None, *(max(value, LEAST_LOGPROB) for value in values)],
            "top_logprobs": [None, *likeliest] if self._num_top else None,
            "text_offset": offsets,
        }

    def _likeliest(
        self, token_id: int, own: float, top: Sequence[tuple[int, float]]
    ) -> dict[str, float]:
        """The likeliest tokens, and the one that came."""
        found = {token_text(self._codec, i): value for i, value in top}
        found.setdefault(token_text(self._codec, token_id), own)
        return {text: max(value, LEAST_LOGPROB) for text, value in found.items()}


def _side_by_side(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The lists of one after those of the other; None where both have none."""
    return {name: values and values + second[name] for name, values in first.items()}


def prompt_logprobs_json(
    codec: TextCodec, call: Call, index: int, output: OutputDelta
) -> list[dict[str, Any] | None]:
    """vLLM's field of that name: for each token of a prompt but the first, the token and the
    likeliest by id."""
    scores = output.prompt_logprobs
    assert scores is not None, "asked for, and there is a token"
    token_ids, top = call.requests[index].prompt_token_ids[1:], call.prompt_top
    rows = zip(
        token_ids,
        scores.logprobs.tolist(),
        scores.ranks.tolist(),
        scores.top_ids[:, :top].tolist(),
        scores.top_logprobs[:, :top].tolist(),
        strict=True,
    )

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        logprob = max(logprob, LEAST_LOGPROB)
        return {"logprob": logprob, "rank": rank, "decoded_token": token_text(codec, token_id)}

    listed: list[dict[str, Any] | None] = [None]
    for token_id, own, own_rank, ids, values in rows:
        found = {str(token_id): entry(token_id, own, own_rank)}
        for rank, (other, value) in enumerate(zip(ids, values, strict=True), 1):
            found.setdefault(str(other), entry(other, value, rank))
        listed.append(found)
    return listed


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
    of_prompt = (part.prompt_logprobs for part in parts)
    return OutputDelta(
        text="".join(part.text for part in parts),
        token_ids=tuple(i for part in parts for i in part.token_ids),
        times_s=tuple(t for part in parts for t in part.times_s),
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
        finish_reason=parts[-1].finish_reason,
        message=parts[-1].message,
        prompt_logprobs=next((found for found in of_prompt if found is not None), None),
    )


def _text_choice(
    index: int, text: str, logprobs: dict[str, Any] | None, reason: Any
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
