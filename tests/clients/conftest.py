"""What the tests with a load generator may be told."""

from __future__ import annotations

from pathlib import Path

import pytest

MADE_UP = Path(__file__).with_name("made_up_slice.jsonl")


@pytest.fixture
def trace(pytestconfig: pytest.Config) -> Path:
    """What `--trace-file` names; else records that are made up, of the same form and like sizes."""
    return Path(pytestconfig.getoption("--trace-file") or MADE_UP)
