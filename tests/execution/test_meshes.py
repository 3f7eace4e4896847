"""Greedy output in float32 is the same on every mesh of groups and tensor-parallel ranks, for heads
that split evenly, are replicated or are padded; and what crosses the ranks is what the design says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from tests.execution.collectives import Collective
from tests.execution.mesh_worker import FILLER, MAX_TOKENS, OPTIONS, PROMPT_LENGTHS, Job
from tests.tiny import write_tiny_llama

pytestmark = pytest.mark.meshes

ROOT = Path(__file__).resolve().parents[2]
HEADS = [(8, 4), (8, 2), (9, 3)]
MESHES = [(sp, tp) for tp in (1, 2) for sp in (1, 2, 3, 4, 8) if sp * tp <= 8] + [(2, 4)]
DECODES_ALONE = ((9, 3), 2, 2)  # here decodes go on by themselves; one more program to compile
LAYERS, HIDDEN = 2, 64
VOCAB = 1153  # odd: padded for tp > 1; and a rank's part of it is longer than any other axis
PROCESSES = 2
# Compilation is nearly all of the time; machine code that runs for a second need not be fast.
COMPILE_FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

Results = dict[tuple[str, int, int, bool], dict]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], str]:
    paths = {heads: tmp_path_factory.mktemp("model") for heads in HEADS}
    for (num_heads, num_kv_heads), path in paths.items():
        write_tiny_llama(
            path,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            layers=LAYERS,
            hidden_size=HIDDEN,
            vocab_size=VOCAB,
            tokenizer=False,
        )
    return {heads: str(path) for heads, path in paths.items()}


@pytest.fixture(scope="module")
def results(models: dict[tuple[int, int], str]) -> Results:
    """Every model on every mesh."""
    jobs = [
        Job(model, sp, tp, filler=(heads, sp, tp) != DECODES_ALONE)
        for heads, model in models.items()
        for sp, tp in MESHES
    ]
    environment = os.environ | {"XLA_FLAGS": COMPILE_FAST}
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    workers = []
    for part in range(PROCESSES):
        arguments = [json.dumps(asdict(job)) for job in jobs[part::PROCESSES]]
        command = [sys.executable, "-m", "tests.execution.mesh_worker", *arguments]
        workers.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    out = {}
    for worker in workers:
        lines, errors = worker.communicate()
        assert worker.returncode == 0, errors
        for result in map(json.loads, lines.splitlines()):
            out[tuple(result["job"].values())] = result
    assert len(out) == len(jobs) == len(HEADS) * len(MESHES)
    return out


@pytest.mark.timeout(900)  # of the first one, which waits for the processes
@pytest.mark.parametrize("heads", HEADS)
def test_greedy_output_is_the_same_on_every_mesh(heads, models, results: Results):
    model = models[heads]
    alone = results[model, 1, 1, True]["answers"]
    assert {name: len(answer) for name, answer in alone.items()} == {
        **dict.fromkeys(PROMPT_LENGTHS, MAX_TOKENS),
        FILLER: 1,
    }
    changed = [token_id != top[0][0] for token_id, top in alone[OPTIONS]]
    assert sum(changed) > MAX_TOKENS // 2
    prompts = results[model, 1, 1, True]["prompts"]
    assert {name: len(values) for name, values in prompts.items()} == {OPTIONS: 10}
    for name in alone.keys() - {OPTIONS}:
        for token_id, ((first, best), (_, second)) in alone[name]:
            assert token_id == first
            assert best - second > 1e-3  # else either of the two would be right
    for (of, sp, tp, filler), result in results.items():
        if of != model:
            continue
        label, got = f"sp={sp} tp={tp}", result["answers"]
        np.testing.assert_allclose(result["prompts"][OPTIONS], prompts[OPTIONS], atol=1e-4)
        assert set(alone) - set(got) == (set() if filler else {FILLER}), label
        for name, answer in got.items():
            assert [token for token, _ in answer] == [token for token, _ in alone[name]], label
            top, expected = ([tops for _, tops in a] for a in (answer, alone[name]))
            # Sums run in another order; see test_step.
            np.testing.assert_allclose(top, expected, atol=1e-4, rtol=0, err_msg=label)


def test_every_kind_of_iteration_ran(results: Results):
    for (_, sp, _, filler), result in results.items():
        wanted = {"a later chunk", "decodes beside prefill", "two chunks"}
        wanted |= {"hand-off"} if sp > 1 else set()
        wanted |= set() if filler else {"decodes alone"}
        assert wanted <= set(result["kinds"]), result["job"]


def test_two_sums_a_layer_cross_the_ranks_and_logits_never_do(results: Results):
    for (_, _, tp, _), result in results.items():
        for program in result["programs"]:
            assert program, result["job"]
            found = [Collective(**fields) for fields in program]
            over_ranks = [c for c in found if c.axis == "tp"]
            in_layers = [c for c in over_ranks if c.in_layer]
            if tp == 1:
                assert not over_ranks, result["job"]
                continue
            assert [c.opcode for c in in_layers] == ["all-reduce"] * 2, result["job"]
            assert all(shape[1] == HIDDEN for c in in_layers for shape in c.shapes)
            # Whole logits, or a rank's, have an axis of this length or more.
            longest = max(size for c in found for shape in c.shapes for size in shape)
            assert longest < VOCAB // tp, result["job"]
