"""Goodput of one system on a slice of a trace: what is replayed, and when a run is given up."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import pytest

from conflux_jax.config import ConfigError
from conflux_jax.models.known_specs import QWEN3_14B
from conflux_jax.simulation import goodput
from conflux_jax.simulation.goodput import Case, Tuned
from conflux_jax.simulation.goodput_book import Book
from conflux_jax.simulation.hardware import preset
from conflux_jax.simulation.system import SimulatedRequest, Tokens
from conflux_jax.simulation.systems.search import candidates
from conflux_jax.simulation.traces import TraceError

SERVICE_S = 0.5


class Server:
    """Satisfies `System`: one request at a time, all its tokens at the end."""

    def __init__(self, service_s: float = SERVICE_S):
        self._service_s = service_s
        self._ends: deque[tuple[float, SimulatedRequest]] = deque()
        self._free_s = 0.0

    def add(self, request: SimulatedRequest) -> None:
        self._free_s = max(self._free_s, request.arrival_s) + self._service_s
        self._ends.append((self._free_s, request))

    @property
    def next_s(self) -> float:
        return self._ends[0][0] if self._ends else math.inf

    def step(self) -> Sequence[Tokens]:
        time_s, request = self._ends.popleft()
        return [Tokens(time_s, (request.number,))] * request.output_tokens


def write_trace(directory: Path, count: int, gap_ms: int, output: int = 1) -> str:
    """Requests of 600 to 3000 tokens, one every gap_ms; neighbours share their first block."""
    path = directory / "trace.jsonl"
    lines = [
        {
            "timestamp": gap_ms * number,
            "input_length": (tokens := 600 + 600 * (number % 5)),
            "output_length": output,
            "hash_ids": [number // 2, *range(1000 + number, 1000 + number - (-tokens // 512) - 1)],
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_known_capacity_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The server's capacity is 1 / SERVICE_S = 2 a second. Above it, request k waits for
    k * (SERVICE_S - 1 / rate), which with 2,000 requests keeps 95% within 2 s less service only
    below 1 / (0.5 - 1.5 / 1900) = 2.0032 a second."""
    case = Case(write_trace(tmp_path, 2000, 100), "chunked", minutes=4)
    monkeypatch.setattr(goodput, "build", lambda *_: Server())
    found = goodput.measure(case, 0, Tuned({}, 5.0, False))
    assert 2.0 / 1.04 < found.rate <= 2.0032
    assert 2.0 < found.failed <= found.rate * 1.04
    assert [point.rate for point in found.points] == sorted(point.rate for point in found.points)
    assert all(point.sustained == (point.rate <= found.rate) for point in found.points)
    assert found.ttft_s[0] == pytest.approx(SERVICE_S) and found.ttft_s[100] <= 2.0 + 2.0
    assert found.tbt_s == []
    assert found.summary["attainment"] >= 0.95


@pytest.mark.parametrize("system", ["conflux", "disaggregated"])
def test_the_best_settings_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str):
    """One of the settings serves twice as fast as the others."""
    case = Case(write_trace(tmp_path, 150, 100), system, minutes=4)
    settings: list[dict] = []
    if system == "conflux":
        settings += goodput.OUR_SETTINGS
    else:
        settings += candidates(system, QWEN3_14B, preset("h100"), 4)
    best = settings[-1]

    def server(_, chosen: dict, __) -> Server:
        return Server(SERVICE_S / (2 if chosen == best else 1))

    monkeypatch.setattr(goodput, "build", server)
    found = goodput.tune(case)
    assert found.settings == best and found.sustained
    assert 2.0 < found.rate < 4.3


@pytest.mark.parametrize("order", goodput.ORDERS)
def test_a_run_that_is_given_up_has_the_verdict_of_a_whole_one(tmp_path: Path, order: str):
    """A real rival around its capacity, with slices that are late at the end or throughout."""
    trace = write_trace(tmp_path, 80, 500, output=200)
    case = Case(trace, "chunked", "llama-3.1-8b", gpus=1, order=order, minutes=1, ttft_s=0.4)
    given_up = []
    for rate in (4.0, 10.0, 13.0, 30.0):
        short, whole = (goodput.run(case, 0, {}, rate, whole) for whole in (False, True))
        assert goodput.sustained(short) == goodput.sustained(whole) == (whole.attainment >= 0.95)
        assert whole.complete
        given_up.append(not short.complete)
    assert given_up[-1] and not given_up[0]


def test_scaling_keeps_order_lengths_and_prefixes(tmp_path: Path):
    """The second minute of the trace at twice and four times the rate."""
    case = Case(write_trace(tmp_path, 300, 500), "conflux", minutes=1)
    slow, fast = (goodput.requests_at(case, 1, rate) for rate in (4.0, 8.0))
    assert [request.number for request in slow] == list(range(120))
    for before, after in zip(slow, fast, strict=True):
        assert before.prefix_hashes == after.prefix_hashes and before.prefix_hashes
        assert (before.prompt_tokens, before.output_tokens) == (
            after.prompt_tokens,
            after.output_tokens,
        )
        assert before.arrival_s == pytest.approx(2 * after.arrival_s)
        assert before.deadline_s - before.arrival_s == pytest.approx(2.0)
    assert slow[0].prefix_hashes[0] == 60  # of request 120 of the trace
    assert slow[2].arrival_s == pytest.approx(0.5)


def test_what_cannot_be_is_named(tmp_path: Path):
    trace = write_trace(tmp_path, 4, 500)
    with pytest.raises(TraceError, match=r"trace\.jsonl: no requests arrive in minutes 5 to 10"):
        goodput.requests_at(Case(trace, "conflux", minutes=5), 1, 1.0)
    with pytest.raises(ConfigError, match="order: must be one of fcfs, own"):
        Case(trace, "conflux", order="srpf")
    with pytest.raises(ConfigError, match=r"loongserve cannot run Llama-3\.1-8B-Instruct on 1"):
        goodput.tune(Case(trace, "loongserve", "llama-3.1-8b", gpus=1))


def test_a_book_is_read_again(tmp_path: Path):
    path = tmp_path / "results.jsonl"
    case, other = Case("some/trace.jsonl", "chunked"), Case("some/trace.jsonl", "chunked", gpus=8)
    Book(path).put("found", case, 2, {"rate": 3.0})
    moved = Case("elsewhere/trace.jsonl", "chunked")
    record = Book(path).get("found", moved, 2)
    assert record is not None and record["rate"] == 3.0
    assert Book(path).get("found", case, 1) is None
    assert Book(path).get("tuned", case, 2) is None
    assert Book(path).get("found", other, 2) is None
    with path.open("a") as file:
        file.write("{}\n")
    with pytest.raises(ConfigError, match=r"results\.jsonl: line 2: no record"):
        Book(path)
