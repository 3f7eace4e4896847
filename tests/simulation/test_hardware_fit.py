"""A fit finds the figures that a table was made with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import hardware as command
from conflux_jax.config import ConfigError
from conflux_jax.simulation.hardware import Hardware, load_hardware, preset
from conflux_jax.simulation.hardware_fit import COLLECTIVES, read_tables

H100 = preset("h100")
HEADER = "op,source,a,b,c,d,latency_ms\n"


def written(path: Path, lines: list[str]) -> Path:
    path.write_text(HEADER + "\n".join(lines) + "\n")
    return path


def reference(gpu: Hardware) -> list[str]:
    """A table of a GPU that is exactly as the forms say, and rows that are none of the fit's."""
    lines = ["gemm_fp8,x,m=1,n=64,k=64,,0.001"]
    for m in (1, 8, 16, 128, 256, 1024, 4096, 16384):
        for n in (1024, 2048, 5120, 16384):
            for k in (1024, 4096, 16384):
                seconds = gpu.gemm.seconds(m, n, k, gpu.sms, gpu.sms)
                lines.append(f"gemm_bf16,x,m={m},n={n},k={k},,{seconds * 1e3}")
    for s in (16, 256, 1024, 2048, 4096, 8192, 16384):
        for heads in (1, 4, 10, 40):
            ms = gpu.prefill_attention_s([(0, s)], heads) * 1e3
            lines.append(f"attn_prefill_causal_hd128,x,b=1,s={s},hq={heads},hkv=1,{ms}")
    for b in (1, 8, 64, 512):
        for s in (16, 256, 1024, 4096, 16384):
            for heads in (1, 8):
                kv_bytes = b * s * heads * 512
                seconds = gpu.decode.seconds(b, kv_bytes, heads, gpu.sms, cached=True)
                lines.append(f"attn_decode_hd128,x,b={b},s={s},hq=40,hkv={heads},{seconds * 1e3}")
    for name, op in COLLECTIVES.items():
        for gpus in (2, 4):
            for power in range(9, 29):
                seconds = gpu.collective_s(name, 2**power, gpus)
                lines.append(f"{op},x,gpus={gpus},bytes={2**power},,,{seconds * 1e3}")
    return lines


def test_figures_are_found_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A GPU of other figures than the committed ones, so that they are not what the fit began
    with: memory half as fast, links a third slower, products and tiles slower by a fifth."""
    gpu = H100.scaled("slow", source="made up", memory=0.5, link=0.67, flops=0.8)
    table = written(tmp_path / "table.csv", reference(gpu))
    out, errors = tmp_path / "gpu.json", tmp_path / "errors.json"
    arguments = ["--reference", str(table), "--write", str(out), "--json", str(errors)]
    assert command.main([*arguments, "--source", "made up"]) == 0
    shown = capsys.readouterr().out
    documents = json.loads(errors.read_text())
    assert len(documents) == 3 + len(COLLECTIVES)
    for document in documents:
        assert document["operator"] in shown
        assert document["median"] < 0.01 and document["worst"] < 0.08, document
    found = load_hardware(str(out))
    assert found.source == "made up"
    # Sizes that are in no row.
    assert found.gemm_s(2048, 3072, 3072) == pytest.approx(gpu.gemm_s(2048, 3072, 3072), rel=0.05)
    long = (48, 48 * 5000, 4)
    assert found.decode_attention_s(*long) == pytest.approx(gpu.decode_attention_s(*long), rel=0.05)
    assert found.all_to_all_s(3e6, 4) == pytest.approx(gpu.all_to_all_s(3e6, 4), rel=0.05)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("gemm_bf16,x,m=1,n=64,j=64,,0.1", ":2: column c: must be k=NUMBER, got 'j=64'"),
        ("gemm_bf16,x,m=1,n=64,k=many,,0.1", ":2: could not convert string to float: 'many'"),
        ("gemm_bf16,x,m=1,n=64,k=64,,-0.1", ":2: sizes and latency_ms must be positive"),
        ("gemm_bf16,x,m=1,n=64", ":2: column c: must be k=NUMBER, got ''"),
        ("gemm_bf16,x,m=1,n=64,k=64,,0.1", ": has no rows of op attn_prefill_causal_hd128"),
    ],
)
def test_a_wrong_table_is_named_with_the_line(row: str, message: str, tmp_path: Path):
    path = written(tmp_path / "table.csv", [row])
    with pytest.raises(ConfigError) as error:
        read_tables(path)
    assert str(error.value).startswith(f"{path}{message}")


def test_a_missing_table_is_an_error_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert command.main(["--reference", str(tmp_path / "none.csv")]) == 2
    assert "none.csv" in capsys.readouterr().err
