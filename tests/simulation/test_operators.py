"""Forms with known answers, and that none falls when a size rises."""

from __future__ import annotations

import numpy as np
import pytest

from conflux_jax.simulation.operators import (
    Collective,
    DecodeAttention,
    Gemm,
    PrefillAttention,
    chunk_tiles,
    memory_share,
    prefill_tiles,
)

SMS = 100
# Sharp, so that the slower of two things counts alone. 1e12 FLOP/s and memory that never counts;
# memory of 1e9 bytes/s and products that never count.
GEMM = Gemm(1e-3, 1e12, 1e-9, 1e-9, 1.0, 1e15, 1e15, 1.0, 200.0)
READING = Gemm(1e-3, 1e18, 1e-12, 1e-9, 1.0, 1e9, 2e9, 1.0, 200.0)
PREFILL = PrefillAttention(1e-3, 1e-4, 1e-9, 200.0)
DECODE = DecodeAttention(1e-3, 1e9, 1e-9, 1e6, 2e9, 1e-6, 200.0)


def rising(sizes: np.ndarray) -> bool:
    return bool(np.all(np.diff(sizes) >= 0)) and sizes[-1] > sizes[0]


def test_a_large_product_runs_at_the_plateau():
    # 100 tiles of 128 x 256 fill 100 SMs exactly: no waste, so FLOPs over the rate.
    m, n, k = 1280, 2560, 10_000_000
    expected = 1e-3 + 2 * m * n * k / 1e12
    assert GEMM.seconds(m, n, k, SMS, SMS) == pytest.approx(expected, rel=1e-3)


