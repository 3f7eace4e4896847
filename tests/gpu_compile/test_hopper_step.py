"""The engine's step with its own attention kernels on H100s: nothing of the KV copied around them,
one launch each, and decode attention beside prefill's where asked."""

from __future__ import annotations

import pytest

from bench.hlo_counts import Instruction, launches
from conflux_jax.models.hopper_kernels import HopperKernels
from tests.gpu_compile.checks import (
    check_hand_off_hidden,
    check_no_kv_copied,
    check_no_weight_copied,
    check_pool_in_place,
)
from tests.gpu_compile.programs import MODELS, Program, program
from tests.gpu_compile.test_step import MAX_LAUNCHES, is_overlapped

KERNELS = {
    "none": HopperKernels(),
    "stream": HopperKernels(decode_sms=64),
    "fused": HopperKernels(decode_sms=64, fused=True),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=KERNELS)
def compiled(request: pytest.FixtureRequest, model: str) -> Program:
    return program(model, request.param, kernels=KERNELS[request.param])


def kernels_of(compiled: Program) -> list[Instruction]:
    """The Mosaic kernels that a layer launches."""
    layer = launches(compiled.module, compiled.layer.body)
    return [i for i in layer if "mosaic_gpu" in i.attributes]


def test_nothing_is_copied(compiled: Program):
    check_pool_in_place(compiled)
    check_no_kv_copied(compiled)
    check_no_weight_copied(compiled)


def test_launches(compiled: Program):
    fused = compiled.setup.config.execution.overlap == "fused"
    assert len(kernels_of(compiled)) == (1 if fused else 2)
    assert len(list(launches(compiled.module, compiled.layer.body))) <= MAX_LAUNCHES


def test_what_overlaps(compiled: Program):
    check_hand_off_hidden(compiled)
    overlap = compiled.setup.config.execution.overlap
    assert is_overlapped(compiled) == (overlap == "stream")
