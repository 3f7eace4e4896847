"""Settings: one tree, three ways in (keywords, YAML, flags), one set of rules."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest
import yaml

from conflux_jax.config import Config, ConfigError


def from_flags(*flags: str) -> Config:
    parser = argparse.ArgumentParser()
    Config.add_arguments(parser)
    return Config.from_arguments(parser.parse_args(flags))


def leaf_names() -> list[str]:
    config = Config()
    sections = (getattr(config, section.name) for section in dataclasses.fields(config))
    return [leaf.name for section in sections for leaf in dataclasses.fields(section)]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    return path


def test_leaf_names_are_unique_and_described():
    names = leaf_names()
    assert len(set(names)) == len(names) > 20
    parser = argparse.ArgumentParser()
    Config.add_arguments(parser)
    text = parser.format_help()
    assert all("--" + name.replace("_", "-") in text for name in names)


def test_flat_keywords_reach_their_section():
    config = Config.from_flat(sp=3, page_tokens=32, rows_ladder=[8, 64], port=0)
    assert config.mesh.sp == 3 and config.mesh.tp == 1
    assert config.cache.page_tokens == 32 and config.server.port == 0
    assert config.scheduler.rows_ladder == (8, 64)
    changed = Config.from_flat(config, sp=2)
    assert changed.mesh.sp == 2 and changed.cache.page_tokens == 32
    assert config.mesh.sp == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.mesh.sp = 4  # pyright: ignore[reportAttributeAccessIssue]


def test_an_unknown_keyword_is_named():
    with pytest.raises(ConfigError, match=r"max_seqs: no such setting; known: .*max_num_seqs"):
        Config.from_flat(max_seqs=3)


WRONG = [
    ({"sp": 0}, "sp: must be at least 1, got 0"),
    ({"sp": 1.5}, "sp: must be int, got 1.5"),
    ({"sp": True}, "sp: must be int, got True"),
    ({"sp": None}, "sp: must be int, got None"),
    ({"sp": "3"}, "sp: must be int, got '3'"),
    ({"model": 3}, "model: must be str, got 3"),
    ({"dtype": "int8"}, "dtype: must be one of bfloat16, float32, got 'int8'"),
    ({"port": 65536}, "port: must be at most 65535, got 65536"),
    ({"drain_s": -0.5}, "drain_s: must be at least 0.0, got -0.5"),
    ({"gpu_memory_fraction": 1.01}, "gpu_memory_fraction: must be at most 1.0, got 1.01"),
    ({"gpu_memory_fraction": float("nan")}, "gpu_memory_fraction: must be at least 0.05, got nan"),
    ({"max_streams": 10**7}, "max_streams: must be at most 1000000, got 10000000"),
    ({"auth_token_file": "a\0b"}, r"auth_token_file: must have no NUL character, got 'a\x00b'"),
    ({"max_model_len": 0}, "max_model_len: must be at least 1, got 0"),
    ({"bucket_growth": 1.0}, "bucket_growth: must be at least 1.01, got 1.0"),
    ({"max_bypass": -1}, "max_bypass: must be at least 0, got -1"),
    ({"rows_ladder": []}, "rows_ladder: must be rising integers"),
    ({"rows_ladder": [8, 4]}, "rows_ladder: must be rising integers"),
    ({"rows_ladder": [8, 8]}, "rows_ladder: must be rising integers"),
    ({"rows_ladder": [0, 8]}, "rows_ladder: must be rising integers"),
    ({"rows_ladder": [1, 2.5]}, "rows_ladder: must be rising integers"),
    ({"decode_rows_ladder": 8}, "decode_rows_ladder: must be rising integers"),
]


@pytest.mark.parametrize(("values", "words"), WRONG)
def test_wrong_values_name_field_and_rule(values, words):
    with pytest.raises(ConfigError) as error:
        Config.from_flat(**values)
    assert words in str(error.value)


def test_optional_settings_may_be_none_and_integers_serve_as_floats():
    config = Config.from_flat(max_model_len=None, rows_ladder=None, drain_s=5, bucket_growth=None)
    assert config.model.max_model_len is None and config.server.drain_s == 5


def test_yaml_is_the_same_tree(tmp_path):
    path = write(
        tmp_path,
        "mesh:\n  sp: 3\nscheduler:\n  rows_ladder: [32, 128]\n  max_num_seqs: 16\n"
        "server:\n  # port: 1\n",
    )
    expected = Config.from_flat(sp=3, rows_ladder=(32, 128), max_num_seqs=16)
    assert Config.from_yaml(path) == expected
    assert Config.from_yaml(write(tmp_path, "")) == Config()


def test_a_whole_config_survives_yaml(tmp_path):
    config = Config.from_flat(sp=2, dtype="float32", rows_ladder=(8, 16), kv_pool_tokens=4096)
    tree = dataclasses.asdict(config)
    tree["scheduler"]["rows_ladder"] = list(config.scheduler.rows_ladder or ())
    assert Config.from_yaml(write(tmp_path, yaml.safe_dump(tree))) == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("meshes:\n  sp: 3\n", "meshes: no such section; known: cache, execution, mesh, model"),
        ("mesh:\n  sq: 3\n", "mesh.sq: no such setting"),
        ("mesh:\n  page_tokens: 3\n", "mesh.page_tokens: no such setting"),
        ("mesh:\n  1: 3\n  x: 4\n", "mesh.1: no such setting"),
        ("mesh: 3\n", "mesh: must hold settings, got 3"),
        ("mesh:\n  sp: 0\n", "sp: must be at least 1, got 0"),
        ("mesh:\n  sp: three\n", "sp: must be int, got 'three'"),
        ("- mesh\n", "must hold sections, got list"),
        ("mesh: [\n", "while parsing"),
        ("mesh:\n  sp: " + "9" * 5000, "Exceeds the limit"),
        ("mesh: " + "[" * 5000, "recursion"),
    ],
)
def test_yaml_errors_name_the_file(tmp_path, text, words):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        Config.from_yaml(path)
    assert str(error.value).startswith(f"{path}: ") and words in str(error.value)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.yaml.*No such file"):
        Config.from_yaml(tmp_path / "nothing.yaml")
    binary = tmp_path / "model.gguf"
    binary.write_bytes(b"GGUF\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match=r"model\.gguf"):
        Config.from_yaml(binary)


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = write(tmp_path, "mesh:\n  sp: 3\ncache:\n  page_tokens: 32\n")
    config = from_flags("--config", str(path), "--sp", "2", "--rows-ladder", "8", "64")
    assert (config.mesh.sp, config.cache.page_tokens) == (2, 32)
    assert config.scheduler.rows_ladder == (8, 64)
    assert config.scheduler.max_num_seqs == Config().scheduler.max_num_seqs
    assert from_flags() == Config()


def test_every_leaf_has_a_flag_that_takes_its_kind():
    config = from_flags(
        "--model", "some/dir", "--dtype", "float32", "--gpu-memory-fraction", "0.5",
        "--max-model-len", "128", "--drain-s", "1.5", "--port", "0",
    )  # fmt: skip
    assert config.model.model == "some/dir" and config.model.dtype == "float32"
    assert config.cache.gpu_memory_fraction == 0.5 and config.model.max_model_len == 128
    assert config.server.drain_s == 1.5 and config.server.port == 0


def test_a_flag_of_yes_or_no_takes_no_value(tmp_path):
    assert not from_flags().server.log_prompts
    assert from_flags("--log-prompts").server.log_prompts
    path = write(tmp_path, "server:\n  log_prompts: true\n")
    assert from_flags("--config", str(path)).server.log_prompts
    assert not from_flags("--config", str(path), "--no-log-prompts").server.log_prompts
    with pytest.raises(ConfigError, match="log_prompts: must be bool, got 1"):
        Config.from_flat(log_prompts=1)


def test_flags_of_a_wrong_kind_or_value_are_refused(capsys):
    with pytest.raises(SystemExit):
        from_flags("--sp", "three")
    assert "--sp" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        from_flags("--dtype", "int8")
    with pytest.raises(ConfigError, match="sp: must be at least 1"):
        from_flags("--sp", "0")


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.yaml")), ids=str)
def test_the_files_of_the_project_load(path):
    assert Config.from_yaml(path) != Config()
