"""A device that trusts nothing: it runs plans on a KV pool of tokens and checks every rule of them.

It mirrors slots and page tables from the plans alone, as a real executor does. Each cell of a page
holds `(position, token)`; the next token is a hash of the tokens that a row *reads there*. So a
page that is mapped wrongly, reused too early or read before it is written is an error at once, or
gives a token that the plain answer, `solo`, does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from conflux_jax.config import SchedulerConfig
from conflux_jax.plan import Admission, Handoff, IterationPlan, Pages, PoolGeometry, StepOutput
from conflux_jax.request import Request
from conflux_jax.scheduler.buckets import Ladders

VOCAB = 13


def next_token(tokens: Sequence[int]) -> int:
    return hash(tuple(tokens)) % VOCAB


def solo(request: Request) -> tuple[int, ...]:
    """What the request yields alone."""
    tokens, outputs = list(request.prompt_token_ids), []
    while len(outputs) < request.max_output_tokens:
        token = next_token(tokens)
        tokens.append(token)
        outputs.append(token)
        if token in request.eos_token_ids and not request.params.ignore_eos:
            break
    return tuple(outputs)


@dataclass(eq=False)
class Page:
    """A page as its owner uses it. A new owner means a new Page: what the old one still does with
    the same number is then caught."""

    owner: Resident
    layout: str
    cells: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(eq=False)
class Resident:
    """A request from an admission on."""

    request: Request
    token_ids: tuple[int, ...]
    prefill_pages: tuple[Pages, ...]
    num_tokens: int = 0
    group: int = -1
    pages: list[int] = field(default_factory=list)
    num_handed: int = 0
    last_token: int = -1

    @property
    def prefilled(self) -> bool:
        return self.num_tokens >= len(self.token_ids)


class CheckingExecutor:
    """`launch` checks and computes at once; `collect` hands the tokens out, in order only."""

    def __init__(self, config: SchedulerConfig, geometry: PoolGeometry, ladders: Ladders):
        self.config, self.geometry, self.ladders = config, geometry, ladders
        self.buckets = set(ladders.all())
        self.level = -(-config.max_num_batched_tokens // geometry.groups)
        self.prefill_layout = "prefill" if geometry.needs_handoff else "decode"
        self.slots: dict[int, Resident] = {}
        self.memory: dict[tuple[int, int], Page] = {}
        self.sampled: dict[int, list[int]] = {}  # by identity of the request
        self.plans: list[IterationPlan] = []
        self._ended: dict[int, Request] = {}  # by identity, which the values keep alive
        self._collected = 0

    def launch(self, plan: IterationPlan) -> tuple[int, list[int]]:
        assert plan.iteration == len(self.plans)
        self.plans.append(plan)
        self._check_shape(plan)
        self._apply_changes(plan)
        writes: list[tuple[Page, int, tuple[int, int]]] = []
        chunked: dict[int, int] = {}  # slot: first token of this iteration's chunk
        tokens = self._run_decodes(plan, writes)
        tokens += self._run_chunks(plan, writes, chunked)
        self._run_handoffs(plan, writes, chunked)
        for page, offset, cell in writes:
            assert offset not in page.cells, f"written twice: {cell}"
            page.cells[offset] = cell
        assert len(tokens) == len(plan.samples)
        return plan.iteration, tokens

    def end(self, request: Request) -> None:
        """Cancelled: its pages may be another's with the next plan, so no plan from here on may
        read or write for it. (Plans that were launched are through before the next one.)"""
        self._ended[id(request)] = request

    def collect(self, ticket: tuple[int, list[int]]) -> StepOutput:
        assert ticket[0] == self._collected
        self._collected += 1
        return StepOutput(np.asarray(ticket[1], np.int32), 0.0)

    # The shape of a plan

    def _check_shape(self, plan: IterationPlan) -> None:
        loads = [len(rows) for rows in plan.decodes]
        assert len(loads) == len(plan.prefill_shares) == self.geometry.groups
        assert plan.bucket in self.buckets
        assert plan.bucket.prefill == bool(plan.chunks)
        assert plan.bucket.handoff or not plan.handoffs
        assert any(loads) or plan.chunks or plan.handoffs, "a plan without work"
        assert len(plan.chunks) <= self.config.max_prefill_segments
        assert sum(plan.prefill_shares) == plan.num_prefill_tokens
        for load, share in zip(loads, plan.prefill_shares, strict=True):
            assert share >= 0
            assert load <= plan.bucket.decode_rows and load + share <= plan.bucket.rows
            assert load + share <= self.level or share == 0
        if plan.chunks:
            assert plan.num_prefill_tokens + sum(loads) <= self.config.max_num_batched_tokens
        decoding = [row.slot for rows in plan.decodes for row in rows]
        working = decoding + [chunk.slot for chunk in plan.chunks]
        admitted = {admission.slot for admission in plan.admissions}
        busy = {*working, *(handoff.slot for handoff in plan.handoffs)} - admitted
        ended = self._ended.keys() & {id(self.slots[slot].request) for slot in busy}
        assert not ended, "work for a request that was cancelled"
        assert len(set(working)) == len(working), "a slot with two rows"
        assert not set(decoding) & {handoff.slot for handoff in plan.handoffs}

    # Changes

    def _apply_changes(self, plan: IterationPlan) -> None:
        fresh: set[tuple[int, int]] = set()
        admitted = [admission.slot for admission in plan.admissions]
        assert len(set(admitted)) == len(admitted)
        for admission in plan.admissions:
            self._admit(admission, fresh)
        for placement in plan.placements:
            resident = self.slots[placement.slot]
            assert resident.group < 0, "placed twice"
            assert len(placement.pages) == self.geometry.decode_pages(len(resident.token_ids))
            resident.group, resident.pages = placement.group, list(placement.pages)
            if self.geometry.needs_handoff:
                self._own(resident, placement.group, placement.pages, "decode", fresh)
            else:
                assert placement.pages == resident.prefill_pages[0]
        for group, rows in enumerate(plan.decodes):
            for row in rows:
                resident = self.slots[row.slot]
                full = row.position == len(resident.pages) * self.geometry.page_tokens
                assert full == (row.new_page >= 0), "a page opened when none was due, or not opened"
                if full:
                    self._own(resident, group, (row.new_page,), "decode", fresh)
                    resident.pages.append(row.new_page)

    def _admit(self, admission: Admission, fresh: set[tuple[int, int]]) -> None:
        request = admission.request
        assert 0 <= admission.slot < self.config.max_num_seqs
        told = self.sampled.setdefault(id(request), [])
        assert tuple(admission.token_ids) == (*request.prompt_token_ids, *told)
        resident = Resident(request, tuple(admission.token_ids), admission.prefill_pages)
        assert len(admission.prefill_pages) == self.geometry.num_pools
        for group, pages in enumerate(admission.prefill_pages):
            assert len(pages) == self.geometry.prefill_pages(len(admission.token_ids))
            self._own(resident, group, pages, self.prefill_layout, fresh)
        self.slots[admission.slot] = resident

    def _own(
        self,
        resident: Resident,
        group: int,
        pages: Sequence[int],
        layout: str,
        fresh: set[tuple[int, int]],
    ) -> None:
        pool = self.geometry.pool_of(group)
        for page in pages:
            assert 0 <= page < self.geometry.num_pages
            assert (pool, page) not in fresh, "a page given out twice in one plan"
            fresh.add((pool, page))
            self.memory[pool, page] = Page(resident, layout)

    # Work. Everything reads the pool as it was; writes come at the end.

    def _page(self, resident: Resident, group: int, number: int, layout: str) -> Page:
        page = self.memory[self.geometry.pool_of(group), number]
        assert page.owner is resident, f"page {number} of group {group} is another's by now"
        assert page.layout == layout
        return page

    def _read(
        self,
        resident: Resident,
        group: int,
        pages: Sequence[int],
        layout: str,
        start: int,
        stop: int,
    ) -> list[int]:
        """Tokens `start .. stop` as the pages hold them."""
        size = self.geometry.page_tokens
        size = self.geometry.prefill_page_tokens if layout == "prefill" else size
        tokens = []
        for number in range(start // size, -(-stop // size)):
            page = self._page(resident, group, pages[number], layout)
            for position in range(max(start, number * size), min(stop, (number + 1) * size)):
                written, token = page.cells[position % size]
                assert written == position
                tokens.append(token)
        return tokens

    def _sample(self, resident: Resident, tokens: Sequence[int]) -> int:
        sampled = self.sampled[id(resident.request)]
        resident.last_token = next_token(tokens)
        sampled.append(resident.last_token)
        assert len(sampled) <= resident.request.max_output_tokens, "a row past max_output_tokens"
        return resident.last_token

    def _run_decodes(self, plan: IterationPlan, writes: list) -> list[int]:
        tokens = []
        size = self.geometry.page_tokens
        for group, rows in enumerate(plan.decodes):
            for row in rows:
                resident = self.slots[row.slot]
                assert resident.request.request_id == row.request_id
                assert resident.group == group
                assert resident.prefilled and row.position == resident.num_tokens
                if self.geometry.needs_handoff:
                    known = self.geometry.decode_pages(len(resident.token_ids))
                    assert resident.num_handed == known, "decodes before it is handed over"
                read = self._read(resident, group, resident.pages, "decode", 0, row.position)
                number = resident.pages[row.position // size]
                page = self._page(resident, group, number, "decode")
                writes.append((page, row.position % size, (row.position, resident.last_token)))
                resident.num_tokens += 1
                tokens.append(self._sample(resident, [*read, resident.last_token]))
        return tokens

    def _run_chunks(self, plan: IterationPlan, writes: list, chunked: dict[int, int]) -> list[int]:
        tokens = []
        layout = self.prefill_layout
        size = self.geometry.prefill_page_tokens
        for chunk in plan.chunks:
            resident = self.slots[chunk.slot]
            assert resident.request.request_id == chunk.request_id
            assert chunk.length >= 1 and chunk.start == resident.num_tokens
            stop = chunk.start + chunk.length
            assert stop <= len(resident.token_ids)
            assert chunk.is_last == (stop == len(resident.token_ids))
            own = resident.token_ids[chunk.start : stop]
            for group, pages in enumerate(resident.prefill_pages):
                read = self._read(resident, group, pages, layout, 0, chunk.start)
                assert tuple(read) == resident.token_ids[: chunk.start]
                for position, token in enumerate(own, chunk.start):
                    page = self._page(resident, group, pages[position // size], layout)
                    writes.append((page, position % size, (position, token)))
            chunked[chunk.slot] = chunk.start
            resident.num_tokens = stop
            if chunk.is_last:
                tokens.append(self._sample(resident, resident.token_ids))
        return tokens

    def _run_handoffs(self, plan: IterationPlan, writes: list, chunked: dict[int, int]) -> None:
        into = [0] * self.geometry.groups
        for handoff in plan.handoffs:
            into[handoff.group] += handoff.num_pages
            self._run_handoff(handoff, writes, chunked)
        assert max(into) <= self.config.handoff_pages

    def _run_handoff(self, handoff: Handoff, writes: list, chunked: dict[int, int]) -> None:
        resident = self.slots[handoff.slot]
        size, length = self.geometry.page_tokens, len(resident.token_ids)
        assert resident.group == handoff.group
        assert handoff.first_page == resident.num_handed and handoff.num_pages >= 1
        assert handoff.num_tokens == length
        start = handoff.first_page * size
        stop = min(length, start + handoff.num_pages * size)
        assert stop <= resident.num_tokens, "handed over before it is prefilled"
        assert stop % size == 0 or stop == length, "a part of a page that is not the last"
        pooled = max(start, min(stop, chunked.get(handoff.slot, length)))
        shards = {
            tuple(self._read(resident, group, pages, "prefill", start, pooled))
            for group, pages in enumerate(resident.prefill_pages)
        }
        assert len(shards) == 1
        moved = (*shards.pop(), *resident.token_ids[pooled:stop])
        for position, token in enumerate(moved, start):
            number = resident.pages[position // size]
            page = self._page(resident, handoff.group, number, "decode")
            writes.append((page, position % size, (position, token)))
        resident.num_handed += handoff.num_pages
        assert resident.num_handed <= len(resident.pages)
