"""The scheduler has no arrays: here its own rules are tested, at full speed."""

from collections.abc import Iterator

import jaxtyping
import pytest


@pytest.fixture(scope="module", autouse=True)
def plain_python() -> Iterator[None]:
    """Without the type checks on every call, which would take five times as long as the tests."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
