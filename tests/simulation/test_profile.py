"""A profile as what traffic is held against, from the file to the numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conflux_jax import traffic
from conflux_jax.config import ConfigError
from conflux_jax.plan import Bucket
from conflux_jax.scheduler.latency_model import Curve, IterationShape, LatencyModel
from conflux_jax.simulation.profile import Profile, load_profile

IDENTITY = {
    "model": "a-model",
    "dtype": "bfloat16",
    "sp": 2,
    "tp": 1,
    "max_model_len": 128,
    "device_kind": "a device",
    "rows_ladder": [16, 32],
    "decode_rows_ladder": [4, 8],
}
FREE = Curve((1,), (0.0,))
# 0.5 s an iteration of up to 16 rows and 1 s one of 32; nothing else costs anything.
MODEL = LatencyModel(
    IDENTITY,
    2,
    1,
    Curve((16, 32), (0.5, 1.0)),
    FREE,
    0.0,
    FREE,
    0.0,
    0.0,
    0.0,
    0.0,
    FREE,
    0.0,
    0.0,
    0.0,
)
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:00,128,1\n"


class LastShape:
    """A predictor that tells what it was asked."""

    shape: IterationShape

    def predict_s(self, shape: IterationShape) -> float:
        self.shape = shape
        return 1.0


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    MODEL.save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


@pytest.mark.parametrize(
    ("groups", "bucket", "work", "priced", "priced_work"),
    [
        (2, Bucket(9, 0, True, True), 600, Bucket(16, 0, True, True), 600),
        # Among 4 groups instead of 2 each has half of the work, among 1 twice as much.
        (4, Bucket(17, 3, True, True), 600, Bucket(32, 3, True, True), 300),
        (1, Bucket(33, 0, True, False), 600, Bucket(33, 0, True, False), 1200),
        (2, Bucket(5, 5, False, False), 0, Bucket(8, 8, False, False), 0),
        (2, Bucket(9, 9, False, False), 0, Bucket(9, 9, False, False), 0),
    ],
)
def test_what_runs_is_priced(
    groups: int, bucket: Bucket, work: int, priced: Bucket, priced_work: int
):
    model = LastShape()
    predictor = Profile(model, 2, (16, 32), (4, 8)).predictor(groups)
    assert predictor.predict_s(IterationShape(bucket, 7, prefill_work=work)) == 1.0
    assert model.shape == IterationShape(priced, 7, prefill_work=priced_work)


def test_the_command_with_a_profile(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "trace.csv").write_text(TRACE)
    out = tmp_path / "numbers.json"
    arguments = [str(tmp_path / "trace.csv"), "--profile", str(saved), "--rate", "1"]
    assert traffic.main([*arguments, "--tbt-slo-s", "0.6", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("a-model (bfloat16) on 2 x a device: 2 groups of 1;")
    assert "measured with 2 groups" in printed and "estimates" not in printed
    assert "CPU" not in printed
    numbers = json.loads(out.read_text())
    # 128 tokens: chunks of 64 on two groups of 32 rows, of 32 on one, 1 s each. Two seconds allow
    # two chunks.
    assert numbers["p95_prefill_all_groups_s"] == 2.0
    assert numbers["p95_prefill_one_group_s"] == 4.0
    assert numbers["gpus_for_p95"] == 2
    assert numbers["decode_iteration_s"] == 0.5
    # 16 rows, one of them a decode: more take 1 s.
    assert numbers["filled_prefill_tokens"] == 2 * 15
    assert numbers["capacity_prompt_tokens_s"] == 30 / 0.5
    assert "decodes_in_memory" not in numbers
    assert numbers["requests_too_long"] == 1.0  # 128 and one more, of 128


def test_devices_that_share_a_cpu_are_named(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    document = json.loads(saved.read_text())
    document["identity"]["cores"] = 2
    saved.write_text(json.dumps(document))
    (tmp_path / "trace.csv").write_text(TRACE)
    arguments = [str(tmp_path / "trace.csv"), "--profile", str(saved), "--rate", "1"]
    assert traffic.main(arguments) == 0
    assert "share the cores of one CPU" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("flag", [["--model", "qwen3-14b"], ["--gpu", "h100"], ["--tp", "2"]])
def test_what_a_profile_says_is_no_flag(
    flag: list[str], saved: Path, capsys: pytest.CaptureFixture[str]
):
    assert traffic.main(["trace", "--profile", str(saved), *flag]) == 2
    assert f"leave out {flag[0]} or --profile" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sp": None}, "identity.sp: must be of type int, not empty, got None"),
        ({"rows_ladder": []}, "identity.rows_ladder"),
        ({"decode_rows_ladder": 4}, "identity.decode_rows_ladder"),
        ({"device_kind": 4}, "identity.device_kind"),
    ],
)
def test_a_profile_that_lacks_something_is_named(change: dict[str, Any], message: str, saved: Path):
    document = json.loads(saved.read_text())
    document["identity"] |= change
    saved.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=message) as raised:
        load_profile(saved)
    assert str(saved) in str(raised.value)


def test_what_is_no_profile_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"profile .*missing"):
        load_profile(tmp_path / "missing")
    (tmp_path / "broken").write_text("{")
    with pytest.raises(ConfigError, match="broken: not JSON"):
        load_profile(tmp_path / "broken")
