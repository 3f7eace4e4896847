"""One turn of the engine, the same under the real executor and under a simulated one.

The loop runs one iteration ahead: iteration N+1 is planned and launched while N is on the device,
because N+1 needs only N's *shape* from the host; N's tokens reach N+1 on the device. The price is
that a stop is seen one iteration late, which costs one discarded token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from conflux_jax.plan import Executor, IterationPlan, StepOutput
from conflux_jax.request import TokenEvent


@runtime_checkable
class Planner(Protocol):
    """What `turn` needs of a scheduler."""

    def schedule(self, now: float) -> IterationPlan | None: ...

    def commit(self, plan: IterationPlan, output: StepOutput, now: float) -> list[TokenEvent]: ...


@dataclass(frozen=True)
class InFlight:
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
