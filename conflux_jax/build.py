"""A running engine from a config: load the model, compile the step, start the thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from conflux_jax.config import Config, ConfigError
from conflux_jax.engine import Engine
from conflux_jax.model_info import ModelInfo
from conflux_jax.models.loading import open_source
from conflux_jax.plan import Executor
from conflux_jax.platform import ensure_devices
from conflux_jax.scheduler.latency_model import LatencyModel
from conflux_jax.scheduler.scheduler import Scheduler
from conflux_jax.text import TextCodec, open_text

if TYPE_CHECKING:
    from conflux_jax.execution.runner import Runner

Progress = Callable[[str, int, int], None]  # stage, steps done, steps in all


def build_runner(config: Config, progress: Progress | None = None) -> tuple[Runner, TextCodec]:
    """Load and compile. JAX is imported here, once the model is known to be there.

    Raises ConfigError or ModelError, each one line that names the setting or the file."""
    report = progress or (lambda stage, done, total: None)
    config = with_profile_settings(config)
    report("load", 0, 1)
    source = open_source(config.model.model)
    text = open_text(config.model.model)
    ensure_devices(config.mesh.sp * config.mesh.tp)

    from conflux_jax.execution.runner import Runner

    runner = Runner.create(source, config, vocab_limit=text.vocab_size)
    report("load", 1, 1)
    report("compile", 0, len(runner.ladders.all()))
    runner.warm_up(lambda done, total: report("compile", done, total))
    return runner, text


def with_profile_settings(config: Config) -> Config:
    """The config, with the `decode_sms` of its latency profile where it leaves that open. Raises
    ConfigError for a file that is no profile."""
    path = config.scheduler.latency_profile
    if path is None or config.execution.decode_sms is not None:
        return config
    return Config.from_flat(config, decode_sms=LatencyModel.read(path).decode_sms)


def load_profile(config: Config, runner: Runner) -> LatencyModel | None:
    """The latency model that the config names. Raises ConfigError where it is another engine's."""
    from conflux_jax.execution.calibration import profile_identity

    path = config.scheduler.latency_profile
    return None if path is None else LatencyModel.load(path, profile_identity(runner))


def build_engine(
    config: Config,
    progress: Progress | None = None,
    watch: Callable[[Any], Executor] | None = None,
) -> Engine:
    """Load, compile and start; raises as `build_runner`.

    watch: puts an executor around the Runner, for measurements.
    """
    if config.scheduler.tbt_slo_s is not None and config.scheduler.latency_profile is None:
        raise ConfigError(
            "tbt_slo_s: needs latency_profile, which `python -m conflux_jax.calibrate` makes with "
            "the same settings"
        )
    runner, text = build_runner(config, progress)
    return start_engine(config, runner, text, watch)


def start_engine(
    config: Config,
    runner: Runner,
    text: TextCodec,
    watch: Callable[[Any], Executor] | None = None,
) -> Engine:
    """An engine over what `build_runner` made of the same config. Raises ConfigError where the
    latency profile is another engine's."""
    scheduler = Scheduler(
        config.scheduler,
        runner.geometry,
        runner.ladders,
        runner.max_model_len,
        load_profile(config, runner),
    )
    spec = runner.dims.spec
    info = ModelInfo(
        name=config.model.served_model_name or spec.name,
        max_model_len=runner.max_model_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=tuple(sorted({*spec.eos_token_ids, *text.eos_token_ids})),
        dtype=config.model.dtype,
        sp=config.mesh.sp,
        tp=config.mesh.tp,
        page_tokens=runner.geometry.page_tokens,
        num_pages=runner.geometry.num_pages,
        max_num_seqs=config.scheduler.max_num_seqs,
    )
    executor = watch(runner) if watch else runner
    return Engine(scheduler, executor, text, info, stall_limit_s=config.execution.stall_s)
