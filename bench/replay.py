"""A real run on this machine, replayed in the simulator.

The real engine's step serves requests that arrive at random, prompts and outputs of all sorts, with
everything recorded. Then twice without the device: with the iteration times that were measured, to
see that the scheduler plans the same again; and with those of the profile that was calibrated just
before, to see how far simulated TTFT and TBT are from the real ones.

Run it while nothing else runs on the machine: a profile is of a machine that is left alone.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.peers.protocol import random_prompt
from conflux_jax.build import build_runner
from conflux_jax.config import Config
from conflux_jax.progress import ProgressBar
from conflux_jax.request import Request, SamplingParams
from conflux_jax.scheduler.scheduler import Scheduler
from conflux_jax.simulation.costs import ProfiledCosts
from conflux_jax.simulation.replay import (
    QUANTILES,
    RecordedSystem,
    RecordingScheduler,
    drive,
    iteration_ratios,
    quantile_errors,
    recorded_requests,
    replan,
)
from conflux_jax.simulation.results import Results
from conflux_jax.simulation.simulator import simulate
from conflux_jax.simulation.system import SimulatedRequest
from conflux_jax.simulation.systems.conflux import Blueprint, ConfluxSystem

if TYPE_CHECKING:
    from conflux_jax.execution.runner import Runner

REQUESTS, QUICK_REQUESTS = 120, 24
PROMPTS, OUTPUTS = (16, 400), (4, 40)
LOAD = 0.5  # of the rate that would just keep the device busy
MAX_MODEL_LEN, MAX_SEQS, MAX_TOKENS = 1024, 8, 128


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    flat = measure(options)
    if options.json:
        options.json.write_text(json.dumps(flat, indent=2) + "\n", encoding="utf-8")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="short calibration, short run")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--sp", type=int, default=1, metavar="N", help="groups; default: 1")
    parser.add_argument("--seed", type=int, default=0, help="which requests come when")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures as flat JSON")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """The JSON's figures; prints the table."""
    config = Config.from_flat(
        model=options.model,
        sp=options.sp,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        handoff_pages=MAX_TOKENS // Config().cache.page_tokens,
    )
    bar = ProgressBar()
    runner, _ = build_runner(config, bar)

    from conflux_jax.execution.calibration import QUICK, Effort, calibrate

    effort = QUICK if options.quick else Effort()
    calibration = calibrate(
        runner, MAX_TOKENS, effort, options.seed, lambda *steps: bar("profile", *steps)
    )
    print(calibration.table())
    model = calibration.model

    def scheduler() -> Scheduler:
        return Scheduler(
            config.scheduler, runner.geometry, runner.ladders, runner.max_model_len, model
        )

    recorder = RecordingScheduler(scheduler())
    blueprint = Blueprint(
        config.scheduler, runner.limits, runner.ladders, model, ProfiledCosts(model)
    )
    count = QUICK_REQUESTS if options.quick else REQUESTS
    requests = traffic(count, sustained_rate(blueprint), options.seed)
    print(f"{count} requests in {requests[-1].arrival_s:.0f} s")
    run(recorder, runner, requests)
    record = recorder.record
    identical = replan(record, scheduler()) == record.plans
    print(f"{len(record.plans)} plans; planned again: {'identical' if identical else 'DIFFERENT'}")
    asked = recorded_requests(record)
    real = simulate(RecordedSystem(record), asked)
    replayed = simulate(ConfluxSystem(blueprint, noise=0.0), asked)
    errors = quantile_errors(replayed, real)
    print_table(real, replayed, errors)
    ratios = iteration_ratios(record, blueprint.costs, runner.limits)
    print_ratios(ratios)
    medians = {
        f"iterations_{kind}": float(np.median(found)) - 1.0
        for kind, found in ratios.items()
        if len(found)
    }
    return {"identical_plans": int(identical), "plans": len(record.plans), **errors, **medians}


def sustained_rate(blueprint: Blueprint) -> float:
    """Requests a second that LOAD of the profile's device would serve: a simulation in which all of
    a few come at once tells how long they keep it busy."""
    at_once = [
        SimulatedRequest(number, 0.0, len(request.prompt_token_ids), request.max_output_tokens)
        for number, request in enumerate(traffic(count=60, rate=1.0, seed=1))
    ]
    system = ConfluxSystem(blueprint, noise=0.0)
    return LOAD * len(at_once) / simulate(system, at_once).end_s


def traffic(count: int, rate: float, seed: int) -> list[Request]:
    """Arrivals at random, in seconds from 0 on."""
    draw, now_s, requests = random.Random(seed), 0.0, []
    for number in range(count):
        now_s += draw.expovariate(rate)
        outputs = draw.randint(*OUTPUTS)
        params = SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True)
        prompt = tuple(random_prompt(draw.randint(*PROMPTS), 40_000, number))
        requests.append(Request(f"r{number}", prompt, params, outputs, arrival_s=now_s))
    return requests


def run(recorder: RecordingScheduler, runner: Runner, requests: Sequence[Request]) -> None:
    """In real time, on a clock that starts now."""
    origin_s = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - origin_s

    def wait_until(time_s: float) -> None:
        time.sleep(max(0.0, time_s - clock()))

    drive(recorder, runner, clock, wait_until, requests)


def print_table(real: Results, replayed: Results, errors: dict[str, float]) -> None:
    names = [f"p{round(100 * level)}" for level in QUANTILES]
    print(f"{'':24}" + "".join(f"{name:>9}" for name in (*names, "overall")))
    for key, title in (("ttft", "TTFT"), ("tbt", "TBT")):
        cells = [f"{errors[f'{key}_{name}']:>+9.1%}" for name in names]
        print(f"{f'{title}, simulated / real':24}" + "".join(cells) + f"{errors[key]:>9.1%}")
    print(
        f"{real.summary()['output_tokens']:,.0f} tokens, {real.end_s:.1f} s in reality, "
        f"{replayed.end_s:.1f} s simulated"
    )


def print_ratios(ratios: dict[str, np.ndarray]) -> None:
    """Where iterations take longer than the profile says, so does everything that is made of them:
    the profile then is of a machine that had less to do beside it."""
    for kind, found in ratios.items():
        if len(found):
            low, middle, high = np.quantile(found, (0.1, 0.5, 0.9)) - 1.0
            title = f"iterations, {kind}, real / profile"
            print(f"{title:40}{middle:+.1%} ({low:+.1%} to {high:+.1%}, p10 to p90)")


if __name__ == "__main__":
    sys.exit(main())
