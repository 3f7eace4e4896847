"""What a caller asks for and what comes back: values that cross every boundary, so all frozen."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

MAX_LOGPROBS = 20  # alternatives a token can report; fixed, because shapes on the device are
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
# Lists of tokens have a place of fixed size on the device (`execution/adjustments.py`).
MAX_STOP_TOKEN_IDS = 128
MAX_ENDING_TOKEN_IDS = 192  # stop tokens and the model's EOS tokens, with min_tokens
MAX_LOGIT_BIAS = 512
MAX_BAD_TOKEN_IDS = 512  # those of bad_words among them
MAX_BAD_PHRASES = 64  # bad words of several tokens; one that is others after a space is two
MAX_PHRASE_TOKENS = 16
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_TOKEN_ID = 2**31 - 1


class InvalidRequest(ValueError):
    """A request that can never be served as it stands; `field` is the one to change."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


class OutOfRange(InvalidRequest):
    """A valid request past a limit of this engine (context length, KV pool)."""


class IdInUse(InvalidRequest):
    """Another request has this id, and is not over."""


class QueueFull(RuntimeError):
    """The waiting queue is at its limit; the same request may be taken later, with luck after
    `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineUnmet(RuntimeError):
    """A request whose first token cannot be there before its caller has given up."""


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an EOS token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # cancelled by its caller
    ERROR = "error"  # the engine failed, or failed at this request


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Defaults are vLLM's; `None` means "the engine's default".

    Logits are changed in this order, as in vLLM: to minus infinity outside `allowed_token_ids` and
    for the bad ones (and, for the first `min_tokens` tokens, those that would end the answer), plus
    `logit_bias`, then by the penalties, then by temperature and cut-offs. `repetition_penalty`
    counts tokens of the prompt and of the output, the other two those of the output alone.

    logit_bias: given as a mapping of token ids, kept as pairs in their order. bad_words: the last
    token of one is banned where those before it have just been generated. stop_token_ids: end the
    answer as EOS does, also with ignore_eos. A token is counted up to 16,383 times.

    Raises InvalidRequest, naming field and limit, on construction.
    """

    max_tokens: int | None = 16  # None: as many as the context holds
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: drawn by the engine
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives to report beside the sampled token's own
    prompt_logprobs: int | None = None  # the same, for each token of the prompt but the first
    presence_penalty: float = 0.0  # taken off the logit of each token that was generated
    frequency_penalty: float = 0.0  # the same, for each time that it was
    repetition_penalty: float = 1.0  # divides positive logits of seen tokens, multiplies others
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0  # before these no EOS, no stop token and no stop string ends it
    stop_token_ids: tuple[int, ...] = ()
    bad_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None

    def __post_init__(self):
        _integer(self, "max_tokens", 1, 2**31 - 1, optional=True)
        _number(self, "temperature", 0.0, 100.0)
        _integer(self, "top_k", 0, 2**31 - 1)
        _number(self, "top_p", 0.0, 1.0, open_low=True)
        _number(self, "min_p", 0.0, 1.0)
        _integer(self, "seed", -(2**63), 2**63 - 1, optional=True)
        _integer(self, "logprobs", 0, MAX_LOGPROBS, optional=True)
        _integer(self, "prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        _number(self, "presence_penalty", -2.0, 2.0)
        _number(self, "frequency_penalty", -2.0, 2.0)
        _number(self, "repetition_penalty", 0.01, 100.0)
        for slo in ("ttft_slo_s", "tbt_slo_s"):
            if getattr(self, slo) is not None:
                _number(self, slo, 0.0, math.inf, open_low=True)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest("ignore_eos", f"must be true or false, got {self.ignore_eos!r}")
        _strings(self, "stop", MAX_STOP_STRINGS)
        _strings(self, "bad_words", MAX_BAD_TOKEN_IDS)
        _token_ids(self, "stop_token_ids", MAX_STOP_TOKEN_IDS)
        _token_ids(self, "bad_token_ids", MAX_BAD_TOKEN_IDS)
        if self.allowed_token_ids is not None:
            _token_ids(self, "allowed_token_ids", MAX_ALLOWED_TOKEN_IDS)
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids", "must have at least one token id")
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        _integer(self, "min_tokens", 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                "min_tokens",
                f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}",
            )

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is kept."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias


def _strings(params: Any, name: str, most: int) -> None:
    """One string or some, kept as a tuple."""
    given = getattr(params, name)
    texts = (given,) if isinstance(given, str) else given or ()
    if not isinstance(texts, list | tuple):
        raise InvalidRequest(name, f"must be a string or a list of them, got {texts!r}")
    if len(texts) > most:
        raise InvalidRequest(name, f"at most {most} strings, got {len(texts)}")
    for text in texts:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
            raise InvalidRequest(
                name, f"each must be a string of 1 to {MAX_STOP_STRING_CHARS} characters"
            )
    object.__setattr__(params, name, tuple(texts))


