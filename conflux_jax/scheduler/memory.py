"""What each running request holds (slot, pages, decode row), and whether another one fits.

A prompt is admitted when its prefill pages are free on every group *and* some group can later hold
it in decode layout. The second half is a pledge: pages that stay free and count as taken for the
admissions after it, so that several prompts never count on the same ones. The prompt's placement
takes them up, which with several groups is some chunks before its end. Pledges bind admissions and
placements only: a running decode that needs a page takes it.
"""

from __future__ import annotations

import heapq
from array import array
from operator import gt

from conflux_jax.plan import PoolGeometry
from conflux_jax.scheduler.decode_table import DecodeTable
from conflux_jax.scheduler.page_pool import PagePool
from conflux_jax.scheduler.placement import choose_group
from conflux_jax.scheduler.state import RequestState


class Room:
    """Slots and unpledged pages, to find out which admissions would fit one after the other."""

    def __init__(self, memory: Memory, unpledged: list[int], slots: int):
        self.slots = slots
        self._memory, self._unpledged = memory, unpledged

    def fits(self, state: RequestState) -> bool:
        """Whether a waiting request can be admitted.

        Worked, two groups with pages of 16 tokens (32 in prefill layout), 9 and 5 unpledged: a
        prompt of 100 tokens needs ceil(100 / 32) = 4 on both, then ceil(101 / 16) = 7 on one: 9 - 4
        are too few. One of 70 needs 3 on both and 5 on one, which the first has.
        """
        prefill = self._memory.prefill_pages(state)
        later = self._memory.later_pages(state)
        return (
            self.slots > 0
            and prefill <= min(self._unpledged)
            and prefill + later <= max(self._unpledged)
        )

    def take(self, state: RequestState) -> None:
        """As `Memory.admit` would."""
        prefill, later = self._memory.prefill_pages(state), self._memory.later_pages(state)
        self._unpledged = [pages - prefill for pages in self._unpledged]
        self._unpledged[self._unpledged.index(max(self._unpledged))] -= later
        self.slots -= 1


