"""The slow correction of the latency model by what iterations really took.

A model is fitted offline; the machine drifts (clocks, neighbours, a model that was fitted on
another day). Iterations with and without prefill drift apart, so each kind has its own correction.
"""

from __future__ import annotations

from dataclasses import dataclass

LOWEST, HIGHEST = 0.25, 4.0  # bounds of a ratio: past them the profile is of another machine
STEP = 0.08  # share of the newest ratio in the mean: a change is 98% absorbed after 50 iterations
ON_TIME = 0.995  # share of iterations that shall stay within the prediction that is planned with
FIRST_MARGIN = 1.12  # a profile that is good enough is off by that in one iteration of twenty
MARGIN_STEP = 0.02
MOST_MARGIN = 1.5
RELAX = 0.02  # share by which an unused correction goes back to what it began with


@dataclass
class Correction:
    """ratio: mean of measured over predicted. margin: how far above the corrected prediction an
    iteration must be expected, so that all but 1 - ON_TIME of them end before: the quantile of
    measured over corrected, tracked by a large step up for each that is late and a small one down
    for each other (Robbins and Monro).
    """

    ratio: float = 1.0
    margin: float = FIRST_MARGIN

    @property
    def factor(self) -> float:
        """What a prediction is multiplied by before it is held against a target."""
        return self.ratio * self.margin

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """One iteration: the model's own prediction, and what it took."""
        if predicted_s <= 0.0 or measured_s <= 0.0:
            return
        seen = min(max(measured_s / predicted_s, LOWEST), HIGHEST)
        late = seen > self.factor
        step = ON_TIME if late else ON_TIME - 1.0
        self.margin = min(max(self.margin + MARGIN_STEP * step, 1.0), MOST_MARGIN)
        self.ratio += STEP * (seen - self.ratio)

    def relax(self) -> None:
        """It kept an iteration from being planned, so nothing was seen that could have lowered it.
        A little nearer to its beginning, so that it is tried again some time."""
        self.ratio += RELAX * min(1.0 - self.ratio, 0.0)
        self.margin += RELAX * min(FIRST_MARGIN - self.margin, 0.0)
