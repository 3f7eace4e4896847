"""From what a caller sends to a `Request`: checked, tokenised, capped and seeded.

Runs on the caller's thread, so that neither a wrong prompt nor a huge one costs the engine's thread
anything. Everything here raises InvalidRequest or OutOfRange, naming the field and the limit.
"""

from __future__ import annotations

import dataclasses
import math
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conflux_jax.request import (
    MAX_BAD_PHRASES,
    MAX_BAD_TOKEN_IDS,
    MAX_ENDING_TOKEN_IDS,
    MAX_PHRASE_TOKENS,
    InvalidRequest,
    OutOfRange,
    Request,
    SamplingParams,
)
from conflux_jax.text import TextCodec

MAX_REQUEST_ID_CHARS = 256
# A prompt of more than this many characters for each token of context is probably too long; its
# first part is tokenised alone to find out, before the whole is.
SUSPECT_CHARS_PER_TOKEN = 16


@dataclass(frozen=True)
class Chat:
    """A conversation: messages with `role` and `content`, rendered by the model's template."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True


Prompt = str | Sequence[int] | Chat
Phrases = tuple[tuple[int, ...], ...]  # token ids


@dataclass(frozen=True)
class Intake:
    """Makes requests. `output_limit(prompt_tokens, max_tokens)` is the scheduler's: the most tokens
    that a request may produce, or OutOfRange. `clock` is the engine's."""

    tokenizer: TextCodec
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    output_limit: Callable[[int, int | None], int]
    clock: Callable[[], float]

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        arrival_s: float | None = None,
        deadline_s: float = math.inf,
    ) -> Request:
        """A request ready to be queued. `arrival_s`: when its caller came (default: now);
        `deadline_s`: when it stops waiting."""
        arrival_s = self.clock() if arrival_s is None else arrival_s
        params, bad_phrases = self._settled(params)
        token_ids = self.token_ids(prompt)
        seed = random.SystemRandom().getrandbits(63) if params.seed is None else params.seed
        return Request(
            request_id=_request_id(request_id),
            prompt_token_ids=token_ids,
            params=params,
            max_output_tokens=self.output_limit(len(token_ids), params.max_tokens),
            eos_token_ids=self.eos_token_ids,
            seed=seed,
            arrival_s=arrival_s,
            deadline_s=deadline_s,
            bad_phrases=bad_phrases,
        )

    def token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's tokens: as many as the engine's limits allow, all in the vocabulary."""
        ids: Sequence[Any]
        if isinstance(prompt, Chat):
            text = self.tokenizer.render_chat(prompt.messages, prompt.add_generation_prompt)
            ids = self._encode(text, add_special_tokens=False)  # the template writes them out
        elif isinstance(prompt, str):
            ids = self._encode(prompt)
        elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
            ids = prompt
        else:
            kind = type(prompt).__name__
            raise InvalidRequest("prompt", f"must be text or token ids, got {kind}")
        self.output_limit(len(ids), None)
        if ids is prompt:
            self._check_ids(ids)
        return tuple(int(i) for i in ids)

    def _settled(self, params: SamplingParams) -> tuple[SamplingParams, Phrases]:
        """With what depends on the vocabulary checked, and `bad_words` as token ids: those of one
        token among the bad tokens, the others beside."""
        phrases: Phrases = ()
        if params.bad_words:
            forms = self._forms_of_words(params.bad_words)
            phrases = tuple(form for form in forms if len(form) > 1)
            ids = (*params.bad_token_ids, *(form[0] for form in forms if len(form) == 1))
            self._check_forms(phrases, len(set(ids)))
            settled = tuple(dict.fromkeys(ids))
            params = dataclasses.replace(params, bad_token_ids=settled, bad_words=())
        lists = {
            "logit_bias": [token_id for token_id, _ in params.bias_pairs],
            "stop_token_ids": params.stop_token_ids,
            "bad_token_ids": params.bad_token_ids,
            "allowed_token_ids": params.allowed_token_ids or (),
        }
        for name, ids in lists.items():
            if ids and (largest := max(ids)) >= self.vocab_size:
                raise InvalidRequest(
                    name,
                    f"token id {largest} is outside the model's vocabulary "
                    f"(0 to {self.vocab_size - 1})",
                )
        self._check_choice(params, phrases)
        return params, phrases

    def _check_choice(self, params: SamplingParams, phrases: Phrases) -> None:
        """There must be a token to choose, whatever is banned, and whatever came before."""
        banned = {*params.bad_token_ids, *(phrase[-1] for phrase in phrases)}
        ending = self.eos_token_ids.union(params.stop_token_ids)
        if params.min_tokens:
            if len(ending) > MAX_ENDING_TOKEN_IDS:
                raise InvalidRequest(
                    "min_tokens",
                    f"takes at most {MAX_ENDING_TOKEN_IDS} tokens that end an answer, got "
                    f"{len(ending)}: stop_token_ids and the model's own",
                )
            banned |= ending
        allowed = params.allowed_token_ids
        if allowed is not None and banned.issuperset(allowed):
            raise InvalidRequest("allowed_token_ids", "leaves no token that is not banned")
        if allowed is None and len(banned) >= self.vocab_size:
            raise InvalidRequest("bad_token_ids", "leaves no token of the vocabulary")

    def _forms_of_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Each word alone and, where that is another end of an answer, with a space in front."""
        forms: dict[tuple[int, ...], None] = {}
        for word in words:
            if not _is_unicode(word):
                raise InvalidRequest("bad_words", f"{word!r} is not valid Unicode")
            plain, spaced = (
                tuple(self.tokenizer.encode(text, add_special_tokens=False))
                for text in (word, word if word[0].isspace() else " " + word)
            )
            for form in (plain,) if spaced[-len(plain) :] == plain else (plain, spaced):
                if not 1 <= len(form) <= MAX_PHRASE_TOKENS:
                    limit = f"a word has 1 to {MAX_PHRASE_TOKENS} tokens"
                    raise InvalidRequest("bad_words", f"{limit}, got {len(form)} of {word!r}")
                forms[form] = None
        return list(forms)

    def _check_forms(self, phrases: Phrases, num_ids: int) -> None:
        if num_ids > MAX_BAD_TOKEN_IDS:
            limit = f"at most {MAX_BAD_TOKEN_IDS} tokens, with those of bad_token_ids"
            raise InvalidRequest("bad_words", f"{limit}; got {num_ids}")
        if len(phrases) > MAX_BAD_PHRASES:
            limit = f"at most {MAX_BAD_PHRASES} words of several tokens"
            twice = "one that has other tokens after a space counts twice"
            raise InvalidRequest("bad_words", f"{limit} ({twice}), got {len(phrases)}")

    def _check_ids(self, ids: Sequence[Any]) -> None:
        for index, token_id in enumerate(ids):
            if isinstance(token_id, bool) or not hasattr(token_id, "__index__"):
                raise InvalidRequest("prompt", f"token {index} must be an integer: {token_id!r}")
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    "prompt",
                    f"token id {token_id} at position {index} is outside the model's vocabulary "
                    f"(0 to {self.vocab_size - 1})",
                )

    def _encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        limit = SUSPECT_CHARS_PER_TOKEN * self.max_model_len
        if len(text) > limit:
            # Cutting a text changes its tokens near the cut only; a factor of two is far from that.
            count = len(self.tokenizer.encode(text[:limit]))
            if count > 2 * self.max_model_len:
                raise OutOfRange(
                    "prompt",
                    f"more than {count} tokens; max_model_len is {self.max_model_len} tokens of "
                    "prompt plus output",
                )
        return self.tokenizer.encode(text, add_special_tokens)


def _is_unicode(text: str) -> bool:
    """Whether UTF-8 can say it: half of a surrogate pair it cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _request_id(given: str | None) -> str:
    if given is None or given == "":
        return f"req-{uuid.uuid4().hex}"
    if len(given) > MAX_REQUEST_ID_CHARS or not given.isprintable():
        raise InvalidRequest(
            "request_id", f"must be at most {MAX_REQUEST_ID_CHARS} printable characters"
        )
    return given