class Memory:
    """max_requests: number of slots. max_rows: decode rows of one group. handoff_pages: that one
    iteration can carry to a group. packing_threshold: share of pages in use on every group from
    which on prompts are placed on the fullest.

    Per group: `num_rows` and `context_tokens` of those placed there (a prompt's tokens count in
    full from its placement), `unhanded` pages of them that are still to be handed over.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        max_requests: int,
        max_rows: int,
        handoff_pages: int,
        packing_threshold: float,
    ):
        self.geometry = geometry
        self.max_rows = max_rows
        self.handoff_pages = handoff_pages
        self.packing_threshold = packing_threshold
        self.pool = PagePool(geometry.num_pools, geometry.num_pages)
        self.num_rows = [0] * geometry.groups
        self.context_tokens = [0] * geometry.groups
        self.unhanded = [0] * geometry.groups
        self.num_ended = 0  # requests that gave everything back for good
        self._pledged = [0] * geometry.num_pools
        self._slots = list(range(max_requests))  # a heap: the lowest free slot is next

    @property
    def has_slot(self) -> bool:
        return bool(self._slots)

    @property
    def num_free_slots(self) -> int:
        return len(self._slots)

    def free_pages(self) -> list[int]:
        """Per pool (`PoolGeometry.pool_of`)."""
        return self.pool.free_pages()

    def unpledged_pages(self) -> list[int]:
        """Per pool; negative where decodes have grown into what was pledged."""
        return [free - out for free, out in zip(self.free_pages(), self._pledged, strict=True)]

    def room(self) -> Room:
        """What is there for admissions."""
        return Room(self, self.unpledged_pages(), len(self._slots))

    def prefill_pages(self, state: RequestState) -> int:
        """Of every pool, for an admission."""
        return self.geometry.prefill_pages(state.length)

    def later_pages(self, state: RequestState) -> int:
        """Pages beside its prefill pages that a request needs on one group to start decoding.

        One that was preempted asks for more, so that it does not come back only to go: room to grow
        by one page, by twice as many after each further preemption. And what it gave up is for
        those that run: until one of them has ended, it needs room for all that it may ever hold.
        """
        if state.unplanned <= 1:
            return 0
        prefill = self.geometry.prefill_pages(state.length)
        held = 0 if self.geometry.needs_handoff else prefill
        if not state.num_preemptions:
            return self.geometry.decode_pages(state.length + 1) - held
        most = self.geometry.decode_pages(state.max_kv_tokens)
        growth = 1 << (state.num_preemptions - 1)
        later = min(self.geometry.decode_pages(state.length) + growth, most) - held
        return max(later, most - prefill) if state.evicted_at == self.num_ended else later

    def admit(self, state: RequestState) -> None:
        """Slot, prefill pages of every pool, and a pledge on the pool with the most to spare."""
        request = state.request
        later = self.later_pages(state)
        state.slot = heapq.heappop(self._slots)
        state.token_ids = request.prompt_token_ids
        if state.outputs:
            state.token_ids = (*state.token_ids, *state.outputs)
        pages = self.geometry.prefill_pages(len(state.token_ids))
        state.prefill_pages = self.pool.allocate_all(pages)
        unpledged = self.unpledged_pages()
        state.pledge_pool = unpledged.index(max(unpledged))
        state.pledge_pages = later
        self._pledged[state.pledge_pool] += later

    def place(self, state: RequestState, keep_pledges: bool = True) -> bool:
        """Give a prompt that is (nearly) done its decode group, row and pages. False, and nothing
        changed, where no group has them. keep_pledges: leave to the other prompts what was pledged
        to them.

        Where nothing is handed over, its prefill pages become its decode pages as they are.
        """
        need = self.geometry.decode_pages(len(state.token_ids))
        self._pledged[state.pledge_pool] -= state.pledge_pages
        pools = self.unpledged_pages() if keep_pledges else self.free_pages()
        room = [pools[self.geometry.pool_of(group)] for group in range(self.geometry.groups)]
        asked = need if self.geometry.needs_handoff else 0
        group = choose_group(
            self.context_tokens,
            [
                rows < self.max_rows and free >= asked
                for rows, free in zip(self.num_rows, room, strict=True)
            ],
            len(state.token_ids),
            [-(-(pages + asked) // self.handoff_pages) for pages in self.unhanded],
            room if self._is_short() else None,
        )
        if group < 0:
            self._pledged[state.pledge_pool] += state.pledge_pages
            return False
        state.pledge_pages = 0
        if self.geometry.needs_handoff:
            state.pages = self.pool.allocate(group, need)
            self.unhanded[group] += need
        else:
            state.pages = state.prefill_pages[0][:]
            state.prefill_pages = ()
        state.group = group
        self.num_rows[group] += 1
        self.context_tokens[group] += state.context_tokens
        return True

    def _is_short(self) -> bool:
        """Whether every pool is used above the threshold."""
        return max(self.free_pages()) < (1.0 - self.packing_threshold) * self.geometry.num_pages

    def hand_over(self, state: RequestState, count: int) -> None:
        """The next `count` pages of a placed prompt go with the plan that is being made."""
        state.num_handed += count
        self.unhanded[state.group] -= count

    def grow(self, state: RequestState) -> bool:
        """Open one more page for a running decode; False where its group has none."""
        assert state.table is not None
        pool = self.geometry.pool_of(state.group)
        if not self.pool.num_free(pool):
            return False
        (page,) = self.pool.open([pool])
        state.table.open_page(state, page)
        return True

    def grow_all(self, table: DecodeTable) -> bool:
        """Open a page for every running decode that needs one. False, and nothing changed, where
        some pool has too few."""
        full = table.full()
        if not full.members:
            return True
        groups = full.where.groups
        pools = [0] * len(groups) if self.geometry.shared else groups
        free = self.free_pages()
        if min(free) < len(pools) and any(map(gt, map(pools.count, range(len(free))), free)):
            return False
        table.open_pages(full, self.pool.open(pools))
        return True

    def release_prefill(self, state: RequestState) -> None:
        """After a hand-off: the prompt's pages in prefill layout."""
        if state.prefill_pages:
            self.pool.free_all(state.prefill_pages)
            state.prefill_pages = ()

    def release(self, state: RequestState, for_good: bool = True) -> None:
        """Everything that a request holds, in any phase (nothing, if it holds nothing). for_good:
        it has ended; else it was preempted and will come back."""
        if state.slot < 0:
            return
        self.num_ended += for_good
        state.evicted_at = self.num_ended
        heapq.heappush(self._slots, state.slot)
        state.slot = -1
        self.release_prefill(state)
        self._pledged[state.pledge_pool] -= state.pledge_pages
        state.pledge_pages = 0
        if state.group >= 0:
            self.pool.free(self.geometry.pool_of(state.group), state.pages)
            self.num_rows[state.group] -= 1
            self.context_tokens[state.group] -= state.context_tokens
            self.unhanded[state.group] -= self._left_to_hand_over(state)
        state.group, state.pages, state.num_handed = -1, array("i"), 0
        state.token_ids, state.num_tokens = (), 0

    def _left_to_hand_over(self, state: RequestState) -> int:
        """Pages of a placed request; those that it opened as a decode never are handed over."""
        if not self.geometry.needs_handoff:
            return 0
        return self.geometry.decode_pages(len(state.token_ids)) - state.num_handed
