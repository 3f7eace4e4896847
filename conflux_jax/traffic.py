"""Tells whether the scheme's premise holds for a trace of your traffic: that long prompts need
several groups of GPUs to have their first token in time, while decode iterations are short beside
the target between tokens.

TRACE is Mooncake JSONL (timestamp, input_length, output_length, hash_ids) or Azure CSV (TIMESTAMP,
ContextTokens, GeneratedTokens), in order of arrival. Times are those of a latency profile, or
else estimates from a GPU's peaks.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conflux_jax.config import ConfigError
from conflux_jax.flags import one_line, positive, positive_int
from conflux_jax.models.known_specs import KNOWN_SPECS
from conflux_jax.simulation import roofline
from conflux_jax.simulation.demand import Demand, Lengths, measure
from conflux_jax.simulation.premise import Engine, Premise, decodes_in_memory, examine
from conflux_jax.simulation.profile import load_profile
from conflux_jax.simulation.traces import TraceError, read_trace
from conflux_jax.simulation.verdict import Verdict, judge

MODEL, GPU, NUM_GPUS, CHUNK_TOKENS = "qwen3-14b", "h100", 4, 4096  # without a profile
PLOT_BINS = 40
PICTURES = (".png", ".svg", ".pdf")
WIDTH = 100  # of the report


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine; returns the exit code. What is wrong is one line on stderr."""
    parsed = _parse(arguments)
    try:
        drawing = _matplotlib() if parsed.plot else None  # now, not after reading a long trace
        target = profile_target(parsed) if parsed.profile else roofline_target(parsed)
        demand = measure(read_trace(parsed.trace))
        rate_per_s = parsed.rate or demand.rate_per_s
        if rate_per_s is None:
            raise TraceError(f"{parsed.trace}: all requests come at once; give --rate")
        premise = examine(demand, target.engine, rate_per_s)
        verdict = judge(premise)
        if parsed.json is not None:
            parsed.json.write_text(json.dumps(numbers(premise), indent=1) + "\n", encoding="utf-8")
        if drawing is not None:
            plot(demand, parsed.plot, drawing)
    except (TraceError, ConfigError, ImportError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    print(report(premise, verdict, target))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m conflux_jax.traffic", description=__doc__, allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("trace", metavar="TRACE", type=Path, help="the trace to read")
    add("--profile", type=Path, help="a file that `python -m conflux_jax.calibrate` wrote")
    add("--model", choices=KNOWN_SPECS, help=f"without a profile (default: {MODEL})")
    add("--gpu", choices=roofline.GPUS, help=f"without a profile (default: {GPU})")
    add("--gpus", type=positive_int, help=f"in all (default: the profile's, or {NUM_GPUS})")
    add("--tp", type=positive_int, help="GPUs of a group (default: as few as hold the weights)")
    add(
        "--chunk-tokens",
        type=positive_int,
        help=f"most of a group in an iteration (default: the profile's, or {CHUNK_TOKENS})",
    )
    add("--ttft-slo-s", type=positive, default=2.0, help="first token (default: %(default)s)")
    add("--tbt-slo-s", type=positive, default=0.1, help="between tokens (default: %(default)s)")
    add("--rate", type=positive, help="requests a second (default: the trace's)")
    add("--json", type=Path, metavar="FILE", help="write the numbers, by name, as JSON")
    add("--plot", type=_picture, metavar="FILE.png", help="draw the lengths (needs matplotlib)")
    return parser.parse_args(arguments)


def _picture(text: str) -> Path:
    if (path := Path(text)).suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"must end in one of {', '.join(PICTURES)}, got {text}")
    return path


@dataclass(frozen=True)
class Target:
    """An engine, and a line each on what it is and where its times come from."""

    engine: Engine
    name: str
    source: str


