"""Goodput of all systems on the traffic of the paper's comparison, beside its ratios.

TRACES is a directory with Mooncake's public traces, a reconstruction of its tool-and-agent one, and
Azure's conversation trace of 2023. What is found is kept in RESULTS, a line for each piece of work,
so a survey that was broken off goes on. `--report` runs nothing and writes tables and plots.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from conflux_jax.config import ConfigError
from conflux_jax.goodput import matplotlib, survey
from conflux_jax.models.known_specs import KNOWN_SPECS
from conflux_jax.simulation import goodput_report
from conflux_jax.simulation.capacity import Interval
from conflux_jax.simulation.goodput import ORDERS, Case
from conflux_jax.simulation.goodput_book import Book
from conflux_jax.simulation.goodput_report import BOUND, OURS, TITLES, Row
from conflux_jax.simulation.systems import SYSTEMS
from conflux_jax.simulation.traces import TraceError


class Traffic(NamedTuple):
    """paper: what it says of our goodput over the strongest other system. minutes: of trace in a
    slice; replayed as fast as systems can serve it, it must still last for a minute or so."""

    title: str
    trace: str
    model: str
    gpus: int
    paper: str
    tbts_ms: tuple[float, ...] = (100.0,)
    minutes: float = 5.0


TOOLAGENT = "mooncake_toolagent_recon.jsonl"
TRAFFIC = (
    Traffic("toolagent-recon", TOOLAGENT, "qwen3-14b", 4, "1.26 to 1.62", (100.0, 50.0)),
    Traffic("toolagent-recon", TOOLAGENT, "llama-3.1-8b", 4, "1.26 to 1.62"),
    Traffic("toolagent-recon", TOOLAGENT, "qwen3-32b", 8, "1.26 to 1.62"),
    Traffic("synthetic", "mooncake_synthetic_trace.jsonl", "qwen3-14b", 4, "1.7"),
    Traffic("Azure conv", "azure_llm_2023_conv.csv", "qwen3-14b", 4, "1.1 (QwenA)", minutes=10.0),
    Traffic("conversation", "mooncake_conversation_trace.jsonl", "qwen3-14b", 4, "not in it"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    cases = cases_of(options.traces)
    try:
        drawing = matplotlib() if options.plot else None
        book = Book(options.results)
        if not options.report:
            survey(cases, options.slices, book, options.processes)
        found = goodput_report.rows(book, cases, options.slices)
        print(tables(found))
        if drawing is not None:
            options.plot.mkdir(parents=True, exist_ok=True)
            goodput_report.plot(found, book, options.plot, drawing)
    except (ConfigError, TraceError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.goodput_tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traces", type=Path, required=True, help="the traces' directory")
    parser.add_argument("--results", type=Path, required=True, help="what is found, as JSON lines")
    parser.add_argument("--slices", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--report", action="store_true", help="only of what has been found")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw it (needs matplotlib)")
    return parser.parse_args(arguments)


def cases_of(traces: Path) -> list[Case]:
    """What matters most comes first, so that a survey that is broken off has it: a target of 100 ms
    before others, then each system's own order before first come first served, which is compared
    on the first traffic above all."""
    choices = [
        (traffic, tbt_ms, order)
        for traffic in TRAFFIC
        for tbt_ms, order in itertools.product(traffic.tbts_ms, ORDERS[::-1])
    ]
    choices.sort(key=lambda one: (one[1] < Case.tbt_ms, one[2] == "fcfs" and one[0] != TRAFFIC[0]))
    return [
        Case(
            trace=str(traces / traffic.trace),
            system=system,
            model=traffic.model,
            gpus=traffic.gpus,
            order=order,
            tbt_ms=tbt_ms,
            minutes=traffic.minutes,
        )
        for traffic, tbt_ms, order in choices
        for system in SYSTEMS
    ]


def tables(found: Sequence[Row]) -> str:
    """In Markdown: a row for each traffic, target and order, a column for each system; then how our
    scheduler compares with first come first served."""
    names = list(SYSTEMS)
    lines = [
        "| trace | model, GPUs | TBT | order | "
        + " | ".join(TITLES[name] for name in names)
        + " | ours over the strongest | paper |",
        "| --- " * (6 + len(names)) + "|",
    ]
    for group in goodput_report.comparisons(found):
        case, by_name = group[0].case, {row.case.system: row for row in group}
        traffic = next(one for one in TRAFFIC if one.trace == Path(case.trace).name)
        cells = [_goodput(by_name[name]) if name in by_name else "" for name in names]
        over = "not all measured"
        if len(by_name) == len(names) and (best := goodput_report.ours_over(by_name[OURS], group)):
            over = f"{_with_bounds(best[1])}, {TITLES[best[0].case.system]}"
        lines.append(
            f"| {traffic.title} | {KNOWN_SPECS[case.model].name}, {case.gpus} | {case.tbt_ms:g} ms "
            f"| {case.order} | {' | '.join(cells)} | {over} | {traffic.paper} |"
        )
    return "\n".join([*lines, "", *_orders(found)])


def _goodput(row: Row) -> str:
    return f"{row.goodput.mean:.2f}"


def _ratio(found: Interval) -> str:
    return f"{found.mean:.2f}"


def _with_bounds(found: Interval) -> str:
    """Of one slice alone there are none."""
    bounds = f" ({found.low:.2f} to {found.high:.2f})" if math.isfinite(found.high) else ""
    return _ratio(found) + bounds


def _orders(found: Sequence[Row]) -> list[str]:
    """Each system's own order over first come first served."""
    lines = ["| trace | model | TBT | own order over first come first served |", "| --- " * 4 + "|"]
    pairs: dict[tuple[str, str, float], dict[str, dict[str, Row]]] = {}
    for row in found:
        case = row.case
        traffic = (Path(case.trace).name, case.model, case.tbt_ms)
        pairs.setdefault(traffic, {}).setdefault(case.system, {})[case.order] = row
    for (trace, model, tbt_ms), systems in pairs.items():
        title = next(one.title for one in TRAFFIC if one.trace == trace)
        cells = [
            f"{TITLES[name]} {_ratio(goodput_report.ratio(rows['own'], rows['fcfs']))}"
            for name, rows in systems.items()
            if len(rows) == len(ORDERS) and name != BOUND
        ]
        if cells:
            name = KNOWN_SPECS[model].name
            lines.append(f"| {title} | {name} | {tbt_ms:g} ms | {', '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
