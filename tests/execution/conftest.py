"""A tiny model on a runner, compiled once for all that serve on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from conflux_jax.config import Config
from conflux_jax.execution.runner import Runner
from conflux_jax.models.loading import open_source
from tests.serving import SETTINGS
from tests.tiny import spoil_token, write_tiny_llama

SPOILT = 287  # a token that makes NaN of all that sees it; it is never sampled


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_llama(tmp_path_factory.mktemp("model"), num_heads=6, num_kv_heads=3)
    spoil_token(path, SPOILT)
    return path


@pytest.fixture(scope="session", params=[1, 3], ids="sp={}".format)
def runner(request: pytest.FixtureRequest, served_model: Path) -> Iterator[Runner]:
    rows = (-(-48 // request.param),)
    config = Config.from_flat(sp=request.param, rows_ladder=rows, **SETTINGS)
    made = Runner.create(open_source(str(served_model)), config, vocab_limit=SPOILT)
    made.warm_up()
    yield made
    made.close()
