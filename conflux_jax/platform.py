"""The devices that this process asks JAX for, and what it tells XLA about them."""

from __future__ import annotations

import contextlib
import os
import sys

from conflux_jax.config import ConfigError

FORCED_COUNT_FLAG = "xla_force_host_platform_device_count"
CPU_COLLECTIVE_FLAGS = {
    # Virtual devices that share few cores can wait long for each other; that is no deadlock.
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 300,
    "xla_cpu_collective_call_terminate_timeout_seconds": 600,
}
# What becomes CUDA graphs: all of a step but the attention kernels and the collectives. A layer's
# linear part is then a few graph launches, and no branch of the sampler waits for the host.
# Matrix products can only be captured by CUDA 12.9 or newer.
GPU_GRAPH_FLAGS: dict[str, str | int] = {
    # Kernels, matrix products, those that read a layer's weights in place, branches and loops.
    # Not CUSTOM_CALL, which is attention; not COLLECTIVES, which hang when captured.
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    ),
    # Runs of two launches and more; XLA's default would leave a layer's as they are.
    "xla_gpu_graph_min_graph_size": 2,
    # Sorts as XLA's own kernels: a library's are custom calls, and a branch with one would be left
    # to the host.
    "xla_gpu_enable_cub_radix_sort": False,
    # A norm's weights are copied in the stream of the kernels: on one of its own, it ends a graph.
    "xla_disable_hlo_passes": "dynamic-slice-copy-fusion-async-wrapper",
}
GPU_PLATFORMS = ("gpu", "cuda", "rocm")  # names that JAX has for the same thing


def ensure_devices(num_devices: int) -> None:
    """Make sure that JAX has `num_devices` devices: on a CPU by asking for virtual ones.

    JAX counts its CPU devices once, when it is first used; so this runs before that, and has no
    effect after it. A count that the user set, in JAX_NUM_CPU_DEVICES or XLA_FLAGS, stands. Never
    more than asked for: XLA makes a thread for each device, and threads past the cores slow every
    operator down (on two cores a step with 8 devices took 1.2 to 1.6 times that with one).
    Raises ConfigError that names the rule when there are too few.
    """
    import jax

    _add_xla_flags()
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


def _add_xla_flags() -> None:
    """XLA reads them when JAX is first used; what the user set stands."""
    flags = os.environ.get("XLA_FLAGS", "")
    missing = {k: v for k, v in CPU_COLLECTIVE_FLAGS.items() if k not in flags}
    added = [f"--{name}={value}" for name, value in missing.items()]
    os.environ["XLA_FLAGS"] = " ".join([flags, *added]).strip()


def compiler_options(platform: str) -> dict[str, str | int]:
    """XLA's options for the engine's programs on a platform; flags that the user set stand."""
    if platform not in GPU_PLATFORMS:
        return {}
    set_by_user = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in GPU_GRAPH_FLAGS.items() if name not in set_by_user}


def python_command() -> str:
    """This Python, as one would type it here: relative where it lies below."""
    python = os.path.relpath(sys.executable)
    return sys.executable if python.startswith(os.pardir) else python


def available_memory_bytes() -> int | None:
    """Memory that this machine can still give; None where it does not say."""
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has bfloat16 arithmetic (AVX512-BF16 or AMX on x86, BF16 on Arm)."""
    try:
        with open("/proc/cpuinfo") as lines:
            features = next(
                (line for line in lines if line.lower().startswith(("flags", "features"))), ""
            )
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(features.split())
