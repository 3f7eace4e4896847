"""llama.cpp on the GGUF itself, through llama-cpp-python's low-level API."""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import time
from typing import Any

import llama_cpp
import numpy as np

from bench.peers.protocol import (
    BATCHES,
    DECODE_PROMPT,
    DECODE_STEPS,
    PREFILL_TOKENS,
    THREADS,
    pin_cpus,
    random_prompt,
    serve,
)


class Context:
    """One llama.cpp context of `sequences` sequences of up to `tokens` tokens each.

    A KV buffer per sequence and flash attention: measured the fastest of the four combinations for
    batches 8 and 32 (a unified buffer costs up to half), and as fast as any for prefill.
    """

    def __init__(self, model: Any, sequences: int, tokens: int):
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sequences * tokens
        params.n_batch = params.n_ubatch = PREFILL_TOKENS
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = THREADS
        params.kv_unified = False
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise MemoryError(f"llama.cpp refused a context of {sequences} x {tokens} tokens")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(PREFILL_TOKENS, 0, 1)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> np.ndarray:
        """Run rows of (token, position, sequence, wants logits); returns greedy tokens of the
        rows that wanted logits."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        if code := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        wanted_rows = sum(row[3] for row in rows)
        logits = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (wanted_rows, self._vocab)).argmax(axis=1)

    def prefill(self, sequence: int, prompt: list[int]) -> int:
        last = len(prompt) - 1
        rows = [(token, i, sequence, i == last) for i, token in enumerate(prompt)]
        return int(self.decode(rows)[0])

    def cut(self, sequence: int, tokens: int) -> None:
        """Forget what a sequence holds past its first `tokens` tokens."""
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, tokens, -1)


class Decoding:
    """A context whose sequences all hold a prompt, so that decode steps can be timed any time."""

    def __init__(self, context: Context, batch: int, vocab: int):
        self._context = context
        self._first = []
        for sequence in range(batch):
            prompt = random_prompt(DECODE_PROMPT, vocab, seed=sequence)
            self._first.append(context.prefill(sequence, prompt))

    def time(self, steps: int) -> float:
        """Seconds of `steps` greedy steps of every sequence, after one untimed step."""
        tokens = list(self._first)
        start = 0.0
        for step in range(steps + 1):
            if step == 1:
                start = time.perf_counter()
            position = DECODE_PROMPT + step
            rows = [(int(token), position, s, True) for s, token in enumerate(tokens)]
            tokens = self._context.decode(rows)
        elapsed = time.perf_counter() - start
        for sequence in range(len(tokens)):
            self._context.cut(sequence, DECODE_PROMPT)
        return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", required=True)
    arguments = parser.parse_args()

    def load():
        pin_cpus()
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        model = llama_cpp.llama_model_load_from_file(arguments.gguf.encode(), params)
        vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        prefiller = Context(model, 1, PREFILL_TOKENS)
        decoding: dict[int, Decoding] = {}
        for batch in BATCHES:
            context = Context(model, batch, DECODE_PROMPT + DECODE_STEPS + 16)
            decoding[batch] = Decoding(context, batch, vocab)

        def prefill(request: dict[str, Any]) -> dict[str, Any]:
            prompt = random_prompt(PREFILL_TOKENS, vocab, request["seed"])
            prefiller.cut(0, 0)
            start = time.perf_counter()
            prefiller.prefill(0, prompt)
            return {"tokens_per_s": len(prompt) / (time.perf_counter() - start)}

        def decode(request: dict[str, Any]) -> dict[str, Any]:
            steps, batch = request["steps"], request["batch"]
            return {"tokens_per_s": batch * steps / decoding[batch].time(steps)}

        version = getattr(llama_cpp, "__version__", "?")
        return {"version": version}, {"prefill": prefill, "decode": decode}

    serve(load)


if __name__ == "__main__":
    main()
