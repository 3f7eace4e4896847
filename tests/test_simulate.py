"""The command: its summary, its files, its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conflux_jax import simulate

GOOD = {"timestamp": 0, "input_length": 900, "output_length": 4}


def write_trace(directory: Path, *records: dict) -> Path:
    path = directory / "trace.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run(trace: Path, *flags: str) -> int:
    """On an engine of few buckets, which is profiled at once."""
    small = ["--set", "bucket_growth=4", "--set", "max_num_seqs=16"]
    model = ["--model", "llama-3.1-8b", "--gpus", "2"]
    return simulate.main(["--trace", str(trace), *model, *small, *flags])


def test_summary_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Five requests, one every 2 s; at 2.5 a second they take 1.6 s. One is too long."""
    records = [GOOD | {"timestamp": 2000 * number} for number in range(5)]
    records[3]["input_length"] = 200_000
    trace = write_trace(tmp_path, *records)
    names = ("summary.json", "requests.jsonl", "timeline.json")
    summary, requests, timeline = (tmp_path / name for name in names)
    flags = ["--json", summary, "--requests", requests, "--timeline", timeline, "--rate", "2.5"]
    assert run(trace, *map(str, flags), "--ttft", "1", "--ordering", "fcfs") == 0
    printed = capsys.readouterr().out
    assert "Llama-3.1-8B" in printed and "max_model_len is 131072" in printed
    numbers = json.loads(summary.read_text())
    assert numbers["requests"] == 5 and numbers["refused"] == 1
    assert numbers["rate_per_s"] == pytest.approx(2.5)
    assert numbers["attainment"] == 0.8
    assert 0 < numbers["utilisation"] < 1 and 0 < numbers["kv_peak"] < 1
    assert numbers["output_tokens"] == 16
    lines = [json.loads(line) for line in requests.read_text().splitlines()]
    assert [line["on_time"] for line in lines] == [True, True, True, False, True]
    assert lines[3]["ttft_s"] is None and lines[3]["refused"].startswith("prompt")
    assert [line["ttft_slo_s"] for line in lines] == pytest.approx([1.0] * 5)
    assert lines[1]["arrival_s"] == pytest.approx(0.4)
    assert len(json.loads(timeline.read_text())["traceEvents"]) > 20


def test_minutes_and_default_deadlines(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    records = [GOOD | {"timestamp": 30_000 * number} for number in range(6)]
    records[3]["input_length"] = 100_000
    requests = tmp_path / "requests.jsonl"
    trace = write_trace(tmp_path, *records)
    assert run(trace, "--minutes", "1:2", "--requests", str(requests), "--tbt", "50") == 0
    lines = [json.loads(line) for line in requests.read_text().splitlines()]
    assert [line["prompt_tokens"] for line in lines] == [900, 100_000]
    assert lines[0]["ttft_slo_s"] == 2.0 and lines[1]["ttft_slo_s"] > 2.0
    assert lines[0]["tbt_slo_s"] == 0.05


def test_requests_of_one_time_can_be_spread(tmp_path: Path):
    """Three of one time, the next after 3 s; at twice the trace's rate within 1.5 s."""
    records = [GOOD, GOOD, GOOD, GOOD | {"timestamp": 3000}]
    trace, requests = write_trace(tmp_path, *records), tmp_path / "requests.jsonl"
    assert run(trace, "--spread", "--rate", "2", "--requests", str(requests)) == 0
    arrivals_s = [json.loads(line)["arrival_s"] for line in requests.read_text().splitlines()]
    assert arrivals_s == sorted(set(arrivals_s))
    assert (arrivals_s[0], arrivals_s[-1]) == pytest.approx((0.0, 1.5))


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([], "trace.jsonl: no requests in it"),
        ([GOOD, GOOD | {"input_length": -3}], "line 2: input_length: must be an integer"),
        ([GOOD, {"timestamp": 0, "input_length": 3}], "line 2: output_length: missing"),
        ([GOOD | {"timestamp": 5}, GOOD], "line 2: timestamp: 0.005 s before"),
    ],
)
def test_bad_traces_are_one_line(tmp_path: Path, capsys, records, problem):
    assert run(write_trace(tmp_path, *records)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("error: ") and problem in captured.err


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--set", "page_tokens=0"], "page_tokens: must be at least 1"),
        (["--set", "speed=high"], "speed: no such setting"),
        (["--sp", "3"], "gpus: must be sp * tp, which is 3 * 1, got 2"),
        (["--hardware", "z80"], "hardware: must be one of"),
        (["--minutes", "7:9"], "trace.jsonl: no requests arrive in minutes 7 to 9"),
        (["--rate", "3"], "trace.jsonl: all requests come at once"),
        (["--json", "no/such/folder.json"], "its directory does not exist"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(tmp_path: Path, capsys, flags, problem):
    assert run(write_trace(tmp_path, GOOD), *flags) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and problem in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--rate", "0"],
        ["--minutes", "3:2"],
        ["--gpus", "0"],
        ["--system", "other"],
        ["--set", "seed"],
    ],
)
def test_flags_out_of_range(tmp_path: Path, capsys, flags):
    with pytest.raises(SystemExit) as ended:
        run(write_trace(tmp_path, GOOD), *flags)
    assert ended.value.code == 2
    assert flags[0] in capsys.readouterr().err
