"""Kernels by themselves, compiled for one H100, and what the assembler makes of them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bench.h100.programs import make_mesh
from pallas_kernels.building_blocks import SMS
from pallas_kernels.prefill_plan import ITEM_FIELDS, PrefillPlan, max_items

MAX_REGISTERS = 65_536  # of an SM, which has one program
MAX_SHARED_BYTES = 227 * 1024
SEGMENTS, RUNS = 8, 11  # of prefill plans


def divided_plan(tokens: int, q_heads: int, max_pages: int) -> Any:
    """Shapes of a prefill plan whose keys may be divided."""
    parts = SMS // q_heads
    items = max_items(tokens, RUNS) + parts
    shapes = (items, ITEM_FIELDS), (), (RUNS, 2), (SEGMENTS, max_pages), (parts,)
    return PrefillPlan(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))  # pyright: ignore


@dataclass(frozen=True)
class Kernel:
    """Machine code of one kernel. registers: of a thread at launch. log: all that ptxas said."""

    name: str
    registers: int
    threads: int
    shared_bytes: int
    spilled_bytes: int
    log: str
    sass: str

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.threads} threads of {self.registers} registers, "
            f"{self.shared_bytes:,} bytes of shared memory, {self.spilled_bytes} spilled"
        )


def compile_kernels(
    function: Callable, operands: list, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Kernel]:
    """The Mosaic kernels that `function` launches on arrays of these shapes and types, by name."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(folder))
    for what in ("PTX", "PTXAS", "SASS"):
        monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{what}", "1")
    monkeypatch.setenv("MOSAIC_GPU_CUDA_ROOT", _disassembler_root())
    mesh, whole = make_mesh(1, 1), PartitionSpec()
    on_device = NamedSharding(mesh, whole)
    shaped = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device), operands
    )
    sharded = jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    jax.jit(sharded).lower(*shaped).compile()
    kernels = [_read(ptx) for ptx in sorted(folder.glob("*.ptx"))]
    return {kernel.name: kernel for kernel in kernels}


def _read(ptx: Path) -> Kernel:
    """What the compiler has left beside a kernel's PTX."""
    log = ptx.with_suffix(".ptxas").read_text()
    return Kernel(
        name=re.sub(r"_\d+$", "", ptx.stem),
        registers=_number(r"Used (\d+) registers", log),
        threads=_number(r"\.maxntid (\d+)", ptx.read_text()),
        shared_bytes=_number(
            r"smem_scratch_bytes=(\d+)", ptx.with_suffix(".resources.txt").read_text()
        ),
        spilled_bytes=sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        log=log,
        sass=ptx.with_suffix(".sass_ctrl").read_text(),
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, f"no {pattern} in {text[:500]}"
    return int(found[1])


def _disassembler_root() -> str:
    """The folder whose `bin` has nvdisasm, of the wheel nvidia-cuda-nvdisasm."""
    package = importlib.util.find_spec("nvidia.cu13")
    assert package is not None and package.submodule_search_locations, "no nvidia-cuda-nvdisasm"
    (root,) = (p for p in package.submodule_search_locations if Path(p, "bin/nvdisasm").exists())
    return root
