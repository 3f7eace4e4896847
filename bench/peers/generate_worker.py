"""`LLM.generate` in a process of its own: what serving is measured against."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from bench.peers.protocol import pin_cpus, serve


def main() -> None:
    settings = json.loads(sys.argv[1])

    def load():
        pin_cpus()
        from conflux_jax import LLM, SamplingParams

        llm = LLM(**settings)

        def generate(request: dict[str, Any]) -> dict[str, Any]:
            """Seconds for all prompts together, and the engine's own sums of that time."""
            params = SamplingParams(
                max_tokens=request["max_tokens"], temperature=0.0, ignore_eos=True
            )
            before, start_s = llm.engine.stats(), time.perf_counter()
            outputs = llm.generate(request["prompts"], params)
            seconds, after = time.perf_counter() - start_s, llm.engine.stats()
            return {
                "seconds": seconds,
                "tokens": sum(len(output.token_ids) for output in outputs),
                "step_s": after["step_s"] - before["step_s"],
                "iterations": after["iterations"] - before["iterations"],
            }

        return {"vocab_size": llm.engine.info.vocab_size}, {"generate": generate}

    serve(load)


if __name__ == "__main__":
    main()
