"""What a scheduling pass costs: the host's part of every iteration, without a device.

The real scheduler plans for a device that takes as long as its latency model says: 8 groups, about
1,024 running decodes, and long prompts waiting, with targets, so that each pass looks for a budget
by the model. A pass is `schedule()`, by the clock and by the processor's time that it took: it
waits for nothing, so what these differ by is what else the machine did. `commit()`, which takes the
tokens of an iteration in, is timed apart. The rows of the table are the growth with the number that
waits.
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
PAGE_TOKENS = 16
TOKENS = 8192  # of an iteration, at the most
PROMPT, SPREAD = 8.5, 1.0  # lognormal, mean 8,100 tokens: an iteration's budget holds about one
OUTPUTS = 1100  # mean; so one ends about as often as one begins
COLUMNS = (
    ("pass p50", "p50"),
    ("p99", "p99"),
    ("cpu p50", "cpu_p50"),
    ("p99", "cpu_p99"),
    ("commit p50", "commit"),
)
TTFT_SLO_S = (5.0, 600.0)  # uniform: some are late, most are not


@dataclass
class Roofline:
    """Any latency model does here; it must cost as much as a fitted one. latest_s: of the shape
    asked last, which in a pass is that of its plan: so long does the device take."""

    latest_s: float = 0.0

    def predict_s(self, shape: IterationShape) -> float:
        linear = 4e-3 + 2.5e-5 * shape.bucket.rows
        decode = 1e-5 * shape.bucket.decode_rows + 1.2e-8 * shape.context_tokens
        prefill = 5e-6 * shape.bucket.rows + 1.5e-10 * shape.prefill_work / GROUPS
        self.latest_s = linear + max(decode + 0.1 * prefill, prefill + 0.1 * decode)
        return self.latest_s


class Load:
    """A scheduler with `DECODES` decodes running and `waiting` prompts queued. Requests that end
    are replaced, so that it stays so."""

    def __init__(self, waiting: int, ordering: str):
        config = SchedulerConfig(
            max_num_seqs=DECODES + 64,
            max_num_batched_tokens=TOKENS,
            handoff_pages=TOKENS // PAGE_TOKENS,  # as the configs for GPUs have it
            max_waiting=max(CURVE) + WAITING,
            ordering=ordering,
            tbt_slo_s=0.05,
        )
        geometry = PoolGeometry(GROUPS, 120_000, PAGE_TOKENS, PAGE_TOKENS * GROUPS)
        ladders = Ladders.make(config.max_num_seqs, 1024, 1.125, handoff=True)
        self._device = Roofline()
        self._scheduler = Scheduler(config, geometry, ladders, 131_072, self._device)
        self._random = random.Random(waiting)
        self._number = 0
        self._refills = False
        self._now = 0.0
        self._pending: tuple[IterationPlan, float] | None = None
        for _ in range(DECODES):
            self._add(self._random.randint(50, 400), self._random.randint(200, 2 * OUTPUTS))
        while sum(self._scheduler.load().num_decodes) < DECODES:
            self.turn()
        self._refills = True
        for _ in range(waiting):
            self._add_long()

    def _add_long(self) -> None:
        prompt = int(self._random.lognormvariate(PROMPT, SPREAD)) + 1
        self._add(prompt, self._random.randint(1, 2 * OUTPUTS))

    def _add(self, prompt: int, outputs: int) -> None:
        self._number += 1
        params = SamplingParams(outputs, 0.0, ttft_slo_s=self._random.uniform(*TTFT_SLO_S))
        tokens = (7,) * min(prompt, 100_000)
        request = Request(str(self._number), tokens, params, outputs, arrival_s=self._now)
        self._scheduler.add(request)

    def turn(self) -> tuple[float, float, float]:
        """Seconds of a pass, of processor time for it, and of a commit."""
        cpu_s, started_s = time.thread_time(), time.perf_counter()
        plan = self._scheduler.schedule(self._now)
        pass_s, pass_cpu_s = time.perf_counter() - started_s, time.thread_time() - cpu_s
        step_s, ended, commit_s = self._device.latest_s, 0, 0.0
        if self._pending is not None:
            done, elapsed_s = self._pending
            self._now += elapsed_s
            output = StepOutput(np.full(len(done.samples), 5, np.int32), elapsed_s)
            before_s = time.perf_counter()
            events = self._scheduler.commit(done, output, self._now)
            commit_s = time.perf_counter() - before_s
            ended = sum(event.finish_reason is not None for event in events)
        self._pending = None if plan is None else (plan, step_s)
        for _ in range(ended if self._refills else 0):
            self._add_long()
        return pass_s, pass_cpu_s, commit_s


def measure(waiting: int, passes: int, ordering: str) -> dict[str, float]:
    """Milliseconds: p50 and p99 of a pass, by processor time too, p50 of a commit. Python's
    collector of cycles runs, but what there is at the start is frozen for it, as the server does.
    """
    load = Load(waiting, ordering)
    for _ in range(50):
        load.turn()
    gc.collect()
    gc.freeze()
    times = np.array([load.turn() for _ in range(passes)]) * 1e3
    gc.unfreeze()
    (p50, p99), (cpu_p50, cpu_p99) = np.percentile(times[:, :2], (50, 99), axis=0).T.tolist()
    commit = float(np.median(times[:, 2]))
    return {"p50": p50, "p99": p99, "cpu_p50": cpu_p50, "cpu_p99": cpu_p99, "commit": commit}


def python_loop_ns() -> float:
    """What a turn of an empty loop takes this interpreter: the yardstick of all figures here, since
    machines differ by five times, and a shared one with itself. Best of ten."""
    turns, best_s = 100_000, float("inf")
    for _ in range(10):
        started_s, total = time.perf_counter(), 0
        for number in range(turns):
            total += number
        best_s = min(best_s, time.perf_counter() - started_s)
    return best_s / turns * 1e9


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
    print(f"{'waiting':>10}" + "".join(f"{name:>12}" for name, _ in COLUMNS))
    curve = {}
    for waiting in CURVE:
        figures = curve[waiting] = measure(waiting, passes, options.ordering)
        columns = "".join(f"{figures[key]:12.3f}" for _, key in COLUMNS)
        print(f"{waiting:10,}{columns}", flush=True)
    loop_ns = python_loop_ns()
    print(f"a turn of `for number in range(n): total += number` takes {loop_ns:.0f} ns here")
    flat = {
        "python_loop_ns": loop_ns,
        "pass_p50_ms": curve[WAITING]["p50"],
        "pass_p99_ms": curve[WAITING]["p99"],
        "pass_cpu_p50_ms": curve[WAITING]["cpu_p50"],
        "pass_cpu_p99_ms": curve[WAITING]["cpu_p99"],
        "pass_100k_p50_ms": curve[100_000]["p50"],
        "commit_p50_ms": curve[WAITING]["commit"],
    }
    if options.json:
        options.json.write_text(json.dumps(flat, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
