"""Runs a trace of your traffic through a simulated serving system, ours or another, on GPUs that
nobody has at hand, and says how many requests would have every token on time.

TRACE is Mooncake JSONL (timestamp, input_length, output_length, hash_ids) or Azure CSV (TIMESTAMP,
ContextTokens, GeneratedTokens), in order of arrival. Our system is the real scheduler and loop on a
modelled device. Without --ttft a first token is due after 2 s, or for long prompts after ten
times what the prompt takes on idle GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from conflux_jax.config import ConfigError
from conflux_jax.flags import one_line, positive, positive_int
from conflux_jax.models.known_specs import KNOWN_SPECS
from conflux_jax.models.spec import ModelError
from conflux_jax.progress import ProgressBar
from conflux_jax.simulation.hardware import load_hardware
from conflux_jax.simulation.results import Results
from conflux_jax.simulation.simulator import Moment, simulate
from conflux_jax.simulation.system import Observable, SimulatedRequest, System
from conflux_jax.simulation.systems import SYSTEMS
from conflux_jax.simulation.targets import Targets, scaled_targets
from conflux_jax.simulation.timeline import Timeline
from conflux_jax.simulation.traces import TraceError, read_trace
from conflux_jax.simulation.workload import at_rate, simulated, slice_minutes, spread

MODEL, HARDWARE, NUM_GPUS, TBT_MS = "qwen3-14b", "h100", 4, 100.0
ORDERINGS = ("deadline", "fcfs", "srpf")


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate; returns the exit code. What is wrong is one line on stderr."""
    parsed = parse(arguments)
    try:
        for path in (parsed.timeline, parsed.requests, parsed.json):
            if path is not None and not path.absolute().parent.is_dir():
                raise OSError(f"{path}: its directory does not exist")
        requests = load_requests(parsed)
        system = build(parsed)
        results = run(system, requests, parsed.timeline)
        if parsed.requests is not None:
            results.write_requests(parsed.requests)
        if parsed.json is not None:
            text = json.dumps(results.summary(), indent=1) + "\n"
            parsed.json.write_text(text, encoding="utf-8")
    except (TraceError, ConfigError, ModelError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    print(report(parsed, results))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m conflux_jax.simulate", description=__doc__, allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--trace", type=Path, required=True, help="the trace to read")
    add("--system", choices=SYSTEMS, default="conflux", help="default: %(default)s")
    add("--model", choices=KNOWN_SPECS, default=MODEL, help="default: %(default)s")
    add(
        "--hardware",
        default=HARDWARE,
        metavar="NAME or FILE",
        help="h100, h200, a100 or a file of `python -m bench.hardware` (default: %(default)s)",
    )
    add(
        "--gpus",
        type=positive_int,
        default=NUM_GPUS,
        metavar="N",
        help="in all (default: %(default)s)",
    )
    add("--sp", type=positive_int, metavar="N", help="groups (default: the GPUs over --tp)")
    add(
        "--tp",
        type=positive_int,
        metavar="N",
        help="GPUs of a group (default: what the weights need)",
    )
    add("--rate", type=positive, help="requests a second (default: the trace's)")
    add(
        "--minutes",
        type=_minutes,
        default=(0.0, math.inf),
        metavar="N or A:B",
        help="of the trace: its first N, or those from A to B (default: all)",
    )
    add(
        "--spread",
        action="store_true",
        help="requests of one time up to the next time, as `goodput` does: Mooncake's traces have "
        "a clock of 3 s",
    )
    add(
        "--set",
        type=_setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the system; of conflux any of the engine's config (may be repeated)",
    )
    add("--ordering", choices=ORDERINGS, help="whose prompt is next (default: the system's own)")
    add("--ttft", type=positive, metavar="S", help="seconds to the first token, for any prompt")
    add(
        "--tbt",
        type=positive,
        default=TBT_MS,
        metavar="MS",
        help="milliseconds between two tokens (default: %(default)g)",
    )
    add("--seed", type=int, default=0, help="of noise, and of --spread (default: %(default)s)")
    add("--timeline", type=Path, metavar="FILE", help="write Chrome trace JSON, for Perfetto")
    add("--requests", type=Path, metavar="FILE", help="write a line of JSON for each request")
    add("--json", type=Path, metavar="FILE", help="write the summary as flat JSON")
    return parser.parse_args(arguments)


