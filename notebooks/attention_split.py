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
# # One layer by hand: where attention splits
#
# Two groups. Request A is a prompt, of which this iteration prefills two tokens, a3 and a4; B and
# C decode one token each, b4 on group 0 and c2 on group 1. One layer is computed twice: by hand in
# NumPy, every exchange written out, and by the real step, whose arrays stand beside it.
#
# Nothing here is timed, so it runs on virtual CPU devices wherever it runs.

# %%
import os

os.environ["JAX_PLATFORMS"] = "cpu"

import re
from array import array

import numpy as np

from conflux_jax.config import Config
from conflux_jax.execution.inspection import Inspector
from conflux_jax.execution.runner import Runner
from conflux_jax.models.known_specs import KNOWN_SPECS
from conflux_jax.models.layers import rope_inv_freq
from conflux_jax.models.loading.tensors import expected_shapes
from conflux_jax.models.spec import ModelSpec
from conflux_jax.plan import (
    Admission,
    DecodeRow,
    DecodeRows,
    Handoff,
    IterationPlan,
    Placement,
    PrefillChunk,
)
from conflux_jax.platform import ensure_devices
from conflux_jax.request import Request, SamplingParams
from conflux_jax.scheduler.waterfill import waterfill
from pallas_kernels.reference import attend, causal

import plotting

ensure_devices(4)  # two groups, later of two ranks each
MACHINE = plotting.machine()
GROUPS, PAGE_TOKENS, ROWS = 2, 2, 4

# %% [markdown]
# ## A model small enough to look at
#
# Eight query and four KV heads: group 0 has query heads 0-3 and KV heads 0-1 of a prefill, group 1
# the others. The weights are random; what matters is who computes what.

# %%
spec = ModelSpec(
    name="tiny", vocab_size=64, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=8,
    num_kv_heads=4, head_dim=8, rms_norm_eps=1e-5, rope_theta=10000.0,
    max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip
DIM = spec.head_dim


class RandomWeights:
    """A `WeightSource`: what the engine asks of any checkpoint."""

    def __init__(self):
        self.spec = spec
        draw = np.random.default_rng(0)
        self._tensors = {
            name: draw.normal(size=shape).astype(np.float32) / (8 if len(shape) > 1 else 1)
            for name, shape in expected_shapes(spec).items()
        }

    def names(self):
        return self._tensors.keys()

    def read(self, name, part=()):
        return self._tensors[name][part]


source = RandomWeights()

# %% [markdown]
# ## Two iterations, as the scheduler writes them
#
# The first prefills a1 a2, b1 b2 b3 and c1 (six tokens: three rows on each group) and hands the KV
# of B to group 0 and of C to group 1. The second is the one to look at. A plan says what changes
# and what runs; page numbers are the only thing that the host knows of the KV.
#
# A page of two tokens with all four KV heads (decode layout) has the bytes of one with four tokens
# and two heads (prefill layout).

# %%
PROMPTS = {"A": (11, 12, 13, 14, 15, 16), "B": (21, 22, 23), "C": (31,)}
SLOTS = {"A": 0, "B": 1, "C": 2}
PREFILL_PAGES = {"A": (0, 1), "B": (2,), "C": (3,)}  # the same numbers on both groups
DECODE_PAGES = {"B": (4, 5), "C": (4,)}  # of B on group 0, of C on group 1
HOME = {"B": 0, "C": 1}


def chunk(name, start, length):
    return PrefillChunk(name, SLOTS[name], start, length, start + length == len(PROMPTS[name]))


def first_plan(runner):
    chunks = (chunk("A", 0, 2), chunk("B", 0, 3), chunk("C", 0, 1))
    return IterationPlan(
        iteration=1,
        bucket=runner.ladders.pick(0, ROWS, prefill=True, handoff=True),
        decodes=(DecodeRows.of(),) * GROUPS,
        chunks=chunks,
        prefill_shares=waterfill((0, 0), ROWS, sum(c.length for c in chunks)),
        admissions=tuple(
            Admission(
                SLOTS[name],
                Request(name, ids, SamplingParams(temperature=0), 8),
                ids,
                (array("i", PREFILL_PAGES[name]),) * GROUPS,
            )
            for name, ids in PROMPTS.items()
        ),
        placements=tuple(
            Placement(SLOTS[name], HOME[name], array("i", pages))
            for name, pages in DECODE_PAGES.items()
        ),
        handoffs=tuple(
            Handoff(SLOTS[name], HOME[name], 0, len(pages), len(PROMPTS[name]))
            for name, pages in DECODE_PAGES.items()
        ),
    )


def second_plan(runner):
    return IterationPlan(
        iteration=2,
        bucket=runner.ladders.pick(1, ROWS, prefill=True, handoff=False),
        decodes=(
            DecodeRows.of([DecodeRow("B", SLOTS["B"], position=3)]),
            DecodeRows.of([DecodeRow("C", SLOTS["C"], position=1)]),
        ),
        chunks=(chunk("A", 2, 2),),
        prefill_shares=waterfill((1, 1), ROWS, 2),
    )


def make_runner(tp):
    config = Config.from_flat(
        sp=GROUPS, tp=tp, dtype="float32", max_model_len=16, max_num_seqs=3,
        max_num_batched_tokens=GROUPS * ROWS, rows_ladder=(ROWS,), decode_rows_ladder=(3,),
        page_tokens=PAGE_TOKENS, kv_pool_tokens=8 * PAGE_TOKENS, handoff_pages=2,
    )  # fmt: skip
    return Runner.create(source, config)


runner = make_runner(tp=1)
b4, c2 = sampled = runner.collect(runner.launch(first_plan(runner))).token_ids.tolist()
plotting.note(f"Sampled by the first iteration: b4 is token {b4}, c2 token {c2}.")

# %% [markdown]
# ## The second iteration's first layer, by hand
#
# **Linear, together.** Each group holds two rows, its decode token first: `[b4, a3]` and `[c2,
# a4]`. One product of the projection serves both.

# %%
FIRST = "model.layers.0."
w = {
    name.removeprefix(FIRST).removesuffix(".weight"): source.read(name).astype(np.float64)
    for name in source.names()
    if name.startswith(FIRST)
}
embedding = source.read("model.embed_tokens.weight").astype(np.float64)
frequencies = rope_inv_freq(spec).astype(np.float64)


def norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + spec.rms_norm_eps) * weight


