"""Whether decodes keep their pace while long prompts arrive, and what that costs in prefill.

A few decodes run; prompts of thousands of tokens arrive as fast as they are taken. The time between
tokens (TBT) shall stay within a target of so many times the bare decode step. The scheduler with a
latency profile is held against fixed levels, `max_num_batched_tokens` as one would set it by hand:
the best of those that keep the target as well.

All runs are on one compiled engine, in turns, round after round, since the machine drifts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.peers.protocol import random_prompt
from conflux_jax.build import build_runner, load_profile
from conflux_jax.config import Config
from conflux_jax.loop import InFlight, turn
from conflux_jax.progress import ProgressBar
from conflux_jax.request import Request, SamplingParams
from conflux_jax.scheduler.latency_model import LatencyPredictor
from conflux_jax.scheduler.scheduler import Scheduler

DECODES, DECODE_PROMPT = 8, 64
SHORTEST, LONGEST = 2000, 6000
FACTORS = (2, 4)
ON_TIME = 0.99
MAX_MODEL_LEN = 8192
LEVELS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # tokens of an iteration, decodes included
ITERATIONS, QUICK_ITERATIONS = 250, 60
ROUNDS, QUICK_ROUNDS = 3, 1


@dataclass(frozen=True)
class Run:
    """gaps_s: seconds between a decode's tokens. prefill_tokens_s: prompt tokens a second."""

    gaps_s: np.ndarray
    prefill_tokens_s: float

    def on_time(self, target_s: float) -> float:
        return float((self.gaps_s <= target_s).mean())