def roofline_target(parsed: argparse.Namespace) -> Target:
    """Raises ConfigError where the GPUs make no groups, or the model does not fit into them."""
    spec, gpu = KNOWN_SPECS[parsed.model or MODEL], roofline.GPUS[parsed.gpu or GPU]
    costs = roofline.ModelCosts.of(spec)
    tp, gpus = parsed.tp or roofline.group_size(costs, gpu), parsed.gpus or NUM_GPUS
    groups = _groups(gpus, tp)
    kv_tokens = roofline.kv_tokens(costs, gpu, tp)
    if not kv_tokens:
        raise ConfigError(f"tp: {tp} x {gpu.name} have no memory for {spec.name} and its KV")
    engine = Engine(
        predictor=lambda shared: roofline.Roofline(costs, gpu, shared, tp),
        groups=groups,
        gpus_per_group=tp,
        max_rows=parsed.chunk_tokens or CHUNK_TOKENS,
        ttft_slo_s=parsed.ttft_slo_s,
        tbt_slo_s=parsed.tbt_slo_s,
        kv_tokens=kv_tokens,
        max_model_len=spec.max_position_embeddings,
    )
    source = (
        f"Times are estimates from peak figures, of which {roofline.LINEAR_FRACTION:.0%} are taken "
        f"as reached in linear layers, {roofline.ATTENTION_FRACTION:.0%} in prefill attention, "
        f"{roofline.MEMORY_FRACTION:.0%} of memory bandwidth, {roofline.LINK_FRACTION:.0%} of "
        "links; nothing was measured."
    )
    return Target(engine, f"{spec.name} on {gpus} x {gpu.name}", source)


def profile_target(parsed: argparse.Namespace) -> Target:
    """Raises ConfigError where the profile cannot be read, or a flag says what it says already."""
    for name in ("model", "gpu", "tp"):
        if getattr(parsed, name) is not None:
            raise ConfigError(f"{name}: the profile says it; leave out --{name} or --profile")
    profile, identity = load_profile(parsed.profile)
    tp, device = identity["tp"], identity["device_kind"]
    gpus = parsed.gpus or identity["sp"] * tp
    engine = Engine(
        predictor=profile.predictor,
        groups=_groups(gpus, tp),
        gpus_per_group=tp,
        max_rows=parsed.chunk_tokens or profile.rows[-1],
        ttft_slo_s=parsed.ttft_slo_s,
        tbt_slo_s=parsed.tbt_slo_s,
        max_model_len=identity["max_model_len"],
    )
    source = (
        f"Times are those of the profile {parsed.profile}, measured with {profile.measured_groups} "
        f"{'group' if profile.measured_groups == 1 else 'groups'}; for other numbers of them "
        "attention is divided anew, and communication taken as it was measured."
    )
    if "cores" in identity:
        source += (
            " Its devices share the cores of one CPU, where more groups are no faster: take the "
            "GPUs that a prompt needs from a GPU's profile."
        )
    return Target(engine, f"{identity['model']} ({identity['dtype']}) on {gpus} x {device}", source)


def _groups(gpus: int, tp: int) -> int:
    if gpus % tp:
        raise ConfigError(f"gpus: must be a multiple of a group's {tp} GPUs, got {gpus}")
    return gpus // tp


def report(premise: Premise, verdict: Verdict, target: Target) -> str:
    """The whole text."""
    demand, engine = premise.demand, premise.engine
    groups = f"{engine.groups} {'group' if engine.groups == 1 else 'groups'}"
    lines = [
        f"{target.name}: {groups} of {engine.gpus_per_group}; "
        f"TTFT {engine.ttft_slo_s:g} s, TBT {1000 * engine.tbt_slo_s:g} ms",
        *textwrap.wrap(target.source, WIDTH),
        "",
        f"{'tokens':<24}{'mean':>9}{'p50':>9}{'p95':>9}{'p99':>9}{'most':>9}",
        _row("prompt", demand.prompts.lengths),
    ]
    if demand.uncached is not None:
        lines.append(_row("prompt less seen prefix", demand.uncached.lengths))
    lines += [_row("output", demand.outputs), ""]
    lines += [f"{name:<40}{value:>18}" for name, value in _facts(premise)]
    findings = [f"{f.topic} ({f.answer.value}): {f.text}" for f in verdict.findings]
    lines += ["", *(textwrap.fill(text, WIDTH, subsequent_indent="  ") for text in findings)]
    return "\n".join([*lines, "", verdict.line])


def _row(name: str, lengths: Lengths) -> str:
    numbers = (lengths.mean, lengths.p50, lengths.p95, lengths.p99, lengths.longest)
    return f"{name:<24}" + "".join(f"{number:>9,.0f}" for number in numbers)


