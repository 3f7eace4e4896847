"""Who is told what the engine does, as it happens: the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from conflux_jax.plan import IterationPlan
from conflux_jax.request import FinishReason, Request


class Observer(Protocol):
    """Called on the engine's thread, between its steps, so it must be quick and raise nothing;
    `ended` also on others. A request is over with the first reason that is told of it."""

    def launched(self, plan: IterationPlan) -> None:
        """An iteration is about to go to the device."""

    def collected(self, plan: IterationPlan, elapsed_s: float) -> None:
        """Its results are here, after `StepOutput.elapsed_s`."""

    def delivered(
        self, requests: Sequence[Request], reasons: Sequence[FinishReason | None], now_s: float
    ) -> None:
        """Each of these has one token more; and is over, where there is a reason.

        now_s: on the clock of `Request.arrival_s`."""

    def ended(self, request: Request, reason: FinishReason) -> None:
        """Over without a new token."""
