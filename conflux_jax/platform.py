"""The devices that this process asks JAX for."""

from __future__ import annotations

import contextlib
import os

from conflux_jax.config import ConfigError

FORCED_COUNT_FLAG = "xla_force_host_platform_device_count"


def ensure_devices(num_devices: int) -> None:
    """Make sure that JAX has `num_devices` devices: on a CPU by asking for virtual ones.

    JAX counts its CPU devices once, when it is first used; so this runs before that, and has no
    effect after it. A count that the user set, in JAX_NUM_CPU_DEVICES or XLA_FLAGS, stands.
    Raises ConfigError that names the rule when there are too few.
    """
    import jax

    counted_by_user = FORCED_COUNT_FLAG in os.environ.get("XLA_FLAGS", "")
    if jax.config.jax_num_cpu_devices < 0 and not counted_by_user:
        with contextlib.suppress(RuntimeError):  # JAX is in use; what it has is counted below
            jax.config.update("jax_num_cpu_devices", num_devices)
    platform = jax.default_backend()
    if (have := len(jax.devices())) >= num_devices:
        return
    message = f"sp * tp = {num_devices} needs as many devices; JAX has {have} ({platform})"
    if platform == "cpu":
        message += (
            ". Virtual CPU devices are counted when JAX is first used in a process: "
            f"set JAX_NUM_CPU_DEVICES={num_devices}, or create the engine with the most devices "
            "before anything else uses JAX"
        )
    raise ConfigError(message)
