"""Who is told what the engine does, as it happens: metrics, a record of iterations."""

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


class Observers:
    """Several observers as one; each is told in the order in which they came."""

    def __init__(self, observers: Sequence[Observer]):
        self.all = tuple(observers)

    def launched(self, plan: IterationPlan) -> None:
        for observer in self.all:
            observer.launched(plan)

    def collected(self, plan: IterationPlan, elapsed_s: float) -> None:
        for observer in self.all:
            observer.collected(plan, elapsed_s)

    def delivered(
        self, requests: Sequence[Request], reasons: Sequence[FinishReason | None], now_s: float
    ) -> None:
        for observer in self.all:
            observer.delivered(requests, reasons, now_s)

    def ended(self, request: Request, reason: FinishReason) -> None:
        for observer in self.all:
            observer.ended(request, reason)


def combined(observers: Sequence[Observer]) -> Observer | None:
    """One observer that tells all of them; nothing where there are none."""
    if len(observers) == 1:
        return observers[0]
    return Observers(observers) if observers else None
