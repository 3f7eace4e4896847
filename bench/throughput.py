"""Tokens per second of conflux_jax beside llama.cpp and torch, on this machine, in one run.

Every engine is a process that loads the same SmolLM2-135M GGUF and uses the same two CPUs. They are
measured in turns, round after round, so that a slow minute of the machine hits all of them; the
table shows medians. llama.cpp runs the Q4_1 file as it is, torch and conflux_jax its weights in
bfloat16. Speeds of conflux_jax are those of its streams: engine, scheduler, sampling included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers.environment import LLAMA_CPP, TORCH, peer_python
from bench.peers.protocol import (
    BATCHES,
    DECODE_CONTEXT,
    DECODE_STEPS,
    PREFILL_TOKENS,
    ROOT,
    THREADS,
    Worker,
)
from conflux_jax.models.loading import find_model

MODEL = "smollm2-135m-instruct"
CACHE = ROOT / ".cache" / "bench"
ROUNDS, QUICK_ROUNDS = 5, 2
OURS, LLAMA, TORCH_BF16, TORCH_F32 = "conflux_jax", "llama.cpp", "torch bf16", "torch float32"
COLUMNS = (OURS, LLAMA, TORCH_BF16, TORCH_F32)


@dataclass(frozen=True)
class Workload:
    """One row of the table: a worker's operation, its arguments, and where its ratios are kept."""

    label: str
    op: str
    arguments: dict[str, int]
    ratios: dict[str, str]  # peer -> key in the JSON


WORKLOADS = (
    Workload(
        f"prefill {PREFILL_TOKENS}",
        "prefill",
        {},
        {TORCH_BF16: "prefill_vs_torch", LLAMA: "prefill_vs_llamacpp"},
    ),
    *(
        Workload(
            f"decode, batch {batch}",
            "decode",
            {"batch": batch, "steps": DECODE_STEPS},
            {LLAMA: f"decode{batch}_vs_llamacpp"},
        )
        for batch in BATCHES
    ),
)


@dataclass
class Results:
    """Answers of all rounds: tokens per second by (workload, column), host fractions."""

    speeds: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    host_fractions: list[float] = field(default_factory=list)
    load_s: float | None = None

    def speed(self, label: str, column: str) -> float | None:
        values = self.speeds.get((label, column))
        return statistics.median(values) if values else None

    def ratio(self, label: str, peer: str) -> float | None:
        own, other = self.speed(label, OURS), self.speed(label, peer)
        return own / other if own and other else None

    def flat(self) -> dict[str, float | None]:
        """What `--json` writes; null where a peer was left out or a counter is missing."""
        ratios = {
            key: self.ratio(workload.label, peer)
            for workload in WORKLOADS
            for peer, key in workload.ratios.items()
        }
        fractions = self.host_fractions
        host = statistics.median(fractions) if fractions else None
        return {**ratios, f"host_fraction_{max(BATCHES)}": host, "load_s": self.load_s}


@contextmanager
def workers(options: argparse.Namespace) -> Iterator[dict[str, Worker]]:
    """Columns and the process that measures each; all are loaded and idle."""
    gguf = ["--gguf", str(find_model(MODEL))]
    commands = {OURS: [sys.executable, "-m", "bench.peers.conflux_worker", "--sp", str(options.sp)]}
    if not options.no_peers:
        llama = options.peers_python_llama or peer_python(LLAMA_CPP)
        torch = options.peers_python_torch or peer_python(TORCH)
        commands[LLAMA] = [llama, "-m", "bench.peers.llama_cpp_worker", *gguf]
        commands[TORCH_BF16] = [torch, "-m", "bench.peers.torch_worker", *gguf]
    with ExitStack() as stack:
        started = {}
        for column, command in commands.items():
            log = CACHE / f"{column.replace(' ', '-')}.log"
            started[column] = Worker(column, command, log)
            stack.callback(started[column].close)
            print(f"{column} {started[column].facts.get('version', '')}: ready", flush=True)
        if TORCH_BF16 in started:
            started[TORCH_F32] = started[TORCH_BF16]
        yield started


def measure(started: dict[str, Worker], rounds: int) -> Results:
    results = Results()
    for round_ in range(rounds):
        print(f"round {round_ + 1} of {rounds}", flush=True)
        turn = round_ % len(started)
        columns = (list(started) * 2)[turn : turn + len(started)]
        for workload in WORKLOADS:
            for column in columns:
                if workload.op == "decode" and column in (TORCH_BF16, TORCH_F32):
                    continue
                arguments: dict[str, Any] = {**workload.arguments, "seed": round_ + 1}
                if column == TORCH_F32:
                    arguments["dtype"] = "float32"
                answer = started[column].ask(workload.op, **arguments)
                results.speeds[workload.label, column].append(answer["tokens_per_s"])
                if workload.arguments.get("batch") == max(BATCHES) and "host_fraction" in answer:
                    results.host_fractions.append(answer["host_fraction"])
    return results


def load_seconds(sp: int) -> float:
    """Seconds to load the model in a fresh process; the second of two, so that files are warm."""
    command = [sys.executable, "-m", "bench.peers.conflux_worker", "--load-only", "--sp", str(sp)]
    seconds = 0.0
    for _ in range(2):
        worker = Worker("load", command, CACHE / "load.log")
        seconds = worker.facts["load_s"]
        worker.close()
    return seconds


def table(results: Results) -> str:
    peers = COLUMNS[1:]
    header = ["tokens/s", *COLUMNS, *(f"vs {peer}" for peer in peers)]
    lines = [header]
    for workload in WORKLOADS:
        speeds = [_number(results.speed(workload.label, column), 1) for column in COLUMNS]
        ratios = [results.ratio(workload.label, peer) for peer in peers]
        lines.append([workload.label, *speeds, *(_number(ratio, 2, "x") for ratio in ratios)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    ]
    flat = results.flat()
    host = flat[f"host_fraction_{max(BATCHES)}"]
    return "\n".join(
        [
            f"{THREADS} CPUs; decode at context {DECODE_CONTEXT}; medians of interleaved rounds",
            "",
            *text,
            "",
            f"host work per step at batch {max(BATCHES)}: {_number(host and host * 100, 1, '%')}",
            f"loading the model: {_number(flat['load_s'], 2, ' s')}",
        ]
    )


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"default: {ROUNDS}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write ratios as flat JSON")
    parser.add_argument("--sp", type=int, default=1, metavar="N", help="our groups (default: 1)")
    parser.add_argument("--no-peers", action="store_true", help="measure conflux_jax only")
    for peer in ("torch", "llama"):
        parser.add_argument(
            f"--peers-python-{peer}",
            metavar="PYTHON",
            help=f"a Python that has {peer} (default: one in .venv-peers, installed when missing)",
        )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    try:
        load_s = load_seconds(options.sp)
        with workers(options) as started:
            results = measure(started, rounds)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    results.load_s = load_s
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results.flat(), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
