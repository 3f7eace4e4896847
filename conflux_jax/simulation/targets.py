"""When a request counts as on time: its first token by a deadline, every gap within a target.

A deadline that is the same for a prompt of 500 tokens and one of 100,000 is either no target for
the one or out of reach for the other. So it grows with the prompt past a floor: SLOWDOWN times what
the prompt takes on an engine that has nothing else to do. Ten times is what Mooncake's evaluation
(FAST '25) allows the first token. The unloaded speed is the same for every system that is compared:
that of the linear layers' products alone, on all GPUs at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from conflux_jax.models.spec import ModelSpec
from conflux_jax.simulation.hardware import Hardware
from conflux_jax.simulation.roofline import ModelCosts

FLOOR_S = 2.0
SLOWDOWN = 10.0
SIDE = 8192  # of the matrices whose product shows what a GPU reaches


@dataclass(frozen=True)
class Targets:
    """floor_s: to the first token of a short prompt. tokens_s: prompt tokens a second that add to
    it; None: the floor is the deadline of all. tbt_slo_s: between two tokens."""

    tbt_slo_s: float
    floor_s: float = FLOOR_S
    tokens_s: float | None = None

    def ttft_slo_s(self, prompt_tokens: int) -> float:
        """
        >>> rule = Targets(0.1, floor_s=2.0, tokens_s=10_000)
        >>> rule.ttft_slo_s(500), rule.ttft_slo_s(20_000), rule.ttft_slo_s(100_000)
        (2.0, 2.0, 10.0)
        """
        if self.tokens_s is None:
            return self.floor_s
        return max(self.floor_s, prompt_tokens / self.tokens_s)


def scaled_targets(spec: ModelSpec, hardware: Hardware, gpus: int, tbt_slo_s: float) -> Targets:
    """The rule of this module; what large products reach is that of square ones.

    Worked, Qwen3-14B on four GPUs that reach 640e12: 13.2e9 weights make 4 * 640e12 / (2 * 13.2e9)
    = 97,000 tokens a second unloaded, so a second of the deadline for each 9,700 tokens, from
    19,400 on.
    """
    flops_s = 2 * SIDE**3 / hardware.gemm_s(SIDE, SIDE, SIDE)
    unloaded = gpus * flops_s / (2 * ModelCosts.of(spec).linear_weights)
    return Targets(tbt_slo_s, tokens_s=unloaded / SLOWDOWN)
