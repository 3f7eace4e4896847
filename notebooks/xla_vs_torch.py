# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The XLA path beside the torch path
#
# The same weights in two implementations: this engine's own step (JAX, compiled by XLA, at `sp` 1
# and 3) and `transformers`' Llama (torch; eager and SDPA attention). Which one is nearer to the
# truth, where do their greedy continuations part, and what does each operator cost?
#
# The truth is the model written out below in NumPy at float64. All weights are rounded to bfloat16
# first, so that every variant has exactly the same ones and only arithmetic differs.

# %%
import contextlib
import os
import time
from functools import partial

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a GPU is shared with torch

import jax
import numpy as np
import torch
import transformers
from jax.experimental.compilation_cache import compilation_cache

from conflux_jax.config import ConfigError
from conflux_jax.execution.kv_cache import page_bytes
from conflux_jax.execution.runner import Runner
from conflux_jax.models.layers import rope_inv_freq
from conflux_jax.models.loading import open_source
from conflux_jax.platform import ensure_devices
from conflux_jax.text import open_text

import plotting
import torch_path
import xla_path
from operators import CONTEXT, REPEATS, Operators, milliseconds, on_torch
from sizes import sized

with contextlib.suppress(ConfigError):  # a GPU machine has as many devices as it has
    ensure_devices(3)
ON_GPU = torch.cuda.is_available() and jax.default_backend() == "gpu"
DEVICE = "cuda" if ON_GPU else "cpu"
GROUPS = [sp for sp in (1, 3) if sp <= len(jax.devices())]
MACHINE = f"{plotting.machine()}, torch {torch.__version__}"
MODEL, NEW_TOKENS = "smollm2-135m-instruct", sized(256, quick=8)
torch.set_grad_enabled(False)
transformers.utils.logging.set_verbosity_error()


# %% [markdown]
# ## One set of weights
#
# The engine reads a checkpoint through a `WeightSource`; this one rounds another's. torch gets the
# very same arrays.

# %%
source = xla_path.Rounded(open_source(MODEL))
spec, text = source.spec, open_text(MODEL)
weights = {name: source.read(name).astype(np.float32) for name in source.names()}
torch_model = partial(torch_path.llama, spec, weights, device=DEVICE)

# %% [markdown]
# ## The truth: Llama in thirty lines of float64
#
# Rotary frequencies are float32 numbers, as both implementations have them; the angles are exact.