def turn(x, positions):
    angles = np.asarray(positions)[:, None, None] * frequencies
    (a, b), cos, sin = np.split(x, 2, axis=-1), np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def project(token_ids, positions):
    """(x, q, k, v): rows, and their heads `[rows, heads, head_dim]`."""
    x = embedding[list(token_ids)]
    h = norm(x, w["input_layernorm"])
    q, k, v = (
        (h @ w[f"self_attn.{part}_proj"].T).reshape(len(x), -1, DIM) for part in ("q", "k", "v")
    )
    return x, turn(q, positions), turn(k, positions), v


def halves(heads):
    """The heads' axis in two: the share of group 0, that of group 1."""
    return np.split(heads, GROUPS, axis=1)


rows = [([b4, PROMPTS["A"][2]], [3, 2]), ([c2, PROMPTS["A"][3]], [1, 3])]
packed = [project(*group) for group in rows]

# %% [markdown]
# **Decode, at home.** b4 attends on group 0 to b1 b2 b3 and itself, with all heads; c2 on group 1
# to c1 and itself. Nothing moves.

# %%
_, _, b_keys, b_values = project(PROMPTS["B"], range(3))
_, _, c_keys, c_values = project(PROMPTS["C"], range(1))
decoded = []
for (_, q, k, v), keys, values in zip(packed, (b_keys, c_keys), (b_values, c_values), strict=True):
    decoded.append(attend(q[0], np.concatenate([keys, k[:1]]), np.concatenate([values, v[:1]])))

# %% [markdown]
# **Prefill, spread.** First all-to-all: each group sends the other group's share of its token's
# heads. Afterwards each has both tokens with its own half of the heads, attends to a1 a2 (whose KV
# has lain there, by heads, since the first iteration) and to the chunk; the second all-to-all
# turns it back. This cell is all that ever crosses between the groups.

# %%
_, _, a_keys, a_values = project(PROMPTS["A"][:2], range(2))
sent = [[halves(part[1:]) for part in group[1:]] for group in packed]  # [from][q, k, v][to]
attended = []
for to in range(GROUPS):
    q, k, v = (np.concatenate([sent[a][part][to] for a in range(GROUPS)]) for part in range(3))
    keys = np.concatenate([halves(a_keys)[to], k])
    values = np.concatenate([halves(a_values)[to], v])
    attended.append(causal(q, keys, values))  # [a3, a4] with half of the heads
returned = [np.concatenate([attended[a][token] for a in range(GROUPS)]) for token in range(GROUPS)]

# %% [markdown]
# **Merge.** Both results go back to their rows; output projection and feed-forward run once over
# them.

