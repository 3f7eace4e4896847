"""The engine's step with the Triton kernels, which older GPUs get. No such GPU can be described
here, so it is compiled for H100s; what XLA makes of the step around the kernels is the same."""

from __future__ import annotations

import pytest

from bench.hlo_counts import launches
from conflux_jax.models.triton_kernels import TritonKernels
from pallas_kernels.triton import attention
from tests.gpu_compile.checks import (
    check_hand_off_hidden,
    check_no_kv_copied,
    check_no_weight_copied,
    check_pool_in_place,
)
from tests.gpu_compile.programs import FIRST, program
from tests.gpu_compile.test_triton import unchecked


@pytest.fixture(scope="module")
def compiled():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "programs", unchecked(attention.programs))
        yield program(FIRST, "none", kernels=TritonKernels())


def test_nothing_is_copied(compiled):
    check_pool_in_place(compiled)
    check_no_kv_copied(compiled)
    check_no_weight_copied(compiled)


def test_attention_is_three_launches(compiled):
    """Decode attention, the merge of its parts, prefill attention."""
    layer = launches(compiled.module, compiled.layer.body)
    assert len([i for i in layer if "triton_kernel_call" in i.attributes]) == 3


def test_the_hand_off_is_hidden(compiled):
    check_hand_off_hidden(compiled)