# %%
def truth(token_ids):
    """Hidden states `[layers + 1, tokens, hidden]` (the first are the embeddings) and logits."""
    w = {name: array.astype(np.float64) for name, array in weights.items() if "layers" not in name}
    embedding = w["model.embed_tokens.weight"]
    tokens, x = len(token_ids), embedding[token_ids]
    angles = np.arange(tokens)[:, None] * rope_inv_freq(spec).astype(np.float64)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    future = np.triu(np.full((tokens, tokens), -np.inf), 1)

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + spec.rms_norm_eps) * weight

    def turn(x):
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    states = [x]
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        own = {k[len(prefix) :]: v.astype(np.float64) for k, v in weights.items() if prefix in k}
        h = norm(x, own["input_layernorm.weight"])
        q, k, v = (
            (h @ own[f"self_attn.{part}_proj.weight"].T).reshape(tokens, -1, spec.head_dim)
            for part in "qkv"
        )
        k, v = (np.repeat(part, spec.num_heads // spec.num_kv_heads, 1) for part in (turn(k), v))
        scores = np.einsum("qhd,khd->hqk", turn(q), k) / np.sqrt(spec.head_dim) + future
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", share, v).reshape(tokens, -1)
        x = x + attended @ own["self_attn.o_proj.weight"].T
        h = norm(x, own["post_attention_layernorm.weight"])
        gate, up = (h @ own[f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ own["mlp.down_proj.weight"].T
        states.append(x)
    logits = norm(x, w["model.norm.weight"]) @ w.get("lm_head.weight", embedding).T
    return np.stack(states), logits


PROMPTS = (
    "The tide comes in twice a day because the moon pulls the water of the oceans towards it. A "
    "ship that wants to leave the harbour waits until the water is high, and then it sails. On the "
    "day of this story the water was high at noon. The captain of the old ship looked at his watch",
    "To bake a loaf of bread you need flour, water, salt and a little yeast. Mix them, knead the "
    "dough for ten minutes, let it rise in a warm place for an hour, and put it into the oven.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(",
)
prompt = text.encode(PROMPTS[0])
true_states, true_logits = truth(prompt)
plotting.note(f"{len(prompt)} prompt tokens, {spec.num_layers} layers.")

# %% [markdown]
# ## Every variant on the same prompt, and on a long greedy generation
#
# Ours (`xla_path.py`): `Inspector` reads the hidden states that stand in the real step's rows after
# any number of layers, and all rows' logits. Then the same loaded runner generates behind `LLM`,
# three prompts at once, token by token.
#
# torch (`torch_path.py`): `output_hidden_states`, and for the generations one pass over each prompt
# and what our float32 engine made of it. The best token after each of its prefixes is what a greedy
# generation would have chosen, up to the first that differs. Steps with a KV cache are only timed.

# %%
encoded = [text.encode(p) for p in PROMPTS]
prompts = [ids[: min(map(len, encoded))] for ids in encoded]
LAYERS_SHOWN = list(range(0, spec.num_layers + 1, 5))


def relative_error(found, true):
    """Root mean square of the difference over that of the truth."""
    return float(np.sqrt(np.square(found - true).mean() / np.square(true).mean()))


def measured(states, logits, chosen, step_s):
    """chosen: greedy tokens after each prompt; step_s: of a decode step of the three."""
    return {
        "layers": list(map(relative_error, states, true_states[LAYERS_SHOWN])),
        "logits": float(np.abs(logits - true_logits).max()),
        "top": float((logits.argmax(-1) == true_logits.argmax(-1)).mean()),
        "chosen": chosen,
        "step_ms": 1000 * step_s,
    }


def our_variant(sp, dtype):
    config = xla_path.config(sp, dtype)
    return measured(*xla_path.look(source, text, config, prompt, LAYERS_SHOWN, prompts, NEW_TOKENS))


def torch_variant(dtype, attention, continuations):
    model = torch_model(dtype=dtype, attention=attention)
    out = model(torch.tensor([prompt], device=DEVICE), output_hidden_states=True)
    # transformers gives the last one after the final norm: that one is left out below.
    states = [out.hidden_states[n][0].float().cpu().numpy() for n in LAYERS_SHOWN]
    logits = out.logits[0].float().cpu().numpy()
    chosen = torch_path.greedy_along(model, prompts, continuations)
    return measured(states, logits, chosen, torch_path.decode_step_s(model, prompts))


variants = {}
for dtype in ("float32", "bfloat16"):
    for sp in GROUPS:
        variants[f"XLA {dtype}, sp {sp}"] = our_variant(sp, dtype)
base = variants[f"XLA float32, sp {GROUPS[0]}"]["chosen"]
for dtype in ("float32", "bfloat16"):
    for attention in ("eager", "sdpa"):
        made = torch_variant(getattr(torch, dtype), attention, base)
        variants[f"torch {dtype}, {attention}"] = made

# %%
figure, panels = plotting.axes(2, sharey=True)
for panel, dtype in zip(panels, ("float32", "bfloat16"), strict=True):
    lines = {name: v for name, v in variants.items() if dtype in name}
    for (name, variant), marker in zip(lines.items(), "os^v", strict=False):
        ours = name.startswith("XLA")
        panel.semilogy(
            list(LAYERS_SHOWN)[1:-1], variant["layers"][1:-1], marker=marker, label=name,
            color=plotting.OURS if ours else plotting.THEIRS, linestyle="-" if ours else "--",
        )  # fmt: skip
    panel.set(title=f"hidden states, {dtype}", xlabel="after layer")
    panel.legend()
panels[0].set_ylabel("RMS error over RMS, against float64")
plotting.show(figure, MACHINE)

# %% [markdown]
# float32 rounds by up to 6e-8 of a number, bfloat16 by up to 4e-3; an error of a few times that is
# rounding and nothing else. Lines of one panel that lie apart differ in the order of additions, or
# in where products are rounded to the type; which of these it is was not looked into.
#
# ## Where greedy continuations part
#
# Two greedy continuations are equal until, for the first time, rounding turns the order of the two
# best logits around. The float64 model says how near that was: the *margin* is by how much its
# best logit beats the one that was chosen.

# %%
scored = []
for ids, continuation in zip(prompts, base, strict=True):
    scored.append(truth(ids + continuation[:-1])[1][len(ids) - 1 :])


def parting(chosen, continuation, logits):
    """(position, margin) at which a continuation leaves the float64 model's greedy one, or None.

    Logits are known along `continuation`, so the search ends where that itself has left it."""
    for position, (own, known) in enumerate(zip(chosen, continuation, strict=True)):
        best = int(logits[position].argmax())
        if own != best:
            return position, float(logits[position][best] - logits[position][own])
        if known != best:
            return None
    return None


for variant in variants.values():
    triples = zip(variant["chosen"], base, scored, strict=True)
    variant["partings"] = [parting(*triple) for triple in triples]

figure, panel = plotting.axes(width=7.5, height=3.4)
for index, logits in enumerate(scored):
    two = np.partition(logits, -2, axis=-1)[:, -2:]
    label = "best over next" if index == 0 else None
    panel.semilogy(two[:, 1] - two[:, 0], ".", color="#bbbbbb", label=label)
for number, (name, variant) in enumerate(variants.items()):
    found = [p for p in variant["partings"] if p is not None]
    if found:
        panel.semilogy(
            *zip(*found, strict=True), "os^vDPX*"[number], markersize=8, fillstyle="none",
            color=plotting.OURS if name.startswith("XLA") else plotting.THEIRS, label=name,
        )  # fmt: skip
panel.set(xlabel="generated token", ylabel="margin of the float64 logits")
panel.legend(loc="upper left", bbox_to_anchor=(1, 1))
plotting.show(figure, MACHINE)

# %% [markdown]
# ## Time by operator
#
# The engine's own functions, each compiled alone, beside what torch's Llama calls for the same
# thing; medians, with the two in turns. Decode attention reads pages through a page table, torch's
# reads one contiguous array, which is less work than a serving engine can get away with. What takes
# half a millisecond is mostly the call: in the engine's step it is part of one program.


# %%
runner = Runner.create(source, xla_path.config(1, "bfloat16"), vocab_limit=text.vocab_size)
operators = Operators(spec, DEVICE, runner.dims.widen_rows)
CASES = {
    **{f"linear, rows: {n}": partial(operators.linear, rows=n) for n in (1, 8, 256)},
    **{
        f"decode attention, {n} x {c:,}": partial(operators.decode_attention, rows=n, context=c)
        for n, c in ((1, CONTEXT), (8, 128), (8, CONTEXT))
    },
    **{
        f"prefill attention, 256 after {c:,}": partial(operators.prefill_attention, context=c)
        for c in (0, CONTEXT)
    },
    **{f"norm, rows: {n}": partial(operators.norm, rows=n) for n in (8, 256)},
    **{f"rotary, rows: {n}": partial(operators.rotary, rows=n) for n in (8, 256)},
    **{f"top-p sampling, rows: {n}": partial(operators.sampling, rows=n) for n in (1, 8)},
}
times = {}
for name, case in CASES.items():
    runs = {}
    for dtype in ("float32", "bfloat16"):
        runs["XLA", dtype], runs["torch", dtype] = case(dtype)
    times[name] = milliseconds(runs)

# %%
figure, panel = plotting.axes(width=7.5, height=5.6)
styles = {
    ("XLA", "float32"): (plotting.OURS, 1.0), ("XLA", "bfloat16"): (plotting.OURS, 0.5),
    ("torch", "float32"): (plotting.THEIRS, 1.0), ("torch", "bfloat16"): (plotting.THEIRS, 0.5),
}  # fmt: skip
for index, (key, (color, alpha)) in enumerate(styles.items()):
    where = np.arange(len(CASES)) + 0.2 * (index - 1.5)
    values = [times[name][key] for name in CASES]
    panel.barh(where, values, 0.18, color=color, alpha=alpha, label=" ".join(key))
panel.set_yticks(range(len(CASES)), list(CASES))
panel.invert_yaxis()
panel.set(xscale="log", xlabel=f"milliseconds (median of {REPEATS})")
panel.legend()
plotting.show(figure, MACHINE)
plotting.table(
    ["ms", *map(" ".join, styles)],
    [[name, *(times[name][key] for key in styles)] for name in CASES],
    MACHINE,
)

# %% [markdown]
# ## What else a GPU offers
#
# `torch.compile` of a whole forward pass, and the attention back ends that are there (cuDNN,
# flash). Without a GPU this cell has nothing to run.

# %%
if ON_GPU:
    ids = torch.tensor([prompt], device=DEVICE)
    model = torch_model(dtype=torch.bfloat16, attention="sdpa")
    runs = {"torch, forward": on_torch(model, ids)}
    runs["torch.compile, forward"] = on_torch(torch.compile(model), ids)
    runs |= operators.gpu_attention(CONTEXT)
    plotting.table(["on the GPU", "ms"], list(milliseconds(runs).items()), MACHINE)
else:
    plotting.note("No GPU here: nothing run.")

# %% [markdown]
# ## Memory and compilation
#
# A step is compiled once for each bucket of static shapes, and read from the compilation cache
# ever after; torch has nothing to compile, and pays on every call instead. Temporaries are what
# XLA says that the step needs beside weights and pool: the pool is updated in place.


# %%
def seconds(function):
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def compile_step():
    return runner.lower(runner.ladders.all()[0]).compile()


kept = jax.config.jax_compilation_cache_dir
jax.config.update("jax_compilation_cache_dir", None)
compilation_cache.reset_cache()
cold_s = seconds(compile_step)
jax.config.update("jax_compilation_cache_dir", kept)
compilation_cache.reset_cache()
temporary_bytes = compile_step().memory_analysis().temp_size_in_bytes  # and it is cached now
warm_s = seconds(compile_step)

model = torch_model(dtype=torch.bfloat16, attention="sdpa")
forward = on_torch(model, torch.tensor([prompt], device=DEVICE))
first_s, again_s = seconds(forward), seconds(forward)
plotting.table(
    ["bfloat16, one group", "XLA", "torch"],
    [
        ["weights, MB", sum(leaf.nbytes for leaf in jax.tree.leaves(runner.params)) / 1e6,
         sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values()) / 1e6],
        ["KV of a token, bytes", page_bytes(runner.dims, 1),
         2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 2],
        ["temporaries of a decode step, MB", temporary_bytes / 1e6, "not known"],
        ["a new shape: compiled, s", cold_s, "nothing to compile"],
        ["a new shape: from the cache, s", warm_s, "nothing to compile"],
        [f"first forward of {len(prompt)} tokens, s", "not timed", first_s],
        [f"second forward of {len(prompt)} tokens, s", "not timed", again_s],
    ],
    MACHINE,
)  # fmt: skip
runner.close()

# %% [markdown]
# ## A table and three sentences

# %%
plotting.table(
    ["variant", "largest logit error", "same best token",
     f"leaves float64 at (margin), 3 x {NEW_TOKENS} tokens", "decode step of 3, ms"],
    [
        [name, v["logits"], f"{v['top']:.0%}",
         ", ".join("never" if p is None else f"{p[0]} ({p[1]:.1g})" for p in v["partings"]),
         v["step_ms"]]
        for name, v in variants.items()
    ],
    MACHINE,
)  # fmt: skip


def errors(dtype):
    of_type = {name: v["logits"] for name, v in variants.items() if dtype in name}
    return ", ".join(f"{e:.2g} ({name.replace(f' {dtype}', '')})" for name, e in of_type.items())


def leaving(dtype):
    found = [p for name, v in variants.items() if dtype in name for p in v["partings"]]
    margins = [p[1] for p in found if p is not None]
    where = f", at margins of at most {max(margins):.2g}" if margins else ""
    return f"{len(margins)} of {len(found)}{where}"


def faster(dtype):
    names = [n for n in CASES if times[n]["XLA", dtype] < times[n]["torch", dtype]]
    return f"{len(names)} of {len(CASES)} cases in {dtype}" + (
        f" ({'; '.join(names)})" if names else ""
    )


gaps = np.concatenate([np.diff(np.partition(one, -2)[:, -2:])[:, 0] for one in scored])
plotting.note(
    f"1. **Accuracy**: the largest error of a logit against float64 is {errors('float32')} in "
    f"float32, {errors('bfloat16')} in bfloat16.\n"
    f"2. **Agreement**: in float32, {leaving('float32')} greedy continuations leave float64's; in "
    f"bfloat16, {leaving('bfloat16')}. The median margin of all tokens is {np.median(gaps):.2g}.\n"
    f"3. **Time**: XLA is faster than torch in {faster('float32')} and {faster('bfloat16')}, and "
    f"a new shape costs it {cold_s:.1f} s of compilation once."
)
