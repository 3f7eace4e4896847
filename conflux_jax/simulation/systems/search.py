"""The best settings of a rival for a model, a machine and some traffic: all of a short list are
tried on the same requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from conflux_jax.config import ConfigError
from conflux_jax.models.spec import ModelSpec
from conflux_jax.simulation.hardware import Hardware
from conflux_jax.simulation.systems.rivals import kv_tokens

LEAST_KV_TOKENS = 32_768  # with less beside the weights a group serves no long prompt
BUDGETS = (512, 1024, 2048, 4096, 8192)
BATCHES = (2048, 8192)  # prompt tokens that are prefilled at once
FRACTIONS = (1.0, 0.5)  # of the TBT target, for a decode iteration

Settings = dict[str, Any]  # JSON values by name, as the builders take them
Score = tuple[float, ...]  # the larger the better; later numbers decide between equals


class Found(NamedTuple):
    settings: Settings
    score: Score
    tried: list[tuple[Settings, Score]]


def search(candidates: Sequence[Settings], score: Callable[[Settings], Score]) -> Found:
    """score: of a system with those settings on the requests that all are tried on, at a rate that
    few of them sustain: such as its share of requests on time. The first of equals wins. Raises
    ValueError where there are no candidates."""
    if not candidates:
        raise ValueError("candidates: none of the settings fits this model on these GPUs")
    tried = [(settings, score(settings)) for settings in candidates]
    best = max(tried, key=lambda one: one[1])
    return Found(*best, tried)


def candidates(name: str, spec: ModelSpec, hardware: Hardware, gpus: int) -> list[Settings]:
    """What is worth trying for a rival of `systems.rivals.BUILDERS`. Empty where it cannot run at
    all: LoongServe and disaggregation take two groups or more."""
    return list(_CANDIDATES[name](_degrees(spec, hardware, gpus), gpus))


def _degrees(spec: ModelSpec, hardware: Hardware, gpus: int) -> list[int]:
    """Numbers of GPUs that one copy of the weights may be split over: powers of two."""
    found = []
    for tp in itertools.takewhile(lambda tp: tp <= gpus, (2**i for i in itertools.count())):
        try:
            if kv_tokens(spec, hardware, tp) >= LEAST_KV_TOKENS:
                found.append(tp)
        except ConfigError:
            continue  # the weights alone are too large
    return found


def _chunked(degrees: list[int], gpus: int) -> Iterator[Settings]:
    for tp, budget in itertools.product(degrees, BUDGETS):
        if gpus % tp == 0:
            yield {"tp": tp, "budget": budget}


def _oracle(degrees: list[int], gpus: int) -> Iterator[Settings]:
    for tp in degrees:
        if gpus % tp == 0:
            yield {"tp": tp}


def _loongserve(degrees: list[int], gpus: int) -> Iterator[Settings]:
    """Any degree; not those that leave none to decode; always the most that leave one; one or two
    instances."""
    for tp in degrees:
        most = gpus // tp
        if gpus % tp or most < 2:
            continue
        every, leaving = tuple(range(1, most + 1)), tuple(range(1, most))
        choices = dict.fromkeys([every, leaving, (most - 1,), every[:2]])
        for allowed, tokens, fraction in itertools.product(choices, BATCHES, FRACTIONS):
            yield {
                "tp": tp,
                "degrees": allowed,
                "batch_tokens": tokens,
                "target_fraction": fraction,
            }


def _muxwise(degrees: list[int], gpus: int) -> Iterator[Settings]:
    for tp, batch_tokens, fraction in itertools.product(degrees, BATCHES, FRACTIONS):
        if gpus % tp == 0:
            yield {"tp": tp, "batch_tokens": batch_tokens, "target_fraction": fraction}


def _disaggregated(degrees: list[int], gpus: int) -> Iterator[Settings]:
    """Every split; TP, SP or neither in prefill; TP or not in decode."""
    for prefill_gpus in range(1, gpus):
        ways = [
            (tp, sp)
            for tp, sp in itertools.product(degrees, range(1, prefill_gpus + 1))
            if prefill_gpus % (tp * sp) == 0 and (sp == 1 or tp == degrees[0])
        ]
        decode_tps = [tp for tp in degrees if (gpus - prefill_gpus) % tp == 0]
        for (tp, sp), decode_tp, tokens in itertools.product(ways, decode_tps, BATCHES):
            yield {
                "prefill_gpus": prefill_gpus,
                "prefill_tp": tp,
                "prefill_sp": sp,
                "decode_tp": decode_tp,
                "batch_tokens": tokens,
            }


_CANDIDATES: dict[str, Callable[[list[int], int], Iterator[Settings]]] = {
    "chunked": _chunked,
    "chunked-oracle": _oracle,
    "loongserve": _loongserve,
    "muxwise": _muxwise,
    "disaggregated": _disaggregated,
}
