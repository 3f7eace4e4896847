"""Seconds that warm-up takes with an empty compilation cache, and again with what that left in it.

Each start is a process of its own, as a server's is; timed is `Runner.warm_up` alone, which traces,
lowers and compiles every variant of the step, or finds it compiled in the cache. Loading the model
is printed beside it. The cold start is measured once (another would need another empty folder and
minutes more), the warm one several times: the table and the JSON have its median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers.protocol import ROOT
from conflux_jax.config import Config, ConfigError

CONFIG = ROOT / "configs" / "smollm2-135m-cpu.yaml"
WARM_STARTS, QUICK_WARM_STARTS = 3, 1
STAGES = {  # as JAX reports them, over all threads
    "/jax/core/compile/jaxpr_trace_duration": "trace_s",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower_s",
    "/jax/core/compile/backend_compile_duration": "compile_s",
}


def start_once(config: Config) -> dict[str, float]:
    """Load and warm up in this process."""
    from conflux_jax.platform import ensure_devices

    ensure_devices(config.mesh.sp * config.mesh.tp)

    import jax

    from conflux_jax.execution.runner import Runner
    from conflux_jax.models.loading import open_source

    start = time.perf_counter()
    runner = Runner.create(open_source(config.model.model), config)
    loaded = time.perf_counter()
    spent: dict[str, float] = defaultdict(float)

    def note(event: str, duration_secs: float, **_: str | int) -> None:
        if event in STAGES:
            spent[STAGES[event]] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(note)
    runner.warm_up()
    warm_up_s = time.perf_counter() - loaded
    variants = len(runner.ladders.all())
    return {"variants": variants, "load_s": loaded - start, "warm_up_s": warm_up_s, **spent}


def measure(arguments: Sequence[str], warm_starts: int) -> list[dict[str, float]]:
    """The cold start, then warm ones, each with these arguments in a process of its own. Raises
    RuntimeError with the end of what a process said that failed."""
    starts = []
    with tempfile.TemporaryDirectory() as folder:
        own = ["--once", "--compilation-cache-dir", folder]
        command = [sys.executable, "-m", "bench.warmup", *arguments, *own]
        for number in range(1 + warm_starts):
            print("cold start" if number == 0 else f"warm start {number}", flush=True)
            # Whatever cache the environment names would make the cold start warm.
            env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError("\n".join(done.stderr.splitlines()[-15:]))
            starts.append(json.loads(done.stdout.splitlines()[-1]))
    return starts


def flat(starts: Sequence[dict[str, float]]) -> dict[str, Any]:
    """What `--json` writes."""
    cold, *warm = starts
    return {
        "variants": cold["variants"],
        "cold_s": cold["warm_up_s"],
        "warm_s": statistics.median(start["warm_up_s"] for start in warm),
    }


def table(starts: Sequence[dict[str, float]]) -> str:
    cold, *warm = starts
    rows = {
        "loading the model": "load_s",
        "warm-up": "warm_up_s",
        "  tracing, all threads": "trace_s",
        "  lowering, all threads": "lower_s",
        "  compiling or reading the cache, all threads": "compile_s",
    }
    lines = [f"{cold['variants']} variants; seconds", f"{'':46}{'cold':>8}{'warm':>8}"]
    for label, key in rows.items():
        median = statistics.median(start[key] for start in warm)
        lines.append(f"{label:46}{cold[key]:8.1f}{median:8.1f}")
    result = flat(starts)
    lines.append(f"warm / cold: {result['warm_s'] / result['cold_s']:.2f}")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.warmup",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    quick = f"{QUICK_WARM_STARTS} warm start instead of {WARM_STARTS}"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as flat JSON")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    Config.add_arguments(parser)
    parser.set_defaults(config=str(CONFIG))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(arguments)
    try:
        config = Config.from_arguments(options)
        if options.once:
            print(json.dumps(start_once(config)))
            return 0
        starts = measure(arguments, QUICK_WARM_STARTS if options.quick else WARM_STARTS)
    except (ConfigError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(starts))
    if options.json:
        options.json.write_text(json.dumps(flat(starts), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
