"""The server asks for as many open files as it may need, in a process that has fewer."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging, resource, sys
from conflux_jax.config import ServerConfig
from conflux_jax.serve.file_limit import raise_file_limit
logging.basicConfig(format="%(message)s", stream=sys.stdout)
soft, hard, streams = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
raise_file_limit(ServerConfig(max_streams=streams))
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "streams", "soft_after", "warns"),
    [
        (64, 1000, 100, 356, False),  # 256 beside the streams
        (400, 1000, 100, 400, False),
        (64, 200, 100, 200, True),
        (200, 200, 100, 200, True),
    ],
)
def test_files_for_all_streams(soft: int, hard: int, streams: int, soft_after: int, warns: bool):
    numbers = map(str, (soft, hard, streams))
    command = [sys.executable, "-c", PROGRAM, *numbers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    *warnings, limits = done.stdout.splitlines()
    assert limits == f"{soft_after} {hard}"
    assert len(warnings) == warns
    for warning in warnings:
        assert "max_streams 100 may need 356 open files, and this process may have 200" in warning
