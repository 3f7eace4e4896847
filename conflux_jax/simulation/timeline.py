"""A simulation's iterations as a Chrome trace, and beside them the requests that wait and run."""

from __future__ import annotations

from pathlib import Path

from conflux_jax import chrome_trace
from conflux_jax.chrome_trace import ChromeTrace, Slice, stage_slices
from conflux_jax.simulation.results import Results
from conflux_jax.simulation.system import Iteration

QUEUE = "requests"


class Timeline(ChromeTrace):
    """A file that is whole, and closed, once this is."""

    def __init__(self, path: Path):
        self._opened = path.open("w", encoding="utf-8")
        super().__init__(self._opened)

    def close(self) -> None:
        super().close()
        self._opened.close()

    def note(self, iteration: Iteration) -> None:
        """An `Observer`."""
        for group in range(len(iteration.work.decodes)):
            self.group(group, slices(iteration, group), _details(iteration, group))

    def count_requests(self, results: Results) -> None:
        """Requests that wait for their first token, and those that have it and are not over, from
        their times."""
        changes: list[tuple[float, int, int]] = []
        for request in results.requests:
            at = request.number
            if at in results.refused:
                continue
            changes.append((request.arrival_s, 1, 0))
            if results.first_s[at] == results.first_s[at]:
                changes.append((results.first_s[at], -1, 1))
            if results.last_s[at] == results.last_s[at]:
                changes.append((results.last_s[at], 0, -1))
        waiting = running = 0
        self.name_process(0, QUEUE)
        for time_s, arrived, started in sorted(changes):
            waiting, running = waiting + arrived, running + started
            self.count(QUEUE, time_s, waiting=waiting, running=running)


def slices(iteration: Iteration, group: int) -> list[Slice]:
    """What a group does in an iteration. Times are those of the group with most, stretched by what
    noise did to the iteration."""
    stages, work = iteration.stages, iteration.work
    has_prefill = bool(work.chunks)
    shown = chrome_trace.Stages(
        linear=stages.linear,
        attention=stages.attention,
        head=stages.head,
        rest=stages.overhead,
        rest_name="overhead",
        prefill=stages.prefill_attention if has_prefill else 0.0,
        communication=stages.communication if has_prefill else 0.0,
        decode=stages.decode_attention if work.decodes[group] else 0.0,
    )
    return stage_slices(shown, iteration.start_s, iteration.elapsed_s)


def _details(iteration: Iteration, group: int) -> dict[str, int]:
    work = iteration.work
    return {
        "iteration": iteration.number,
        "rows": work.rows,
        "decodes": work.decodes[group],
        "context_tokens": work.contexts[group],
        "prefill_tokens": work.shares[group] if work.shares else 0,
    }
