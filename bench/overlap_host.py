"""How long the device waits for the host between decode steps, as a fraction of the step.

Method: the engine runs as it always does, with an executor around its own that looks at the clock.
The device is busy without a gap as long as step N+1 is in its queue before N is through. So when
the launch of N+1 has returned, N is asked whether it is ready: if not, the gap before N+1 is 0. If
it is, the gap began at an unknown moment; it is counted from the last moment at which N was seen
*not* to be ready (right after its launch, after each collect, before the next launch), so it is
never underestimated. What the runtime itself needs from the end of N to the start of N+1 is not
seen. Counted are the steps in which all requests decode and none prefills; the fraction is the sum
of their gaps by the sum of their times, from one collect to the next.

On a CPU the host's work also takes time from the cores that compute; that is no gap, and is in
`host_fraction` of bench.throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.conflux_worker import stream
from bench.peers.protocol import pin_cpus, random_prompt
from conflux_jax.config import Config, ConfigError
from conflux_jax.plan import IterationPlan, StepOutput

MODEL = "smollm2-135m-instruct"
BATCH = 32
PROMPT_TOKENS = 128
STEPS, QUICK_STEPS = 64, 24


@dataclass
class Step:
    """Seconds of the clock. launched_s: the launch returned. busy_s: when it was last seen not to
    be ready. gap_s: between the step before and this one. collected_s: its tokens were here."""

    plan: IterationPlan
    ticket: Any
    launched_s: float
    busy_s: float
    gap_s: float
    collected_s: float = 0.0

    @property
    def is_ready(self) -> bool:
        return self.ticket.sampled.token_ids.is_ready()


class WatchedExecutor:
    """A Runner, and the times of its steps."""

    def __init__(self, runner: Any):
        self._runner = runner
        self.close = runner.close
        self.steps: list[Step] = []

    def launch(self, plan: IterationPlan) -> Step:
        self._look()
        ticket = self._runner.launch(plan)
        now = time.perf_counter()
        step = Step(plan, ticket, launched_s=now, busy_s=now, gap_s=0.0)
        if self.steps and self.steps[-1].is_ready:
            step.gap_s = now - self.steps[-1].busy_s
        self.steps.append(step)
        return step

    def collect(self, ticket: Step) -> StepOutput:
        output = self._runner.collect(ticket.ticket)
        ticket.collected_s = time.perf_counter()
        self._look()
        return output

    def _look(self) -> None:
        if self.steps:
            now = time.perf_counter()  # before the question: busy then, if it still is
            if not self.steps[-1].is_ready:
                self.steps[-1].busy_s = now


def idle_fraction(steps: Sequence[Step], batch: int) -> tuple[float, int, float]:
    """Gaps by times of the steps with `batch` decodes and no prefill whose predecessor was such a
    step too; how many they are; their median seconds. Raises RuntimeError when there are none."""
    gaps, times = [], []
    for before, step in itertools.pairwise(steps):
        if all(_decodes_only(s.plan, batch) and s.collected_s for s in (before, step)):
            gaps.append(step.gap_s)
            times.append(step.collected_s - before.collected_s)
    if not times:
        raise RuntimeError(f"no two steps in a row had {batch} decodes and no prefill")
    return sum(gaps) / sum(times), len(times), statistics.median(times)


def _decodes_only(plan: IterationPlan, batch: int) -> bool:
    return not plan.chunks and sum(len(rows) for rows in plan.decodes) == batch


def measure(model: str, sp: int, batch: int, num_steps: int) -> list[Step]:
    """Decode `batch` requests together for `num_steps` steps, every token streamed to a reader."""
    from conflux_jax.build import build_engine

    tokens = max(PROMPT_TOKENS, 2 * batch)  # one prompt an iteration, beside the decodes
    config = Config.from_flat(
        model=model,
        sp=sp,
        max_model_len=PROMPT_TOKENS + 2 * batch + num_steps,
        max_num_seqs=batch,
        max_num_batched_tokens=tokens + batch,
        decode_rows_ladder=(batch,),
        rows_ladder=(-(-(tokens + batch) // sp),),
        handoff_pages=-(-PROMPT_TOKENS // 16),
    )
    watched: list[WatchedExecutor] = []

    def watch(runner: Any) -> WatchedExecutor:
        watched.append(WatchedExecutor(runner))
        return watched[0]

    with build_engine(config, watch=watch) as engine:
        vocab = engine.info.vocab_size
        prompts = [random_prompt(PROMPT_TOKENS, vocab, seed) for seed in range(batch)]
        # The first decode while the others are prefilled, about one an iteration.
        asyncio.run(stream(engine, prompts, 2 * batch + num_steps))
    return watched[0].steps


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overlap_host",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps, not {STEPS}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figure as flat JSON")
    parser.add_argument("--model", default=MODEL, help=f"default: {MODEL}")
    parser.add_argument("--sp", type=int, default=1, metavar="N", help="groups (default: 1)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    pin_cpus()
    try:
        num_steps = QUICK_STEPS if options.quick else STEPS
        steps = measure(options.model, options.sp, BATCH, num_steps)
        fraction, counted, median_s = idle_fraction(steps, BATCH)
    except (ConfigError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.model}, sp {options.sp}, {counted} steps of {BATCH} decodes")
    print(f"median step: {median_s * 1e3:.1f} ms")
    print(f"device idle between steps: {fraction * 100:.2f}% of the step at most")
    if options.json:
        figures = {f"idle_fraction_{BATCH}": fraction}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