def _facts(premise: Premise) -> list[tuple[str, str]]:
    demand, engine, decoding = premise.demand, premise.engine, premise.decoding
    reuse = "not in the trace" if demand.prefix_reuse is None else f"{demand.prefix_reuse:.1%}"
    too_long = "not known" if premise.too_long is None else f"{premise.too_long:.1%}"
    fitting = decodes_in_memory(demand, engine)
    gpus = None if premise.groups_p95 is None else premise.groups_p95 * engine.gpus_per_group
    return [
        ("requests", f"{demand.num_requests:,}"),
        ("requests a second", f"{premise.rate_per_s:.3g}"),
        ("longer than the model takes", too_long),
        ("prefix reuse, nothing ever evicted", reuse),
        ("GPUs for the p95 prompt within TTFT", "more than tried" if gpus is None else str(gpus)),
        ("decodes that run at once, each group", f"{decoding.concurrency:,}"),
        ("that a group has memory for", "not known" if fitting is None else f"{fitting:,}"),
        ("KV tokens that a decode reads", f"{demand.decode_context:,.0f}"),
        ("one decode iteration", f"{1000 * decoding.iteration_s:.1f} ms"),
        ("decode slack under TBT", f"{premise.slack:.1%}"),
    ]


def numbers(premise: Premise) -> dict[str, float]:
    """Flat, by name; what is not known, or has no finite number, is left out."""
    demand, engine, filled = premise.demand, premise.engine, premise.filled
    values: dict[str, float | None] = {
        "requests": demand.num_requests,
        "duration_s": demand.duration_s,
        "rate_per_s": premise.rate_per_s,
        "groups": engine.groups,
        "gpus_per_group": engine.gpus_per_group,
        "ttft_slo_s": engine.ttft_slo_s,
        "tbt_slo_s": engine.tbt_slo_s,
        "requests_too_long": premise.too_long,
        "prefix_reuse": demand.prefix_reuse,
        "decode_context": demand.decode_context,
        "decode_concurrency": premise.decoding.concurrency,
        "decode_iteration_s": premise.decoding.iteration_s,
        "decode_steady": int(premise.decoding.steady),
        "decode_slack": premise.slack,
        "decodes_in_memory": decodes_in_memory(demand, engine),
        "p95_prefill_one_group_s": premise.p95_prefill_s,
        "p95_prefill_all_groups_s": premise.p95_all_groups_s,
        "offered_prompt_tokens_s": premise.offered_tokens_s,
        "capacity_prompt_tokens_s": filled.capacity_tokens_s,
        "filled_iteration_s": filled.target_s,
        "filled_decodes": filled.decodes,
        "filled_prefill_tokens": filled.tokens,
    }
    for name, groups in (
        ("p95", premise.groups_p95),
        ("p99", premise.groups_p99),
        ("p95_uncached", premise.groups_p95_uncached),
    ):
        values[f"gpus_for_{name}"] = None if groups is None else groups * engine.gpus_per_group
    kinds = {"prompt": demand.prompts.lengths, "output": demand.outputs}
    if demand.uncached is not None:
        kinds["uncached"] = demand.uncached.lengths
    for kind, lengths in kinds.items():
        values |= {f"{kind}_{name}": number for name, number in vars(lengths).items()}
    return {name: value for name, value in values.items() if value is not None}


def plot(demand: Demand, path: Path, drawing: Any) -> None:
    """Histograms of prompt and output tokens on logarithmic axes, with prompts' percentiles."""
    figure = drawing.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    kinds = (("prompt", demand.prompt_lengths), ("output", demand.output_lengths))
    most = max(max(lengths) for _, lengths in kinds)
    edges = [(most + 1) ** (step / PLOT_BINS) for step in range(PLOT_BINS + 1)]
    for name, lengths in kinds:
        axes.hist(lengths, bins=edges, alpha=0.6, label=name)
    percentiles = demand.prompts.lengths
    for style, name in ((":", "p50"), ("--", "p95"), ("-.", "p99")):
        tokens = getattr(percentiles, name)
        axes.axvline(tokens, color="black", linestyle=style, label=f"prompt {name}: {tokens:,}")
    axes.set(xscale="log", xlabel="tokens", ylabel="requests")
    axes.legend()
    figure.savefig(path)


def _matplotlib() -> Any:
    """matplotlib.figure, which draws without a display."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'conflux-jax[plot]'") from error


if __name__ == "__main__":
    sys.exit(main())
