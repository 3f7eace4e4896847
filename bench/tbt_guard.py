"""Whether decodes keep their pace while long prompts arrive, and what that costs in prefill.

A few decodes run; prompts of thousands of tokens arrive as fast as they are taken. The time between
tokens (TBT) shall stay within a target of so many times the bare decode step. The scheduler with a
latency profile is held against fixed levels, `max_num_batched_tokens` as one would set it by hand:
the best of those that keep the target as well. Decodes alone show what this machine allows.

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
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.peers.protocol import random_prompt
from conflux_jax.build import build_runner, load_profile
from conflux_jax.config import Config, SchedulerConfig
from conflux_jax.loop import InFlight, turn
from conflux_jax.progress import ProgressBar
from conflux_jax.request import Request, SamplingParams
from conflux_jax.scheduler.latency_model import LatencyPredictor
from conflux_jax.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from conflux_jax.execution.runner import Runner

DECODES, DECODE_PROMPT = 8, 64
SHORTEST, LONGEST = 2000, 6000
FACTORS = (2, 4)
ON_TIME = 0.99
HOPELESS = 0.5
MAX_MODEL_LEN = 8192
LEVELS = (16, 32, 64, 96, 128, 256, 512)  # tokens of an iteration, decodes included
LONE_PROMPT = 4000  # tokens, beside one decode; past that not even the least chunk fits here
RUN_S, QUICK_RUN_S = 20.0, 8.0
ROUNDS, QUICK_ROUNDS = 3, 1


@dataclass(frozen=True)
class Run:
    """gaps_s: seconds between a decode's tokens. prefill_tokens_s: prompt tokens a second."""

    gaps_s: np.ndarray
    prefill_tokens_s: float


class Session:
    """A scheduler of its own on the shared engine, turned by hand."""

    def __init__(
        self, runner: Runner, settings: SchedulerConfig, predictor: LatencyPredictor | None
    ):
        self._runner = runner
        self._scheduler = Scheduler(
            settings, runner.geometry, runner.ladders, runner.max_model_len, predictor
        )
        self._in_flight: InFlight | None = None
        self._ids: list[str] = []

    def add(self, request_id: str, length: int, outputs: int, seed: int) -> None:
        self._ids.append(request_id)
        self._scheduler.add(_request(request_id, length, outputs, seed))

    def turn(self) -> tuple[list[str], int]:
        """Whose tokens came back, and how many prompt tokens their iteration prefilled."""
        collected = self._in_flight
        self._in_flight, events = turn(self._scheduler, self._runner, time.perf_counter, collected)
        prefilled = collected.plan.num_prefill_tokens if collected else 0
        return [event.request_id for event in events], prefilled

    def close(self) -> None:
        for request_id in self._ids:
            self._scheduler.cancel(request_id)
        while self._in_flight is not None:
            self.turn()


