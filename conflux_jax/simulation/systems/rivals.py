"""The rival systems on GPUs of a kind: from a model, their number and a few settings by name.

KV memory is what weights leave of a GPU's memory, as for our own system.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from conflux_jax.config import ConfigError
from conflux_jax.models.spec import ModelSpec
from conflux_jax.simulation.costs import UniformTPCosts
from conflux_jax.simulation.hardware import Hardware
from conflux_jax.simulation.model_costs import heads_per_gpu
from conflux_jax.simulation.rival_costs import (
    ElasticCosts,
    MultiplexedCosts,
    RivalOperators,
    SideCosts,
)
from conflux_jax.simulation.roofline import BYTES, ModelCosts, group_size, kv_room
from conflux_jax.simulation.system import System
from conflux_jax.simulation.systems.chunked import Budget, Chunked
from conflux_jax.simulation.systems.conflux import ITERATION_NOISE
from conflux_jax.simulation.systems.disaggregated import Disaggregated, Side
from conflux_jax.simulation.systems.events import EventSystem
from conflux_jax.simulation.systems.jobs import ORDERS
from conflux_jax.simulation.systems.loongserve import Elasticity, LoongServe
from conflux_jax.simulation.systems.muxwise import Multiplexing, MuxWise

SM_STEP = 16  # what MuxWise's shares are multiples of
ORACLE_TOKENS = 16_384  # most that the oracle takes at once
FRACTIONAL = ("noise", "target_fraction")  # settings that are no integers


@dataclass(frozen=True)
class ChunkedSettings:
    """tp: GPUs of a replica. budget: tokens of an iteration."""

    tp: int
    budget: int = 2048


@dataclass(frozen=True)
class OracleSettings:
    tp: int


@dataclass(frozen=True)
class LoongServeSettings:
    """tp: GPUs of an instance. degrees: of prefill, in instances; None: all that there can be."""

    tp: int
    degrees: tuple[int, ...] | None = None
    batch_tokens: int = 4096
    target_fraction: float = 1.0


@dataclass(frozen=True)
class MuxWiseSettings:
    """tp: GPUs of a replica."""

    tp: int
    batch_tokens: int = 8192
    target_fraction: float = 1.0


@dataclass(frozen=True)
class DisaggregatedSettings:
    """prefill_gpus: the rest decode. A prefill instance has prefill_tp * prefill_sp GPUs, a decode
    instance decode_tp."""

    prefill_gpus: int
    prefill_tp: int
    decode_tp: int
    prefill_sp: int = 1
    batch_tokens: int = 8192


def kv_tokens(spec: ModelSpec, hardware: Hardware, tp: int) -> int:
    """That a group of `tp` GPUs has memory for beside the weights, as the engine would use it.
    Raises ConfigError where there is none.

    Worked, Qwen3-14B on one H100: 72 GB less 29.5 GB of weights, at 163,840 bytes a token: 259,000.
    """
    token_bytes = spec.num_layers * 2 * heads_per_gpu(spec, tp).kv * spec.head_dim * BYTES
    tokens = int(kv_room(ModelCosts.of(spec), hardware.memory_bytes, tp) // token_bytes)
    if tokens < 1:
        raise ConfigError(f"tp: {tp} GPUs have no memory for KV beside the weights of {spec.name}")
    return tokens


def replicas(gpus: int, tp: int) -> int:
    """Raises ConfigError where GPUs would be left over."""
    if tp < 1 or gpus < 1 or gpus % tp:
        raise ConfigError(f"tp: {gpus} GPUs cannot be groups of {tp}")
    return gpus // tp


Settings = Mapping[str, Any]
Builder = Callable[[ModelSpec, Hardware, int, Settings | None, str | None], System]


def _builder[S](
    name: str,
    kind: type[S],
    make: Callable[..., EventSystem],
    default_noise: float = ITERATION_NOISE,
) -> Builder:
    """make(spec, hardware, gpus, the settings as `kind`, order)."""

    def build(
        spec: ModelSpec,
        hardware: Hardware,
        gpus: int,
        settings: Settings | None = None,
        ordering: str | None = None,
    ) -> EventSystem:
        """settings: of `kind`, and `noise` and `seed` of what runs. Without a setting that has no
        default: groups as small as the weights allow, but all GPUs in one for uniform TP; half of
        the GPUs prefill."""
        settings = settings or {}
        known = {item.name for item in fields(kind)}  # type: ignore[arg-type]
        if unknown := sorted(settings.keys() - known - {"noise", "seed"}):
            raise ConfigError(f"{unknown[0]}: {name} has only {', '.join(sorted(known))}")
        given = {key: _checked(key, value) for key, value in settings.items()}
        noise, seed = given.pop("noise", default_noise), given.pop("seed", 0)
        smallest = group_size(ModelCosts.of(spec), hardware)
        defaults = {
            "tp": smallest if name == "loongserve" else gpus,
            "prefill_gpus": max(1, gpus // 2),
            "prefill_tp": smallest,
            "decode_tp": smallest,
        }
        given = {key: value for key, value in defaults.items() if key in known} | given
        try:
            system = make(spec, hardware, gpus, kind(**given), ordering or ORDERS[0])
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from error
        system.vary(noise, seed)
        return system

    return build


def _checked(name: str, value: Any) -> Any:
    """A setting's value, which may come from JSON. Raises ConfigError where it is of another kind
    than that setting: degrees are a list of integers, FRACTIONAL are numbers, all else integers."""
    if name == "degrees":
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(type(one) is int for one in value):
            raise ConfigError(f"degrees: must be a list of integers, got {value!r}")
        return tuple(value)
    if name in FRACTIONAL:
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ConfigError(f"{name}: must be a number, 0 or above, got {value!r}")
        return value
    if type(value) is not int or value < (0 if name == "seed" else 1):
        raise ConfigError(f"{name}: must be an integer above 0, got {value!r}")
    return value


def _chunked(
    spec: ModelSpec, hardware: Hardware, gpus: int, settings: ChunkedSettings, order: str
) -> EventSystem:
    return _uniform(spec, hardware, gpus, settings.tp, Budget(settings.budget), order)


def _oracle(
    spec: ModelSpec, hardware: Hardware, gpus: int, settings: OracleSettings, order: str
) -> EventSystem:
    return _uniform(spec, hardware, gpus, settings.tp, Budget(ORACLE_TOKENS, oracle=True), order)


def _uniform(
    spec: ModelSpec, hardware: Hardware, gpus: int, tp: int, budget: Budget, order: str
) -> EventSystem:
    count = replicas(gpus, tp)
    costs = UniformTPCosts(spec, hardware, tp)
    return Chunked(costs, count, kv_tokens(spec, hardware, tp), budget, order)


def _loongserve(
    spec: ModelSpec, hardware: Hardware, gpus: int, settings: LoongServeSettings, order: str
) -> EventSystem:
    instances = replicas(gpus, settings.tp)
    degrees = settings.degrees or tuple(range(1, instances + 1))
    costs = ElasticCosts(RivalOperators(spec, hardware), settings.tp)
    elasticity = Elasticity(degrees, settings.batch_tokens, settings.target_fraction)
    return LoongServe(costs, instances, kv_tokens(spec, hardware, settings.tp), elasticity, order)


def _muxwise(
    spec: ModelSpec, hardware: Hardware, gpus: int, settings: MuxWiseSettings, order: str
) -> EventSystem:
    shares = tuple(range(SM_STEP, hardware.sms - SM_STEP + 1, SM_STEP))
    multiplexing = Multiplexing(shares, settings.batch_tokens, settings.target_fraction)
    count, tp = replicas(gpus, settings.tp), settings.tp
    costs = MultiplexedCosts(RivalOperators(spec, hardware), tp)
    return MuxWise(costs, count, kv_tokens(spec, hardware, tp), multiplexing, order)


def _disaggregated(
    spec: ModelSpec, hardware: Hardware, gpus: int, settings: DisaggregatedSettings, order: str
) -> EventSystem:
    if not 1 <= settings.prefill_gpus < gpus:
        raise ConfigError(
            f"prefill_gpus: from 1 to {gpus - 1}, so that both sides have some of {gpus}: "
            f"{settings.prefill_gpus}"
        )
    operators = RivalOperators(spec, hardware)
    tp, sp, decode_tp = settings.prefill_tp, settings.prefill_sp, settings.decode_tp
    prefill = Side(
        replicas(settings.prefill_gpus, tp * sp),
        SideCosts(operators, tp, sp),
        sp * kv_tokens(spec, hardware, tp),
        share=tp * sp / gpus,
    )
    decode = Side(
        replicas(gpus - settings.prefill_gpus, decode_tp),
        SideCosts(operators, decode_tp),
        kv_tokens(spec, hardware, decode_tp),
        share=decode_tp / gpus,
    )
    return Disaggregated(prefill, decode, settings.batch_tokens, order)


BUILDERS: dict[str, Builder] = {
    "chunked": _builder("chunked", ChunkedSettings, _chunked),
    "chunked-oracle": _builder("chunked-oracle", OracleSettings, _oracle, default_noise=0.0),
    "loongserve": _builder("loongserve", LoongServeSettings, _loongserve),
    "muxwise": _builder("muxwise", MuxWiseSettings, _muxwise),
    "disaggregated": _builder("disaggregated", DisaggregatedSettings, _disaggregated),
}
