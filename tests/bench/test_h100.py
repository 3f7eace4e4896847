"""The H100 part of `bench.long_prefill`, as far as it needs no CUDA plugin: what attention costs
against arithmetic on paper, its flags, and the process that it runs in."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from bench import long_prefill
from bench.h100.accounting import AttentionCost, Cost, Iteration, attention_cost, dealt
from bench.h100.options import CONFIGS, MODELS, Workload, add_arguments
from bench.h100.report import flat, table
from bench.hlo_counts import Collective
from bench.variants import VARIANTS
from conflux_jax.config import Config
from conflux_jax.execution.limits import BatchLimits
from conflux_jax.models.decoder import DecoderDims
from conflux_jax.models.heads import HeadLayout
from conflux_jax.models.known_specs import KNOWN_SPECS
from conflux_jax.models.spec import ModelSpec
from conflux_jax.plan import Bucket, PoolGeometry
from conflux_jax.scheduler.buckets import Ladders

# 8 query and 2 KV heads on four groups: a device has one KV head (a copy) and two query heads.
SPEC = ModelSpec(
    name="small",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
DIMS = DecoderDims(SPEC, HeadLayout.make(SPEC, 4, 1), jnp.dtype(jnp.bfloat16))
# One KV head of one token in all layers: 3 layers, key and value, 16 numbers, 2 bytes.
HEAD_TOKEN = 192
# One query by one key, and its weight by one value, in all layers: 3 x 2 x (2 x 16).
PAIR = 192
WORKLOAD = Workload("llama-3.1-8b", 10, 30, num_decodes=6, decode_context=20)


def limits(shared: bool = False) -> BatchLimits:
    geometry = PoolGeometry(4, 100, page_tokens=4, prefill_page_tokens=8, shared=shared)
    return BatchLimits(geometry, 8, 16, 64, max_segments=2, handoff_pages=3)


# The chunk's queries see 6, 7 and 8 keys: 21 pairs for each query head.
ITERATION = Iteration(chunk_tokens=3, context_tokens=5, decodes=((7, 9), (20,), (), (1,)))


def test_decodes_at_home_cost_what_the_busiest_group_has():
    cost = attention_cost(DIMS, limits(), Bucket(8, 2, True, True), ITERATION)
    # 20 tokens in the second group, with both heads; 16 in the first.
    assert cost.decode_bytes == 20 * 2 * HEAD_TOKEN
    assert cost.prefill_bytes == 5 * 1 * HEAD_TOKEN
    # Three pages of four tokens for each of four groups.
    assert cost.handoff_bytes == 48 * 1 * HEAD_TOKEN
    assert cost.kv_bytes == (40 + 5 + 48) * HEAD_TOKEN
    # A decode sees its context and itself: 21 in the second group, 8 + 10 in the first.
    assert cost.flops == (21 * 8 + 21 * 2) * PAIR


def test_decodes_spread_over_the_groups_are_balanced():
    """Of all 37 tokens every device reads its one head. With scarce heads that is more in all than
    at home, where each of the two heads is read once."""
    cost = attention_cost(DIMS, limits(shared=True), Bucket(8, 2, True, False), ITERATION)
    assert (cost.decode_bytes, cost.handoff_bytes) == (37 * 1 * HEAD_TOKEN, 0)
    assert cost.flops == ((8 + 10 + 21 + 2) * 2 + 21 * 2) * PAIR


def test_decodes_of_other_groups_are_refused():
    with pytest.raises(ValueError, match="decodes of 1 groups, the program has 4"):
        attention_cost(DIMS, limits(), Bucket(8, 8, True, True), Iteration(3, 5, ((7,),)))


def test_figures_and_table():
    collectives = (
        Collective("there", "all-to-all", 4 << 20, 4, False),
        Collective("sum", "all-reduce", 4 << 20, 4, True),
    )
    attention = AttentionCost(1 << 30, 2 << 30, 0, flops=3 * 10**12)
    cost = Cost(512, collectives * 2, 5 << 30, 4 * 10**12, attention, launches=644)
    figures = flat({"scheme": cost})
    # Three quarters go to others; of a sum twice.
    assert figures["h100_scheme_all_to_all_bytes"] == 2 * (3 << 20)
    assert figures["h100_scheme_all_reduce_bytes"] == 2 * (6 << 20)
    assert figures["h100_scheme_kv_bytes"] == 3 << 30
    assert figures["h100_scheme_flops"] == 7 * 10**12
    text = table({"scheme": cost}, Iteration(10, 20, ((30, 30),)), "small")
    (row,) = (line for line in text.splitlines() if line.startswith("the scheme") and "512" in line)
    assert " ".join(row.split()[2:]) == "512 6 12 5.00 1.00 2.00 0.00 4.00 3.00 644"
    assert "2 x (all-to-all 4, all-reduce 4)" in text


def test_every_model_has_a_config_and_a_spec():
    for model in MODELS:
        assert model in KNOWN_SPECS
        assert Config.from_yaml(CONFIGS / f"{model}.yaml").mesh.sp > 1


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.key)
def test_an_iteration_gets_a_bucket_that_fits(variant):
    """16 tokens: four a group, or three of ten and a ladder's eight decodes apart."""
    settings = variant.on(sp=4, tp=1)
    apart = settings.get("linear") == "apart"
    groups = settings["sp"]
    assert groups * settings["tp"] == 4
    rows = WORKLOAD.settings(groups, apart)["rows_ladder"][0]
    assert rows == (3 if apart else 16 // groups)
    decodes = 8 if groups == 1 else 2
    ladders = Ladders((rows,), (decodes,), (0, decodes), handoff=groups > 1, apart=apart)
    bucket = WORKLOAD.bucket(ladders, WORKLOAD.iteration(groups))
    assert bucket == Bucket(rows + 2 * apart, decodes, True, groups > 1)


def test_flags_go_through_another_process():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert Workload.of(parser.parse_args(WORKLOAD.arguments())) == WORKLOAD


def test_what_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        long_prefill.parse(["--h100-decodes", "0"])
    assert "argument --h100-decodes: must be at least 1, got 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        long_prefill.parse(["--h100-python", "no-such-python"])
    assert "argument --h100-python: no-such-python does not exist" in capsys.readouterr().err
    iteration = Iteration(10, 30, dealt(6, 20, 4))
    with pytest.raises(ValueError, match="context of 40 is past the model's 39"):
        WORKLOAD.check(39, limits().geometry, iteration)
    # Two decodes of 21 tokens, six pages each; 40 tokens of prompt in five: 17 of a group's pages.
    WORKLOAD.check(40, PoolGeometry(4, 17, 4, 8), iteration)
    with pytest.raises(ValueError, match="takes 17 pages of a group; its pool has 16"):
        WORKLOAD.check(40, PoolGeometry(4, 16, 4, 8), iteration)


def python_that(folder: Path, does: str) -> Path:
    """A program in the place of another venv's Python."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)
    return path


def test_figures_come_from_another_python(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    script = 'echo "$JAX_PLATFORMS $@"; for last; do :; done; echo \'{"h100_x": 1}\' > "$last"'
    output = tmp_path / "figures.json"
    arguments = ["--skip-cpu", "--json", str(output), "--h100-decodes", "7"]
    python = python_that(tmp_path, script)
    assert long_prefill.main([*arguments, "--h100-python", str(python)]) == 0
    assert json.loads(output.read_text()) == {"h100_x": 1}
    ran = capfd.readouterr().out
    assert ran.startswith("cpu -m bench.h100 ") and "--h100-decodes 7" in ran


def test_a_python_without_the_plugin_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    python = python_that(tmp_path, "echo noise >&2; echo 'error: no CUDA plugin' >&2; exit 1")
    assert long_prefill.main(["--skip-cpu", "--h100-python", str(python)]) == 1
    assert capfd.readouterr().err == f"error: H100 part, by {python}: no CUDA plugin\n"


def test_without_another_python_the_part_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(long_prefill, "H100_PYTHON", tmp_path / "none")
    assert long_prefill.main(["--skip-cpu"]) == 0
    assert "make .venv-gpu/.gpu" in capsys.readouterr().out
