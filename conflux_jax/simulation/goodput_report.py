"""Tables and plots of a survey of goodput."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conflux_jax.models.known_specs import KNOWN_SPECS
from conflux_jax.simulation.capacity import CONFIDENCE, TOLERANCE, Interval, interval
from conflux_jax.simulation.goodput import QUANTILES, SHARE, Case
from conflux_jax.simulation.goodput_book import Book, Record

OURS, BOUND = "conflux", "chunked-oracle"  # the latter knows what no real system does
TITLES = {
    "conflux": "ConfluxServe",
    "chunked": "chunked prefill",
    "chunked-oracle": "chunked, oracle",
    "loongserve": "LoongServe",
    "muxwise": "MuxWise",
    "disaggregated": "disaggregated",
}


@dataclass(frozen=True)
class Row:
    """One case. rates: its goodput by seed; settings: of the system."""

    case: Case
    rates: dict[int, float]
    settings: dict[str, Any]
    records: list[Record]

    @property
    def goodput(self) -> Interval:
        return interval(list(self.rates.values()))


def _is_bounded(row: Row) -> bool:
    """Whether on every slice some rate was too high."""
    return all(math.isfinite(record["failed"]) for record in row.records)


def rows(book: Book, cases: Sequence[Case], seeds: int) -> list[Row]:
    """Of the cases that have been measured with any of the seeds."""
    found = []
    for case in cases:
        records = [book.get("found", case, seed) for seed in range(seeds)]
        known = [record for record in records if record is not None]
        tuned = book.get("tuned", case)
        if known and tuned is not None:
            rates = {record["seed"]: record["rate"] for record in known}
            found.append(Row(case, rates, tuned["settings"], known))
    return found


def ours_over(row: Row, others: Sequence[Row]) -> tuple[Row, Interval] | None:
    """Our row beside the strongest of the others that real systems could be, by mean goodput, and
    the ratio to it: slice by slice, of those that both have. None without such a one."""
    real = [other for other in others if other.case.system not in (OURS, BOUND)]
    best = max(real, key=lambda other: other.goodput.mean, default=None)
    if best is None or not best.goodput.mean:
        return None
    return best, ratio(row, best)


def ratio(row: Row, other: Row) -> Interval:
    seeds = row.rates.keys() & other.rates.keys()
    pairs = [(row.rates[seed], other.rates[seed]) for seed in sorted(seeds)]
    return interval([mine / theirs for mine, theirs in pairs if theirs])


def settings_of(case: Case) -> tuple[Any, ...]:
    """What cases have in common that are compared with each other."""
    return dataclasses.astuple(dataclasses.replace(case, system=OURS))


def comparisons(found: Sequence[Row]) -> list[list[Row]]:
    """Rows of different systems under the same traffic, order and targets."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        groups.setdefault(settings_of(row.case), []).append(row)
    return list(groups.values())


def text(found: Sequence[Row]) -> str:
    """The report of a command: a table for each comparison, then how to read it."""
    lines: list[str] = []
    for group in comparisons(found):
        lines += [*_table(group), ""]
    return "\n".join(
        [
            *lines,
            f"Goodput: the highest rate, in requests a second, at which {SHARE:.0%} of a slice's "
            "requests have every",
            f"token on time; a rate {TOLERANCE:.0%} higher was not sustained. Mean over slices of "
            "the trace, one a seed, with its",
            f"{CONFIDENCE:.0%} interval: Student's t on the logarithms, slices taken as "
            "independent; ratios slice by slice.",
        ]
    )


def _table(group: Sequence[Row]) -> list[str]:
    case = group[0].case
    ttft = "2 s, or more for long prompts" if case.ttft_s is None else f"{case.ttft_s:g} s"
    slices = max(len(row.rates) for row in group)
    lines = [
        f"{KNOWN_SPECS[case.model].name} on {case.gpus} x {case.hardware}, {Path(case.trace).name}",
        f"{slices} {'slice' if slices == 1 else 'slices'} of {case.minutes:g} minutes; "
        f"TTFT {ttft}; TBT {case.tbt_ms:g} ms; "
        + ("first come first served" if case.order == "fcfs" else "each system's own order"),
        f"{'system':<18}{'goodput':>9}{'interval':>18}   settings",
    ]
    for row in group:
        settings = ", ".join(f"{name} {value}" for name, value in row.settings.items())
        mean, span = f"{row.goodput.mean:.2f}", _span(row.goodput)
        if not _is_bounded(row):
            mean, span = "any rate", ""
        lines.append(f"{TITLES[row.case.system]:<18}{mean:>9}{span:>18}   {settings}".rstrip())
    if not all(map(_is_bounded, group)):
        lines.append("Any rate: even with a whole slice at once all is on time; see --minutes")
        return lines
    for row in group:
        if row.case.system == OURS and (compared := ours_over(row, group)) is not None:
            best, times = compared
            lines.append(
                f"{TITLES[OURS]} over {TITLES[best.case.system]}, the strongest: "
                f"{times.mean:.2f} ({_span(times)})"
            )
    return lines


