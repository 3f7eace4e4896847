"""What one iteration does, and who can run it.

A plan is a list of *changes* (admissions, placements, new pages) and of *work* (decode rows,
prefill chunks, hand-offs). It is complete given the plans before it: an executor mirrors slots and
page tables and needs nothing else, so a recorded list of plans can be replayed.

A slot is a small integer that a request holds from admission to its end (or preemption).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from conflux_jax.request import Logprobs, PromptLogprobs, Request

NO_TOKEN = -1  # in the place of a token whose logits were not finite
type Pages = array[int]  # numbers of pages, int32 ("i"); not to be written to once in a plan


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """The KV pool of every group, counted in pages.

    A page of `page_tokens` tokens with all heads of its tensor-parallel rank (decode layout) has
    the bytes of one with `prefill_page_tokens` tokens and that device's share of the heads (prefill
    layout). With one group both layouts are the same and pages change hands without a copy.

    shared: decode attention is spread over the groups as well, so there is only one layout. A page
    then stands for the one of its number on every group, and all groups have one free list.
    """

    groups: int
    num_pages: int  # per group
    page_tokens: int
    prefill_page_tokens: int
    shared: bool = False

    @property
    def needs_handoff(self) -> bool:
        return self.groups > 1 and not self.shared

    @property
    def num_pools(self) -> int:
        """Free lists: one per group, or one for all."""
        return 1 if self.shared else self.groups

    def pool_of(self, group: int) -> int:
        """The free list that a group's pages come from."""
        return 0 if self.shared else group

    def decode_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def prefill_pages(self, num_tokens: int) -> int:
        """Pages that each group holds for the prompt tokens in prefill layout."""
        return -(-num_tokens // self.prefill_page_tokens)

    def peak_pages(self, num_tokens: int) -> int:
        """Pages of its decode group that a request of this many KV tokens holds at the most:
        both layouts at once while its KV is handed over."""
        extra = self.prefill_pages(num_tokens) if self.needs_handoff else 0
        return self.decode_pages(num_tokens) + extra

    @property
    def max_request_tokens(self) -> int:
        """The most KV tokens that one request alone can have in this pool."""
        low, high = 0, self.num_pages * self.page_tokens
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.peak_pages(middle) <= self.num_pages
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


class Bucket(NamedTuple):
    """The static shape that an iteration runs in; one compiled program each.

    rows: packed token rows per group. decode_rows: rows among them that may be decodes (0: none).
    prefill: whether the prefill path is part of the program. handoff: whether KV moves.
    """

    rows: int
    decode_rows: int
    prefill: bool
    handoff: bool


class Admission(NamedTuple):
    """A request takes a slot. `token_ids` is its prompt, plus what it had generated before a
    preemption. `prefill_pages[pool]` are the pages for all of it in prefill layout, in each group
    (`PoolGeometry.pool_of`)."""

    slot: int
    request: Request
    token_ids: Sequence[int]
    prefill_pages: tuple[Pages, ...]


class Placement(NamedTuple):
    """A request gets its decode group and pages there for the tokens it has (decode layout).
    Where nothing is handed over these are its prefill pages."""

    slot: int
    group: int
    pages: Pages


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One decode token. `position` is the index of the input token, which is also the number of
    tokens already in the pool. `new_page` is the page it opens, or -1."""

    request_id: str
    slot: int
    position: int
    new_page: int = -1


class DecodeRows:
    """The decode tokens of one group, one column a field: thousands of rows are a few arrays.

    Iterates over its rows as `DecodeRow`s. columns: int32 array [3, rows] of slots, positions and
    new pages, not to be written to. From one plan to the next, `request_ids` is the same object
    only where the same rows go on, each by one token.
    """

    __slots__ = ("columns", "request_ids")

    def __init__(self, request_ids: tuple[str, ...], columns: np.ndarray):
        self.request_ids, self.columns = request_ids, columns

    @classmethod
    def of(cls, rows: Sequence[DecodeRow] = ()) -> DecodeRows:
        numbers = [(row.slot, row.position, row.new_page) for row in rows]
        columns = np.array(numbers, np.int32).reshape(-1, 3).T
        return cls(tuple(row.request_id for row in rows), columns)

    @property
    def slots(self) -> np.ndarray:
        return self.columns[0]

    @property
    def positions(self) -> np.ndarray:
        return self.columns[1]

    @property
    def new_pages(self) -> np.ndarray:
        return self.columns[2]

    def __len__(self) -> int:
        return len(self.request_ids)

    def __iter__(self) -> Iterator[DecodeRow]:
        return map(DecodeRow, self.request_ids, *self.columns.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DecodeRows) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(self.request_ids)


class PrefillChunk(NamedTuple):
    """Tokens `start .. start+length` of a slot's `token_ids`. The chunks of a plan, laid end to end
    in order, are cut into the groups' `prefill_shares`. The last chunk of a prompt samples."""

    request_id: str
    slot: int
    start: int
    length: int
    is_last: bool


class Handoff(NamedTuple):
    """Decode pages `first_page .. first_page+num_pages` of a slot's placement are filled from the
    head-sharded prefill pages (and from this iteration's chunk). `num_tokens` is the request's
    length, which ends the last page."""

    slot: int
    group: int
    first_page: int
    num_pages: int
    num_tokens: int


class IterationPlan(NamedTuple):
    """Everything that one iteration does.

    decodes[group] are the rows of that group in order; prefill_shares[group] is how many of the
    chunks' tokens it takes, on the rows after its decodes. level: rows that a group may have, C of
    the waterfill; 0 where prefill is held back. prefill_room: prefill tokens that fit below it.
    """

    iteration: int
    bucket: Bucket
    decodes: tuple[DecodeRows, ...]
    chunks: tuple[PrefillChunk, ...] = ()
    prefill_shares: tuple[int, ...] = ()
    handoffs: tuple[Handoff, ...] = ()
    admissions: tuple[Admission, ...] = ()
    placements: tuple[Placement, ...] = ()
    predicted_s: float = 0.0
    level: int = 0
    prefill_room: int = 0

    @property
    def samples(self) -> tuple[str, ...]:
        """Request ids in the order of `StepOutput`: decodes group by group, then last chunks."""
        rows = chain.from_iterable(group.request_ids for group in self.decodes)
        return (*rows, *(chunk.request_id for chunk in self.chunks if chunk.is_last))

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


@dataclass(frozen=True)
class StepOutput:
    """What came back from the device, in the order of `IterationPlan.samples`.

    token_ids: int array [samples], NO_TOKEN where there was none to choose. elapsed_s: from the
    launch, or from the end of the iteration before where that was later. logprobs: by request id,
    for those that asked. prompt_logprobs: the same, of those tokens whose predecessor this
    iteration's chunks had.
    """

    token_ids: np.ndarray
    elapsed_s: float
    logprobs: dict[str, Logprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)


@runtime_checkable
class Executor(Protocol):
    """Runs plans in order. `launch` returns at once where it can; `collect` waits.

    Either may raise, after which no other plan is known to run, unless it has a method `reset()`:
    then plans that begin with admissions do. `close()` frees what it holds, where it has that.
    `is_compiling`: whether `launch` waits for a program to be made, for those that may.
    """

    def launch(self, plan: IterationPlan) -> Any: ...

    def collect(self, ticket: Any) -> StepOutput: ...
