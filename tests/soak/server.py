"""The server under the storm: a process over a tiny random model, and what can be seen of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.soak.cases import MAX_MODEL_LEN
from tests.tiny import write_tiny_llama

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 120
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Memory for a third of what may run, so that requests are preempted; a queue that is full at times.
FLAGS = {
    "dtype": "float32",
    "max-model-len": MAX_MODEL_LEN,
    "max-num-seqs": 32,
    "max-num-batched-tokens": 128,
    "max-waiting": 2048,
    "kv-pool-tokens": 2048,
    "page-tokens": 4,
    "rows-ladder": 128,
    "decode-rows-ladder": 32,  # three programs: it starts in seconds
    "drain-s": 10.0,
}


@dataclass(frozen=True)
class Served:
    """A running server. rss_bytes, num_files: as the kernel counts them."""

    process: subprocess.Popen[str]
    grpc_port: int
    http_port: int
    log: Path

    @property
    def rss_bytes(self) -> int:
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(fields[1]) * PAGE_BYTES

    @property
    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def num_threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def stop(self) -> tuple[int, str]:
        """Exit code after SIGTERM, and all that it wrote on stderr."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        return code, self.log.read_text()


@contextlib.contextmanager
def serving() -> Iterator[Served]:
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_llama(Path(folder) / "model", layers=1)
        command = [sys.executable, "-m", "conflux_jax.serve", "--model", str(model)]
        command += ["--port", "0", "--http-port", "0"]
        for name, value in FLAGS.items():
            command += [f"--{name}", str(value)]
        log = Path(folder) / "stderr"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        try:
            yield Served(process, *_ports(process, log), log)
        finally:
            process.kill()
            process.wait(30)
            if process.stdout is not None:
                process.stdout.close()


def _ports(process: subprocess.Popen[str], log: Path) -> tuple[int, int]:
    """gRPC's and HTTP's, once it says that it serves."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if "--target" in line:
            break
    found = re.search(r"gRPC on \S+:(\d+) and HTTP on \S+:(\d+)\. ", said)
    if found is None:
        raise RuntimeError(f"the server did not start: {said}{log.read_text()}")
    return int(found[1]), int(found[2])
