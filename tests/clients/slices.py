"""A stretch of a Mooncake trace, made small enough for the machine at hand.

Lengths are divided, and with prompts the size of the blocks that `hash_ids` name: what prompts
share stays in proportion. The rate is lowered by leaving out requests; the others come as they did.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from conflux_jax.simulation.traces import BLOCK_TOKENS, TraceRequest, read_trace


def scaled_slice(
    path: Path,
    *,
    seconds: float,
    divide_prompts: int,
    divide_outputs: int,
    keep_every: int,
    max_tokens: int,
) -> list[TraceRequest]:
    """Every `keep_every`th request of the first `seconds`, in tokens divided and rounded up;
    without those that are then longer than `max_tokens`, output included."""
    first = itertools.takewhile(lambda request: request.arrival_s < seconds, read_trace(path))
    scaled = [
        TraceRequest(
            arrival_s=request.arrival_s,
            prompt_tokens=-(-request.prompt_tokens // divide_prompts),
            output_tokens=-(-request.output_tokens // divide_outputs),
            prefix_hashes=request.prefix_hashes,
        )
        for request in itertools.islice(first, 0, None, keep_every)
    ]
    return [r for r in scaled if r.prompt_tokens + r.output_tokens <= max_tokens]


def write_mooncake(requests: Sequence[TraceRequest], path: Path) -> None:
    """As the trace's own lines."""
    lines = (
        {
            "timestamp": round(1000 * request.arrival_s),
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": list(request.prefix_hashes),
        }
        for request in requests
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def block_tokens(divide_prompts: int) -> int:
    """Of a hash, in the scaled trace."""
    assert BLOCK_TOKENS % divide_prompts == 0
    return BLOCK_TOKENS // divide_prompts
