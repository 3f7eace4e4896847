"""Line-JSON over stdin and stdout between the benchmark and its workers.

A worker writes one line when it is ready, then answers one line per request line until its input
ends. Between requests it blocks on its input, so an idle worker leaves the cores to the others and
measurements can be taken in turns. Standard library only: workers run in venvs of their own.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

THREADS = 2
PREFILL_TOKENS = 512
DECODE_CONTEXT = 256  # middle of the timed steps
DECODE_STEPS = 32
DECODE_PROMPT = DECODE_CONTEXT - DECODE_STEPS // 2
BATCHES = (1, 8, 32)
ROOT = Path(__file__).resolve().parents[2]

Handler = Callable[[dict[str, Any]], dict[str, Any]]


def pin_cpus() -> None:
    """Keep this process on the same `THREADS` CPUs as every other worker (Linux)."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])


def random_prompt(num_tokens: int, vocab_size: int, seed: int) -> list[int]:
    """Token ids without control tokens; the same for every worker."""
    draw = random.Random(seed)
    return [draw.randrange(100, min(vocab_size, 40_000)) for _ in range(num_tokens)]


def serve(load: Callable[[], tuple[dict[str, Any], dict[str, Handler]]]) -> None:
    """Run a worker: `load` returns facts for the ready line and a handler per operation.

    The real stdout is kept for the protocol; whatever libraries print goes to stderr.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    facts, handlers = load()
    print(json.dumps({"ready": True, **facts}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(handlers[request["op"]](request)), file=answers)


class Worker:
    """A worker process, seen from the benchmark. Raises RuntimeError when it dies."""

    def __init__(self, name: str, command: list[str], log: Path):
        self.name = name
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.facts = self._read()

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # _read says why
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise RuntimeError(f"worker {self.name} ended with code {code}:\n{tail}")
        return json.loads(line)
