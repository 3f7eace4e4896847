"""Reading traces: both formats, and what is said of a line that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conflux_jax.simulation.traces import TraceError, TraceRequest, read_trace

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def mooncake_line(time_ms: float = 0, prompt: int = 600, output: int = 5, **fields: Any) -> str:
    record = {"timestamp": time_ms, "input_length": prompt, "output_length": output}
    return json.dumps(record | fields)


def written(directory: Path, *lines: str) -> Path:
    path = directory / "trace"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_mooncake(tmp_path: Path):
    path = written(
        tmp_path,
        mooncake_line(1500, 600, 5, hash_ids=[7, 8], other="ignored"),
        "",
        mooncake_line(1500, 512, 6, hash_ids=[7]),
        mooncake_line(4000, 513, 1),
    )
    assert list(read_trace(path)) == [
        TraceRequest(0.0, 600, 5, (7, 8)),
        TraceRequest(0.0, 512, 6, (7,)),
        TraceRequest(2.5, 513, 1, ()),
    ]


def test_azure_with_columns_in_any_order(tmp_path: Path):
    path = written(
        tmp_path,
        "\ufeffGeneratedTokens,TIMESTAMP,Model,ContextTokens",
        "44,2023-11-16 23:59:59.5000000,a,374",
        '9,2023-11-17 00:00:01.2500000,"b, c",4000',
    )
    assert list(read_trace(path)) == [TraceRequest(0.0, 374, 44), TraceRequest(1.75, 4000, 9)]


def test_lines_are_read_one_at_a_time(tmp_path: Path):
    """The good lines before a bad one are there before it is met."""
    requests = read_trace(written(tmp_path, mooncake_line(0), mooncake_line(10), "{"))
    assert [next(requests).arrival_s, next(requests).arrival_s] == [0.0, 0.01]
    with pytest.raises(TraceError, match="line 3: not JSON"):
        next(requests)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "line 3: must be a JSON object"),
        ('{"timestamp": 1, "input_length": 4}', "line 3: output_length: missing"),
        (mooncake_line(0, prompt=0), "line 3: input_length: .* at least 1, got 0"),
        (mooncake_line(0, output=-1), "line 3: output_length: .* at least 1, got -1"),
        (mooncake_line(0, input_length=2.5), "line 3: input_length: .* integer .* got 2.5"),
        (mooncake_line(0, output_length=True), "line 3: output_length: .* integer .* got True"),
        (mooncake_line(timestamp="now"), "line 3: timestamp: must be a number .* 'now'"),
        (mooncake_line(timestamp=float("nan")), "line 3: timestamp: .* nan"),
        (mooncake_line(0, 600, hash_ids=[1]), "line 3: hash_ids: .* 600, which is 2, got 1"),
        (mooncake_line(0, 600, hash_ids=[1, "b"]), "line 3: hash_ids: must be a list of integers"),
        (mooncake_line(-2000), "line 3: timestamp: 2 s before .* sort the trace"),
    ],
)
def test_a_bad_mooncake_line_is_named(tmp_path: Path, line: str, message: str):
    path = written(tmp_path, mooncake_line(0), "", line)
    with pytest.raises(TraceError, match=message) as raised:
        list(read_trace(path))
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2023-11-16 18:15:46,5", "line 3: has 2 columns, the header 3"),
        ("yesterday,5,6", "line 3: TIMESTAMP: must be a date and time, got 'yesterday'"),
        ("2023-11-16 18:15:47,five,6", "line 3: ContextTokens: .* integer .* got 'five'"),
        ("2023-11-16 18:15:47,5,-6", "line 3: GeneratedTokens: .* integer .* got '-6'"),
        ("2023-11-16 18:15:47,5,0", "line 3: GeneratedTokens: .* at least 1, got 0"),
        ('2023-11-16 18:15:47,"5,6', "line 3: not a line of CSV"),
        ("2023-11-16 18:15:45,5,6", "line 3: timestamp: 1 s before"),
    ],
)
def test_a_bad_azure_line_is_named(tmp_path: Path, line: str, message: str):
    path = written(tmp_path, AZURE_HEADER, "2023-11-16 18:15:46,5,6", line)
    with pytest.raises(TraceError, match=message):
        list(read_trace(path))


def test_what_is_no_trace_is_refused(tmp_path: Path):
    with pytest.raises(TraceError, match="no requests"):
        list(read_trace(written(tmp_path, "", "  ")))
    with pytest.raises(TraceError, match="no requests"):
        list(read_trace(written(tmp_path, AZURE_HEADER)))
    with pytest.raises(TraceError, match=r"line 1: .*Mooncake.*Azure.*; TIMESTAMP is missing"):
        list(read_trace(written(tmp_path, "time,ContextTokens,GeneratedTokens", "0,1,1")))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(TraceError, match="not text in UTF-8"):
        list(read_trace(binary))
    with pytest.raises(FileNotFoundError):
        list(read_trace(tmp_path / "missing"))
