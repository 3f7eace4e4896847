"""The engine's executor: another one, timed, whose failures say which iteration they were of."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from conflux_jax.observer import Observer
from conflux_jax.plan import Executor, IterationPlan, StepOutput
from conflux_jax.watchdog import Watchdog


class StepFailed(RuntimeError):
    """The executor raised, in `launch` or in `collect`; what it raised is the cause."""

    def __init__(self, in_launch: bool, error: Exception):
        super().__init__(f"{type(error).__name__}: {error}")
        self.in_launch = in_launch


class Measured:
    """Times the waits for the device and reports each plan's measured seconds."""

    def __init__(self, executor: Executor, on_plan: Callable[[IterationPlan, float], None] | None):
        self._executor = executor
        self._on_plan = on_plan
        self.observer: Observer | None = None
        self.watchdog: Watchdog | None = None
        self.waited_s = 0.0
        self.num_collected = 0

    @property
    def is_compiling(self) -> bool:
        """Whether the step waits for its program, which takes as long as it takes."""
        return getattr(self._executor, "is_compiling", False)

    @property
    def reset(self) -> Callable[[], None] | None:
        """Makes the executor's state anew after a failed step, where it can."""
        return getattr(self._executor, "reset", None)

    def launch(self, plan: IterationPlan) -> Any:
        if self.observer is not None:
            self.observer.launched(plan)
        if self.watchdog is not None:
            self.watchdog.launched(plan.predicted_s)
        try:
            return plan, self._executor.launch(plan)
        except Exception as error:
            raise StepFailed(True, error) from error

    def collect(self, ticket: Any) -> StepOutput:
        plan, inner = ticket
        started_s = time.perf_counter()
        try:
            output = self._executor.collect(inner)
        except Exception as error:
            raise StepFailed(False, error) from error
        self.waited_s += time.perf_counter() - started_s
        self.num_collected += 1
        if self.watchdog is not None:
            self.watchdog.collected(output.elapsed_s)
        if self._on_plan is not None:
            self._on_plan(plan, output.elapsed_s)
        if self.observer is not None:
            self.observer.collected(plan, output.elapsed_s)
        return output
