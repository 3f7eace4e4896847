"""Scaled traces: what is kept, and that prompts share what they shared."""

from __future__ import annotations

import json
from pathlib import Path

from conflux_jax.simulation.traces import TraceRequest, read_trace
from tests.clients.conftest import MADE_UP
from tests.clients.slices import block_tokens, scaled_slice, write_mooncake


def test_a_slice_is_thinned_scaled_and_cut_in_time(tmp_path: Path):
    lines = [
        {"timestamp": 500, "input_length": 1000, "output_length": 9, "hash_ids": [1, 2]},
        {"timestamp": 600, "input_length": 1000, "output_length": 9, "hash_ids": [3, 4]},
        {"timestamp": 1500, "input_length": 1025, "output_length": 8, "hash_ids": [1, 2, 5]},
        {"timestamp": 1500, "input_length": 1, "output_length": 1, "hash_ids": [6]},
        {"timestamp": 2000, "input_length": 6400, "output_length": 8, "hash_ids": [*range(13)]},
        {"timestamp": 2000, "input_length": 1, "output_length": 1, "hash_ids": [6]},
        {"timestamp": 2500, "input_length": 1, "output_length": 1, "hash_ids": [7]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = scaled_slice(
        path, seconds=2.0, divide_prompts=32, divide_outputs=8, keep_every=2, max_tokens=200
    )
    assert kept == [TraceRequest(0.0, 32, 2, (1, 2)), TraceRequest(1.0, 33, 1, (1, 2, 5))]
    write_mooncake(kept, path)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"timestamp": 0, "input_length": 32, "output_length": 2, "hash_ids": [1, 2]},
        {"timestamp": 1000, "input_length": 33, "output_length": 1, "hash_ids": [1, 2, 5]},
    ]


def test_hashes_fit_their_prompts_before_and_after():
    def check(requests: list[TraceRequest], block: int) -> None:
        assert requests
        for request in requests:
            assert len(request.prefix_hashes) == -(-request.prompt_tokens // block)

    check(list(read_trace(MADE_UP)), 512)
    scaled = scaled_slice(
        MADE_UP, seconds=60, divide_prompts=32, divide_outputs=8, keep_every=4, max_tokens=2048
    )
    check(scaled, block_tokens(32))
    assert scaled[-1].arrival_s > 55