def _span(found: Interval) -> str:
    return f"{found.low:.2f} to {found.high:.2f}" if math.isfinite(found.high) else "one slice"


def flat(found: Sequence[Row]) -> dict[str, float]:
    """By name, such as goodput_muxwise_own_tbt100; ratio_* is ours over the strongest other. One
    slice has no interval. What has no bound is left out, and with it the ratio."""
    values: dict[str, float] = {}
    for group in comparisons(found):
        for row in filter(_is_bounded, group):
            case = row.case
            suffix = f"{case.order}_tbt{case.tbt_ms:g}"
            name = f"{case.system}_{suffix}"
            values |= _interval(f"goodput_{name}", row.goodput)
            values[f"slices_{name}"] = len(row.rates)
            compared = ours_over(row, group) if case.system == OURS else None
            if compared is not None and all(map(_is_bounded, group)):
                values |= _interval(f"ratio_{suffix}", compared[1])
    return values


def _interval(name: str, found: Interval) -> dict[str, float]:
    if math.isinf(found.high):
        return {name: found.mean}
    return {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}


def plot(found: Sequence[Row], book: Book, directory: Path, drawing: Any) -> list[Path]:
    """Three pictures in `directory`, by what is compared; returns their paths. drawing:
    matplotlib.figure."""
    written = []
    for group in comparisons(found):
        case = group[0].case
        stem = f"{Path(case.trace).stem}-{case.model}-{case.order}-tbt{case.tbt_ms:g}"
        for name, draw in (("goodput", _bars), ("times", _times), ("attainment", _attainment)):
            figure = drawing.Figure(figsize=(9, 4.5), layout="constrained")
            draw(figure, group, book)
            written.append(directory / f"{stem}-{name}.png")
            figure.savefig(written[-1])
    return written


def _bars(figure: Any, group: Sequence[Row], book: Book) -> None:
    axes = figure.subplots()
    title = "goodput"
    for place, row in enumerate(group):
        (mean, low, high), error = row.goodput, None
        if math.isfinite(high):
            title, error = (
                f"goodput and its {CONFIDENCE:.0%} interval",
                [[mean - low], [high - mean]],
            )
        axes.bar(place, mean, yerr=error, capsize=4)
    axes.set_xticks(range(len(group)), [TITLES[row.case.system] for row in group])
    axes.set(ylabel="requests a second", title=title)


def _times(figure: Any, group: Sequence[Row], book: Book) -> None:
    """Of the first slice, each system at its own goodput."""
    first, between = figure.subplots(1, 2)
    shares = [percent / 100 for percent in QUANTILES]
    for row in group:
        record = row.records[0]
        label = f"{TITLES[row.case.system]}, {record['rate']:.2f}/s"
        for axes, times_s in ((first, record["ttft_s"]), (between, record["tbt_s"])):
            if times_s:
                axes.plot(times_s, shares, label=label)
    first.set(xscale="log", xlabel="s to the first token", ylabel="share of requests")
    between.set(xscale="log", xlabel="s between two tokens", ylabel="share of tokens")
    between.axvline(group[0].case.tbt_ms / 1000, color="black", linestyle=":")
    first.legend(title="at its goodput")


def _attainment(figure: Any, group: Sequence[Row], book: Book) -> None:
    """Of the first slice, at the rates that the search ran to the end and those of the curve."""
    axes = figure.subplots()
    for row in group:
        record = row.records[0]
        curve = book.get("curve", row.case, record["seed"]) or {"points": []}
        tried = record["points"] + curve["points"]
        points = {rate: share for rate, _, share in tried if share is not None}
        rates = sorted(points)
        axes.plot(rates, [points[rate] for rate in rates], "o-", label=TITLES[row.case.system])
    axes.axhline(SHARE, color="black", linestyle=":")
    axes.set(xlabel="requests a second", ylabel="share of requests on time")
    axes.legend()
