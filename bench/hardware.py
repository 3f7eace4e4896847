"""Fits the simulation's hardware figures to a table of measured latencies, and says how well.

The table is what `conflux_jax.simulation.hardware_fit` describes. Every third row of an operator is
held out; errors are of those, relative. `region` is the part of an operator's sizes in which
serving spends its time: products of layers (inner and outer size of 2,048 or more), prefill of
1,024 tokens or more over 4 heads or more, decode of 100 MB of KV or more, messages from 100 KB to
300 MB.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from conflux_jax.config import ConfigError
from conflux_jax.simulation.hardware import Hardware
from conflux_jax.simulation.hardware_fit import Errors, Fit, fit, read_tables
from conflux_jax.simulation.roofline import GPUS

SMS = {"a100": 108, "h100": 132, "h200": 132}
SOURCE = (
    "fitted to vLLM 0.24 (torch.linear, FlashAttention 3) and NCCL 2.29.2 on an H100 80 GB HBM3, "
    "as measured in NVIDIA AIConfigurator's tables (Apache-2.0)"
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware", description=__doc__)
    parser.add_argument("--reference", type=Path, required=True, help="CSV of measured latencies")
    parser.add_argument("--gpu", choices=sorted(SMS), default="h100", help="that was measured")
    parser.add_argument("--source", default=SOURCE, help="what the written file says of its origin")
    parser.add_argument("--write", type=Path, help="write the fitted hardware there")
    parser.add_argument("--json", type=Path, help="write the errors there")
    args = parser.parse_args(argv)
    gpu = GPUS[args.gpu]
    try:
        found = fit(read_tables(args.reference), SMS[args.gpu], gpu.flops, gpu.memory_bytes_s)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(found.errors))
    if args.write:
        args.write.write_text(hardware(found, args.gpu, args.source).to_json(), encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps([asdict(e) for e in found.errors], indent=1) + "\n")
    return 0


def hardware(found: Fit, gpu: str, source: str) -> Hardware:
    return Hardware(
        name=GPUS[gpu].name,
        source=source,
        sms=SMS[gpu],
        memory_bytes=GPUS[gpu].memory_bytes,
        gemm=found.gemm,
        prefill=found.prefill,
        decode=found.decode,
        collectives=found.collectives,
    )


def table(errors: Sequence[Errors]) -> str:
    lines = [
        f"{'relative error':20s}{'rows':>6s}{'fitted':>9s}{'held out':>10s}{'p90':>8s}"
        f"{'worst':>8s}{'region':>9s}{'rows':>6s}"
    ]
    for e in errors:
        lines.append(
            f"{e.operator:20s}{e.rows:6d}{e.fitted:9.1%}{e.median:10.1%}{e.p90:8.1%}"
            f"{e.worst:8.1%}{e.region:9.1%}{e.region_rows:6d}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
