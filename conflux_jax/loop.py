"""One turn of the engine, the same under the real executor and under a simulated one.

The loop runs one iteration ahead: iteration N+1 is planned and launched while N is on the device,
because N+1 needs only N's *shape* from the host; N's tokens reach N+1 on the device. The price is
that a stop is seen one iteration late, which costs one discarded token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from conflux_jax.plan import Executor, IterationPlan, StepOutput
from conflux_jax.request import FinishReason, Request, TokenEvent


@runtime_checkable
class Planner(Protocol):
    """What `turn` needs of a scheduler."""

    def schedule(self, now: float) -> IterationPlan | None: ...

    def commit(self, plan: IterationPlan, output: StepOutput, now: float) -> list[TokenEvent]: ...


@runtime_checkable
class RequestScheduler(Planner, Protocol):
    """What the engine needs of `scheduler.Scheduler`."""

    def add(self, request: Request) -> None: ...

    def cancel(self, request_id: str) -> bool: ...

    def finish(self, request_id: str, reason: FinishReason) -> Any: ...

    def lose_device_state(self) -> Sequence[str]: ...

    @property
    def has_work(self) -> bool: ...

    def load(self) -> Any: ...

    def snapshot(self, most: int) -> Any: ...

    def modelled(self, plan: IterationPlan) -> Any: ...

    def estimate(self, prompt_tokens: int) -> Any: ...

    def least_s(self, prompt_tokens: int) -> float: ...

    def output_limit(self, prompt_tokens: int, max_tokens: int | None) -> int: ...


class InFlight(NamedTuple):
    plan: IterationPlan
    ticket: Any


def turn(
    scheduler: Planner,
    executor: Executor,
    clock: Callable[[], float],
    previous: InFlight | None,
) -> tuple[InFlight | None, list[TokenEvent]]:
    """Plan and launch the next iteration, then collect and commit the previous one."""
    plan = scheduler.schedule(clock())
    current = InFlight(plan, executor.launch(plan)) if plan is not None else None
    if previous is None:
        return current, []
    output = executor.collect(previous.ticket)
    return current, scheduler.commit(previous.plan, output, clock())
