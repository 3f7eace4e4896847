"""Our side of the comparison: the engine's own step and scheduler over weights that it is given."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from conflux_jax import LLM, SamplingParams
from conflux_jax.build import start_engine
from conflux_jax.config import Config
from conflux_jax.execution.inspection import Inspector
from conflux_jax.execution.runner import Runner
from conflux_jax.models.spec import WeightSource
from conflux_jax.text import TextCodec

WARM_TOKENS = 2


class Rounded:
    """Another source's weights, each rounded to bfloat16: a `WeightSource` as any checkpoint is."""

    def __init__(self, source: WeightSource):
        self.spec, self._source = source.spec, source

    def names(self):
        return self._source.names()

    def read(self, name, part=()):
        return np.asarray(self._source.read(name, part)).astype(ml_dtypes.bfloat16)


class Seen(NamedTuple):
    """states: hidden states of the prompt's tokens after each number of layers asked for. chosen:
    greedy tokens after each of the prompts. step_s: of a decode step of them all, scheduling and
    sampling included."""

    states: list[np.ndarray]
    logits: np.ndarray
    chosen: list[list[int]]
    step_s: float


def config(sp: int, dtype: str) -> Config:
    """Few buckets of static shapes, so that little has to be compiled."""
    return Config.from_flat(
        sp=sp, dtype=dtype, max_model_len=512, max_num_seqs=4, max_num_batched_tokens=96,
        rows_ladder=(96,), decode_rows_ladder=(4,), max_prefill_segments=4, kv_pool_tokens=2048,
    )  # fmt: skip


def look(
    source: WeightSource,
    text: TextCodec,
    config: Config,
    prompt: Sequence[int],
    layers: Sequence[int],
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
) -> Seen:
    """Prefills `prompt` and reads the real step's rows, then generates after `prompts`, all at
    once, with the same loaded runner behind `LLM`."""
    runner = Runner.create(source, config, vocab_limit=text.vocab_size)
    inspector = Inspector(runner)
    states = [inspector.prompt_hidden(prompt, n) for n in layers]
    logits = inspector.prompt_logits(prompt)
    runner.warm_up()
    with LLM.over(start_engine(config, runner, text)) as llm:

        def greedy(tokens: int) -> tuple[float, list[list[int]]]:
            params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
            began_s = time.perf_counter()
            outputs = llm.generate(prompts, params)
            return time.perf_counter() - began_s, [list(o.token_ids) for o in outputs]

        greedy(WARM_TOKENS)  # the first calls load programs
        short_s, _ = greedy(WARM_TOKENS)
        long_s, chosen = greedy(new_tokens)
    return Seen(states, logits, chosen, (long_s - short_s) / (new_tokens - WARM_TOKENS))
