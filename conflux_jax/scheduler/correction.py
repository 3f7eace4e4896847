"""The slow correction of the latency model by what iterations really took.

A model is fitted offline; the machine drifts (clocks, neighbours, a model that was fitted on
another day). Iterations with and without prefill drift apart, so each kind has its own correction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LOWEST, HIGHEST = 0.25, 4.0  # bounds of a ratio: past them the profile is of another machine
STEP = 0.08  # share of the newest ratio in the mean: a change is 98% absorbed after 50 iterations
SPREAD_STEP = 0.02  # share of the newest deviation in the spread
# A request is on time when all its tokens are, and has hundreds: one iteration of some thousands
# may be late, not one of a hundred. So far out are 3.5 standard deviations.
DEVIATIONS = 3.5
MOST_MARGIN = 1.5
FIRST_SPREAD = math.log(1.12) / DEVIATIONS
LEAST_SPREAD = 1e-3  # so that it can grow again
FAR = 3.0  # deviations from which on one is counted as so far: a hiccup is no spread
RELAX = 0.02  # share by which an unused correction goes back to what it began with


@dataclass
class Correction:
    """ratio: mean of measured over predicted. spread: standard deviation of the logarithm of
    measured over corrected: what the model does not know, and what the machine does not repeat.
    """

    ratio: float = 1.0
    spread: float = FIRST_SPREAD

    @property
    def margin(self) -> float:
        """How far above the corrected prediction an iteration must be expected."""
        return min(math.exp(DEVIATIONS * self.spread), MOST_MARGIN)

    @property
    def factor(self) -> float:
        """What a prediction is multiplied by before it is held against a target."""
        return self.ratio * self.margin

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """One iteration: the model's own prediction, and what it took."""
        if predicted_s <= 0.0 or measured_s <= 0.0:
            return
        seen = min(max(measured_s / predicted_s, LOWEST), HIGHEST)
        off = math.log(seen / self.ratio)
        square = min(off * off, FAR * FAR * self.spread * self.spread)
        variance = self.spread * self.spread
        spread = math.sqrt(variance + SPREAD_STEP * (square - variance))
        self.spread = max(spread, LEAST_SPREAD)
        self.ratio += STEP * (seen - self.ratio)

    def relax(self) -> None:
        """It kept an iteration from being planned, so nothing was seen that could have lowered it.
        A little nearer to its beginning, so that it is tried again some time."""
        self.ratio += RELAX * min(1.0 - self.ratio, 0.0)
        self.spread += RELAX * min(FIRST_SPREAD - self.spread, 0.0)
