"""A load generator that others wrote replays a minute of a trace against the HTTP server.

`make test-clients`, which installs aiperf into a virtual environment of its own and passes its
command as `--aiperf`; `--trace-file FILE` replays a Mooncake trace instead of the made-up one.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from conflux_jax.simulation.traces import TraceRequest
from conflux_jax.tokenizer_files import read_tokenizer
from tests.clients.slices import block_tokens, scaled_slice, write_mooncake
from tests.serve.harness import ROOT, Server, running

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]

CONFIG, MODEL = ROOT / "configs" / "smollm2-135m-cpu.yaml", "smollm2-135m-instruct"
SECONDS, DIVIDE_PROMPTS, DIVIDE_OUTPUTS, KEEP_EVERY = 60.0, 32, 8, 4
TOKENIZER = "local/tokenizer"  # a name, as of a repository
MAX_TOKENS = 2000  # of the model's 2,048; the generator's prompts may be some tokens off


@pytest.fixture
def requests(trace: Path) -> list[TraceRequest]:
    return scaled_slice(
        trace,
        seconds=SECONDS,
        divide_prompts=DIVIDE_PROMPTS,
        divide_outputs=DIVIDE_OUTPUTS,
        keep_every=KEEP_EVERY,
        max_tokens=MAX_TOKENS,
    )


@pytest.fixture
def aiperf(pytestconfig: pytest.Config) -> str:
    """Fails, rather than skips, without it."""
    command = pytestconfig.getoption("--aiperf")
    assert command, "run `make test-clients`, or give --aiperf COMMAND"
    return command


def write_tokenizer(model: Path, hub: Path) -> None:
    """The model's own as TOKENIZER, in the form of Hugging Face's cache: without a network the
    generator looks nowhere else."""
    folder, commit = hub / f"models--{TOKENIZER.replace('/', '--')}", "0" * 40
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    read_tokenizer(model).tokenizer.save(str(snapshot / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048}
    (snapshot / "tokenizer_config.json").write_text(json.dumps(config))


def replay(aiperf: str, url: str, trace: Path, hub: Path, folder: Path) -> dict[str, Any]:
    """What the generator reports."""
    command = [
        aiperf, "profile", "--model", MODEL, "--url", url, "--endpoint-type", "completions",
        "--streaming", "--use-server-token-count", "--tokenizer", TOKENIZER,
        "--input-file", str(trace), "--custom-dataset-type", "mooncake_trace",
        "--isl-block-size", str(block_tokens(DIVIDE_PROMPTS)),
        "--fixed-schedule", "--fixed-schedule-auto-offset",
        "--extra-inputs", '{"ignore_eos": true}',
        "--workers-max", "1", "--record-processors", "1", "--ui", "none",
        "--no-gpu-telemetry", "--no-server-metrics", "--random-seed", "1",
        "--output-artifact-dir", str(folder),
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_CACHE": str(hub)}
    environment = os.environ | offline
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, cwd=folder.parent, env=environment
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (report,) = folder.rglob("profile_export_aiperf.json")
    return json.loads(report.read_text())


def counters(server: Server) -> dict[str, float]:
    """The server's own counts of what it did."""
    text = httpx.get(server.http_url + "/metrics", verify=False).text
    samples = (s for family in text_string_to_metric_families(text) for s in family.samples)
    return {s.name + s.labels.get("finished_reason", ""): s.value for s in samples}


def test_a_minute_of_a_trace_is_served_as_it_comes(
    requests: list[TraceRequest], aiperf: str, smollm2_path: Path, tmp_path: Path, capsys
):
    trace = tmp_path / "slice.jsonl"
    write_mooncake(requests, trace)
    write_tokenizer(smollm2_path, tmp_path / "hub")
    flags = ("--config", str(CONFIG), "--sp", "1", "--http-port", "0")
    with running(*flags, module="conflux_jax.serve") as server:
        report = replay(aiperf, server.http_url, trace, tmp_path / "hub", tmp_path / "report")
        counts = counters(server)
    num_tokens = sum(request.output_tokens for request in requests)
    with capsys.disabled():
        print(f"\n{len(requests)} requests, {num_tokens} tokens asked for; aiperf says:")
        for name in ("time_to_first_token", "inter_token_latency", "request_latency"):
            metric = report[name]
            numbers = ", ".join(f"{key} {metric[key]:.0f}" for key in ("avg", "p50", "p99"))
            print(f"  {name:<22} {numbers} {metric['unit']}")
    # What the client saw, what the server counted and what the trace asked for are one thing.
    assert report["request_count"]["avg"] == len(requests)
    assert not report.get("error_summary") and not report.get("was_cancelled")
    assert counts["vllm:request_success_totallength"] == len(requests)
    assert counts["vllm:generation_tokens_total"] == num_tokens
    assert report["total_output_tokens"]["avg"] == num_tokens
    assert report["benchmark_duration"]["avg"] >= requests[-1].arrival_s
