"""The paper's figures beside what the simulation computes, with the ratio.

Under each row: its setting, and what stands behind a value that is off by more than 15% (marked) or
that hangs on what the paper leaves open. A row of several values is within when all of them are.
Row 12 is measured: what this machine takes for a scheduling pass.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import scheduler
from conflux_jax.config import ConfigError
from conflux_jax.simulation.hardware import Hardware, load_hardware
from conflux_jax.simulation.paper import ROWS, WITHIN, Row, Value
from conflux_jax.simulation.paper_systems import prefills_beside_decodes

WIDTH = 100


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.paper", description=__doc__)
    parser.add_argument("--hardware", default="h100", help="h100, h200, a100 or a file (h100)")
    parser.add_argument("--json", type=Path, help="write every row's ratios there")
    parser.add_argument("--quick", action="store_true", help="without rows 6 and 12: seconds")
    args = parser.parse_args(argv)
    try:
        hardware = load_hardware(args.hardware)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    functions = ROWS if args.quick else (*ROWS, prefills_beside_decodes, scheduling_pass)
    rows = sorted((row(hardware) for row in functions), key=lambda row: row.number)
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(document(rows), indent=1) + "\n", encoding="utf-8")
    return 0


def scheduling_pass(hardware: Hardware) -> Row:
    """Measured on this machine, whatever the GPU."""
    figures = scheduler.measure(scheduler.WAITING, scheduler.QUICK_PASSES, "deadline")
    setting = "8 groups, about 1,024 running decodes, 4,096 waiting, on one core of this machine"
    note = (
        f"p99 {figures['p99']:.2f} ms. A turn of a loop of Python's takes "
        f"{scheduler.python_loop_ns():.0f} ns here; on a server of today about 30 to 50"
    )
    value = Value("p50", 1.05, figures["p50"], "ms", at_most=True)
    return Row(12, "one scheduling pass, at most", setting, (value,), note)


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'':58s}{'paper':>10s}{'here':>10s}{'ratio':>8s}"]
    for row in rows:
        lines.append(f"{row.number:2d} {row.what}")
        for value in row.values:
            name = f"     {value.name} {f'({value.unit})' if value.unit else ''}".rstrip()
            mark = "" if value.within else " *"
            lines.append(
                f"{name:58s}{value.paper:10,.4g}{value.ours:10,.4g}{value.ratio:8.2f}{mark}"
            )
        for note in (row.setting, row.note):
            lines += textwrap.wrap(
                note, WIDTH - 5, initial_indent=" " * 5, subsequent_indent="     "
            )
    within = sum(row.within for row in rows)
    lines.append(f"{within} of {len(rows)} rows within {WITHIN:.0%}")
    return "\n".join(lines)


def document(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "rows": [
            {
                "number": row.number,
                "what": row.what,
                "setting": row.setting,
                "within": row.within,
                "values": [
                    {
                        "name": value.name,
                        "unit": value.unit,
                        "paper": value.paper,
                        "ours": value.ours,
                        "ratio": value.ratio,
                    }
                    for value in row.values
                ],
                "note": row.note,
            }
            for row in rows
        ],
        "rows_within_15pct": sum(row.within for row in rows),
        "rows_total": len(rows),
    }


if __name__ == "__main__":
    sys.exit(main())