def _token_ids(params: Any, name: str, most: int) -> None:
    """A list of token ids, kept as a tuple, each once."""
    given = getattr(params, name) or ()
    if not isinstance(given, list | tuple):
        raise InvalidRequest(name, f"must be a list of token ids, got {given!r}")
    if len(given) > most:
        raise InvalidRequest(name, f"at most {most} token ids, got {len(given)}")
    for token_id in given:
        _check_token_id(name, token_id)
    object.__setattr__(params, name, tuple(dict.fromkeys(given)))


def _check_token_id(name: str, token_id: Any) -> None:
    if isinstance(token_id, bool) or not isinstance(token_id, int):
        raise InvalidRequest(name, f"token ids must be integers, got {token_id!r}")
    if not 0 <= token_id <= MAX_TOKEN_ID:
        raise InvalidRequest(name, f"token ids are at least 0 and below 2^31, got {token_id}")


def _bias_pairs(given: Any) -> tuple[tuple[int, float], ...]:
    name = "logit_bias"
    try:
        biases: dict[Any, Any] = dict(given or ())
    except (TypeError, ValueError) as error:
        raise InvalidRequest(name, f"must map token ids to numbers, got {given!r}") from error
    if len(biases) > MAX_LOGIT_BIAS:
        raise InvalidRequest(name, f"at most {MAX_LOGIT_BIAS} token ids, got {len(biases)}")
    for token_id, bias in biases.items():
        _check_token_id(name, token_id)
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not number or not -100 <= bias <= 100:
            raise InvalidRequest(
                name, f"that of {token_id} must be a number from -100 to 100, got {bias!r}"
            )
    return tuple(sorted((token_id, float(bias)) for token_id, bias in biases.items()))


def _integer(params: Any, name: str, low: int, high: int, optional: bool = False) -> None:
    value = getattr(params, name)
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(name, f"must be an integer, got {value!r}")
    if not low <= value <= high:
        raise InvalidRequest(name, f"must be between {low} and {high}, got {value}")


def _number(params: Any, name: str, low: float, high: float, open_low: bool = False) -> None:
    value = getattr(params, name)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or value != value:  # NaN (math.isnan fails on huge integers)
        raise InvalidRequest(name, f"must be a number, got {value!r}")
    if not low <= value <= high or (open_low and value == low):
        bound = "above" if open_low else "at least"
        raise InvalidRequest(name, f"must be {bound} {low} and at most {high}, got {value}")


@dataclass(frozen=True)
class Request:
    """A prompt that has been checked and tokenised; all that the scheduler knows of it.

    `prompt_token_ids`: a tuple, or in a simulation, where only their number counts, a range.
    `max_output_tokens` is already capped by the engine's context limit. `arrival_s` is on the
    engine's clock, and so is `deadline_s`, when its caller stops waiting. `seed` is settled, so
    that a replay draws the same tokens. `bad_phrases`: bad words of several tokens.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    max_output_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    arrival_s: float = 0.0
    deadline_s: float = math.inf
    bad_phrases: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The sampled token's log-probability and the likeliest alternatives, best first."""

    sampled: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Of the tokens `first`, `first + 1`, ... of a prompt, each given all those before it.

    logprobs: float32 [tokens]. ranks: int32 [tokens], 1 for the likeliest of the vocabulary.
    top_ids, top_logprobs: [tokens, alternatives], the likeliest, best first. Arrays, because a
    prompt may have a hundred thousand tokens.
    """

    first: int
    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.logprobs, self.ranks, self.top_ids, self.top_logprobs

    @classmethod
    def joined(cls, pieces: Sequence[PromptLogprobs]) -> PromptLogprobs:
        """From the second token on: pieces that follow one another, or again from an earlier token
        (a prompt that was preempted); what came first counts."""
        kept, following = [], 1
        for piece in pieces:
            skipped = following - piece.first
            assert skipped >= 0, "a piece is missing"
            if skipped < len(piece):
                kept.append([array[skipped:] for array in piece.arrays])
                following = piece.first + len(piece)
        if not kept:
            nothing, none = np.zeros(0, np.float32), np.zeros((0, 0), np.float32)
            return cls(1, nothing, nothing.astype(np.int32), none.astype(np.int32), none)
        return cls(1, *(np.concatenate(parts) for parts in zip(*kept, strict=True)))


class TokenEvent(NamedTuple):
    """One step of one request: a token, an end, or both.

    `token_id` is None only when the request ended without a new token (abort, error).
    An EOS or stop token that ends a request is reported, with `finish_reason` STOP.
    prompt_logprobs: with the first token of a request that asked, and with no other.
    """

    request_id: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None
    message: str = ""
    prompt_logprobs: PromptLogprobs | None = None
