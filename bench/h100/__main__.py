"""One iteration of a long prefill, counted in the programs that XLA makes of it for H100s.

The scheme, its ablations and uniform tensor parallelism, each compiled as the engine would for the
model's config in configs/, on a machine that needs no GPU: bytes of collectives, weight and KV
bytes read, FLOPs and kernel launches. Needs a Python with JAX's CUDA plugin:
`make .venv-gpu/.gpu` makes one in .venv-gpu. `python -m bench.long_prefill` runs this with it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.h100.options import CONFIGS, Workload, add_arguments
from bench.variants import VARIANTS, Variant

if TYPE_CHECKING:
    from bench.h100.accounting import Cost


def variant_cost(variant: Variant, workload: Workload) -> Cost:
    """Compiles the variant's program for the iteration. Raises ConfigError or ValueError where the
    iteration cannot be."""
    from bench.h100.accounting import cost
    from bench.h100.programs import Setup, compile_step
    from conflux_jax.config import Config
    from conflux_jax.models.known_specs import KNOWN_SPECS

    spec = KNOWN_SPECS[workload.model]
    base = Config.from_yaml(CONFIGS / f"{workload.model}.yaml")
    settings = variant.on(base.mesh.sp, base.mesh.tp)
    room = workload.settings(settings["sp"], apart=settings.get("linear") == "apart")
    setup = Setup.make(spec, Config.from_flat(base, **room, **settings))
    iteration = workload.iteration(setup.limits.geometry.groups)
    bucket = workload.bucket(setup.ladders, iteration)
    workload.check(spec.max_position_embeddings, setup.limits.geometry, iteration)
    program = compile_step(setup, bucket)
    return cost(program.module, setup.dims, setup.limits, bucket, iteration)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.h100",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures as flat JSON")
    options = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # H100s are described, not looked for
    from bench.h100.report import flat, table

    workload = Workload.of(options)
    costs = {}
    try:
        for variant in VARIANTS:
            print(f"compiling for H100s: {variant.label}", flush=True)
            costs[variant.key] = variant_cost(variant, workload)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(costs, workload.iteration(1), workload.model))
    if options.json:
        options.json.write_text(json.dumps(flat(costs), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
