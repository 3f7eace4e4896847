"""The attention kernels on the paper's shapes: what they do, the least time that an H100 needs for
it, and, on a machine with a GPU, the time that they take.

Counts come from the kernels' own plans and loops (`bench/kernel_work.py`); no GPU is needed for
them. Where JAX has one of compute capability 9, the same command runs every case, checks rows of
the result against the oracle, and measures cuDNN and tokamax beside them where they can do it.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax

from bench.kernel_work import CASES, Case, MixedCase, PrefillCase, Work, work_of
from pallas_kernels.building_blocks import SMS

NOTES = """\
TFLOP: multiplied by the kernel; needed: of them, by pairs of query and key that attend. GB loaded:
into an SM, by the kernel's loops; memory: the least that must pass through memory. busiest: work of
the SM that has most, over the mean. floor: an H100's least time for it, and what sets it. expected:
by the hardware model of the simulator, of mixed the slower side's alone."""


@functools.cache
def work(case: Case) -> Work:
    return work_of(case)


def kind(case: Case) -> str:
    return type(case).__name__.removesuffix("Case").lower()


def expected_seconds() -> Callable[[Case], float] | None:
    """The simulator's hardware model of an H100; None where this version has none."""
    try:
        module = importlib.import_module("conflux_jax.simulation.hardware")
    except ModuleNotFoundError:
        return None
    hardware = module.load_hardware("h100")

    def seconds(case: Case) -> float:
        if isinstance(case, MixedCase):
            return max(seconds(case.prefill), seconds(case.decode))
        q_heads, kv_heads = case.heads
        if isinstance(case, PrefillCase):
            return hardware.prefill_attention_s(case.chunks, q_heads, head_dim=case.head_dim)
        rows, tokens = len(case.contexts), sum(case.contexts)
        return hardware.decode_attention_s(rows, tokens, kv_heads, head_dim=case.head_dim)

    return seconds


def on_hopper() -> bool:
    device = jax.devices()[0]
    return device.platform == "gpu" and device.compute_capability.startswith("9.")


def figures(case: Case, expected: Callable[[Case], float] | None) -> dict[str, float]:
    done = work(case)
    out = {
        "flops": done.flops,
        "needed_flops": done.needed_flops,
        "loaded_bytes": done.loaded_bytes,
        "memory_bytes": done.memory_bytes,
        "floor_s": done.floor_s,
    }
    if expected is not None:
        out["expected_s"] = expected(case)
    return out


def key(case: Case) -> str:
    """Of a case in the JSON."""
    return re.sub(r"\W+", "_", f"{kind(case)}_{case.model}_{case.label}".lower())


def table(cases: Sequence[Case], rows: Mapping[str, Mapping[str, float]]) -> str:
    lines = [
        f"{'':54}{'needed':>15}{'GB':>8}{'GB':>8}{'floor':>17}{'expected':>23}",
        f"{'':54}{'TFLOP':>8}{'%':>7}{'loaded':>8}{'memory':>8}{'busiest':>9}{'us':>8}{'us':>23}",
    ]
    for case in cases:
        done, row = work(case), rows[key(case)]
        expected = f"{row['expected_s'] * 1e6:,.0f}" if "expected_s" in row else "-"
        lines.append(
            f"{title(case)}{done.flops / 1e12:8.3f}{100 * done.needed_flops / done.flops:7.1f}"
            f"{done.loaded_bytes / 1e9:8.3f}{done.memory_bytes / 1e9:8.3f}{done.busiest * SMS:9.2f}"
            f"{done.floor_s * 1e6:8,.0f}  {done.limit:12}{expected:>9}"
        )
    return "\n".join(lines)


def title(case: Case) -> str:
    return f"{kind(case):8}{case.model:14}{case.label:32}"


def measured_table(cases: Sequence[Case], rows: Mapping[str, Mapping[str, float]]) -> str:
    """Achieved rates: bytes of memory for decode, needed FLOPs for all else, over time."""
    lines = [f"{'':54}{'us':>9}{'of floor':>10}{'rate':>14}{'cuDNN':>14}{'tokamax':>14}"]
    for case in cases:
        row, is_decode = rows[key(case)], kind(case) == "decode"
        amount = row["memory_bytes"] / 1e9 if is_decode else row["needed_flops"] / 1e12
        unit = "GB/s" if is_decode else "TFLOP/s"

        def rate(name: str, row=row, amount=amount, unit=unit) -> str:
            seconds = row.get(name)
            return f"{amount / seconds:7,.0f} {unit:>6}" if seconds else f"{'-':>14}"

        lines.append(
            f"{title(case)}{row['seconds'] * 1e6:9,.0f}"
            f"{100 * row['floor_s'] / row['seconds']:9.0f}%"
            f"{rate('seconds'):>14}{rate('cudnn_s'):>14}{rate('tokamax_s'):>14}"
        )
        if "slower_s" in row:
            lines[-1] += f"  {row['seconds'] / row['slower_s']:.2f}x the slower side alone"
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=sorted({case.model for case in CASES}))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures as flat JSON")
    parser.add_argument("--count-only", action="store_true", help="leave the GPU alone")
    options = parser.parse_args(arguments)
    cases = [case for case in CASES if options.model in (None, case.model)]
    expected = expected_seconds()
    rows = {key(case): figures(case, expected) for case in cases}
    print(table(cases, rows))
    print(f"\n{NOTES}\n")
    if options.count_only or not on_hopper():
        print("Nothing ran: no GPU of compute capability 9 was used.")
    else:
        from bench.kernel_runs import measure

        for case in cases:
            try:
                rows[key(case)] |= measure(case)
            except AssertionError as error:
                print(f"error: {key(case)}: {error}", file=sys.stderr)
                return 1
        print(measured_table(cases, rows))
    if options.json:
        flat = {f"{name}_{k}": v for name, row in rows.items() for k, v in row.items()}
        options.json.write_text(json.dumps(flat, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
