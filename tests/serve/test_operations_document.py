"""docs/operations.md says what the code does: settings with their defaults, and limits."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from conflux_jax.config import ServerConfig
from conflux_jax.intake import MAX_REQUEST_ID_CHARS
from conflux_jax.request import MAX_LOGPROBS, MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS
from conflux_jax.serve import auth, grpc_server, http_server, logs, openai_requests

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()


def table(heading: str) -> list[tuple[str, ...]]:
    """The cells of the first table under a heading, without its head."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert rows is not None
    lines = rows[0].splitlines()[2:]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]


def shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", False: "off", True: "on"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def test_every_setting_of_the_server_has_its_row_with_its_default():
    written = {
        name.strip("`"): default.strip("`") for name, default, _ in table("Settings of the server")
    }
    defaults = dataclasses.asdict(ServerConfig())
    assert written == {name: shown(value) for name, value in defaults.items()}


def test_limits_are_the_codes():
    rows = {row[0]: row[1] for row in table("Limits")}
    for of, numbers in {
        "stop strings": (MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS),
        "`n`": (openai_requests.MAX_N, openai_requests.MAX_CHOICES),
        "`logprobs`, `top_logprobs`": (MAX_LOGPROBS,),
        "request id": (MAX_REQUEST_ID_CHARS, http_server.MAX_REQUEST_ID_CHARS),
    }.items():
        found = [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", rows[of])]
        assert found == list(numbers), of
    assert f"{auth.MIN_TOKEN_CHARS} to {auth.MAX_TOKEN_CHARS:,} printable" in TEXT
    assert f"cut after {logs.MAX_PROMPT_CHARS:,} characters" in TEXT
    assert grpc_server.MIN_PING_INTERVAL_MS == 1000 / 4 and "four times a second" in TEXT
