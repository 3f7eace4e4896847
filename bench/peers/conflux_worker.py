"""conflux_jax itself: requests go through the engine, and every token is streamed to a reader."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from bench.peers.protocol import (
    BATCHES,
    DECODE_PROMPT,
    PREFILL_TOKENS,
    pin_cpus,
    random_prompt,
    serve,
)

MAX_BATCHED_TOKENS = PREFILL_TOKENS
SAMPLE_INTERVAL_S = 0.02


async def stream(engine: Any, prompts: Sequence[list[int]], max_tokens: int) -> list[list[float]]:
    """Run the prompts together, reading every token as it comes; for each prompt, the seconds at
    which its tokens reached the host, all after one common start."""
    from conflux_jax import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    arrival_s = engine.now_s
    requests = [engine.prepare(prompt, params, arrival_s=arrival_s) for prompt in prompts]

    async def read(request: Any) -> list[float]:
        times: list[float] = []
        async for delta in await engine.submit(request):
            times.extend(delta.times_s)
        return times

    return list(await asyncio.gather(*(read(request) for request in requests)))


@contextlib.asynccontextmanager
async def stats_samples(engine: Any) -> AsyncIterator[list[tuple[float, float, float]]]:
    """Collects (seconds since now, host_s, step_s) of the engine's counters while it is open."""
    samples: list[tuple[float, float, float]] = []
    start_s = engine.now_s

    async def sample() -> None:
        while True:
            stats = engine.stats()
            samples.append((engine.now_s - start_s, stats["host_s"], stats["step_s"]))
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    task = asyncio.create_task(sample())
    try:
        yield samples
    finally:
        task.cancel()


async def decode_speed(engine: Any, vocab: int, batch: int, steps: int, seed: int) -> dict:
    """Tokens a second while all `batch` requests decode.

    The window opens when the last request has its first token and closes when the first one ends;
    prompts enter over several iterations, so the earliest ask for as many tokens more.
    """
    prompts = [random_prompt(DECODE_PROMPT, vocab, seed * 1000 + i) for i in range(batch)]
    entering = -(-batch * DECODE_PROMPT // (MAX_BATCHED_TOKENS - batch))
    async with stats_samples(engine) as samples:
        times = await stream(engine, prompts, entering + steps + 1)
    opens, closes = max(own[0] for own in times), min(own[-1] for own in times)
    tokens = sum(opens < at <= closes for own in times for at in own)
    before = sum(at <= opens for own in times for at in own) / batch
    answer = {
        "tokens_per_s": tokens / (closes - opens),
        "mean_context": DECODE_PROMPT + before + tokens / batch / 2,
    }
    inside = [sample for sample in samples if opens <= sample[0] <= closes]
    if len(inside) >= 2 and inside[-1][2] > inside[0][2]:
        (_, host_0, step_0), (_, host_1, step_1) = inside[0], inside[-1]
        answer["host_fraction"] = (host_1 - host_0) / (step_1 - step_0)
    return answer


def seconds_to_load(model: str, sp: int) -> float:
    """From opening the model's file to parameters on the devices; no step is compiled."""
    from conflux_jax.platform import ensure_devices

    ensure_devices(sp)

    import jax
    import jax.numpy as jnp

    from conflux_jax.execution.runner import make_mesh, use_compilation_cache
    from conflux_jax.models.decoder import DecoderDims, abstract_decoder
    from conflux_jax.models.heads import HeadLayout
    from conflux_jax.models.loading import open_source
    from conflux_jax.models.loading.placement import load_parameters

    use_compilation_cache(None)
    mesh = make_mesh(sp, 1)
    start = time.perf_counter()
    source = open_source(model)
    heads = HeadLayout.make(source.spec, sp, 1)
    dims = DecoderDims(source.spec, heads, jnp.dtype("bfloat16"))
    jax.block_until_ready(load_parameters(source, dims, abstract_decoder(dims)[1], mesh))
    return time.perf_counter() - start


def start_engine(model: str, sp: int):
    """Ready-line facts and handlers of a compiled engine."""
    import jax

    from conflux_jax import LLM

    llm = LLM(
        model,
        sp=sp,
        dtype="bfloat16",
        max_model_len=2 * PREFILL_TOKENS,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
    )
    engine, vocab = llm.engine, llm.engine.info.vocab_size

    def prefill(request: dict[str, Any]) -> dict[str, Any]:
        prompt = random_prompt(PREFILL_TOKENS, vocab, request["seed"])
        [[ttft_s]] = asyncio.run(stream(engine, [prompt], 1))
        return {"tokens_per_s": PREFILL_TOKENS / ttft_s}

    def decode(request: dict[str, Any]) -> dict[str, Any]:
        batch, steps, seed = request["batch"], request["steps"], request["seed"]
        return asyncio.run(decode_speed(engine, vocab, batch, steps, seed))

    return {"version": f"jax {jax.__version__}, sp {sp}"}, {"prefill": prefill, "decode": decode}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--sp", type=int, default=1)
    parser.add_argument("--load-only", action="store_true", help="time loading and nothing else")
    arguments = parser.parse_args()
    model, sp = arguments.model, arguments.sp

    def load():
        pin_cpus()
        if arguments.load_only:
            return {"load_s": seconds_to_load(model, sp)}, {}
        return start_engine(model, sp)

    serve(load)


if __name__ == "__main__":
    main()
