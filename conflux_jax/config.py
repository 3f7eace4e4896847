"""Every setting, once: this dataclass tree is the YAML files in `configs/`, the command-line flags
and the keywords of `LLM(...)`. Leaf names are unique in the tree, so a flat keyword names one.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


class ConfigError(ValueError):
    """A setting that cannot work; the message names the field and the rule."""


def _setting(default: Any, help: str, **limits: Any) -> Any:
    return field(default=default, metadata={"help": help, **limits})


@dataclass(frozen=True)
class ModelOptions:
    model: str = _setting(
        "smollm2-135m-instruct",
        "a known name, a Hugging Face directory, a .gguf file or a converted directory",
    )
    served_model_name: str | None = _setting(
        None, "name that clients use (default: from the model)"
    )
    dtype: str = _setting("bfloat16", "weights and activations", choices=("bfloat16", "float32"))
    max_model_len: int | None = _setting(
        None, "most tokens of prompt plus output (default: the model's)", low=1
    )


@dataclass(frozen=True)
class MeshConfig:
    sp: int = _setting(1, "groups that share each prompt's attention", low=1)
    tp: int = _setting(1, "devices inside a group that split the weights", low=1)


@dataclass(frozen=True)
class ExecutionConfig:
    """How an iteration runs. The defaults are the scheme; the other choices take one of its parts
    away, to measure what it brings."""

    overlap: str | None = _setting(
        None,
        "decode attention before prefill's, beside it on a GPU stream of its own, or in one launch "
        "with it (default: stream on a GPU whose attention kernels can, none elsewhere)",
        choices=("none", "stream", "fused"),
    )
    attention: str | None = _setting(
        None,
        "attention kernels: Pallas' for Hopper GPUs, Triton's for older ones, or XLA's own "
        "operations on any device (default: the first that device, dtype, head_dim and "
        "page_tokens allow)",
        choices=("pallas", "triton", "xla"),
    )
    decode_sms: int | None = _setting(
        None,
        "multiprocessors of a GPU that decode attention has to itself while prefill attention, "
        "with the others, runs beside it (default: what calibrate found, if latency_profile has "
        "it; else 64, which is a guess)",
        low=1,
        high=131,
    )
    decode_attention: str = _setting(
        "local",
        "where decode tokens attend: on their own group, or over all groups as prefill does",
        choices=("local", "spread"),
    )
    linear: str = _setting(
        "together",
        "linear layers: decode and prefill rows as one batch, or one after the other",
        choices=("together", "apart"),
    )
    stall_s: float = _setting(
        30.0,
        "seconds without progress after which the engine gives up; in effect never less than ten "
        "times its longest iteration",
        low=0.1,
    )


@dataclass(frozen=True)
class CacheConfig:
    page_tokens: int = _setting(16, "tokens of one KV page in decode layout", low=1)
    kv_pool_tokens: int | None = _setting(
        None,
        "KV tokens per group (default: max_num_seqs contexts on a CPU, the free memory on a GPU)",
        low=1,
    )
    gpu_memory_fraction: float = _setting(
        0.9, "share of a GPU's memory for weights, KV and what slots need", low=0.05, high=1.0
    )
    compilation_cache_dir: str | None = _setting(
        None, "folder that keeps compiled programs (default: the user's cache; empty: none)"
    )


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int = _setting(32, "most requests admitted at once, over all groups", low=1)
    max_num_batched_tokens: int = _setting(
        512, "most tokens of one iteration, decodes and prefill of all groups", low=1
    )
    max_waiting: int = _setting(1024, "most requests queued; more are refused", low=1)
    max_prefill_segments: int = _setting(8, "most prompts with a chunk in one iteration", low=1)
    handoff_pages: int = _setting(
        32,
        "KV pages that one iteration can hand to each group; with max_num_batched_tokens / "
        "page_tokens of them a prompt decodes right after its last chunk, however long it is",
        low=1,
    )
    ordering: str = _setting(
        "deadline",
        "who is prefilled next: by TTFT deadline while it can be met, then shortest remaining; "
        "first come first served; or shortest remaining",
        choices=("deadline", "fcfs", "shortest"),
    )
    max_bypass: int = _setting(
        1024, "later requests that may overtake a waiting one before it must be next", low=0
    )
    ttft_slo_s: float | None = _setting(
        None, "target for the first token, where a request sets none (default: no target)", low=1e-6
    )
    tbt_slo_s: float | None = _setting(
        None,
        "target for the time between tokens, where a request sets none; needs latency_profile "
        "(default: no target)",
        low=1e-6,
    )
    latency_profile: str | None = _setting(
        None, "file that `python -m conflux_jax.calibrate` wrote for this model and mesh"
    )
    packing_threshold: float = _setting(
        0.85,
        "share of KV pages in use on every group from which on a prompt is placed where least is "
        "free, so that free pages stay together",
        low=0.0,
        high=1.0,
    )
    bucket_growth: float | None = _setting(
        None,
        "ratio of neighbouring bucket sizes (default: 2 on a CPU, 1.125 elsewhere)",
        low=1.01,
        high=8.0,
    )
    rows_ladder: tuple[int, ...] | None = _setting(
        None, "rows per group of iterations with prefill (default: by bucket_growth)"
    )
    decode_rows_ladder: tuple[int, ...] | None = _setting(
        None, "rows per group of decode iterations (default: by bucket_growth)"
    )


_PORTS = {"low": 0, "high": 65535}


@dataclass(frozen=True)
class ServerConfig:
    host: str = _setting("127.0.0.1", "address to listen on")
    port: int = _setting(50051, "gRPC port (0: any free one)", **_PORTS)
    http_port: int | None = _setting(
        None, "port of the OpenAI-compatible HTTP server (0: any free one; default: off)", **_PORTS
    )
    drain_s: float = _setting(30.0, "seconds that running streams get after SIGTERM", low=0.0)
    max_message_mib: int = _setting(
        64, "largest gRPC message or HTTP body in MiB", low=1, high=2047
    )
    max_unread_tokens: int = _setting(
        1024,
        "tokens of one request that may wait for its client to read them, beside what the network "
        "holds; with more the request ends",
        low=1,
    )
    read_timeout_s: float = _setting(
        60.0, "seconds that an HTTP client may take to send a request, head and body", low=0.1
    )
    write_timeout_s: float = _setting(
        60.0,
        "seconds that a client may read nothing of what waits for it; then it is left",
        low=0.1,
    )
    max_streams: int = _setting(
        4096,
        "most calls in progress at once, over gRPC and HTTP; more are refused",
        low=1,
        high=1_000_000,
    )
    tls_cert_file: str | None = _setting(
        None, "PEM file of the certificate chain to serve with; read again when it changes"
    )
    tls_key_file: str | None = _setting(None, "PEM file of its key, without a password")
    tls_client_ca_file: str | None = _setting(
        None, "PEM file of authorities; clients must show a certificate of one (mutual TLS)"
    )
    auth_token_file: str | None = _setting(
        None, "file of bearer tokens, one a line; calls must bring one (default: anyone may call)"
    )
    log_format: str = _setting("text", "form of the log on stderr", choices=("text", "json"))
    log_prompts: bool = _setting(False, "log the text of prompts too")
    metrics_prefix: str = _setting(
        "vllm:", "what the metrics that vLLM has too begin with, so that its dashboards find them"
    )
    timeline: str | None = _setting(
        None,
        "file for the last iterations as a Chrome trace (for Perfetto), written at the end and, by "
        "serve, at SIGUSR1 (default: none)",
    )
    timeline_iterations: int = _setting(
        2000, "iterations that a timeline has, the last ones", low=1, high=1_000_000
    )


@dataclass(frozen=True)
class Config:
    """The whole tree. Raises ConfigError on construction when a leaf breaks its limits."""

    model: ModelOptions = field(default_factory=ModelOptions)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self):
        for section, leaf, kind in _leaves():
            _check(leaf, kind, getattr(getattr(self, section), leaf.name))

    @classmethod
    def from_flat(cls, base: Config | None = None, **values: Any) -> Config:
        """A config from leaf names, over `base`; `Config.from_flat(sp=3, page_tokens=32)`."""
        base = base or cls()
        by_name = {leaf.name: section for section, leaf, _ in _leaves()}
        if unknown := sorted(set(values) - set(by_name)):
            raise ConfigError(f"{unknown[0]}: no such setting; known: {', '.join(sorted(by_name))}")
        sections = {}
        for section in dataclasses.fields(cls):
            own = {k: _tupled(v) for k, v in values.items() if by_name[k] == section.name}
            sections[section.name] = dataclasses.replace(getattr(base, section.name), **own)
        return cls(**sections)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Config:
        """Raises ConfigError that names the file when it cannot be read or has unknown keys."""
        try:
            tree = yaml.safe_load(Path(path).read_text()) or {}
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: {error}") from error
        if not isinstance(tree, Mapping):
            raise ConfigError(f"{path}: must hold sections, got {type(tree).__name__}")
        known = {section.name for section in dataclasses.fields(cls)}
        flat: dict[str, Any] = {}
        for name, section in tree.items():
            if name not in known:
                names = ", ".join(sorted(known))
                raise ConfigError(f"{path}: {name}: no such section; known: {names}")
            section = {} if section is None else section  # all of its lines commented out
            if not isinstance(section, Mapping):
                raise ConfigError(f"{path}: {name}: must hold settings, got {section!r}")
            owned = {leaf.name for owner, leaf, _ in _leaves() if owner == name}
            if unknown := sorted(set(section) - owned, key=str):
                raise ConfigError(
                    f"{path}: {name}.{unknown[0]}: no such setting; "
                    f"known: {', '.join(sorted(owned))}"
                )
            flat |= section
        try:
            return cls.from_flat(**flat)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """One flag per leaf, grouped by section, and `--config FILE`."""
        parser.add_argument(
            "--config", metavar="FILE", help="YAML file of settings; flags win over it"
        )
        groups = {s.name: parser.add_argument_group(s.name) for s in dataclasses.fields(Config)}
        for section, leaf, kind in _leaves():
            base = _base_type(kind)
            many = typing.get_origin(base) is tuple
            if base is bool:
                groups[section].add_argument(
                    "--" + leaf.name.replace("_", "-"),
                    action=argparse.BooleanOptionalAction,
                    default=argparse.SUPPRESS,
                    help=leaf.metadata["help"].replace("%", "%%"),
                )
                continue
            placeholder = {str: "TEXT", float: "X"}.get(base, "N")
            groups[section].add_argument(
                "--" + leaf.name.replace("_", "-"),
                type=int if many else base,
                nargs="+" if many else None,
                choices=leaf.metadata.get("choices"),
                default=argparse.SUPPRESS,
                metavar=None if leaf.metadata.get("choices") else placeholder,
                help=leaf.metadata["help"].replace("%", "%%"),
            )

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Config:
        base = cls.from_yaml(arguments.config) if arguments.config else cls()
        names = {leaf.name for _, leaf, _ in _leaves()}
        given = {k: v for k, v in vars(arguments).items() if k in names}
        return cls.from_flat(base, **given)


def _leaves() -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """(section name, field, type) of every leaf."""
    for section in dataclasses.fields(Config):
        owner = typing.get_type_hints(Config)[section.name]
        hints = typing.get_type_hints(owner)
        for leaf in dataclasses.fields(owner):
            yield section.name, leaf, hints[leaf.name]


def _base_type(kind: Any) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next(k for k in typing.get_args(kind) if k is not type(None))
    return kind


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check(leaf: dataclasses.Field, kind: Any, value: Any) -> None:
    optional = type(None) in typing.get_args(kind)
    if value is None and optional:
        return
    base = _base_type(kind)
    limits = leaf.metadata
    if typing.get_origin(base) is tuple:
        sizes = value if isinstance(value, tuple) else ()
        ok = len(sizes) > 0 and all(type(size) is int and size >= 1 for size in sizes)
        if not ok or list(sizes) != sorted(set(sizes)):
            raise ConfigError(f"{leaf.name}: must be rising integers of at least 1, got {value!r}")
        return
    accepted = (int, float) if base is float else (base,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and base is not bool):
        raise ConfigError(f"{leaf.name}: must be {base.__name__}, got {value!r}")
    if isinstance(value, str) and "\0" in value:  # no path, no address and no name has one
        raise ConfigError(f"{leaf.name}: must have no NUL character, got {value!r}")
    if "choices" in limits and value not in limits["choices"]:
        choices = ", ".join(limits["choices"])
        raise ConfigError(f"{leaf.name}: must be one of {choices}, got {value!r}")
    if "low" in limits and not value >= limits["low"]:  # not: NaN is neither
        raise ConfigError(f"{leaf.name}: must be at least {limits['low']}, got {value}")
    if "high" in limits and not value <= limits["high"]:
        raise ConfigError(f"{leaf.name}: must be at most {limits['high']}, got {value}")
