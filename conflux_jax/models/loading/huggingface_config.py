"""config.json and generation_config.json of a Hugging Face directory, as a ModelSpec."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conflux_jax.models.loading.tensors import check_spec
from conflux_jax.models.spec import ModelError, ModelSpec, RopeScaling

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_DEFAULT_THETA = 10000.0


@dataclass(frozen=True)
class _Family:
    """What transformers assumes where config.json says nothing."""

    qk_norm: bool
    max_position_embeddings: int
    head_dim: int | None  # None: hidden_size / num_attention_heads


_FAMILIES = {
    "LlamaForCausalLM": _Family(False, 2048, None),
    "Qwen3ForCausalLM": _Family(True, 32768, 128),
}
_BY_MODEL_TYPE = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Fields that change the arithmetic; only these values (or no value) are computed as they ask.
_NEUTRAL = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "compression_config": None,
}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


def read_spec(directory: Path) -> ModelSpec:
    """Raises ModelError, naming file and field, for what is missing, wrong or not supported."""
    config = _Fields(directory / _CONFIG, read_json(directory / _CONFIG))
    family = _family(config)
    for field, neutral in _NEUTRAL.items():
        value = config.values.get(field)
        if value is not None and value != neutral:
            shown = "this" if isinstance(value, Mapping) else repr(value)
            raise config.fail(field, f"{shown} is not supported")
    for kind in config.values.get("layer_types") or ():
        if kind != "full_attention":
            raise config.fail("layer_types", f"{kind!r} is not supported, only 'full_attention'")
    max_positions = config.integer("max_position_embeddings", family.max_position_embeddings)
    num_heads = config.integer("num_attention_heads")
    theta, scaling = _rope(config, max_positions)
    spec = ModelSpec(
        name=directory.resolve().name,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=_head_dim(config, family, num_heads),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        max_position_embeddings=max_positions,
        tie_word_embeddings=config.values.get("tie_word_embeddings") is True,
        rope_scaling=scaling,
        qk_norm=family.qk_norm,
        eos_token_ids=eos_token_ids(directory),
    )
    check_spec(spec, str(config.path))
    return spec


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """The ids that end an answer: generation_config.json's where it names any (chat models often
    list several there), else config.json's."""
    for name in (_GENERATION, _CONFIG):
        path = directory / name
        if not path.is_file():
            continue
        value = read_json(path).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(token_id) is not int for token_id in ids):
            raise ModelError(f"{path}: eos_token_id: must be integers, got {value!r}")
        if ids:
            return tuple(dict.fromkeys(ids))
    return ()


@dataclass(frozen=True)
class _Fields:
    """A JSON object that names its file and field when a value is not what it must be."""

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""

    def fail(self, field: str, message: str) -> ModelError:
        return ModelError(f"{self.path}: {self.prefix}{field}: {message}")

    def integer(self, field: str, default: int | None = None) -> int:
        value = self._present(field, default)
        if type(value) is not int:
            raise self.fail(field, f"must be an integer, got {value!r}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        value = self._present(field, default)
        if type(value) not in (int, float):
            raise self.fail(field, f"must be a number, got {value!r}")
        return float(value)

    def _present(self, field: str, default: Any) -> Any:
        value = self.values.get(field)
        value = default if value is None else value
        if value is None:
            raise self.fail(field, "this field is missing")
        return value


def _family(config: _Fields) -> _Family:
    names = config.values.get("architectures")
    model_type = config.values.get("model_type")
    if not names and isinstance(model_type, str) and model_type in _BY_MODEL_TYPE:
        names = [_BY_MODEL_TYPE[model_type]]
    if not isinstance(names, list) or len(names) != 1 or names[0] not in _FAMILIES:
        raise config.fail("architectures", f"must be one of {', '.join(_FAMILIES)}, got {names!r}")
    return _FAMILIES[names[0]]


def _head_dim(config: _Fields, family: _Family, num_heads: int) -> int:
    if config.values.get("head_dim") is not None or family.head_dim is not None:
        return config.integer("head_dim", family.head_dim)
    hidden_size = config.integer("hidden_size")
    if num_heads < 1 or hidden_size % num_heads:
        raise config.fail("head_dim", f"is missing, and {hidden_size}/{num_heads} is no integer")
    return hidden_size // num_heads


def _rope(config: _Fields, max_positions: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from any of the forms that transformers has written:

    - `rope_theta` beside `rope_scaling`: null or {"rope_type": "llama3", ...};
    - the same with the older key "type";
    - since version 5 `rope_parameters`: {"rope_theta": ..., "rope_type": ..., ...}, also one
      such object for each attention type, of which only "full_attention" exists here.
    """
    field = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    values = config.values.get(field) or {}
    if isinstance(values, Mapping) and "full_attention" in values:
        field, values = field + ".full_attention", values["full_attention"]
    if not isinstance(values, Mapping):
        raise config.fail(field, f"must be an object or null, got {values!r}")
    rope = _Fields(config.path, values, field + ".")
    theta = rope.number("rope_theta", config.number("rope_theta", _DEFAULT_THETA))
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.fail("partial_rotary_factor", "partial rotary positions are not supported")
    kind_field = "rope_type" if "rope_type" in values else "type"
    kind = values.get(kind_field, "default")
    if kind in ("default", None):
        return theta, None
    if kind != "llama3":
        raise rope.fail(kind_field, f"{kind!r} is not supported, only 'default' and 'llama3'")
    original = "original_max_position_embeddings"
    scaling = RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=(
            config.integer(original)
            if config.values.get(original) is not None
            else rope.integer(original, max_positions)
        ),
    )
    if not scaling.factor >= 1:
        raise rope.fail("factor", f"must be at least 1, got {scaling.factor}")
    if not 0 < scaling.low_freq_factor < scaling.high_freq_factor:
        raise rope.fail("high_freq_factor", "must be above low_freq_factor, and that above 0")
    return theta, scaling