class Guard:
    """A compiled engine; each run has a scheduler of its own."""

    def __init__(self, options: argparse.Namespace):
        self.iterations = QUICK_ITERATIONS if options.quick else ITERATIONS
        self.config = Config.from_flat(
            model=options.model,
            sp=options.sp,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=16,
            max_num_batched_tokens=max(LEVELS),
            kv_pool_tokens=6 * MAX_MODEL_LEN,
            rows_ladder=tuple(sorted({-(-level // options.sp) for level in LEVELS})),
            decode_rows_ladder=(-(-DECODES // options.sp), 16),
            latency_profile=options.profile,
        )
        bar = ProgressBar()
        self.runner, _ = build_runner(self.config, bar)
        self.predictor: LatencyPredictor
        if options.profile:
            self.predictor = load_profile(self.config, self.runner)  # pyright: ignore
        else:
            from conflux_jax.execution.calibration import QUICK, Effort, calibrate

            effort = QUICK if options.quick else Effort()
            calibration = calibrate(
                self.runner, max(LEVELS), effort, 0, lambda *steps: bar("profile", *steps)
            )
            print(calibration.table())
            self.predictor = calibration.model

    def run(
        self, level: int, predictor: LatencyPredictor | None = None, target_s: float | None = None
    ) -> Run:
        """Prompts come so that two always wait; the decodes never end. level:
        max_num_batched_tokens; 0: decodes alone."""
        settings = dataclasses.replace(
            self.config.scheduler,
            max_num_batched_tokens=level or max(LEVELS),
            tbt_slo_s=target_s,
        )
        runner = self.runner
        scheduler = Scheduler(
            settings, runner.geometry, runner.ladders, runner.max_model_len, predictor
        )
        for number in range(DECODES):
            scheduler.add(_request(f"decode{number}", DECODE_PROMPT, 4000, number))
        sizes = np.random.default_rng(1)
        in_flight: InFlight | None = None
        last: dict[str, float] = {}
        gaps: list[float] = []
        waiting = prefilled = 0
        started_s, left = 0.0, self.iterations
        try:
            while left:
                steady = len(last) == DECODES
                while steady and level and waiting < 2:
                    waiting += 1
                    number = int(sizes.integers(1 << 30))
                    length = int(sizes.integers(SHORTEST, LONGEST))
                    scheduler.add(_request(f"prompt{number}", length, 1, number))
                plan_before = in_flight.plan if in_flight else None
                in_flight, events = turn(scheduler, runner, time.perf_counter, in_flight)
                now_s = time.perf_counter()
                for event in events:
                    if event.request_id.startswith("prompt"):
                        waiting -= 1
                        continue
                    if event.request_id in last and steady:
                        gaps.append(now_s - last[event.request_id])
                    last[event.request_id] = now_s
                if steady:
                    started_s = started_s or now_s
                    prefilled += plan_before.num_prefill_tokens if plan_before else 0
                    left -= 1
            elapsed_s = time.perf_counter() - started_s
        finally:
            for request_id in list(scheduler._requests):
                scheduler.cancel(request_id)
            while in_flight is not None:
                in_flight, _ = turn(scheduler, runner, time.perf_counter, in_flight)
        return Run(np.array(gaps), prefilled / elapsed_s)


def _request(request_id: str, length: int, outputs: int, seed: int) -> Request:
    params = SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True)
    prompt = tuple(random_prompt(length, 40_000, seed % 1000))
    return Request(request_id, prompt, params, outputs, arrival_s=time.perf_counter())


def measure(guard: Guard, rounds: int) -> dict[str, float]:
    """The JSON's figures; prints the table."""
    bare = guard.run(0)
    step_s = float(np.median(bare.gaps_s))
    print(f"bare decode step of {DECODES}: {step_s * 1e3:.1f} ms (p99 {_p99(bare):.1f} ms)")
    flat: dict[str, float] = {"bare_step_ms": step_s * 1e3}
    fixed: dict[int, list[Run]] = {level: [] for level in LEVELS if level > DECODES}
    guarded: dict[int, list[Run]] = {factor: [] for factor in FACTORS}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", flush=True)
        for factor in FACTORS:
            run = guard.run(max(LEVELS), guard.predictor, factor * step_s)
            guarded[factor].append(run)
        for level, runs in fixed.items():
            runs.append(guard.run(level))
    print(f"{'':28}{'prefill tok/s':>14}" + "".join(f"{f'on time {f}x':>13}" for f in FACTORS))
    for level, runs in fixed.items():
        _print_row(f"fixed, {level} tokens", runs, step_s)
    for factor, runs in guarded.items():
        _print_row(f"latency model, {factor}x", runs, step_s)
        target_s = factor * step_s
        on_time = _on_time(runs, target_s)
        keeping = [
            _speed(others) for others in fixed.values() if _on_time(others, target_s) >= ON_TIME
        ]
        flat[f"on_time_{factor}x"] = on_time
        flat[f"prefill_vs_best_fixed_{factor}x"] = (
            _speed(runs) / max(keeping) if keeping else float("inf")
        )
    return flat


def _print_row(name: str, runs: list[Run], step_s: float) -> None:
    shares = "".join(f"{_on_time(runs, factor * step_s):13.3%}" for factor in FACTORS)
    print(f"{name:28}{_speed(runs):14.1f}{shares}", flush=True)


def _speed(runs: list[Run]) -> float:
    return statistics.median(run.prefill_tokens_s for run in runs)


def _on_time(runs: list[Run], target_s: float) -> float:
    """Of all gaps of all rounds."""
    return float((np.concatenate([run.gaps_s for run in runs]) <= target_s).mean())


def _p99(run: Run) -> float:
    return float(np.percentile(run.gaps_s, 99)) * 1e3


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tbt_guard",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one short round, short calibration")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"default: {ROUNDS}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures as flat JSON")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--sp", type=int, default=1, metavar="N", help="groups; default: 1")
    parser.add_argument("--profile", metavar="FILE", help="default: calibrate first")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    flat = measure(Guard(options), options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS))
    for factor in FACTORS:
        print(
            f"{factor}x: {flat[f'on_time_{factor}x']:.2%} of gaps on time, prefill "
            f"{flat[f'prefill_vs_best_fixed_{factor}x']:.2f} of the best fixed level that keeps it"
        )
    if options.json:
        options.json.write_text(json.dumps(flat, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
