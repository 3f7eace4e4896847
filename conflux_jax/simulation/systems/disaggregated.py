"""Prefill and decode on GPUs of their own, as in DistServe and Splitwise.

Each prefill instance takes prompts from its queue, up to so many tokens at once; each decode
instance runs all that it holds. A prompt's KV goes from one to the other over NVLink, layer by
layer while it is prefilled (Splitwise), once a decode instance has memory for it and its output;
until then the prefill instance keeps it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conflux_jax.simulation.rival_costs import SideCosts
from conflux_jax.simulation.system import SimulatedRequest
from conflux_jax.simulation.systems.events import EventSystem, check_fits
from conflux_jax.simulation.systems.jobs import DecodeBatch, Job, Prefills, Slice


@dataclass(frozen=True)
class Side:
    """Instances of one side. memory_tokens: KV tokens that one of them has room for. share: of all
    GPUs, that one of them has."""

    instances: int
    costs: SideCosts
    memory_tokens: int
    share: float = 0.0


class PrefillInstance:
    """Holds a prompt's KV from its first chunk until all of it has gone."""

    def __init__(
        self,
        system: EventSystem,
        side: Side,
        batch_tokens: int,
        order: str,
        hand_over: Callable[[PrefillInstance, Job, float], None],
    ):
        self._system, self._side, self._batch_tokens = system, side, batch_tokens
        self.memory = system.new_pool(side.memory_tokens)
        self._prefills = Prefills(order, self.memory, outputs=False)
        self._hand_over = hand_over
        self._busy = False

    @property
    def load(self) -> tuple[int, int]:
        return self._prefills.load

    def add(self, job: Job) -> None:
        self._prefills.waiting.add(job)

    def wake(self) -> None:
        slices = [] if self._busy else self._prefills.offer(self._batch_tokens)
        if not slices:
            return
        self._busy = True
        self._prefills.start(slices)
        seconds = self._side.costs.prefill_s([piece.chunk for piece in slices])
        self._system.run(seconds, self._side.share, lambda: self._end(slices, seconds))

    def _end(self, slices: Sequence[Slice], seconds: float) -> None:
        complete = self._prefills.finish(slices)
        self._system.give([job.number for job in complete])
        for job in complete:
            if job.output_tokens == 1:
                self.release(job)
            else:
                self._hand_over(self, job, seconds)
        self._busy = False
        self.wake()

    def release(self, job: Job) -> None:
        """Its KV is needed here no longer."""
        self._prefills.release([job])
        self.wake()


class DecodeInstance:
    def __init__(self, system: EventSystem, side: Side, freed: Callable[[], None]):
        self._system, self._side, self._freed = system, side, freed
        self.memory, self.decoding = system.new_pool(side.memory_tokens), DecodeBatch()
        self._joining: list[Job] = []
        self._busy = False

    def join(self, job: Job) -> None:
        """All its KV is here."""
        self._joining.append(job)
        if not self._busy:
            self._begin()

    def _begin(self) -> None:
        for job in self._joining:
            self.decoding.join(job)
        self._joining = []
        self._busy = len(self.decoding) > 0
        if self._busy:
            batch = self.decoding
            seconds = self._side.costs.decode_s(len(batch), batch.contexts)
            self._system.run(seconds, self._side.share, self._end)

    def _end(self) -> None:
        self._system.give(self.decoding.numbers)
        ended = self.decoding.advance()
        for job in ended:
            self.memory.free(job.kv_tokens)
        self._begin()
        if ended:
            self._freed()


class Disaggregated(EventSystem):
    """batch_tokens: most prompt tokens of a prefill iteration; longer prompts take several."""

    def __init__(self, prefill: Side, decode: Side, batch_tokens: int, order: str):
        super().__init__()
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens: {batch_tokens}; at least 1")
        self._transfer = prefill.costs
        self.prefills = [
            PrefillInstance(self, prefill, batch_tokens, order, self._hand_over)
            for _ in range(prefill.instances)
        ]
        self.decodes = [
            DecodeInstance(self, decode, self._move_on) for _ in range(decode.instances)
        ]
        self._capacity_tokens = min(prefill.memory_tokens, decode.memory_tokens)
        self._kept: deque[tuple[PrefillInstance, Job]] = deque()  # until decode has memory

    def add(self, request: SimulatedRequest) -> None:
        job = self.new_job(request)
        check_fits(job, self._capacity_tokens)
        instance = min(self.prefills, key=lambda one: one.load)
        instance.add(job)
        self.at(request.arrival_s, instance.wake)

    def _hand_over(self, source: PrefillInstance, job: Job, prefill_s: float) -> None:
        """A prompt is complete; all but its tail has gone already if decode had memory."""
        if self._kept or not self._send(source, job, prefill_s):
            self._kept.append((source, job))

    def _move_on(self) -> None:
        """A decode instance has memory again; nobody overtakes. Nothing was sent in advance."""
        while self._kept and self._send(*self._kept[0], prefill_s=0.0):
            self._kept.popleft()

    def _send(self, source: PrefillInstance, job: Job, prefill_s: float) -> bool:
        """To the decode instance with most memory left; False if it has too little."""
        target = min(self.decodes, key=lambda one: one.memory.used_tokens)
        if job.kv_tokens > target.memory.free_tokens:
            return False
        target.memory.take(job.kv_tokens)

        def arrive() -> None:
            source.release(job)
            target.join(job)

        self.after(self._transfer.exposed_s(job.prompt_tokens, prefill_s), arrive)
        return True
