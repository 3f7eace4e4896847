"""How much faster than real time the simulator is: seconds of serving that it runs through in one
second, with our own system, whose real scheduler it runs.

One process on one core, a trace at its own rate, Qwen3-14B on four H100s. Laying the engine out
(profile and fit, about a second) and reading the trace are not in it, since they are done once.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import math
import pstats
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from conflux_jax.models.known_specs import QWEN3_14B
from conflux_jax.progress import ProgressBar
from conflux_jax.simulate import progress
from conflux_jax.simulation.hardware import load_hardware
from conflux_jax.simulation.simulator import simulate
from conflux_jax.simulation.system import SimulatedRequest
from conflux_jax.simulation.systems.conflux import ConfluxSystem
from conflux_jax.simulation.systems.conflux_design import design
from conflux_jax.simulation.targets import scaled_targets
from conflux_jax.simulation.traces import TraceError, read_trace
from conflux_jax.simulation.workload import simulated, slice_minutes

GPUS, TBT_SLO_S = 4, 0.1
PROFILED = 30  # functions that --profile shows


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        flat = measure(options)
    except (TraceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = json.dumps(flat, indent=2) + "\n"
    if options.json == Path("-"):
        print(text, end="")
        return 0
    if options.json:
        options.json.write_text(text, encoding="utf-8")
    print(
        f"{flat['requests']:,.0f} requests, {flat['simulated_s']:,.0f} s of serving in "
        f"{flat['wall_s']:.1f} s: {flat['realtime_factor']:.0f} times real time"
    )
    print(
        f"{flat['iterations']:,.0f} iterations, {1e6 * flat['wall_s'] / flat['iterations']:.0f} us "
        f"each; {flat['output_tokens']:,.0f} tokens; {flat['attainment']:.1%} on time"
    )
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake's or Azure's format")
    parser.add_argument("--minutes", type=float, default=math.inf, help="only the first so many")
    parser.add_argument("--profile", action="store_true", help="show where the time goes")
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=Path("-"),
        metavar="FILE",
        help="write figures as flat JSON, without FILE in place of the text",
    )
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, float]:
    hardware = load_hardware("h100")
    targets = scaled_targets(QWEN3_14B, hardware, GPUS, TBT_SLO_S)
    requests = simulated(slice_minutes(read_trace(options.trace), 0, options.minutes), targets)
    system = ConfluxSystem(design(QWEN3_14B, hardware, GPUS))
    if options.profile:
        with cProfile.Profile() as profiler:
            flat = timed(system, requests)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(PROFILED)
        return flat
    return timed(system, requests)


def timed(system: ConfluxSystem, requests: Sequence[SimulatedRequest]) -> dict[str, float]:
    gc.collect()
    gc.freeze()
    started_s = time.perf_counter()
    results = simulate(system, requests, progress(ProgressBar()))
    wall_s = time.perf_counter() - started_s
    gc.unfreeze()
    summary = results.summary()
    return {
        "realtime_factor": results.end_s / wall_s,
        "simulated_s": results.end_s,
        "wall_s": wall_s,
        "requests": len(requests),
        "iterations": summary["iterations"],
        "output_tokens": summary["output_tokens"],
        "attainment": results.attainment,
    }


if __name__ == "__main__":
    sys.exit(main())
