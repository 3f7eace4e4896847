"""The compiled step: what it computes on every mesh, and what it must not copy."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np
import pytest

from conflux_jax.config import Config, ConfigError
from conflux_jax.execution.batch import Batch
from conflux_jax.execution.runner import Runner
from conflux_jax.execution.step import lower_step
from conflux_jax.models.attention import AttentionOptions, XlaKernels
from conflux_jax.models.loading import open_source
from conflux_jax.plan import StepOutput
from conflux_jax.request import Request, SamplingParams
from conflux_jax.scheduler.scheduler import Scheduler
from tests.forward import forward_logits
from tests.tiny import write_tiny_llama

MESHES = {(9, 3): [(2, 1), (3, 1)], (8, 2): [(4, 1), (2, 2)], (4, 4): [(3, 1)]}


@pytest.mark.parametrize("heads", MESHES)
def test_logits_are_the_same_on_every_mesh_and_for_every_chunk(tmp_path, heads):
    num_heads, num_kv_heads = heads
    path = write_tiny_llama(tmp_path, num_heads=num_heads, num_kv_heads=num_kv_heads)
    source = open_source(str(path))
    prompt = np.random.default_rng(0).integers(0, 256, 75).tolist()
    expected = forward_logits(source, prompt, chunk=75)
    for sp, tp in MESHES[heads]:
        got = forward_logits(source, prompt, sp=sp, tp=tp, chunk=32)
        assert_equal_but_for_rounding(got, expected, f"sp={sp} tp={tp}")
    got = forward_logits(source, prompt, chunk=17)
    assert_equal_but_for_rounding(got, expected, "chunks of 17")


def assert_equal_but_for_rounding(got: np.ndarray, expected: np.ndarray, label: str) -> None:
    """Sums run in another order on every mesh and for every chunk. Of logits with a standard
    deviation of 2 the differences then have an RMS of 1.7e-6, whatever the mesh (single elements
    reach 2.2e-5); a wrong term anywhere is orders of magnitude more."""
    differences = got - expected
    assert np.sqrt(np.mean(differences**2)) < 4e-6, label
    assert np.abs(differences).max() < 1e-4, label


@pytest.mark.parametrize("sp", [1, 3])
def test_no_bucket_copies_the_pool_or_what_slots_have_seen(tmp_path, sp):
    """Both are updated in place: aliased with the input, and no temporary is as large."""
    source = open_source(str(write_tiny_llama(tmp_path, num_heads=9, num_kv_heads=3)))
    settings = {
        "sp": sp,
        "dtype": "bfloat16",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64 * sp,
        "rows_ladder": (64,),
        "decode_rows_ladder": (8,),
        "max_prefill_segments": 2,
        "handoff_pages": 2,
        "compilation_cache_dir": "",
    }
    runner = Runner.create(source, Config.from_flat(kv_pool_tokens=1 << 17, **settings))
    device_bytes = runner._state.pool.nbytes // sp
    assert device_bytes >= 48 << 20  # a copy would show against the bound below
    limits = replace(runner.limits, max_slots=1 << 16)
    marks_bytes = 2 * limits.max_slots * runner.dims.padded_vocab
    assert marks_bytes > 32 << 20
    for bucket in runner.ladders.all():
        lowered = lower_step(runner.dims, runner.mesh, limits, bucket, 288, runner.attention)
        memory = lowered.compile().memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes >= device_bytes + marks_bytes, bucket
        assert memory.temp_size_in_bytes < 12 << 20, bucket
    runner.close()


def test_only_the_buffer_crosses_to_the_device(tmp_path):
    """The step's arguments are weights, state and one int32 buffer; it has no host callbacks."""
    source = open_source(str(write_tiny_llama(tmp_path)))
    runner = Runner.create(source, Config.from_flat(max_num_seqs=2, kv_pool_tokens=256))
    for bucket in runner.ladders.all()[:1]:
        lowered = runner.lower(bucket)
        buffer = jax.tree.leaves(lowered.in_avals)[-1]
        assert buffer.dtype == np.int32
        assert buffer.ndim == 2
        assert "callback" not in lowered.as_text()
    runner.close()


def test_overlap_changes_no_value(tmp_path):
    """One iteration with decodes, a chunk and a hand-off, in either mode, from the same random
    pool. On a CPU the modes differ in the order that the program asks for."""
    source = open_source(str(write_tiny_llama(tmp_path, num_heads=4, num_kv_heads=2)))
    config = Config.from_flat(
        sp=2,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_prefill_segments=2,
        kv_pool_tokens=512,
        compilation_cache_dir="",
    )
    runner = Runner.create(source, config)
    batch = mixed_batch(runner, config)
    pool = np.random.default_rng(0).normal(size=runner._state.pool.shape).astype(np.float32)
    results, texts = {}, {}
    for mode in ("none", "stream"):
        options = AttentionOptions.make(mode, "cpu")
        lowered = lower_step(runner.dims, runner.mesh, runner.limits, batch.bucket, 288, options)
        texts[mode] = lowered.as_text()
        shardings = jax.tree.map(lambda x: x.sharding, runner._state)
        start = runner._state._replace(pool=pool)
        state = jax.device_put(jax.tree.map(np.array, start), shardings)
        state, sampled, _ = lowered.compile()(runner._params, state, batch.buffer)
        results[mode] = jax.tree.map(np.asarray, (state, sampled))
    runner.close()
    assert texts["none"] != texts["stream"]
    assert (results["none"][0].pool != pool).mean() > 0.01  # KV was written
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), *results.values())


def mixed_batch(runner: Runner, config: Config) -> Batch:
    """The first iteration that does everything at once. Those before it are planned, not run."""
    scheduler = Scheduler(config.scheduler, runner.geometry, runner.ladders, runner.max_model_len)
    for i in range(4):
        prompt = np.random.default_rng(i).integers(0, 256, 10 + 20 * i).tolist()
        scheduler.add(Request(str(i), tuple(prompt), SamplingParams(max_tokens=50), 50))
    for iteration in range(20):
        plan = scheduler.schedule(float(iteration))
        assert plan is not None
        batch = runner._batches.build(plan)
        if plan.chunks and plan.handoffs and any(plan.decodes):
            return batch
        tokens = np.ones(len(plan.samples), np.int32)
        scheduler.commit(plan, StepOutput(tokens, 0.0), float(iteration))
    raise AssertionError("no such iteration")


@dataclass(frozen=True)
class KernelsThatStream(XlaKernels):
    streams: bool = True


def test_what_each_mode_asks_of_the_stage():
    kernels = KernelsThatStream()
    none = AttentionOptions.make("none", "cuda", kernels)
    assert none.ordered and not none.decode_on_stream
    stream = AttentionOptions.make("stream", "cuda", kernels)
    assert stream.decode_on_stream and not stream.ordered
    assert AttentionOptions.make(None, "cuda", kernels) == stream
    assert AttentionOptions.make(None, "cuda") == AttentionOptions.make("none", "cuda")
    assert not AttentionOptions.make("stream", "cpu").decode_on_stream
    assert AttentionOptions.make(None, "cpu") == AttentionOptions.make("none", "cpu")
    with pytest.raises(
        ConfigError, match="overlap: must be one of none, stream, fused, got 'full'"
    ):
        Config.from_flat(overlap="full")
    with pytest.raises(ConfigError, match="overlap: fused needs attention kernels"):
        AttentionOptions.make("fused", "cuda")
    with pytest.raises(ConfigError, match="overlap: stream needs attention kernels"):
        AttentionOptions.make("stream", "cuda")
