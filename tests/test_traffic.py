"""The command: its report, its numbers, its errors."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conflux_jax import traffic
from conflux_jax.simulation.demand import measure
from conflux_jax.simulation.roofline import Gpu
from conflux_jax.simulation.traces import TraceRequest

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


@pytest.fixture
def long_trace(tmp_path: Path) -> Path:
    """Ten prompts of 65,536 tokens, one every 2 s, whose first half is the same."""
    shared = list(range(64))
    lines = [
        {
            "timestamp": 2000 * index,
            "input_length": 65_536,
            "output_length": 100,
            "hash_ids": shared + list(range(1000 * (index + 1), 1000 * (index + 1) + 64)),
        }
        for index in range(10)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def azure_trace(directory: Path, *rows: str) -> Path:
    path = directory / "trace.csv"
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    return path


def test_long_prompts(long_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "numbers.json"
    assert traffic.main([str(long_trace), "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "estimates from peak figures" in printed
    assert max(map(len, printed.splitlines())) <= traffic.WIDTH
    # Nine of ten find 64 of 128 blocks.
    assert "45.0%" in printed
    assert printed.splitlines()[-1].startswith("The premise holds")
    numbers = json.loads(out.read_text())
    assert {type(value) for value in numbers.values()} <= {int, float}
    assert numbers["prompt_p50"] == numbers["prompt_p95"] == numbers["prompt_longest"] == 65_536
    assert numbers["uncached_p50"] == 32_768 and numbers["uncached_p99"] == 65_536
    assert numbers["rate_per_s"] == 0.5
    assert numbers["requests_too_long"] == 1.0  # of Qwen3-14B's 40,960 positions
    assert numbers["prefix_reuse"] == pytest.approx(0.45)
    assert numbers["gpus_for_p95"] == 4  # as published: at least 4 for 64K within 2 s


def test_a_group_of_several_gpus_counts_all_of_them(long_trace: Path, tmp_path: Path):
    out = tmp_path / "numbers.json"
    flags = ["--model", "qwen3-32b", "--gpus", "8", "--ttft-slo-s", "5", "--json", str(out)]
    assert traffic.main([str(long_trace), *flags]) == 0
    numbers = json.loads(out.read_text())
    assert (numbers["groups"], numbers["gpus_per_group"]) == (4, 2)
    assert numbers["p95_prefill_one_group_s"] > 5
    assert numbers["gpus_for_p95"] == 2 * 2


def test_short_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = (f"2023-11-16 18:15:{second:02},400,50" for second in range(20))
    out = tmp_path / "numbers.json"
    assert traffic.main([str(azure_trace(tmp_path, *rows)), "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "not in the trace" in printed
    assert printed.splitlines()[-1].startswith("The premise does not hold: prompts are short")
    numbers = json.loads(out.read_text())
    assert numbers["rate_per_s"] == 1.0
    assert numbers["gpus_for_p95"] == 1
    assert not {name for name in numbers if "uncached" in name or "reuse" in name}


def test_a_rate_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    at_once = str(azure_trace(tmp_path, "2023-11-16 18:15:00,400,50"))
    assert traffic.main([at_once]) == 2
    assert "give --rate" in capsys.readouterr().err
    assert traffic.main([at_once, "--rate", "3"]) == 0
    assert "1,200 prompt tokens a second" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus", "3", "--model", "qwen3-32b"], "gpus: must be a multiple of a group's 2"),
        (["--gpu", "tiny", "--tp", "1"], "tp: 1 x a tiny GPU have no memory for Qwen3-14B"),
        (["--plot", "x.png"], "--plot needs matplotlib: pip install 'conflux-jax[plot]'"),
        (["--json", "missing/x.json"], "missing/x.json"),
    ],
)
def test_errors_are_one_line(
    flags: list[str],
    message: str,
    long_trace: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    tiny = Gpu("a tiny GPU", 1e12, 1e12, 20e9, 1e9)
    monkeypatch.setitem(traffic.roofline.GPUS, "tiny", tiny)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code = traffic.main([str(long_trace), *flags])
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert error.startswith("error: ") and error.count("\n") == 1


def test_a_bad_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = azure_trace(tmp_path, "2023-11-16 18:15:00,400,none")
    assert traffic.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert f"{path}: line 2: GeneratedTokens:" in error and error.count("\n") == 1
    assert traffic.main([str(tmp_path / "missing")]) == 2
    assert "missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [["--gpus", "0"], ["--tbt-slo-s", "-1"], ["--rate", "nan"], ["--plot", "x.txt"]]
)
def test_flags_that_cannot_be_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        traffic.main(["trace", *flags])
    assert flags[0] in capsys.readouterr().err


class Axes:
    """Counts what a histogram would show."""

    def __init__(self):
        self.counts: dict[str, list[int]] = {}
        self.marks: list[int] = []

    def hist(self, values: Any, bins: Any, label: str, **_: Any) -> None:
        pairs = list(itertools.pairwise(bins))
        self.counts[label] = [sum(low <= v < high for v in values) for low, high in pairs]

    def axvline(self, at: int, **_: Any) -> None:
        self.marks.append(at)

    def set(self, **_: Any) -> None: ...

    def legend(self) -> None: ...


def test_the_histogram_shows_every_request(tmp_path: Path):
    axes, saved = Axes(), []
    figure = SimpleNamespace(subplots=lambda: axes, savefig=saved.append)
    drawing = SimpleNamespace(Figure=lambda **_: figure)
    demand = measure(TraceRequest(float(n), 10**n, 1 + n) for n in range(5))
    traffic.plot(demand, tmp_path / "plot.png", drawing)
    assert {name: sum(counts) for name, counts in axes.counts.items()} == {"prompt": 5, "output": 5}
    assert max(axes.counts["prompt"]) == 1  # a decade each: none together
    assert axes.marks == [100, 10_000, 10_000]
    assert saved == [tmp_path / "plot.png"]
