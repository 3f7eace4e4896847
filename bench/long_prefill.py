"""One long prompt under a fixed decode load: the scheme beside its ablations and uniform TP.

Every variant is the real scheduler and the real step on the same virtual CPU devices, in turns,
round after round; the table shows medians and ratios to the scheme. Virtual devices share the
machine's cores: what these ratios say about overlap and communication on GPUs is little; they show
what each variant costs in work and in iterations.

What one iteration would cost on H100s is then counted in compiled programs (`bench.h100`), by
another Python, which needs JAX's CUDA plugin but no GPU.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.h100.options import Workload, add_arguments
from bench.variants import SCHEME, VARIANTS, Variant
from conflux_jax.platform import ensure_devices

LOAD_PROMPT = 128  # tokens of each decoding request when the long prompt comes
ROUNDS, QUICK_ROUNDS = 3, 1
LONG_ID = "long"
ROOT = Path(__file__).resolve().parents[1]
H100_PYTHON = ROOT / ".venv-gpu" / "bin" / "python"


@dataclass(frozen=True)
class Measured:
    """ttft_s: from the long prompt's arrival to its first token. tbt_s: mean time between a
    decoding request's tokens meanwhile. iterations: that the prompt's prefill took."""

    ttft_s: float
    tbt_s: float
    iterations: int


class Bench:
    """One variant: a compiled runner, and a run of the workload under a new scheduler each time."""

    def __init__(self, variant: Variant, options: argparse.Namespace):
        from conflux_jax.config import Config
        from conflux_jax.execution.runner import Runner
        from conflux_jax.models.loading import open_source

        self.options = options
        settings = variant.on(sp=options.devices, tp=1)
        longest = options.prompt_tokens + 64
        self.config = Config.from_flat(
            max_model_len=longest,
            max_num_seqs=options.decodes + 1,
            max_num_batched_tokens=options.batched_tokens,
            rows_ladder=(-(-options.batched_tokens // settings["sp"]),),
            decode_rows_ladder=(options.decodes + 1,),
            kv_pool_tokens=2 * (longest + options.decodes * (LOAD_PROMPT + longest // 4)),
            dtype=options.dtype,
            **settings,
        )
        self.runner = Runner.create(open_source(options.model), self.config)
        self.runner.warm_up()

    def run(self) -> Measured:
        from conflux_jax.loop import InFlight, turn
        from conflux_jax.scheduler.scheduler import Scheduler

        runner, options = self.runner, self.options
        scheduler = Scheduler(
            self.config.scheduler, runner.geometry, runner.ladders, runner.max_model_len
        )
        started: set[str] = set()
        in_flight: InFlight | None = None
        for number in range(options.decodes):
            scheduler.add(_request(f"load{number}", LOAD_PROMPT, runner.max_model_len, number))
        while len(started) < options.decodes:
            in_flight, events = turn(scheduler, runner, time.monotonic, in_flight)
            started.update(event.request_id for event in events)
        scheduler.add(_request(LONG_ID, options.prompt_tokens, runner.max_model_len, 99))
        start_s = time.perf_counter()
        steps = 0
        while LONG_ID not in started:
            in_flight, events = turn(scheduler, runner, time.monotonic, in_flight)
            started.update(event.request_id for event in events)
            steps += 1
        ttft_s = time.perf_counter() - start_s
        for request_id in started:
            scheduler.cancel(request_id)
        while in_flight is not None:
            in_flight, _ = turn(scheduler, runner, time.monotonic, in_flight)
        return Measured(ttft_s, ttft_s / steps, steps)


def _request(request_id: str, length: int, max_model_len: int, seed: int):
    from bench.peers.protocol import random_prompt
    from conflux_jax.request import Request, SamplingParams

    most = max_model_len - length
    params = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
    return Request(request_id, tuple(random_prompt(length, 40_000, seed)), params, most)


def measure(options: argparse.Namespace) -> dict[str, list[Measured]]:
    """By key of the variant. Every variant in turns; the first run of each only warms up."""
    benches = {}
    for variant in VARIANTS:
        print(f"compiling: {variant.label}", flush=True)
        benches[variant.key] = Bench(variant, options)
        benches[variant.key].run()
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    results: dict[str, list[Measured]] = {variant.key: [] for variant in VARIANTS}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", flush=True)
        for variant in VARIANTS:
            results[variant.key].append(benches[variant.key].run())
    return results


def summary(results: dict[str, list[Measured]]) -> dict[str, float]:
    """What `--json` writes: for each variant its medians, and ratios to the scheme."""
    flat: dict[str, float] = {}
    for key, runs in results.items():
        flat[f"{key}_ttft_s"] = statistics.median(run.ttft_s for run in runs)
        flat[f"{key}_tbt_s"] = statistics.median(run.tbt_s for run in runs)
        flat[f"{key}_iterations"] = float(runs[0].iterations)
    for key in results:
        for figure in ("ttft", "tbt"):
            own, scheme = flat[f"{key}_{figure}_s"], flat[f"{SCHEME.key}_{figure}_s"]
            flat[f"{key}_{figure}_ratio"] = own / scheme
    return flat


def table(flat: dict[str, float], options: argparse.Namespace) -> str:
    lines = [
        f"{options.prompt_tokens} tokens of prefill beside {options.decodes} decodes, at most "
        f"{options.batched_tokens} tokens an iteration; {options.devices} virtual devices that "
        "share this machine's cores",
        "",
        f"{'':24}{'TTFT s':>9}{'ratio':>8}{'TBT s':>9}{'ratio':>8}{'iterations':>12}",
    ]
    lines += [
        f"{v.label:24}{flat[f'{v.key}_ttft_s']:9.2f}{flat[f'{v.key}_ttft_ratio']:8.2f}"
        f"{flat[f'{v.key}_tbt_s']:9.3f}{flat[f'{v.key}_tbt_ratio']:8.2f}"
        f"{flat[f'{v.key}_iterations']:12.0f}"
        for v in VARIANTS
    ]
    return "\n".join(lines)


def h100_figures(python: Path | None, workload: Workload) -> dict[str, float]:
    """Prints what `bench.h100` prints, run by `python`; its figures. None: by that of .venv-gpu,
    without which there are none.

    Raises RuntimeError with what the process said when it fails."""
    if python is None and not H100_PYTHON.exists():
        print("H100 part left out: it needs .venv-gpu, which `make .venv-gpu/.gpu` makes")
        return {}
    with tempfile.TemporaryDirectory() as folder:
        figures, errors = Path(folder) / "figures.json", Path(folder) / "errors"
        command = [str(python or H100_PYTHON), "-m", "bench.h100", *workload.arguments()]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        with errors.open("w") as stderr:  # XLA writes there that it sees no GPU
            done = subprocess.run(
                [*command, "--json", str(figures)], cwd=ROOT, env=environment, stderr=stderr
            )
        if done.returncode:
            last = (errors.read_text().strip().splitlines() or [f"exit {done.returncode}"])[-1]
            raise RuntimeError(f"H100 part, by {command[0]}: {last.removeprefix('error: ')}")
        return json.loads(figures.read_text())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.long_prefill",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} round")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"default: {ROUNDS}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures as flat JSON")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--devices", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--prompt-tokens", type=int, default=1536, metavar="N")
    parser.add_argument("--decodes", type=int, default=8, metavar="N", help="load; default: 8")
    parser.add_argument("--batched-tokens", type=int, default=384, metavar="N")
    parser.add_argument("--skip-cpu", action="store_true", help="only the H100 part")
    add_arguments(parser)
    parser.add_argument(
        "--h100-python",
        type=Path,
        metavar="PATH",
        help="a Python with JAX's CUDA plugin; default: .venv-gpu's, where there is one",
    )
    options = parser.parse_args(arguments)
    if options.h100_python and not options.h100_python.exists():
        parser.error(f"argument --h100-python: {options.h100_python} does not exist")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    flat: dict[str, float] = {}
    if not options.skip_cpu:
        ensure_devices(options.devices)
        flat = summary(measure(options))
        print(table(flat, options), end="\n\n", flush=True)
    failed = False
    try:
        flat |= h100_figures(options.h100_python, Workload.of(options))
    except (OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        failed = True
    if options.json:
        options.json.write_text(json.dumps(flat, indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
