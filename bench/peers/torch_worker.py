"""Prefill by torch and transformers, with the GGUF's weights dequantised."""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.peers.protocol import PREFILL_TOKENS, THREADS, pin_cpus, random_prompt, serve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", required=True, type=Path)
    arguments = parser.parse_args()

    def load():
        pin_cpus()
        torch.set_num_threads(THREADS)
        path: Path = arguments.gguf
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
        models = {"float32": model, "bfloat16": copy.deepcopy(model).to(torch.bfloat16)}
        vocab = model.config.vocab_size

        @torch.inference_mode()
        def prefill(request: dict[str, Any]) -> dict[str, Any]:
            prompt = torch.tensor([random_prompt(PREFILL_TOKENS, vocab, request["seed"])])
            model = models[request.get("dtype", "bfloat16")]
            start = time.perf_counter()
            model(prompt, use_cache=True, logits_to_keep=1).logits.argmax(-1).item()
            return {"tokens_per_s": PREFILL_TOKENS / (time.perf_counter() - start)}

        for name in models:
            prefill({"seed": 0, "dtype": name})
        return {"version": torch.__version__}, {"prefill": prefill}

    serve(load)


if __name__ == "__main__":
    main()
