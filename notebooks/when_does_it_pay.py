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
# # When does it pay?
#
# Goodput of this scheme over that of other designs, by simulation: against prompt length and the
# target for the time between tokens (TBT), the number of GPUs, and the bandwidth between them. The
# question behind it: is my traffic of the kind that gains, and would it across nodes?
#
# **Goodput** is the highest rate at which 95% of the requests have every token on time: the first
# within 2 s (longer for long prompts: ten times what the linear layers take on idle GPUs), every
# other within TBT of the one before.
#
# **The others** are the two that come closest in the tables of `docs/goodput`, each as replicas of
# one GPU and as one group of all GPUs, whichever is better:
#
# - chunked prefill by an *oracle* that knows what every iteration will take. No real system does,
#   so this is a bound on how well its chunk size can be chosen;
# - MuxWise: prefill and decode on disjoint multiprocessors of the same GPUs.
#
# Ours is the real scheduler on a modelled device. Each point is half a minute or more of
# made-up traffic, so single points are good to about 10%; `python -m conflux_jax.goodput` does it
# properly, on a trace and with every rival's best settings.

# %%
import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from conflux_jax.models.known_specs import KNOWN_SPECS
from conflux_jax.simulation.goodput import Case, Tuned, first_guess, measure
from conflux_jax.simulation.hardware import load_hardware

import plotting
import traffic
from sizes import sized

MODEL = "qwen3-14b"
H100 = load_hardware("h100")
SIMULATED = plotting.simulated(f"{KNOWN_SPECS[MODEL].name} on {H100.name}")
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # processes share the cores
# In a trace: for four GPUs half a minute and more at their goodput; and how many requests at least.
TOKENS, REQUESTS = sized((2_000_000, 80), quick=(100_000, 20))
FOLDER = Path(tempfile.mkdtemp())
NVLINK = 450  # GB/s of an H100 each way, which the hardware model was measured with


def trace(prompt_median):
    """A file of traffic whose 95th percentile is four times its median prompt."""
    path = FOLDER / f"prompts-{prompt_median}.jsonl"
    tokens = 1.43 * prompt_median + 150  # the means of both lengths
    count = max(REQUESTS, round(TOKENS / tokens))
    requests = traffic.poisson(count, 1.0, prompt_median, 4 * prompt_median, output_median=150)
    traffic.write(requests, path)
    return str(path)


def linked(gigabytes_s):
    """H100s whose every collective runs at another bandwidth; start-up times stay as they are."""
    path = FOLDER / f"h100-{gigabytes_s}.json"
    hardware = H100.scaled(
        f"H100, {gigabytes_s} GB/s", source="the H100's, with another link",
        link=gigabytes_s / NVLINK,
    )  # fmt: skip
    path.write_text(hardware.to_json(), encoding="utf-8")
    return str(path)


# %% [markdown]
# ## The points

# %%
PROMPTS = sized((1000, 4000, 12_000, 30_000), quick=(12_000,))
TBTS = sized((50.0, 100.0), quick=(100.0,))
COUNTS, LINKS = sized((2, 4, 8), quick=(2, 4)), (450, 50, 12.5)
LONG = 12_000  # of the points that vary something else


def case(prompt, tbt_ms=100.0, gpus=4, hardware="h100"):
    return Case(
        TRACES[prompt], "conflux", model=MODEL, hardware=hardware, gpus=gpus, tbt_ms=tbt_ms,
        minutes=10_000.0,
    )  # fmt: skip


TRACES = {prompt: trace(prompt) for prompt in PROMPTS}
HARDWARE = {gb_s: "h100" if gb_s == NVLINK else linked(gb_s) for gb_s in LINKS}
points = {
    **{("map", prompt, tbt): case(prompt, tbt) for prompt in PROMPTS for tbt in TBTS},
    **{("gpus", gpus): case(LONG, gpus=gpus) for gpus in COUNTS},
    **{("link", gb_s): case(LONG, hardware=HARDWARE[gb_s]) for gb_s in LINKS},
}


def contenders(gpus):
    """(system, settings): ours with no bound on overtaking, as none of the others has one."""
    for tp in (1, gpus):
        yield "chunked-oracle", {"tp": tp}
        yield "muxwise", {"tp": tp}
    yield "conflux", {"max_bypass": 1_000_000}


def search(pool, point):
    """Futures of the point's goodput, by system and settings."""
    start = first_guess(point)
    for system, settings in contenders(point.gpus):
        own = Case(**(point.record() | {"trace": point.trace, "system": system}))
        yield system, settings, pool.submit(measure, own, 0, Tuned(settings, start, False))


# %%
spawn = multiprocessing.get_context("spawn")
found = {}  # point -> system -> (goodput, settings)
with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
    unique = dict.fromkeys(points.values())
    asked = {point: list(search(pool, point)) for point in unique}
    for point, runs in asked.items():
        best = {}
        for system, settings, future in runs:
            rate = future.result().rate
            if rate > best.get(system, (-1.0, None))[0]:
                best[system] = (rate, settings)
        found[point] = best
OTHERS = ("chunked-oracle", "muxwise")


