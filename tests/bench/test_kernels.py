"""`bench.kernels`: what the attention kernels do against arithmetic on paper, and the code around
their runs on a GPU, with the XLA path in the kernels' place."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest

from bench import kernel_runs, kernel_work, kernels
from bench.kernel_work import (
    DecodeCase,
    Heads,
    MixedCase,
    PrefillCase,
    decode_work,
    mixed_work,
    prefill_work,
    work_of,
)
from pallas_kernels import blockwise
from pallas_kernels.mixed_attention import MixedResults

MODEL = "llama-3.1-8b"  # prefill: 8 query heads on 2 KV heads a device; decode: 32 on 8


def test_prefill_is_counted_in_tiles():
    """300 tokens after 200 are three blocks of queries: 2 tiles of context each, and 1, 2, 3."""
    work = prefill_work(PrefillCase("", MODEL, ((200, 300),)))
    tiles, units = 8 * 12, 8 * 3
    assert work.flops == tiles * 4 * 128**3
    assert work.needed_flops == 8 * 4 * 128 * (300 * 200 + 300 * 301 // 2)
    assert work.busiest == 5 / tiles  # 24 units, a program each
    assert work.loaded_bytes == (tiles * 2 * 128 + units * 128) * 128 * 2
    # Keys and values of 500 tokens, queries and results of 300.
    assert work.memory_bytes == (2 * 2 * 500 + 2 * 8 * 300) * 128 * 2
    assert work.limit == "tensor cores"
    assert work.floor_s == pytest.approx(5 * 4 * 128**3 / (989.4e12 / 132))


def test_divided_keys_are_counted_with_their_merging():
    """128 tokens after 12,800 are one block of 101 tiles: 8 units, each in six parts of at most 17
    tiles, 16 being the least."""
    work = prefill_work(PrefillCase("", MODEL, ((12_800, 128),)))
    tiles, units = 8 * 101, 8 * 6
    assert work.flops == tiles * 4 * 128**3
    assert work.busiest == 17 / tiles
    queries_and_keys = (tiles * 2 * 128 + units * 128) * 128 * 2
    assert work.loaded_bytes == queries_and_keys + units * 128 * 129 * 4


def test_a_round_that_turns_around_evens_out():
    """34 blocks of 8 heads on 132 programs: three rounds, the second in reverse."""
    work = prefill_work(PrefillCase("", MODEL, ((0, 34 * 128),)))
    units = sorted((block + 1 for block in range(34) for _ in range(8)), reverse=True)
    turns = [*range(132), *reversed(range(132)), *range(132)]
    shares = [0] * 132
    for program, tiles in zip(turns, units, strict=False):
        shares[program] += tiles
    assert work.busiest == pytest.approx(max(shares) / sum(units))


def test_decode_is_counted_in_blocks():
    """Contexts of 100 and 0 are two blocks of 64 keys and one, for each of 8 heads."""
    work = decode_work(DecodeCase("", MODEL, (100, 0)))
    items = 8 * 3
    assert work.flops == items * 4 * 64 * 64 * 128
    assert work.needed_flops == 32 * 4 * 128 * 102
    assert work.busiest == 1 / items
    assert work.loaded_bytes == (items * 2 * 64 + 2 * (32 + 16)) * 128 * 2
    assert work.memory_bytes == (2 * 8 * 102 + 2 * 2 * 32) * 128 * 2
    assert decode_work(DecodeCase("", MODEL, (8192,) * 24)).limit == "memory"


def test_mixed_has_the_work_of_both_sides():
    sides = PrefillCase("", MODEL, ((200, 300),)), DecodeCase("", MODEL, (100, 0))
    work, prefill, decode = mixed_work(MixedCase("", *sides)), *map(work_of, sides)
    assert work.flops == prefill.flops + decode.flops
    assert work.memory_bytes == prefill.memory_bytes + decode.memory_bytes
    assert work.floor_s == pytest.approx(work.flops / 989.4e12)
    assert work.floor_s < prefill.floor_s  # of 24 programs, where now all share the work


def test_the_command_prints_and_writes_every_case(tmp_path, capsys):
    path = tmp_path / "kernels.json"
    assert kernels.main(["--model", "qwen3-32b", "--count-only", "--json", str(path)]) == 0
    printed, figures = capsys.readouterr().out, json.loads(path.read_text())
    assert "Nothing ran" in printed
    for case in kernels.CASES:
        assert (kernels.title(case).strip() in printed) == (case.model == "qwen3-32b")
        name = f"{kernels.key(case)}_floor_s"
        assert (name in figures) == (case.model == "qwen3-32b")
    assert all(value > 0 for value in figures.values())


@pytest.fixture
def tiny(monkeypatch):
    """A model, and quick runs, of which the XLA path does the work."""
    monkeypatch.setitem(kernel_work.HEADS, "tiny", Heads((4, 2), (8, 4), 64))
    monkeypatch.setattr(kernel_runs, "RUNS", 1)
    monkeypatch.setattr(
        kernel_runs, "decode_attention", lambda *args: (blockwise.decode_attention(*args), None)
    )
    return "tiny"


def prefill_by_xla(case: PrefillCase, factor: float):
    segments = jax.tree.map(jnp.asarray, case.segments())

    def prefill(qkv, pool, layer, plan, kv_heads, tickets=None):
        q, k, v = jnp.split(qkv, (4, 6), axis=1)
        grouped = q.reshape(-1, kv_heads, 2, 64)
        out = blockwise.prefill_attention(grouped, k, v, pool, layer, segments)
        return factor * out.reshape(q.shape), None

    return prefill


def mixed_by_xla(case: MixedCase):
    prefill = prefill_by_xla(case.prefill, 1.0)

    def mixed(shape, decode, other, pool, layer, queues, *, kv_heads, decode_sms):
        q = decode.q.reshape(-1, shape.kv_heads, shape.group, 64)
        k, v = (x.reshape(-1, shape.kv_heads, 64) for x in (decode.new_k, decode.new_v))
        table, lens = decode.page_table, decode.context_lens
        out = blockwise.decode_attention(q, k, v, pool, layer, table, lens)
        return MixedResults(out, out, prefill(other.qkv, pool, layer, None, kv_heads)[0], out)

    return mixed


@pytest.mark.kernels
def test_what_a_gpu_would_run_is_checked(tiny, monkeypatch):
    case, rows = PrefillCase("", tiny, ((70, 50), (0, 33))), DecodeCase("", tiny, (40, 40, 7))
    mixed = MixedCase("", case, rows)
    monkeypatch.setattr(kernel_runs, "prefill_attention", prefill_by_xla(case, 1.0))
    monkeypatch.setattr(kernel_runs, "mixed_attention", mixed_by_xla(mixed))
    for one in (case, rows, mixed):
        assert kernel_runs.measure(one)["seconds"] > 0
    monkeypatch.setattr(kernel_runs, "prefill_attention", prefill_by_xla(case, 1.1))
    with pytest.raises(AssertionError, match="differs from the oracle"):
        kernel_runs.measure(case)
