"""The command: its report, its files, its errors; a survey that goes on where it stood."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import goodput_tables
from conflux_jax import goodput
from conflux_jax.simulation import goodput_report
from conflux_jax.simulation.goodput import Case
from conflux_jax.simulation.goodput_book import Book


def write_trace(directory: Path, count: int = 40) -> Path:
    path = directory / "trace.jsonl"
    record = {"input_length": 4000, "output_length": 3}
    lines = (json.dumps(record | {"timestamp": 500 * number}) for number in range(count))
    path.write_text("\n".join(lines) + "\n")
    return path


def run(trace: Path, *flags: str, system: str = "chunked") -> int:
    model = ["--model", "llama-3.1-8b", "--gpus", "1", "--system", system]
    few = ["--processes", "1", "--minutes", "0.15", "--slices", "2"]
    return goodput.main(["--trace", str(trace), *model, *few, *flags])


def test_report_and_files_and_going_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    trace, figures, results = (write_trace(tmp_path), tmp_path / "f.json", tmp_path / "r.jsonl")
    flags = ["--results", str(results), "--json", str(figures), "--ttft", "1"]
    assert run(trace, *flags) == 0
    printed = capsys.readouterr().out
    assert "Llama-3.1-8B-Instruct on 1 x h100, trace.jsonl" in printed
    assert "2 slices of 0.15 minutes; TTFT 1 s; TBT 100 ms" in printed
    numbers = json.loads(figures.read_text())
    low, mean, high = (numbers[f"goodput_chunked_own_tbt100{end}"] for end in ("_low", "", "_high"))
    assert 1.0 < mean < 30.0 and low <= mean <= high  # 16 TFLOP a prompt on 0.6 PFLOP/s
    assert numbers["slices_chunked_own_tbt100"] == 2
    lines = results.read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["tuned", "found", "found"]
    results.write_text("\n".join(lines[:2]) + "\n")
    tasks = []
    work = goodput.work
    monkeypatch.setattr(goodput, "ProcessPoolExecutor", InPlace)
    monkeypatch.setattr(goodput, "work", lambda *task: tasks.append(task[:3]) or work(*task))
    assert run(trace, *flags) == 0
    assert [(kind, seed) for kind, _, seed in tasks] == [("found", 1)]
    assert json.loads(figures.read_text()) == numbers
    assert results.read_text().splitlines() == lines


class InPlace:
    """As a ProcessPoolExecutor, in this process."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, task, *arguments):
        future = goodput.Future()
        future.set_result(task(*arguments))
        return future

    def shutdown(self, **_):
        pass


SYSTEMS = ("conflux", "chunked", "chunked-oracle", "muxwise")
CASES = [
    Case("a/mooncake_toolagent_recon.jsonl", system, order=order)
    for order in ("own", "fcfs")
    for system in SYSTEMS
]


def filled_book() -> Book:
    """Two slices of each case. Our system has 6 and 3, the others less and the oracle more."""
    book = Book()
    times = {"conflux": 1.0, "chunked": 0.5, "chunked-oracle": 2.0, "muxwise": 0.75}
    for case in CASES:
        book.put("tuned", case, 0, {"settings": {"tp": 2}, "rate": 1.0, "sustained": True})
        for seed, rate in enumerate((6.0, 3.0)):
            rate *= times[case.system] / (1 if case.order == "own" else 2)
            points = [[rate, True, 0.96], [1.04 * rate, False, None]]
            seconds = [0.001 * percent for percent in range(101)]
            found = {"rate": rate, "failed": 1.04 * rate, "points": points}
            book.put("found", case, seed, found | {"ttft_s": seconds, "tbt_s": seconds})
    book.put("curve", CASES[0], 0, {"points": [[7.0, False, 0.5]]})
    return book


