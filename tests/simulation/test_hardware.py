"""Presets against measurements and data sheets, and files that are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conflux_jax.config import ConfigError
from conflux_jax.simulation.hardware import Hardware, load_hardware, preset

MIB = 1 << 20


@pytest.fixture(scope="module")
def h100() -> Hardware:
    return preset("h100")


def test_the_h100_is_near_what_was_measured(h100: Hardware):
    """Rows of the table that `source` names, in microseconds."""
    measured_us = {
        h100.gemm_s(4096, 5120, 5120): 280.0,
        h100.gemm_s(1, 5120, 16384): 60.0,
        h100.gemm_s(512, 7168, 5120): 54.0,
        h100.prefill_attention_s([(0, 8192)], 10): 309.7,
        h100.decode_attention_s(32, 32 * 8192, 8): 354.4,
        h100.all_to_all_s(32 * MIB, 4): 110.9,
        h100.all_reduce_s(16 * MIB, 8): 121.9,
        h100.all_gather_s(16 * MIB, 2): 56.0,
        h100.reduce_scatter_s(16 * MIB, 4): 59.3,
    }
    errors = {us: abs(seconds * 1e6 / us - 1) for seconds, us in measured_us.items()}
    assert len(errors) == 9
    assert {us: error for us, error in errors.items() if error > 0.15} == {}


def test_no_figure_is_beyond_the_data_sheet(h100: Hardware):
    assert h100.gemm.flops_s <= 989e12
    assert max(h100.gemm.memory_bytes_s, h100.gemm.few_rows_bytes_s) <= 3.35e12
    assert h100.decode.memory_bytes_s <= 3.35e12
    # A tile is two products of 128 x 128 x 128; all SMs together stay below the peak.
    assert h100.sms * 4 * 128**3 / h100.prefill.tile_s <= 989e12
    # What leaves a GPU in an all-to-all passes its links, 450e9 bytes/s one way.
    for gpus, figures in h100.collectives["all_to_all"].items():
        assert figures.bytes_s * (gpus - 1) / gpus <= 450e9


def test_other_gpus_differ_by_their_peaks(h100: Hardware):
    h200, a100 = preset("h200"), preset("a100")
    assert h200.memory_bytes == 141e9 and h200.sms == h100.sms
    long = [gpu.decode_attention_s(64, 64 * 100_000, 8) for gpu in (h100, h200, a100)]
    assert long[0] / long[1] == pytest.approx(4.8 / 3.35, rel=0.01)
    assert long[2] / long[0] == pytest.approx(3.35 / 2.039, rel=0.01)
    prompt = [gpu.prefill_attention_s([(0, 65_536)], 40) for gpu in (h100, h200, a100)]
    assert prompt[0] == prompt[1]
    assert prompt[2] / prompt[0] == pytest.approx(989 / 312, rel=0.01)
    sent = [gpu.all_to_all_s(1e10, 4) for gpu in (h100, h200, a100)]
    assert sent[0] == sent[1] and sent[2] / sent[0] == pytest.approx(1.5, rel=0.01)
    assert "not fitted" in a100.source and a100.gemm.start_s == h100.gemm.start_s


def test_decode_gets_just_enough_sms(h100: Hardware):
    sms = h100.decode_sms
    assert sms % h100.sm_grain == 0 and 0 < sms < h100.sms / 2
    assert h100.memory_share(sms) >= 0.9 > h100.memory_share(sms - h100.sm_grain)
    whole, part = (h100.decode_attention_s(32, 32 * 8192, 8, n) for n in (None, sms))
    assert whole < part <= whole / 0.85


def test_fewer_sms_take_longer(h100: Hardware):
    for call in (
        lambda sms: h100.gemm_s(4096, 5120, 5120, sms),
        lambda sms: h100.gemm_s(4, 5120, 5120, sms),
        lambda sms: h100.prefill_attention_s([(8192, 4096)], 40, sms),
        lambda sms: h100.elementwise_s(1e8, sms),
    ):
        seconds = [call(sms) for sms in (8, 32, 64, 100, 132)]
        assert sorted(seconds, reverse=True) == seconds and seconds[0] > seconds[-1]
        assert call(None) == seconds[-1]


def test_collectives_have_a_floor_and_need_more_than_one_gpu(h100: Hardware):
    for name in ("all_reduce_s", "all_gather_s", "all_to_all_s", "reduce_scatter_s"):
        call = getattr(h100, name)
        assert call(MIB, 1) == call(0, 4) == 0
        floors = [call(1, gpus) for gpus in (2, 4, 8)]
        assert all(5e-6 < floor < 20e-6 for floor in floors)
        # Numbers of GPUs that were not measured lie between those that were, or beyond.
        for size in (1, MIB, 256 * MIB):
            four, six, eight = (call(size, gpus) for gpus in (4, 6, 8))
            assert min(four, eight) < six < max(four, eight)
            assert call(size, 16) >= call(size, 8)


def test_a_send_moves_its_bytes_over_one_link(h100: Hardware):
    assert h100.send_s(1e9) == h100.all_to_all_s(2e9, 2) > 1e9 / 450e9


def test_nothing_takes_no_time(h100: Hardware):
    assert h100.gemm_s(0, 5120, 5120) == 0
    assert h100.prefill_attention_s([], 10) == 0
    assert h100.decode_attention_s(0, 0, 8) == 0
    assert h100.elementwise_s(0) == 0


def test_a_written_file_reads_back(h100: Hardware, tmp_path: Path):
    path = tmp_path / "gpu.json"
    path.write_text(h100.to_json())
    assert load_hardware(str(path)) == h100 == load_hardware("h100")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format: must be 1"),
        ({"sms": 0}, "sms: must be a number above 0, got 0"),
        ({"sms": 13.5}, "sms: must be an integer, got 13.5"),
        ({"contention": -0.1}, "contention: must be a number of at least 0, got -0.1"),
        ({"name": 5}, "name: must be a string, got 5"),
        ({"gemm": 5}, "gemm: must be an object, got 5"),
        ({"gemm": {"flops_s": 1}}, "gemm.few_rows_bytes_s: missing"),
        ({"warp": 32}, "warp: no such number"),
        ({"collectives": {"all_reduce": {}}}, "collectives.all_gather: missing"),
    ],
)
def test_a_wrong_file_is_named_with_the_field(
    change: dict[str, object], message: str, h100: Hardware, tmp_path: Path
):
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(json.loads(h100.to_json()) | change))
    with pytest.raises(ConfigError) as error:
        load_hardware(str(path))
    assert str(path) in str(error.value) and message in str(error.value)


def test_wrong_figures_inside_are_named_too(h100: Hardware):
    document = json.loads(h100.to_json())
    document["collectives"]["all_reduce"]["4"]["bytes_s"] = "fast"
    with pytest.raises(ConfigError, match=r"all_reduce\.4\.bytes_s: .* got 'fast'"):
        Hardware.from_json(json.dumps(document))
    document["collectives"]["all_reduce"] = {"4": {}}
    with pytest.raises(ConfigError, match=r"^collectives\.all_reduce: must have figures of two"):
        Hardware.from_json(json.dumps(document))
    with pytest.raises(ConfigError, match="not JSON"):
        Hardware.from_json("{")


def test_unknown_hardware_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="one of h100, h200, a100 or a file, got 'b200'"):
        load_hardware("b200")
    with pytest.raises(ConfigError, match=r"none\.json"):
        load_hardware(str(tmp_path / "none.json"))