def _minutes(text: str) -> tuple[float, float]:
    first, _, last = text.rpartition(":")
    start, end = float(first or 0), float(last)
    if not 0 <= start < end < math.inf:
        raise argparse.ArgumentTypeError(f"must be N or A:B with 0 <= A < B, got {text}")
    return start, end


def _setting(text: str) -> tuple[str, Any]:
    """VALUE is JSON where it can be, else a string."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def load_requests(parsed: argparse.Namespace) -> list[SimulatedRequest]:
    """Raises TraceError that names the file, and the line where it is one's fault."""
    traced = read_trace(parsed.trace)
    try:
        taken = slice_minutes(traced, *parsed.minutes)
        if parsed.spread:
            taken = spread(taken, parsed.seed)
        if parsed.rate is not None:
            taken = at_rate(taken, parsed.rate)
    except TraceError as error:
        named = str(error).startswith(f"{parsed.trace}:")
        raise error if named else TraceError(f"{parsed.trace}: {error}") from error
    return simulated(taken, targets(parsed))


def targets(parsed: argparse.Namespace) -> Targets:
    tbt_slo_s = parsed.tbt / 1000
    if parsed.ttft is not None:
        return Targets(tbt_slo_s, floor_s=parsed.ttft)
    hardware = load_hardware(parsed.hardware)
    return scaled_targets(KNOWN_SPECS[parsed.model], hardware, parsed.gpus, tbt_slo_s)


def build(parsed: argparse.Namespace) -> System:
    flags = {"seed": parsed.seed, "sp": parsed.sp, "tp": parsed.tp}
    given = {name: value for name, value in flags.items() if value is not None}
    return SYSTEMS[parsed.system](
        KNOWN_SPECS[parsed.model],
        load_hardware(parsed.hardware),
        parsed.gpus,
        given | dict(parsed.set),
        parsed.ordering,
    )


def run(system: System, requests: Sequence[SimulatedRequest], timeline: Path | None) -> Results:
    """With a progress bar; raises ConfigError where the system has no timeline to write."""
    with contextlib.ExitStack() as stack:
        writer = None
        if timeline is not None:
            if not isinstance(system, Observable):
                raise ConfigError("timeline: this system does not tell of its iterations")
            writer = stack.enter_context(Timeline(timeline))
            system.observe(writer.note)
        gc.collect()
        gc.freeze()  # the requests stay to the end: no use in looking at them again and again
        stack.callback(gc.unfreeze)
        results = simulate(system, requests, progress(ProgressBar()))
        if writer is not None:
            writer.count_requests(results)
    return results


def progress(bar: ProgressBar) -> Callable[[Moment], None]:
    return lambda moment: bar("simulate", moment.done, moment.total)


def report(parsed: argparse.Namespace, results: Results) -> str:
    values = results.summary()
    ttft = "2 s or more for long prompts" if parsed.ttft is None else f"{parsed.ttft:g} s"
    lines = [
        f"{parsed.system}, {KNOWN_SPECS[parsed.model].name} on {parsed.gpus} x {parsed.hardware}; "
        f"TTFT {ttft}, TBT {parsed.tbt:g} ms",
        f"{'requests':<24}{len(results.requests):>12,}",
    ]
    if "rate_per_s" in values:
        lines.append(f"{'requests a second':<24}{values['rate_per_s']:>12.3f}")
    for name, title, scale, unit in (
        ("ttft", "first token", 1, "s"),
        ("tbt", "between tokens", 1000, "ms"),
        ("latency", "whole request", 1, "s"),
    ):
        if f"{name}_p50_s" in values:
            cells = [scale * values[f"{name}_p{percent}_s"] for percent in (50, 95, 99)]
            numbers = "".join(f"{cell:>12,.2f}" for cell in cells)
            lines.append(f"{f'{title}, {unit}':<24}{numbers}   (p50, p95, p99)")
    lines.append(f"{'on time':<24}{values['attainment']:>12.1%}")
    for name, title, form in (
        ("utilisation", "GPUs busy", ".1%"),
        ("kv_peak", "KV memory at most", ".1%"),
        ("preemptions", "preemptions", ",.0f"),
        ("iterations", "iterations", ",.0f"),
    ):
        if name in values:
            lines.append(f"{title:<24}{values[name]:>12{form}}")
    if results.refused:
        first = next(iter(results.refused.values()))
        lines.append(f"{'refused':<24}{len(results.refused):>12,}   ({first})")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