def test_ratios_are_to_the_strongest_real_system(monkeypatch: pytest.MonkeyPatch):
    """Slice by slice 1 / 0.75, so without any spread, though rates differ by a factor of two."""
    rows = goodput_report.rows(filled_book(), CASES, 2)
    numbers = goodput_report.flat(rows)
    for end in ("", "_low", "_high"):
        assert numbers[f"ratio_own_tbt100{end}"] == pytest.approx(4 / 3)
    assert numbers["goodput_conflux_own_tbt100"] == pytest.approx(18**0.5)
    assert numbers["goodput_conflux_own_tbt100_low"] < 3.0
    printed = goodput_report.text(rows)
    assert "ConfluxServe over MuxWise, the strongest: 1.33 (1.33 to 1.33)" in printed
    monkeypatch.setattr(goodput_tables, "SYSTEMS", dict.fromkeys(SYSTEMS))
    whole = goodput_tables.tables(rows)
    # Slice by slice, both orders.
    assert whole.count("| 1.33 (1.33 to 1.33), MuxWise | 1.26 to 1.62 |") == 2
    monkeypatch.undo()
    tables = goodput_tables.tables(rows)
    (line,) = [line for line in tables.splitlines() if "| own |" in line]
    assert "| toolagent-recon | Qwen3-14B, 4 | 100 ms | own | 4.24 | 2.12 | 8.49 |" in line
    assert line.endswith("| not all measured | 1.26 to 1.62 |")
    assert "ConfluxServe 2.00, chunked prefill 2.00, MuxWise 2.00" in tables


def test_what_no_rate_is_too_high_for_has_no_goodput():
    book, case = filled_book(), CASES[0]
    record = book.get("found", case, 1)
    assert record is not None
    book.put("found", case, 1, {**record, "failed": math.inf})
    rows = goodput_report.rows(book, CASES, 2)
    numbers = goodput_report.flat(rows)
    assert "goodput_conflux_own_tbt100" not in numbers and "ratio_own_tbt100" not in numbers
    assert "goodput_muxwise_own_tbt100" in numbers and "ratio_fcfs_tbt100" in numbers
    printed = goodput_report.text(rows)
    assert "ConfluxServe       any rate" in printed
    assert printed.count("Any rate: even with a whole slice at once all is on time") == 1
    assert printed.count("the strongest") == 1  # in the other order


class Axes:
    """Notes what it is told to draw."""

    def __init__(self, drawn: list[tuple[str, tuple]]):
        self._drawn = drawn

    def __getattr__(self, name: str):
        return lambda *data, **_: self._drawn.append((name, data))


def test_plots(tmp_path: Path):
    drawn: list[tuple[str, tuple]] = []
    saved: list[Path] = []

    def figure(**_):
        def subplots(*shape: int):
            return [Axes(drawn)] * shape[1] if shape else Axes(drawn)

        return SimpleNamespace(subplots=subplots, savefig=saved.append)

    rows = goodput_report.rows(filled_book(), CASES[:4], 2)
    drawing = SimpleNamespace(Figure=figure)
    written = goodput_report.plot(rows, filled_book(), tmp_path, drawing)
    stem = "mooncake_toolagent_recon-qwen3-14b-own-tbt100"
    names = [f"{stem}-{name}.png" for name in ("goodput", "times", "attainment")]
    assert [path.name for path in written] == names and saved == written
    bars = [data for name, data in drawn if name == "bar"]
    assert [height for _, height in bars] == pytest.approx([18**0.5 * t for t in (1, 0.5, 2, 0.75)])
    lines = [data for name, data in drawn if name == "plot"]
    assert len(lines) == 2 * 4 + 4
    assert lines[-4][:2] == ([6.0, 7.0], [0.96, 0.5])  # of the search and the curve


def test_plot_without_matplotlib(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(goodput.sys.modules, "matplotlib", None)
    monkeypatch.setitem(goodput.sys.modules, "matplotlib.figure", None)
    assert run(write_trace(tmp_path), "--plot", str(tmp_path)) == 2
    assert capsys.readouterr().err.startswith("error: --plot needs matplotlib")


@pytest.mark.parametrize(
    ("system", "flags", "problem"),
    [
        ("chunked", ["--hardware", "z80"], "hardware: must be one of"),
        ("chunked", ["--minutes", "0.005"], "trace.jsonl: all requests come at once"),
        ("chunked", ["--json", "no/such/folder.json"], "its directory does not exist"),
        ("loongserve", [], "gpus: loongserve cannot run"),
    ],
)
def test_what_cannot_be_is_one_line(
    tmp_path: Path, capsys, monkeypatch, system: str, flags: list[str], problem: str
):
    monkeypatch.setattr(goodput, "ProcessPoolExecutor", InPlace)
    assert run(write_trace(tmp_path), *flags, system=system) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and problem in error


@pytest.mark.parametrize("flags", [["--tbt", "0"], ["--slices", "0"], ["--order", "srpf"]])
def test_flags_out_of_range(tmp_path: Path, capsys, flags):
    with pytest.raises(SystemExit) as ended:
        run(write_trace(tmp_path), *flags)
    assert ended.value.code == 2
    assert flags[0] in capsys.readouterr().err