# %%
by_hand = []
for (x, *_), decode, prefill in zip(packed, decoded, returned, strict=True):
    attention = np.stack([decode, prefill]).reshape(2, -1)
    x = x + attention @ w["self_attn.o_proj"].T
    h = norm(x, w["post_attention_layernorm"])
    gate, up = h @ w["mlp.gate_proj"].T, h @ w["mlp.up_proj"].T
    by_hand.append(x + (gate / (1 + np.exp(-gate)) * up) @ w["mlp.down_proj"].T)
by_hand = np.stack(by_hand)

# %% [markdown]
# ## The real step's arrays beside it
#
# `Inspector` runs the same layers on the same plan, pool and buffer and reads the packed rows
# after one of them. Rows 2 and 3 of each group are padding.

# %%
look = Inspector(runner)
step = look.hidden(second_plan(runner), num_layers=1)
NAMES = (("b4", "a3"), ("c2", "a4"))
plotting.table(
    ["group", "row", "token", "by hand, first three of 64", "the step's", "largest difference"],
    [
        [g, r, NAMES[g][r], np.round(by_hand[g, r, :3], 4), np.round(step[g, r, :3], 4),
         float(np.abs(by_hand[g, r] - step[g, r]).max())]
        for g in range(GROUPS) for r in range(2)
    ],
    MACHINE,
)  # fmt: skip
assert np.abs(by_hand - step[:, :2]).max() < 1e-5

# %% [markdown]
# ## Where each KV byte lives
#
# Now the iteration runs, and the pool is read back. The keys of layer 0 follow from the embeddings
# alone, so every row of the pool can be told by its value: which token's key it is, of which head.

# %%
runner.collect(runner.launch(second_plan(runner)))
KNOWN = {"a": (PROMPTS["A"][:4], 4), "b": ((*PROMPTS["B"], b4), 4), "c": ((*PROMPTS["C"], c2), 2)}
KEYS = {
    (f"{name}{token + 1}", head): key
    for name, (ids, length) in KNOWN.items()
    for token, heads in enumerate(project(ids, range(length))[2])
    for head, key in enumerate(heads)
}


def whose(row):
    """(token, head) of a row of the pool, or None where nothing was written."""
    if not row.any():
        return None
    off = {name: np.abs(key - row).max() for name, key in KEYS.items()}
    nearest = min(off, key=off.__getitem__)
    assert off[nearest] < 1e-5, "a row of the pool that is no token's key"
    return nearest


def draw_pool(runner, tp):
    keys = np.asarray(runner.state.pool)[0, 0]  # layer 0: [groups * pages, tp * page_rows, dim]
    pages = runner.geometry.num_pages
    per_device = keys.shape[1] // tp
    colors = dict(zip("abc", plotting.COLORS, strict=False))
    figure, panels = plotting.axes(
        GROUPS * tp, width=3.6, height=0.34 * per_device + 1.1, squeeze=False
    )
    for device, panel in enumerate(panels[0]):
        group, rank = divmod(device, tp)
        panel.grid(visible=False)
        for page in range(pages):
            for line in range(per_device):
                found = whose(keys[group * pages + page, rank * per_device + line])
                if found is not None:
                    token, head = found
                    plotting.cell(panel, page, line, f"{token}·{head}", colors[token[0]])
        title = f"group {group}" + (f", rank {rank}" if tp > 1 else "")
        panel.set(title=title, xlabel="page", xlim=(0, pages), xticks=np.arange(pages) + 0.5)
        panel.set_xticklabels(range(pages))
        panel.set_ylim(per_device - 0.5, -0.5)
        panel.set_yticks(range(per_device))
    panels[0][0].set_ylabel("row of the page")
    plotting.show(figure, MACHINE)


draw_pool(runner, tp=1)

# %% [markdown]
# `a1·0` is the key of a1, head 0. Pages 0 to 3 are in prefill layout: four tokens, and the half of
# the heads that is this group's. Pages 4 and 5 are in decode layout: two tokens with all heads,
# B's on group 0, C's on group 1. b1 to b3 and c1 still stand in pages 2 and 3 too: these were free
# again as soon as the hand-off was over, and whoever gets them writes over it. b4 and c2 went
# straight into their decode pages, a3 and a4 straight to their heads' group: nothing of a running
# request ever moves again.
#
# ## What moves, in bytes
#
# By hand, for the second iteration; and what XLA's program really sends. It sends all packed rows
# as they lie, decode rows and padding included, because picking rows out first would be a kernel
# more, and room for a hand-off whether or not there is one.

# %%
NUM_Q, NUM_KV = spec.num_heads // GROUPS, spec.num_kv_heads // GROUPS  # heads of one group


