"""Serves the same few requests on many meshes and prints what came of it, one JSON line a mesh.

A process of its own, because it needs 8 virtual devices, and XLA's threads for them would slow all
other tests down: `python -m tests.execution.mesh_worker JOB [JOB ...]`, see `Job`.

The requests are planned, launched and committed as in the engine. To keep compilation short, each
mesh has one program for all iterations with prefill, and a long prompt keeps them coming until the
last decode has ended; without that filler, decodes go on by themselves in a second program.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np

from conflux_jax.config import Config
from conflux_jax.execution.runner import Runner
from conflux_jax.loop import turn
from conflux_jax.models.loading import open_source
from conflux_jax.plan import IterationPlan
from conflux_jax.platform import ensure_devices
from conflux_jax.request import Request, SamplingParams
from conflux_jax.scheduler.scheduler import Scheduler
from tests.execution.collectives import collectives

DEVICES = 8
PROMPT_SEED = 8  # of prompts for which no token's lead over the runner-up is near nothing
OPTIONS = "with options"
PROMPT_LENGTHS = {"short": 3, "page and a half": 6, "several chunks": 19, OPTIONS: 11}
FILLER = "filler"
FILLER_LENGTH = 72
MAX_TOKENS = 6
MAX_DECODES = 4
BATCHED_TOKENS = 8


@dataclass(frozen=True)
class Job:
    """A model on a mesh, with or without the filler; JSON on the command line."""

    model: str
    sp: int
    tp: int
    filler: bool = True


def settings(sp: int, tp: int) -> Config:
    return Config.from_flat(
        sp=sp,
        tp=tp,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=MAX_DECODES,
        max_num_batched_tokens=BATCHED_TOKENS,
        max_prefill_segments=2,
        rows_ladder=(BATCHED_TOKENS,),
        decode_rows_ladder=(MAX_DECODES,),
        page_tokens=4,
        kv_pool_tokens=256,
        handoff_pages=2,
        compilation_cache_dir="",
    )


def requests(vocab_size: int, filler: bool) -> list[Request]:
    """Greedy, with the runner-up of each token, so that its lead is known."""
    rng = np.random.default_rng(PROMPT_SEED)
    lengths = PROMPT_LENGTHS | {FILLER: FILLER_LENGTH}
    made = []
    for name, length in lengths.items():
        most = 1 if name == FILLER else MAX_TOKENS
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, logprobs=2)
        if name == OPTIONS:
            params = replace(
                params,
                repetition_penalty=1.5,
                frequency_penalty=2.0,
                logit_bias={token_id: 6.0 for token_id in range(100, vocab_size, 100)},
                bad_token_ids=tuple(range(0, vocab_size, 3)),
                prompt_logprobs=2,
            )
        prompt = tuple(rng.integers(0, vocab_size, length).tolist())
        made.append(Request(name, prompt, params, most))
    return made if filler else [r for r in made if r.request_id != FILLER]


def serve(job: Job) -> dict:
    """What the requests got (for each token, it and the likeliest two), how likely prompts were,
    what kinds of iterations ran, and each program's collectives."""
    config = settings(job.sp, job.tp)
    runner = Runner.create(open_source(job.model), config)
    runner.ladders = replace(runner.ladders, mixed_decode_rows=(MAX_DECODES,))
    scheduler = Scheduler(config.scheduler, runner.geometry, runner.ladders, runner.max_model_len)
    for request in requests(runner.dims.spec.vocab_size, job.filler):
        scheduler.add(request)
    answers: dict[str, list] = {}
    prompts: dict[str, list[float]] = {}
    kinds: set[str] = set()
    in_flight = None
    while scheduler.has_work or in_flight is not None:
        in_flight, events = turn(scheduler, runner, lambda: 0.0, in_flight)
        if in_flight is not None:
            kinds |= set(kinds_of(in_flight.plan))
        for event in events:
            assert event.logprobs is not None
            if event.prompt_logprobs is not None:
                prompts[event.request_id] = event.prompt_logprobs.logprobs.tolist()
            answers.setdefault(event.request_id, []).append((event.token_id, event.logprobs.top))
    programs = [collectives(str(program.as_text())) for program in runner._compiled.values()]
    runner.close()
    return {
        "job": asdict(job),
        "answers": answers,
        "prompts": prompts,
        "kinds": sorted(kinds),
        "programs": [[asdict(found) for found in program] for program in programs],
    }


def kinds_of(plan: IterationPlan) -> Iterator[str]:
    decodes = any(plan.decodes)
    if decodes and plan.chunks:
        yield "decodes beside prefill"
    if decodes and not plan.chunks:
        yield "decodes alone"
    if plan.handoffs:
        yield "hand-off"
    if any(chunk.start > 0 for chunk in plan.chunks):
        yield "a later chunk"
    if len(plan.chunks) > 1:
        yield "two chunks"


def main() -> None:
    ensure_devices(DEVICES)
    for job in sys.argv[1:]:
        print(json.dumps(serve(Job(**json.loads(job)))), flush=True)


if __name__ == "__main__":
    main()
