"""Made-up traffic for the notebooks' simulations: independent arrivals, lengths drawn by their
median and spread. Traces of real services have bursts and sessions that this has not."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

from conflux_jax.simulation.traces import TraceRequest

LONGEST_PROMPT = 120_000


def poisson(
    count: int,
    rate: float,
    prompt_median: float,
    prompt_p95: float,
    output_median: float,
    seed: int = 0,
) -> list[TraceRequest]:
    """`count` requests, `rate` a second on average. Lengths are log-normal: prompts by median and
    95th percentile (at most LONGEST_PROMPT tokens), outputs with 95% under four medians."""
    draw, now_s, requests = random.Random(seed), 0.0, []
    spread = math.log(prompt_p95 / prompt_median) / 1.645
    for _ in range(count):
        prompt = round(prompt_median * math.exp(spread * draw.gauss(0, 1)))
        output = round(output_median * math.exp(math.log(4) / 1.645 * draw.gauss(0, 1)))
        requests.append(TraceRequest(now_s, min(max(prompt, 1), LONGEST_PROMPT), max(output, 1)))
        now_s += draw.expovariate(rate)
    return requests


def write(requests: Sequence[TraceRequest], path: Path) -> None:
    """As Mooncake's JSONL, which the commands read."""
    lines = [
        json.dumps(
            {
                "timestamp": 1000 * request.arrival_s,
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
            }
        )
        for request in requests
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
