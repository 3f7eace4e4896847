"""How our engine is laid out on GPUs that are not there: what its config, its buckets and its KV
pool would be by its own rules, and the latency profile that `calibrate` would write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conflux_jax.config import Config, ConfigError
from conflux_jax.execution.limits import BatchLimits, ladders_for
from conflux_jax.models.heads import HeadLayout
from conflux_jax.models.spec import ModelSpec
from conflux_jax.plan import PoolGeometry
from conflux_jax.scheduler.buckets import Ladders
from conflux_jax.simulation.costs import ConfluxCosts
from conflux_jax.simulation.hardware import Hardware
from conflux_jax.simulation.profiling import profile
from conflux_jax.simulation.roofline import BYTES, ModelCosts, group_size, kv_room
from conflux_jax.simulation.systems.conflux import ITERATION_NOISE, Blueprint, ConfluxSystem
from conflux_jax.simulation.systems.replicated import Replicated

# Of a config that says nothing else. In TOKENS_PER_GROUP rows the products of the linear layers
# have long reached their speed, and no iteration of so many is within a target of 100 ms.
TOKENS_PER_GROUP = 2560
MAX_NUM_SEQS = 512
# As far as the three known models go; the Qwen3 ones from 40,960 on by YaRN, as they document.
MAX_MODEL_LEN = 131_072
ORDERINGS = {"srpf": "shortest"}  # other systems' name for it


def batch_limits(config: Config, geometry: PoolGeometry, page_rows: int) -> BatchLimits:
    """The static sizes of the steps of an engine with that config. page_rows: of a device's page;
    no time depends on it."""
    assert config.model.max_model_len is not None
    return BatchLimits(
        geometry=geometry,
        page_rows=page_rows,
        max_slots=config.scheduler.max_num_seqs,
        max_model_len=config.model.max_model_len,
        max_segments=config.scheduler.max_prefill_segments,
        handoff_pages=config.scheduler.handoff_pages,
        apart=config.execution.linear == "apart",
    )


def pool_geometry(
    spec: ModelSpec, config: Config, memory_bytes: float, heads: HeadLayout
) -> PoolGeometry:
    """The KV pool of one group in what memory its weights leave (`gpu_memory_fraction`).

    Raises ConfigError where they leave none. Worked, Qwen3-14B on one H100 (80 GB): 72 GB less 29.5
    GB of weights are 42.5 GB, and a token has 163,840 bytes: 259,000 tokens.
    """
    page_tokens = config.cache.page_tokens
    page_bytes = 2 * spec.num_layers * heads.kv_per_rank * spec.head_dim * BYTES * page_tokens
    used = config.cache.gpu_memory_fraction
    free = kv_room(ModelCosts.of(spec), memory_bytes, config.mesh.tp, used)
    if free < page_bytes:
        raise ConfigError(
            f"tp: {config.mesh.tp} GPUs of {memory_bytes / 1e9:.0f} GB have no memory for "
            f"{spec.name} and its KV"
        )
    return PoolGeometry(
        groups=config.mesh.sp,
        num_pages=int(free // page_bytes),
        page_tokens=page_tokens,
        prefill_page_tokens=heads.prefill_page_tokens(page_tokens),
    )


def sizes(spec: ModelSpec, config: Config, memory_bytes: float) -> tuple[BatchLimits, Ladders]:
    """What an engine with that config would compile for GPUs of that memory. Raises ConfigError or
    ModelError where it could not."""
    heads = HeadLayout.make(spec, config.mesh.sp, config.mesh.tp)
    geometry = pool_geometry(spec, config, memory_bytes, heads)
    page_rows = geometry.prefill_page_tokens * heads.kv_per_device
    limits = batch_limits(config, geometry, page_rows)
    return limits, ladders_for(config, geometry, on_cpu=False)


def default_config(gpus: int, tp: int, settings: dict[str, Any]) -> Config:
    """settings: leaves of `Config`. A hand-off carries all that an iteration prefills to any one
    group, so that a prompt decodes right after its last chunk. Raises ConfigError where the GPUs
    make no groups."""
    if gpus % tp or settings.get("sp", gpus // tp) != gpus // tp:
        asked = f"{settings['sp']} * {tp}" if "sp" in settings else f"a multiple of {tp}"
        raise ConfigError(f"gpus: must be sp * tp, which is {asked}, got {gpus}")
    groups = gpus // tp
    config = Config.from_flat(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=groups * TOKENS_PER_GROUP,
        max_model_len=MAX_MODEL_LEN,
    )
    config = Config.from_flat(config, **settings | {"sp": groups, "tp": tp})
    if "handoff_pages" in settings:
        return config
    pages = -(-config.scheduler.max_num_batched_tokens // config.cache.page_tokens)
    return Config.from_flat(config, handoff_pages=pages)


def design(
    spec: ModelSpec,
    hardware: Hardware,
    gpus: int,
    settings: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Blueprint:
    """Lay an engine out on so many GPUs and profile it. settings: leaves of `Config`; without `tp`
    a group has as few GPUs as hold the weights well. seed: of the profile. Raises ConfigError or
    ModelError that names what cannot work."""
    settings = dict(settings or {})
    tp = settings.get("tp") or group_size(ModelCosts.of(spec), hardware)
    config = default_config(gpus, tp, settings)
    limits, ladders = sizes(spec, config, hardware.memory_bytes)
    costs = ConfluxCosts(spec, hardware, config.mesh.sp, tp)
    identity = {"model": spec.name, "hardware": hardware.name, "sp": config.mesh.sp, "tp": tp}
    most = config.scheduler.max_num_batched_tokens
    calibration = profile(costs, limits, ladders, most, identity, seed=seed)
    return Blueprint(config.scheduler, limits, ladders, calibration.model, costs)


def replica_gpus(gpus: int, settings: Mapping[str, Any]) -> int:
    """GPUs of each of the setting `replicas`: engines that share nothing (default: one). Raises
    ConfigError where GPUs would be left over."""
    replicas = settings.get("replicas", 1)
    if type(replicas) is not int or replicas < 1 or gpus % replicas:
        raise ConfigError(f"replicas: must divide {gpus} GPUs, got {replicas!r}")
    return gpus // replicas


def assemble(
    blueprint: Blueprint,
    replicas: int = 1,
    ordering: str | None = None,
    noise: float = ITERATION_NOISE,
    seed: int = 0,
) -> ConfluxSystem | Replicated:
    """So many engines of that design; their noise differs."""
    ordering = ORDERINGS.get(ordering or "", ordering)
    seeds = range(seed * replicas, (seed + 1) * replicas)
    engines = [ConfluxSystem(blueprint, ordering, noise, each) for each in seeds]
    return engines[0] if replicas == 1 else Replicated(engines)


def build(
    spec: ModelSpec,
    hardware: Hardware,
    gpus: int,
    settings: Mapping[str, Any] | None = None,
    ordering: str | None = None,
) -> ConfluxSystem | Replicated:
    """settings: as of `design`, `replicas`, and `seed` and `noise` of the iterations. To run often,
    keep what `design` gives: it takes longer than a short run."""
    settings = dict(settings or {})
    seed, noise = settings.pop("seed", 0), settings.pop("noise", ITERATION_NOISE)
    gpus = replica_gpus(gpus, settings)
    replicas = settings.pop("replicas", 1)
    blueprint = design(spec, hardware, gpus, settings, seed)
    return assemble(blueprint, replicas, ordering, noise, seed)