def test_half_of_the_sms_take_twice_as_long():
    whole = GEMM.seconds(1280, 2560, 10**7, SMS, SMS) - GEMM.start_s
    half = GEMM.seconds(1280, 2560, 10**7, SMS // 2, SMS) - GEMM.start_s
    assert half == pytest.approx(2 * whole)


def test_a_partly_filled_wave_costs_a_whole_one():
    # 101 tiles of 128 x 256 or more of the smaller ones: two waves of the largest, as 200 would.
    one = GEMM.seconds(1280, 2560, 10**7, SMS, SMS) - GEMM.start_s
    two = GEMM.seconds(1280 + 1280, 2560, 10**7, SMS, SMS) - GEMM.start_s
    some = GEMM.seconds(1280 + 640, 2560, 10**7, SMS, SMS) - GEMM.start_s
    assert two == pytest.approx(2 * one)
    assert 1.5 * one <= some <= two


def test_a_few_rows_wait_for_the_weights():
    # 1,000 x 1,000 weights of 2 bytes, and 1,000 numbers in and out, at 2e9 bytes/s.
    expected = 1e-3 + 2 * (1_000_000 + 2_000) / 2e9
    assert READING.seconds(1, 1000, 1000, SMS, SMS) == pytest.approx(expected)
    # Beyond the few, at 1e9; on SMs that draw half of the bandwidth, twice as long.
    slow = 2 * (1_000_000 + 9 * 2_000) / 1e9
    assert READING.seconds(9, 1000, 1000, SMS, SMS) == pytest.approx(1e-3 + slow)
    assert READING.seconds(9, 1000, 1000, SMS, SMS, 0.5) == pytest.approx(1e-3 + 2 * slow)


def test_tiles_of_chunks_add_up_to_those_of_the_prompt():
    whole = prefill_tiles([(0, 4096)], 8)
    parts = [prefill_tiles([chunk], 8) for chunk in ((0, 1024), (1024, 2048), (3072, 1024))]
    assert sum(part.tiles for part in parts) == whole.tiles == 8 * 32 * 33 / 2
    assert sum(part.blocks for part in parts) == whole.blocks == 8 * 32
    assert max(part.longest for part in parts) == whole.longest == 32
    assert prefill_tiles([(0, 1024), (1024, 2048), (3072, 1024)], 8) == whole
    assert chunk_tiles(1024, 2048, 8) == parts[1]


def test_prefill_attention_lasts_as_long_as_its_mean_or_its_longest_block():
    # 10,000 tiles on 100 SMs are 100 each; a block of 300 lasts longer.
    assert PREFILL.seconds(10_000, 1000, 50, SMS) == pytest.approx(1e-3 + 100 * 1e-4)
    assert PREFILL.seconds(10_000, 1000, 300, SMS) == pytest.approx(1e-3 + 300 * 1e-4)
    # 20 blocks on 100 SMs: five share the keys of each.
    assert PREFILL.seconds(20 * 300, 20, 300, SMS) == pytest.approx(1e-3 + 60 * 1e-4, rel=0.01)


def test_doubling_bandwidth_halves_a_memory_bound_decode():
    slow = DECODE.seconds(4, 1e8, 8, SMS) - DECODE.start_s
    fast = DECODE.seconds(4, 1e8, 8, SMS, memory=2.0) - DECODE.start_s
    assert slow == pytest.approx(1e8 / 1e9)
    assert slow == pytest.approx(2 * fast, rel=1e-6)


def test_many_short_decodes_wait_for_pieces_of_work():
    # 50,000 rows of 8 KV heads at a microsecond on 100 SMs: 4 ms; their KV takes 1 ms.
    assert DECODE.seconds(50_000, 1e6, 8, SMS) == pytest.approx(1e-3 + 4e-3)


def test_kv_read_just_before_comes_from_the_cache():
    cold, warm = DECODE.seconds(1, 1e5, 1, SMS), DECODE.seconds(1, 1e5, 1, SMS, cached=True)
    assert warm - 1e-3 == pytest.approx(1e5 / 2e9) and cold - 1e-3 == pytest.approx(1e5 / 1e9, 1e-4)
    large = [DECODE.seconds(1, 1e8, 1, SMS, cached=cached) for cached in (False, True)]
    assert large[0] == pytest.approx(large[1])


def test_a_collective_has_a_floor_and_a_bandwidth():
    collective = Collective(1e-5, 2e-5, 1e6, 1e9)
    assert collective.seconds(1) == pytest.approx(1e-5, rel=1e-3)
    assert collective.seconds(1e6) == pytest.approx(1e-5 + 1e-5 + 1e-3)  # half of the switch
    assert collective.seconds(1e12) == pytest.approx(1e3, rel=1e-6)


def test_bandwidth_bends_before_all_sms_have_it():
    # Alone, SMs draw 1 each; memory gives 25.
    shares = np.array([memory_share(sms, 1.0, 25.0) for sms in range(1, 101)])
    assert rising(shares) and shares[-1] < 1
    assert shares[4] == pytest.approx(5 / 25, rel=1e-3)
    assert shares[49] > 0.98  # twice as many as would do: nearly all of it


@pytest.mark.parametrize("size", range(3))
def test_products_never_get_cheaper_by_growing(size: int):
    gemm = Gemm(3e-6, 9e14, 2e-6, 0.3, 2e-4, 2.8e12, 2.9e12, 2.0, 6.0)
    for fixed in (100, 1000, 5120):
        sizes = [np.full(3000, fixed) for _ in range(3)]
        sizes[size] = np.arange(1, 3001) * (1 if size == 0 else 8)
        m, n, k = sizes
        assert rising(gemm.seconds(m, n, k, np.array(132), 132))


def test_attention_and_collectives_never_get_cheaper_by_growing():
    lengths = np.arange(1, 8193)
    prefill = PrefillAttention(7e-6, 1.6e-6, 6e-6, 3.6)
    for heads, start in ((5, 0), (10, 30_000), (40, 0)):
        tiles = chunk_tiles(np.full_like(lengths, start), lengths, heads)
        # Sharing a block's keys ends where there are enough blocks: more blocks, no more sharing.
        assert rising(prefill.seconds(*tiles, np.array(132)))
    decode = DecodeAttention(1e-5, 3.2e12, 1e-5, 5e7, 3.6e12, 3.6e-6, 1.8)
    for rows in (1, 100):
        assert rising(decode.seconds(rows, np.arange(1, 2000) * 1e6, 8, 132))
    assert rising(decode.seconds(np.arange(1, 2000), 1e9, 8, 132))
    assert rising(Collective(1e-5, 5e-5, 1e6, 3e11).seconds(np.geomspace(1, 1e9, 1000)))