class Guard:
    """A compiled engine with a latency model of it."""

    def __init__(self, options: argparse.Namespace):
        self.run_s = QUICK_RUN_S if options.quick else RUN_S
        self.config = Config.from_flat(
            model=options.model,
            sp=options.sp,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=DECODES + 2,
            max_num_batched_tokens=max(LEVELS),
            kv_pool_tokens=6 * MAX_MODEL_LEN,
            rows_ladder=tuple(sorted({-(-level // options.sp) for level in LEVELS})),
            decode_rows_ladder=(-(-DECODES // options.sp), DECODES + 2),
            latency_profile=options.profile,
        )
        bar = ProgressBar()
        self.runner, _ = build_runner(self.config, bar)
        predictor = load_profile(self.config, self.runner)
        if predictor is None:
            from conflux_jax.execution.calibration import QUICK, Effort, calibrate

            effort = QUICK if options.quick else Effort()
            calibration = calibrate(
                self.runner, max(LEVELS), effort, 0, lambda *steps: bar("profile", *steps)
            )
            print(calibration.table())
            predictor = calibration.model
        self.predictor: LatencyPredictor = predictor

    def session(self, level: int, target_s: float | None) -> Session:
        """level: max_num_batched_tokens, without a target; else the latency model's choice."""
        settings = dataclasses.replace(
            self.config.scheduler, max_num_batched_tokens=level, tbt_slo_s=target_s
        )
        return Session(self.runner, settings, self.predictor if target_s is not None else None)

    def run(self, level: int, target_s: float | None = None, prompts: bool = True) -> Run:
        """Decodes that never end, and, if `prompts`, always two prompts that are not done yet."""
        lengths = np.random.default_rng(1)
        session, gaps = self.session(level, target_s), _Gaps()
        with closing(session):
            for number in range(DECODES):
                session.add(f"decode{number}", DECODE_PROMPT, 4000, number)
            while len(gaps.last_s) < DECODES:
                gaps.note(session.turn()[0])
            gaps.seconds.clear()
            open_prompts = prefilled = number = 0
            started_s = time.perf_counter()
            while (elapsed_s := time.perf_counter() - started_s) < self.run_s:
                while prompts and open_prompts < 2:
                    length = int(lengths.integers(SHORTEST, LONGEST))
                    session.add(f"prompt{number}", length, 1, number)
                    open_prompts, number = open_prompts + 1, number + 1
                came, tokens = session.turn()
                gaps.note([name for name in came if name.startswith("decode")])
                open_prompts -= sum(name.startswith("prompt") for name in came)
                prefilled += tokens
        return Run(np.array(gaps.seconds), prefilled / elapsed_s)

    def lone_prompt(self, target_s: float) -> tuple[Run, float]:
        """One long prompt comes to one decode: the decode's gaps, and the prompt's TTFT."""
        session, gaps = self.session(max(LEVELS), target_s), _Gaps()
        with closing(session):
            session.add("decode0", DECODE_PROMPT, 8000, 0)
            while not gaps.seconds:
                gaps.note(session.turn()[0])
            gaps.seconds.clear()
            started_s = time.perf_counter()
            session.add("prompt", LONE_PROMPT, 1, 1)
            came: list[str] = []
            while "prompt" not in came:
                came, _ = session.turn()
                gaps.note([name for name in came if name != "prompt"])
            ttft_s = time.perf_counter() - started_s
        return Run(np.array(gaps.seconds), LONE_PROMPT / ttft_s), ttft_s


class _Gaps:
    """Seconds between the tokens of each request."""

    def __init__(self):
        self.seconds: list[float] = []
        self.last_s: dict[str, float] = {}

    def note(self, request_ids: list[str]) -> None:
        now_s = time.perf_counter()
        for request_id in request_ids:
            if request_id in self.last_s:
                self.seconds.append(now_s - self.last_s[request_id])
            self.last_s[request_id] = now_s


def _request(request_id: str, length: int, outputs: int, seed: int) -> Request:
    params = SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True)
    prompt = tuple(random_prompt(length, 40_000, seed % 1000))
    return Request(request_id, prompt, params, outputs, arrival_s=time.perf_counter())


def measure(guard: Guard, rounds: int) -> dict[str, float]:
    """The JSON's figures; prints the table. A fixed level far past all targets is run once."""
    bare = guard.run(max(LEVELS), prompts=False)
    step_s = float(np.median(bare.gaps_s))
    print(f"bare decode step of {DECODES}: {step_s * 1e3:.1f} ms (p99 {_p99(bare):.1f} ms)")
    flat: dict[str, float] = {"bare_step_ms": step_s * 1e3}
    fixed: dict[int, list[Run]] = {level: [] for level in LEVELS}
    guarded: dict[int, list[Run]] = {factor: [] for factor in FACTORS}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", flush=True)
        for factor in FACTORS:
            guarded[factor].append(guard.run(max(LEVELS), factor * step_s))
        for level, runs in fixed.items():
            if not runs or _on_time(runs, max(FACTORS) * step_s) > HOPELESS:
                runs.append(guard.run(level))
    print(f"{'':28}{'prefill tok/s':>14}" + "".join(f"{f'on time {f}x':>13}" for f in FACTORS))
    _print_row("no prefill", [bare], step_s)
    for factor in FACTORS:
        flat[f"bare_on_time_{factor}x"] = _on_time([bare], factor * step_s)
    for level, runs in fixed.items():
        _print_row(f"fixed, {level} tokens", runs, step_s)
    for factor, runs in guarded.items():
        _print_row(f"latency model, {factor}x", runs, step_s)
        target_s = factor * step_s
        keeping = [_speed(r) for r in fixed.values() if _on_time(r, target_s) >= ON_TIME]
        flat[f"on_time_{factor}x"] = _on_time(runs, target_s)
        if keeping:
            flat[f"prefill_vs_best_fixed_{factor}x"] = _speed(runs) / max(keeping)
    target_s = max(FACTORS) * step_s
    lone, flat["lone_prompt_ttft_s"] = guard.lone_prompt(target_s)
    flat["lone_prompt_on_time"] = _on_time([lone], target_s)
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
        ratio = flat.get(f"prefill_vs_best_fixed_{factor}x")
        held = "no fixed level keeps it" if ratio is None else f"{ratio:.2f} of the best that does"
        print(f"{factor}x: {flat[f'on_time_{factor}x']:.2%} of gaps on time; prefill: {held}")
    on_time, ttft_s = flat["lone_prompt_on_time"], flat["lone_prompt_ttft_s"]
    print(
        f"one decode, one prompt of {LONE_PROMPT} tokens, {max(FACTORS)}x: {on_time:.2%} of gaps "
        f"on time, TTFT {ttft_s:.1f} s"
    )
    if options.json:
        options.json.write_text(json.dumps(flat, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
