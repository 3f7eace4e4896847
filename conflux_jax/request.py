"""What a caller asks for and what comes back: values that cross every boundary, so all frozen."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_LOGPROBS = 20  # alternatives a token can report; fixed, because shapes on the device are
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024


class InvalidRequest(ValueError):
    """A request that can never be served as it stands; `field` is the one to change."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


class OutOfRange(InvalidRequest):
    """A valid request past a limit of this engine (context length, KV pool)."""


class QueueFull(RuntimeError):
    """The waiting queue is at its limit; the same request may be taken later."""


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an EOS token or a stop string
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # cancelled by its caller
    ERROR = "error"  # the engine failed


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Defaults are vLLM's; `None` means "the engine's default".

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
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None

    def __post_init__(self):
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        if not isinstance(stop, list | tuple):
            raise InvalidRequest("stop", f"must be a string or a list of them, got {stop!r}")
        object.__setattr__(self, "stop", tuple(stop))
        _integer(self, "max_tokens", 1, 2**31 - 1, optional=True)
        _number(self, "temperature", 0.0, 100.0)
        _integer(self, "top_k", 0, 2**31 - 1)
        _number(self, "top_p", 0.0, 1.0, open_low=True)
        _number(self, "min_p", 0.0, 1.0)
        _integer(self, "seed", -(2**63), 2**63 - 1, optional=True)
        _integer(self, "logprobs", 0, MAX_LOGPROBS, optional=True)
        for slo in ("ttft_slo_s", "tbt_slo_s"):
            if getattr(self, slo) is not None:
                _number(self, slo, 0.0, math.inf, open_low=True)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest("ignore_eos", f"must be true or false, got {self.ignore_eos!r}")
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidRequest("stop", f"at most {MAX_STOP_STRINGS} strings, got {len(stop)}")
        for text in stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise InvalidRequest(
                    "stop", f"each must be a string of 1 to {MAX_STOP_STRING_CHARS} characters"
                )


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
    engine's clock. `seed` is settled, so that a replay draws the same tokens.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    max_output_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The sampled token's log-probability and the likeliest alternatives, best first."""

    sampled: float
    top: tuple[tuple[int, float], ...] = ()


class TokenEvent(NamedTuple):
    """One step of one request: a token, an end, or both.

    `token_id` is None only when the request ended without a new token (abort, error).
    An EOS token that ends a request is reported, with `finish_reason` STOP.
    """

    request_id: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None
    message: str = ""