def gain(point):
    """Ours over the best of the others, and which that is. NaN where no other sustains anything."""
    best = found[point]
    strongest = max(OTHERS, key=lambda system: best[system][0])
    theirs = best[strongest][0]
    return (best["conflux"][0] / theirs if theirs else np.nan), strongest


# %% [markdown]
# ## Where it wins, ties and loses
#
# Blue: ours sustains more. Red: it sustains less. White: within a few percent.

# %%
grid = np.array([[gain(points["map", p, t])[0] for p in PROMPTS] for t in TBTS])
figure, panel = plotting.axes(width=6.5, height=3.0)
image = panel.imshow(np.log2(grid), cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
panel.grid(visible=False)
for y, tbt in enumerate(TBTS):
    for x, prompt in enumerate(PROMPTS):
        ratio, strongest = gain(points["map", prompt, tbt])
        ours = found[points["map", prompt, tbt]]["conflux"][0]
        label = f"{ratio:.2f}\n{ours:.2g}/s\nover {strongest}"
        panel.text(x, y, label, ha="center", va="center", fontsize=7)
panel.set_xticks(range(len(PROMPTS)), [f"{p:,}" for p in PROMPTS])
panel.set_yticks(range(len(TBTS)), [f"{t:g}" for t in TBTS])
panel.set(xlabel="median prompt, tokens", ylabel="TBT target, ms",
          title="goodput over the best of the others, 4 GPUs")  # fmt: skip
bar = figure.colorbar(image, ticks=[-1, 0, 1])
bar.ax.set_yticklabels(["half", "equal", "twice"])
plotting.show(figure, SIMULATED)

# %% [markdown]
# ## GPUs, and what lies between them
#
# Prompts of 12,000 tokens (median), TBT 100 ms. The bandwidths are those of NVLink on an H100 (450
# GB/s each way), of a 400 Gb/s network card for each GPU (50 GB/s) and of a 100 Gb/s one. Start-up
# times of collectives stay those of NVLink, which flatters whoever exchanges a lot across nodes:
# ours, and the others' large groups. Replicas of one GPU exchange nothing.
#
# One setting of ours is made for NVLink and was not changed: an iteration with prefill has room to
# hand all of its tokens' KV to any one group, sent whether it is used or not (`handoff_pages`).
# With 10,240 tokens of 160 KiB that is 1.7 GB, which takes 134 ms at 12.5 GB/s: longer than the
# TBT target, so that no rate at all is sustained there. Smaller hand-offs would be tried first.

# %%
figure, panels = plotting.axes(2)
for panel, kind, values, label in (
    (panels[0], "gpus", COUNTS, "GPUs"),
    (panels[1], "link", LINKS, "GB/s each way, a GPU"),
):
    for index, (system, title) in enumerate(
        (("conflux", "ours"), ("chunked-oracle", "chunked, oracle"), ("muxwise", "MuxWise"))
    ):
        rates = [found[points[kind, value]][system][0] for value in values]
        panel.plot(values, rates, "o-", color=plotting.COLORS[index], label=title)
    panel.set_xscale("log")
    panel.set_xticks(values, [f"{v:g}" for v in values])
    panel.minorticks_off()
    panel.set(xlabel=label, ylabel="goodput, requests/s", ylim=(0, None))
panels[0].legend()
plotting.show(figure, SIMULATED)

# %%
plotting.table(
    ["median prompt", "TBT, ms", "GPUs", "GB/s", "ours", "chunked, oracle", "MuxWise",
     "ours over the best", "best of the others"],
    [
        [f"{next(p for p in PROMPTS if TRACES[p] == point.trace):,}", f"{point.tbt_ms:g}",
         point.gpus, next(f"{g:g}" for g, h in HARDWARE.items() if h == point.hardware),
         *(best[s][0] for s in ("conflux", *OTHERS)), gain(point)[0],
         f"{gain(point)[1]}, tp {best[gain(point)[1]][1]['tp']}"]
        for point, best in found.items()
    ],
    f"{SIMULATED}; goodput in requests a second",
)  # fmt: skip

# %% [markdown]
# ## What comes out


# %%
def described(ratio):
    return "wins" if ratio > 1.05 else "loses" if ratio < 0.95 else "ties"


def counted(prompt):
    ratios = [gain(points["map", prompt, tbt])[0] for tbt in TBTS]
    pairs = zip(ratios, TBTS, strict=True)
    words = ", ".join(f"{described(r)} ({r:.2f}) at {t:g} ms" for r, t in pairs)
    return f"- Prompts of {prompt:,} tokens: {words}."


network = gain(points["link", 50])[0]
slow = gain(points["link", 12.5])[0]
plotting.note(
    "\n".join(map(counted, PROMPTS))
    + f"\n- Across nodes: it {described(network)} with 400 Gb/s a GPU ({network:.2f}) and "
    f"{described(slow)} with 100 Gb/s ({slow:.2f}).\n"
    f"- GPUs, prompts of {LONG:,} tokens: "
    + ", ".join(f"{gain(points['gpus', n])[0]:.2f} on {n}" for n in COUNTS)
    + "."
)
