"""What a scheduling pass costs: the host's part of every iteration, without a device.

The real scheduler with a latency model plans for a device that answers at once: 8 groups, 1,024
running decodes, and prompts waiting, with targets, so that each pass looks for a budget by the
model. A pass is `schedule()`. `commit()`, which takes the tokens of an iteration in, is timed
apart. The second table is the growth with the number that waits.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from conflux_jax.config import SchedulerConfig
from conflux_jax.plan import IterationPlan, PoolGeometry, StepOutput
from conflux_jax.request import Request, SamplingParams
from conflux_jax.scheduler.buckets import Ladders
from conflux_jax.scheduler.latency_model import IterationShape
from conflux_jax.scheduler.scheduler import Scheduler

GROUPS, DECODES, WAITING = 8, 1024, 4096
CURVE = (0, 1_000, 4_096, 20_000, 100_000)
PASSES, QUICK_PASSES = 2000, 300
STEP_S = 0.03
PAGE_TOKENS = 16


@dataclass(frozen=True)
class Roofline:
    """Any latency model does here; it must cost as much as a fitted one."""

    def predict_s(self, shape: IterationShape) -> float:
        linear = 4e-3 + 2.5e-5 * shape.bucket.rows
        decode = 1e-5 * shape.bucket.decode_rows + 1.2e-8 * shape.context_tokens
        prefill = 5e-6 * shape.bucket.rows + 1.5e-10 * shape.prefill_work / GROUPS
        return linear + max(decode + 0.1 * prefill, prefill + 0.1 * decode)


class Load:
    """A scheduler with `DECODES` decodes running and `waiting` prompts queued. Requests that end
    are replaced, so that it stays so."""

    def __init__(self, waiting: int, ordering: str):
        config = SchedulerConfig(
            max_num_seqs=DECODES + 64,
            max_num_batched_tokens=8192,
            max_waiting=max(CURVE) + WAITING,
            ordering=ordering,
            ttft_slo_s=20.0,
            tbt_slo_s=0.05,
        )
        geometry = PoolGeometry(GROUPS, 60_000, PAGE_TOKENS, PAGE_TOKENS * GROUPS)
        ladders = Ladders.make(config.max_num_seqs, 1024, 1.125, handoff=True)
        self._scheduler = Scheduler(config, geometry, ladders, 131_072, Roofline())
        self._random = random.Random(waiting)
        self._number = 0
        self._now = 0.0
        self._pending: IterationPlan | None = None
        for _ in range(DECODES):
            self._add(self._random.randint(50, 400), 1500)
        while sum(self._scheduler.load().num_decodes) < DECODES:
            self.turn()
        for _ in range(waiting):
            self._add(int(self._random.lognormvariate(8.5, 1.0)) + 1, 200)

    def _add(self, prompt: int, outputs: int) -> None:
        self._number += 1
        params = SamplingParams(max_tokens=outputs, ignore_eos=True, temperature=0.0)
        tokens = (7,) * min(prompt, 100_000)
        request = Request(str(self._number), tokens, params, outputs, arrival_s=self._now)
        self._scheduler.add(request)

    def turn(self) -> tuple[float, float]:
        """Seconds of a pass and of a commit."""
        started_s = time.perf_counter()
        plan = self._scheduler.schedule(self._now)
        planned_s = time.perf_counter()
        ended = 0
        self._now += STEP_S
        commit_s = 0.0
        if self._pending is not None:
            tokens = np.full(len(self._pending.samples), 5, np.int32)
            output = StepOutput(tokens, self._pending.predicted_s)
            before_s = time.perf_counter()
            events = self._scheduler.commit(self._pending, output, self._now)
            commit_s = time.perf_counter() - before_s
            ended = sum(event.finish_reason is not None for event in events)
        self._pending = plan
        for _ in range(ended if self._number > DECODES else 0):
            self._add(int(self._random.lognormvariate(8.5, 1.0)) + 1, 200)
        return planned_s - started_s, commit_s


def measure(waiting: int, passes: int, ordering: str) -> dict[str, float]:
    """Milliseconds: p50 and p99 of a pass, p50 of a commit. Python's collector of cycles runs, but
    what there is at the start is frozen for it, as the server does."""
    load = Load(waiting, ordering)
    for _ in range(50):
        load.turn()
    gc.collect()
    gc.freeze()
    times = np.array([load.turn() for _ in range(passes)]) * 1e3
    gc.unfreeze()
    p50, p99 = np.percentile(times[:, 0], (50, 99))
    return {"p50": float(p50), "p99": float(p99), "commit": float(np.median(times[:, 1]))}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.scheduler",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_PASSES} passes each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures as flat JSON")
    parser.add_argument("--ordering", default="deadline", choices=("deadline", "fcfs", "shortest"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    passes = QUICK_PASSES if options.quick else PASSES
    print(f"{GROUPS} groups, {DECODES} running decodes, {options.ordering} order; milliseconds")
    print(f"{'waiting':>10}{'pass p50':>11}{'pass p99':>11}{'commit p50':>12}")
    curve = {}
    for waiting in CURVE:
        figures = curve[waiting] = measure(waiting, passes, options.ordering)
        columns = f"{figures['p50']:11.3f}{figures['p99']:11.3f}{figures['commit']:12.3f}"
        print(f"{waiting:10,}{columns}", flush=True)
    flat = {
        "pass_p50_ms": curve[WAITING]["p50"],
        "pass_p99_ms": curve[WAITING]["p99"],
        "pass_100k_p50_ms": curve[100_000]["p50"],
        "commit_p50_ms": curve[WAITING]["commit"],
    }
    if options.json:
        options.json.write_text(json.dumps(flat, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
