"""What the scheduler knows of one request, and where it stands.

    WAITING -> PREFILLING -> [HANDOFF] -> DECODING -> DRAINING -> GONE

Everything in between is left early by a cancel, a stop or, back to WAITING, a preemption. DRAINING:
every sample is planned, nothing is held any more, some results are still on their way.
"""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from conflux_jax.plan import Pages, PoolGeometry
from conflux_jax.request import PromptLogprobs, Request
from conflux_jax.scheduler.cohort import Cohort
from conflux_jax.scheduler.decode_table import DecodeTable


class Phase(enum.Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    HANDOFF = "handoff"
    DECODING = "decoding"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class RequestState:
    """Planning runs ahead of results, so a request has two ends: `outputs` came back, `in_flight`
    samples are planned and will, `unplanned` are left to plan. Their sum is max_output_tokens.

    order: rank of arrival, which decides who is served first and preempted last. num_tokens: tokens
    whose KV is in the pool once everything planned has run. num_planned: samples planned. While it
    decodes, its group's table counts on instead of these two: `num_decoded` rows so far.
    """

    request: Request
    order: int
    request_id: str = ""
    stop_token_ids: frozenset[int] = frozenset()  # those that end it
    deadline_s: float = math.inf  # of the first token, on the clock of arrivals
    tbt_slo_s: float = math.inf
    phase: Phase = Phase.WAITING
    outputs: list[int] = field(default_factory=list)
    scores: list[PromptLogprobs] = field(default_factory=list)  # of its prompt, until all are here
    num_planned: int = 0
    bypassed: int = 0  # later requests admitted while this one waited for memory
    num_preemptions: int = 0
    evicted_at: int = 0  # requests that had ended when it was preempted last
    queued_tokens: int = 0  # length, as the waiting queue counted it
    # Held from admission to release:
    slot: int = -1
    token_ids: Sequence[int] = ()
    num_tokens: int = 0
    prefill_pages: tuple[Pages, ...] = ()  # of each pool; those of a plan, not to be written to
    pledge_pool: int = -1
    pledge_pages: int = 0
    # Held from placement to release. With several groups, a prompt is placed before its last chunk:
    group: int = -1
    pages: Pages = field(default_factory=lambda: array("i"))  # see `held_pages`
    num_handed: int = 0  # pages whose hand-off is planned
    # While it decodes:
    table: DecodeTable | None = None
    row: int = -1
    joined_at: int = 0  # steps of the table: then it began, its first pages are full, it ends
    full_at: int = 0
    ends_at: int = 0
    cohort: Cohort | None = None  # from its first full page on
    place: int = -1  # there
    opened_before: int = 0  # openings of the cohort that are among its pages

    def __post_init__(self):
        self.request_id = self.request.request_id
        params = self.request.params
        if not params.ignore_eos:
            self.stop_token_ids = self.request.eos_token_ids
        if params.stop_token_ids:
            self.stop_token_ids |= set(params.stop_token_ids)

    @property
    def wants_scores(self) -> bool:
        """Whether it is still to be told how likely its prompt was."""
        return self.request.params.prompt_logprobs is not None and not self.outputs

    @property
    def num_decoded(self) -> int:
        """Rows planned since it began to decode; 0 while it does not."""
        return 0 if self.table is None else self.table.step - self.joined_at

    @property
    def in_flight(self) -> int:
        return self.num_planned + self.num_decoded - len(self.outputs)

    @property
    def unplanned(self) -> int:
        return self.request.max_output_tokens - self.num_planned - self.num_decoded

    @property
    def prefill_left(self) -> int:
        """Tokens still to prefill, of one that waits or is partly prefilled."""
        return (len(self.token_ids) - self.num_tokens) if self.token_ids else self.length

    @property
    def length(self) -> int:
        """Tokens that the host knows: what a (re-)admission has to prefill."""
        return len(self.request.prompt_token_ids) + len(self.outputs)

    @property
    def context_tokens(self) -> int:
        """Of one that is placed: KV tokens that its group holds or will once it is prefilled."""
        return max(self.num_tokens, len(self.token_ids)) + self.num_decoded

    @property
    def max_kv_tokens(self) -> int:
        """KV tokens at the very end: all but the last token."""
        return len(self.request.prompt_token_ids) + self.request.max_output_tokens - 1

    @property
    def held_pages(self) -> Pages:
        """All of its group, in decode layout."""
        opened = [] if self.cohort is None else self.cohort.opened(self)
        return self.pages + array("i", opened)

    def pages_in(self, group: int) -> int:
        """Pages that it holds in `group`, which has a pool of its own."""
        prefill = len(self.prefill_pages[group]) if self.prefill_pages else 0
        return prefill + (len(self.held_pages) if self.group == group else 0)


class Running:
    """The requests that hold memory, by phase; in the dicts, by `order` and in order of entry."""

    def __init__(self, geometry: PoolGeometry):
        groups = geometry.groups
        self._geometry = geometry
        self.prefilling: dict[int, RequestState] = {}
        self.handing: dict[int, RequestState] = {}
        self.decoding = DecodeTable(groups, geometry.page_tokens)

    def enter(self, state: RequestState, phase: Phase) -> None:
        """Move a request to a phase in which it holds memory."""
        self._leave(state)
        state.phase = phase
        if phase is Phase.DECODING:
            capacity = len(state.pages) * self._geometry.page_tokens
            self.decoding.join(state, capacity)
        else:
            self._prompts(phase)[state.order] = state

    def remove(self, state: RequestState, phase: Phase) -> None:
        """Move it to a phase in which it holds none."""
        self._leave(state)
        state.phase = phase

    def all(self) -> list[RequestState]:
        """Every request that holds memory."""
        decoding = chain.from_iterable(self.decoding.states)
        return [*self.prefilling.values(), *self.handing.values(), *decoding]

    def youngest_holder(self, group: int) -> RequestState:
        """The request of latest arrival with pages of this group's pool; there must be one."""
        return max(self.holders(group), key=lambda state: state.order)

    def holders(self, group: int) -> list[RequestState]:
        if self._geometry.shared:
            return self.all()
        states = self.decoding.states[group]
        return [*self.prefilling.values(), *self.handing.values(), *states]

    def _leave(self, state: RequestState) -> None:
        if state.table is not None:
            state.table.leave(state)
        elif state.phase in (Phase.PREFILLING, Phase.HANDOFF):
            del self._prompts(state.phase)[state.order]

    def _prompts(self, phase: Phase) -> dict[int, RequestState]:
        return self.prefilling if phase is Phase.PREFILLING else self.handing