def exchanges(runner, plan):
    """Bytes of the operand of every all-to-all in a layer of the compiled step."""
    lines = runner.lower(plan.bucket).compile().as_text().splitlines()
    found = []
    for line in lines:
        result, called, _ = line.partition(" all-to-all(")
        if called:
            arrays = re.findall(r"f32\[([\d,]+)\]", result)
            found.append(sum(4 * int(np.prod(list(map(int, a.split(","))))) for a in arrays))
    return sorted(found)


ITEM = 4  # bytes of float32
there = (NUM_Q + 2 * NUM_KV) * DIM * ITEM
back = NUM_Q * DIM * ITEM
page = 2 * spec.num_kv_heads * PAGE_TOKENS * DIM * ITEM
plotting.table(
    ["what a group sends, one layer", "needed, bytes", "how it comes about"],
    [
        ["first all-to-all, to the other group", there,
         f"1 token x ({NUM_Q} query + 2 x {NUM_KV} KV heads) x {DIM} x {ITEM} bytes"],
        ["second all-to-all, to the other group", back,
         f"1 token x {NUM_Q} heads x {DIM} x {ITEM} bytes"],
        ["decode", 0, "attends at home"],
        ["hand-off of a page, once in a request's life", page // GROUPS * (GROUPS - 1),
         f"half of {page}: the other half is there"],
    ],
    MACHINE,
)  # fmt: skip
buffers = exchanges(runner, second_plan(runner))
plotting.note(
    f"The compiled step has {len(buffers)} all-to-alls a layer, of {', '.join(map(str, buffers))} "
    f"bytes a group ({ROWS} static rows each; half of each buffer stays where it is)."
)

# %% [markdown]
# ## The same with tensor parallelism inside the groups
#
# Four devices: a group is two ranks, which split all weights, and the KV heads with them. The
# all-to-all then runs between devices of the same rank; a sum over the ranks of a group follows
# the output projection and the down projection. The plans are the same, and so are the values.

# %%
both = make_runner(tp=2)
assert both.collect(both.launch(first_plan(both))).token_ids.tolist() == sampled
ranks = Inspector(both).hidden(second_plan(both), num_layers=1)
difference = float(np.abs(ranks[:, :2] - step[:, :2]).max())
assert difference < 1e-5
both.collect(both.launch(second_plan(both)))
plotting.note(f"Largest difference to `tp` 1 after the layer: {difference:.1e}.")
draw_pool(both, tp=2)

# %% [markdown]
# Each device has one KV head of a prefill (four tokens a page) and the two of its rank in decode
# pages.
#
# ## At the size of real models
#
# Per layer and prompt token, in bfloat16: the two all-to-alls of the split, and the two
# all-reduces of uniform tensor parallelism over the same GPUs (each GPU sends twice its share of
# the sum). Sent by one GPU, a chunk of 8,192 tokens, one layer.

# %%
TOKENS, BF16 = 8192, 2


def split_mib(spec, gpus):
    """Each GPU has 1/gpus of the tokens and keeps 1/gpus of what it exchanges."""
    heads = 2 * spec.num_heads + 2 * max(spec.num_kv_heads, gpus)
    return TOKENS / gpus * (1 - 1 / gpus) * heads * spec.head_dim * BF16 / 2**20


def uniform_mib(spec, gpus):
    return 2 * TOKENS * 2 * (1 - 1 / gpus) * spec.hidden_size * BF16 / 2**20


figure, panels = plotting.axes(len(KNOWN_SPECS), width=3.2, height=2.8, sharey=True)
COUNTS = (2, 4, 8)
for panel, known in zip(panels, KNOWN_SPECS.values(), strict=True):
    where = np.arange(len(COUNTS))
    panel.bar(where - 0.2, [split_mib(known, n) for n in COUNTS], 0.38, color=plotting.OURS,
              label="all-to-alls of the split")  # fmt: skip
    panel.bar(where + 0.2, [uniform_mib(known, n) for n in COUNTS], 0.38, color=plotting.THEIRS,
              label="all-reduces of uniform TP")  # fmt: skip
    panel.set_xticks(where, COUNTS)
    panel.set(title=known.name, xlabel="GPUs")
panels[0].set_ylabel("MiB sent by a GPU, a layer")
panels[-1].legend(loc="upper left")
plotting.show(figure, "arithmetic, no machine")
last = list(KNOWN_SPECS.values())[-1]
plotting.note(
    "The split's share shrinks with the number of GPUs, that of all-reduces does not: for "
    f"{last.name} on 8 GPUs {uniform_mib(last, 8) / split_mib(last, 8):.0f} times as many bytes."
)
runner.close()
both.close()
