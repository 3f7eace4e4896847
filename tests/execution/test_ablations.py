"""Every ablation serves the same tokens as the scheme: they change where work runs, not what."""

from pathlib import Path

import numpy as np
import pytest

from conflux_jax.config import Config
from conflux_jax.execution.runner import Runner
from conflux_jax.models.loading import open_source
from tests.serving import Serving, make_request
from tests.tiny import write_tiny_llama

pytestmark = pytest.mark.meshes

PROMPT_TOKENS = (45, 1, 19, 30, 7)
MAX_TOKENS = 20
ABLATIONS = {
    "spread, KV heads replicated": {"sp": 4, "decode_attention": "spread"},
    "apart": {"sp": 2, "linear": "apart"},
    "spread and apart, KV heads padded": {
        "sp": 3,
        "decode_attention": "spread",
        "linear": "apart",
    },
    "uniform TP": {"sp": 1, "tp": 2},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), num_heads=8, num_kv_heads=2)


@pytest.fixture(scope="module")
def scheme(checkpoint: Path) -> dict[str, list[int]]:
    return serve(checkpoint, sp=2)


def serve(path: Path, **settings) -> dict[str, list[int]]:
    """Greedy tokens of a few prompts that arrive one after the other and are cut into chunks."""
    config = Config.from_flat(
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=24,
        rows_ladder=(24 // settings["sp"],),
        decode_rows_ladder=(4,),
        kv_pool_tokens=640,
        page_tokens=4,
        handoff_pages=4,
        compilation_cache_dir="",
        **settings,
    )
    runner = Runner.create(open_source(str(path)), config)
    serving = Serving(runner, config)
    rng = np.random.default_rng(5)
    for number, length in enumerate(PROMPT_TOKENS):
        prompt = rng.integers(0, 256, length).tolist()
        serving.add(make_request(f"r{number}", prompt, MAX_TOKENS))
        serving.run(2)
    tokens = dict(serving.drain())
    runner.close()
    return tokens


@pytest.mark.parametrize("name", ABLATIONS)
def test_tokens_are_those_of_the_scheme(checkpoint, scheme, name):
    assert len(scheme) == len(PROMPT_TOKENS)
    assert {len(tokens) for tokens in scheme.values()} == {MAX_TOKENS}
    assert serve(checkpoint, **ABLATIONS[name]) == scheme
