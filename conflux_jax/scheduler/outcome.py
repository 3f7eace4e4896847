"""What came back of a plan, and what it means for the requests that it had samples of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from typing import NamedTuple

from conflux_jax.plan import NO_TOKEN, PrefillChunk, StepOutput
from conflux_jax.request import FinishReason, PromptLogprobs, TokenEvent
from conflux_jax.scheduler.latency_model import IterationShape
from conflux_jax.scheduler.state import Phase, RequestState


class InFlight(NamedTuple):
    """What is kept of a plan until its results are here. samplers: in the order of its samples,
    some at a time. ending: those of them whose last sample it is. gone: requests that ended since,
    whose samples do not count. chunks: of prompts. scored: who has one and asked for
    log-probabilities of the prompt. is_full: prefill used all its budget."""

    iteration: int
    samplers: list[Sequence[RequestState]]
    ending: list[RequestState]
    gone: list[RequestState]
    chunks: tuple[PrefillChunk, ...]
    scored: Sequence[RequestState]
    shape: IterationShape | None
    is_full: bool


def take_in(
    entry: InFlight, request_ids: Sequence[str], output: StepOutput, stop_token_ids: set[int]
) -> tuple[list[TokenEvent], list[RequestState]]:
    """An event for each sample that still counts, and the requests that it was the last of. Raises
    ValueError, and changes nothing, where `output` is not of the plan's size.

    request_ids: of the samples. stop_token_ids: those that may end some request. Thousands of
    tokens come at a time, and next to none of them is special: only those cost a turn in Python.
    """
    states = list(chain.from_iterable(entry.samplers))
    token_ids: list[int] = output.token_ids.tolist()
    if len(token_ids) != len(states):
        raise ValueError(f"{len(token_ids)} tokens came back for {len(states)} samples")
    events = _plain_events(request_ids, token_ids)
    special = _special(entry, states, token_ids, stop_token_ids)
    for at, event in special.items():
        events[at] = event
    for state, token_id in zip(states, token_ids, strict=True):
        state.outputs.append(token_id)
    if output.logprobs:
        reports = [output.logprobs.get(event.request_id) for event in events]
        events = [e._replace(logprobs=r) if r else e for e, r in zip(events, reports, strict=True)]
    if entry.scored and (of_prompts := _scores(entry, output)):
        events = [e._replace(prompt_logprobs=of_prompts.get(e.request_id)) for e in events]
    gone = {states.index(state) for state in entry.gone if state in states}
    if gone:
        events = [event for at, event in enumerate(events) if at not in gone]
    return events, [states[at] for at in special if at not in gone]


def _special(
    entry: InFlight, states: list[RequestState], token_ids: list[int], stop_token_ids: set[int]
) -> dict[int, TokenEvent]:
    """The samples that are the last of their requests, by their place."""
    reasons = {states.index(state): FinishReason.LENGTH for state in entry.ending}
    if not stop_token_ids.isdisjoint(token_ids):
        for at, (state, token_id) in enumerate(zip(states, token_ids, strict=True)):
            min_tokens = state.request.params.min_tokens
            if token_id in state.stop_token_ids and len(state.outputs) >= min_tokens:
                reasons[at] = FinishReason.STOP
    special = {
        at: TokenEvent(states[at].request_id, token_ids[at], reason)
        for at, reason in reasons.items()
    }
    if NO_TOKEN in token_ids:
        dead = [at for at, token_id in enumerate(token_ids) if token_id == NO_TOKEN]
        special |= {at: _no_token(states[at]) for at in dead}
    return special


def _scores(entry: InFlight, output: StepOutput) -> dict[str, PromptLogprobs]:
    """Keeps what an iteration says of its prompts; all of it, by request, for those that end."""
    ending, reports = set(map(id, entry.samplers[-1])), {}
    for state in entry.scored:
        if (piece := output.prompt_logprobs.get(state.request_id)) is not None:
            state.scores.append(piece)
        if id(state) in ending and state.phase is not Phase.GONE:
            reports[state.request_id] = PromptLogprobs.joined(state.scores)
            state.scores = []
    return reports


def _plain_events(request_ids: Sequence[str], token_ids: Sequence[int]) -> list[TokenEvent]:
    """A token for each, and nothing else."""
    nothing = repeat(None)
    values = zip(request_ids, token_ids, nothing, nothing, repeat(""), nothing)
    return list(map(tuple.__new__, repeat(TokenEvent), values))


def _no_token(state: RequestState) -> TokenEvent:
    """The end of a request whose logits were not finite."""
    message = (
        f"request {state.request_id}: the logits after {state.length} tokens are not finite, "
        "so there is no next token"
    )
    return TokenEvent(state.request_id, None, FinishReason.ERROR, message=message)
