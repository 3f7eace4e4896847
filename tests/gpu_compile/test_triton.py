# pyright: reportMissingImports=false
"""The Triton kernels: right in Triton's interpreter, and compiled for Ampere and Hopper.

The interpreter misreads bfloat16 in products, so there they are of float32.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton
import ml_dtypes
import numpy as np
import nvidia.cuda_nvcc
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.prefill_attention import by_rows
from pallas_kernels.prefill_plan import PrefillPlan
from pallas_kernels.triton import attention
from tests.gpu_compile.test_kernels import decode_operands
from tests.gpu_compile.test_prefill_kernel import prefill_operands
from tests.gpu_compile.triton_interpreter import Launch, interpret
from tests.kernels import test_decode, test_prefill
from tests.kernels.interpreter import assert_close

GPUS = {"sm_80": "NVIDIA A100-SXM4-80GB", "sm_90": "NVIDIA H100 80GB HBM3"}
MAX_REGISTERS = 255  # of a thread
MAX_SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}


def on_host(**arrays) -> dict[str, np.ndarray]:
    return {name: np.atleast_1d(np.asarray(x)) for name, x in arrays.items()}


def poisoned(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.full(shape, np.nan, dtype)


@pytest.mark.parametrize(
    "case",
    [
        ([(0, 1)], [(0, 1)], 8, 16, 1, 1, 64),
        ([(5, 3), (64, 70), (65, 1)], [(9, 74)], 96, 16, 1, 2, 64),
        ([(130, 100), (3, 60)], [(5, 60), (97, 60), (162, 40)], 208, 48, 2, 3, 128),
    ],
)
def test_prefill_equals_the_oracle(case, tmp_path):
    case = test_prefill.Case(*case)
    pool, layer = case.pool.operands
    qkv, plan = jnp.asarray(case.qkv, jnp.bfloat16), case.plan
    tokens, q_heads, head_dim = case.out.shape
    sizes = attention.prefill_sizes(qkv, pool, plan, case.kv_heads) | {"UPCAST": True}
    read = {name: array for name, array in plan._asdict().items() if array is not None}
    arrays = on_host(layer=layer, **read, qkv=qkv, pool=pool)
    arrays["out"] = poisoned(tokens, q_heads, head_dim, dtype=ml_dtypes.bfloat16)
    arrays["lse"] = poisoned(q_heads, len(plan.items) * sizes["QUERIES"])
    operands = ("layer", *read, "qkv", "pool", "out", "lse")
    grid = attention.prefill_grid(qkv, plan, case.kv_heads)
    launch = Launch("prefill_program", grid, operands, sizes)
    results = interpret([launch], arrays, tmp_path)
    assert_close(results["out"], case.out)
    assert (results["out"][np.isinf(case.lse[:, 0])] == 0).all()
    lse = by_rows(jnp.asarray(results["lse"]), plan, tokens)
    np.testing.assert_allclose(lse, case.lse, atol=1e-4)


@pytest.mark.parametrize(
    ("case", "splits"),
    [
        (([70, 0], 16, 1, 3, 64), 1),
        (([1, 15, 16, 17, 200], 16, 2, 5, 128), 3),
        (([127, 129, 640], 128, 1, 20, 64), 4),
    ],
)
def test_decode_equals_the_oracle(case, splits, tmp_path):
    case = test_decode.Case(*case)
    rows, kv_heads, group, head_dim = case.q.shape
    pool, layer = case.pool.operands
    own = [np.stack([s[kind, -1] for s in case.sequences]) for kind in (0, 1)]
    q, new_k, new_v = (jnp.asarray(x, jnp.bfloat16) for x in (case.q, *own))
    arrays = on_host(q=q, new_k=new_k, new_v=new_v, pool=pool, layer=layer, table=case.table)
    arrays["contexts"] = np.array(case.contexts, np.int32)
    arrays["parts"] = poisoned(rows, kv_heads, group, splits, head_dim)
    arrays["part_lse"] = poisoned(rows, kv_heads, group, splits)
    arrays["out"] = poisoned(*q.shape, dtype=ml_dtypes.bfloat16)
    arrays["lse"] = poisoned(rows, kv_heads, group)
    sizes = attention.decode_sizes(q, pool, case.table) | {"UPCAST": True, "SPLITS": splits}
    operands = ("q", "new_k", "new_v", "pool", "layer", "table", "contexts", "parts", "part_lse")
    merge = attention.merge_sizes(head_dim, splits)
    launches = [
        Launch("decode_program", (rows, kv_heads, splits), operands, sizes),
        Launch("merge_program", (arrays["lse"].size,), ("parts", "part_lse", "out", "lse"), merge),
    ]
    results = interpret(launches, arrays, tmp_path)
    assert_close(results["out"], case.expected())
    np.testing.assert_allclose(results["lse"], case.expected_lse(), atol=1e-4)


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize(
    ("page_tokens", "q_heads", "kv_heads", "head_dim"), [(16, 32, 8, 128), (256, 9, 3, 64)]
)
def test_both_compile(arch, page_tokens, q_heads, kv_heads, head_dim, tmp_path, monkeypatch):
    """Assembled without spills, within a GPU's resources, with tensor cores."""
    monkeypatch.setattr(jax_triton.triton_lib, "_JAX_TRITON_DUMP_DIR", str(tmp_path))
    monkeypatch.setattr(attention, "programs", unchecked(attention.programs))

    def prefill(qkv, pool, layer, *plan):
        plan = PrefillPlan(*plan)
        return attention.prefill_attention(qkv, pool, layer, plan, kv_heads=kv_heads)

    device = AbstractDevice(GPUS[arch], 1, "gpu")
    operands = (
        prefill_operands(page_tokens, q_heads, kv_heads, head_dim),
        decode_operands(page_tokens, q_heads // kv_heads, head_dim),
    )
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        for function, shapes in zip((prefill, attention.decode_attention), operands, strict=True):
            jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))
    found = {path.stem: path for path in tmp_path.rglob("*.ptx")}
    assert set(found) == {"prefill_program", "decode_program", "merge_program"}
    for name, path in found.items():
        log = assemble(path, arch)
        assert re.findall(r"(\d+) bytes spill", log) == ["0", "0"]
        (registers,) = map(int, re.findall(r"Used (\d+) registers", log))
        told = path.with_suffix(".compile_info").read_text()
        (shared,) = map(int, re.findall(r"shared_mem_bytes: (\d+)", told))
        print(f"{arch} {name}: {registers} registers, {shared:,} bytes of shared memory, 0 spilled")
        assert registers <= MAX_REGISTERS and shared <= MAX_SHARED_BYTES[arch]
        text = path.read_text()
        assert ("mma" in text) == (name != "merge_program")


def unchecked(module: ModuleType) -> ModuleType:
    """Imported without the checks of types that tests put around functions: Triton compiles what
    it finds in the source."""
    assert module.__file__ is not None
    spec = importlib.util.spec_from_file_location("programs", module.__file__)
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    return again


def assemble(ptx: Path, arch: str) -> str:
    """What ptxas says."""
    target = arch + "a" if arch == "sm_90" else arch
    ptxas = Path(nvidia.cuda_nvcc.__path__[0], "bin", "ptxas")
    command = [ptxas, f"-arch={target}", "-v", ptx, "-o", ptx.with_suffix(".cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr
