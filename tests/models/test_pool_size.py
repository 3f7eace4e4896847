"""The KV pool in what memory a GPU has left, worked by hand."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from conflux_jax.config import Config, ConfigError
from conflux_jax.execution import kv_cache
from conflux_jax.execution.runner import make_mesh, plan_pool
from conflux_jax.models.decoder import DecoderDims
from conflux_jax.models.heads import HeadLayout
from conflux_jax.models.spec import ModelSpec

SPEC = ModelSpec(
    name="test",
    vocab_size=256,
    hidden_size=128,
    intermediate_size=128,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)
# A page of 8 tokens: keys and values of 2 layers and 2 heads, 64 numbers of 2 bytes.
PAGE_BYTES = 2 * 2 * 2 * 64 * 2 * 8
# A slot: its last token; 2 bytes for each of 256 tokens; 1,216 entries of three numbers; 64 phrases
# and the end of the answer, 16 numbers each.
SLOT_BYTES = 4 + 512 + 14_592 + 4096 + 64


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that says it has a megabyte, with 100,000 bytes of weights in it."""
    monkeypatch.setattr(kv_cache, "device_memory", lambda device: (1_000_000, 100_000))


@pytest.mark.parametrize(("slots", "pages"), [(1, 46), (4, 39), (20, 1)])
def test_the_pool_has_what_the_weights_and_the_slots_leave(slots: int, pages: int):
    """Half of the megabyte, less the weights: 400,000, or 48 pages of 8,192."""
    assert (PAGE_BYTES, SLOT_BYTES) == (8192, 19_268)
    assert (400_000 - slots * 19_268) // 8192 == pages
    assert num_pages(slots) == pages


def test_slots_that_leave_no_page_are_refused():
    with pytest.raises(ConfigError, match=r"gpu_memory_fraction: .* max_num_seqs .* no memory"):
        num_pages(21)  # of 400,000 bytes 404,628


def num_pages(slots: int) -> int:
    dims = DecoderDims(SPEC, HeadLayout.make(SPEC, 1, 1), jnp.dtype(jnp.bfloat16))
    config = Config.from_flat(page_tokens=8, gpu_memory_fraction=0.5, max_num_seqs=slots)
    return plan_pool(dims, config, 1024, make_mesh(1, 1)).num_pages
