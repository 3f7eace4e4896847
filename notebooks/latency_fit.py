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
# # The latency model: how it is fitted, and what it costs to be wrong
#
# The scheduler decides from one number how much prefill rides along with the decodes: how long the
# iteration will take. Here this machine's engine is profiled and fitted, the model taken apart,
# and then made wrong on purpose, to see what becomes of the time between tokens (TBT) and of
# goodput.

# %%
import dataclasses

import numpy as np

from conflux_jax.build import build_runner
from conflux_jax.config import Config
from conflux_jax.execution.calibration import Effort, calibrate
from conflux_jax.execution.measurements import KINDS
from conflux_jax.models.known_specs import KNOWN_SPECS
from conflux_jax.scheduler.latency_model import Curve, iteration_shape
from conflux_jax.simulation.capacity import allowed_late, highest_sustained
from conflux_jax.simulation.costs import ConfluxCosts
from conflux_jax.simulation.hardware import load_hardware
from conflux_jax.simulation.profiling import profile
from conflux_jax.simulation.simulator import simulate
from conflux_jax.simulation.systems.conflux import Blueprint, ConfluxSystem
from conflux_jax.simulation.systems.conflux_design import default_config, sizes
from conflux_jax.simulation.targets import scaled_targets
from conflux_jax.simulation.workload import at_rate, simulated

import plotting
import traffic
from sizes import sized

# %% [markdown]
# ## Calibrate this machine
#
# What `python -m conflux_jax.calibrate` does: made-up iterations of every bucket, in random order
# again and again, a shape's time being its median. Some shapes are held out of the fit and timed
# twice over: how far the two medians are apart is noise that no model can explain.

# %%
config = Config.from_flat(
    model="smollm2-135m-instruct", max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=128,
    rows_ladder=(32, 128), decode_rows_ladder=(2, 8), max_prefill_segments=4,
)  # fmt: skip
EFFORT = sized(Effort(shapes=36, repeats=3), quick=Effort(shapes=1, repeats=1))
runner, _ = build_runner(config)
measured = calibrate(runner, config.scheduler.max_num_batched_tokens, EFFORT)
MACHINE = plotting.machine()
print(measured.table())
runner.close()


# %%
def residuals(panel, calibration, title):
    """Predicted over measured, by measured time."""
    groups = (("fitted", calibration.fitted, "."), ("held out", calibration.held_out, "x"))
    for index, kind in enumerate(KINDS):
        for name, measurements, marker in groups:
            chosen = [m for m in measurements if m.workload.kind == kind]
            predicted = [calibration.model.predict_s(m.workload.shape) for m in chosen]
            panel.semilogx(
                [1000 * m.seconds for m in chosen],
                [100 * (p / m.seconds - 1) for p, m in zip(predicted, chosen, strict=True)],
                marker, color=plotting.COLORS[index], linestyle="",
                label=f"{kind}, {name}",
            )  # fmt: skip
    noise = 100 * calibration.noise().mean
    panel.axhspan(-noise, noise, color="#dddddd", zorder=0, label="mean noise")
    panel.set(title=title, xlabel="measured, ms", ylabel="predicted over measured, %")


figure, panel = plotting.axes(width=6.5, height=3.4)
residuals(panel, measured, "SmolLM2-135M on this machine")
panel.legend(loc="upper left", bbox_to_anchor=(1, 1))
plotting.show(figure, MACHINE)

# %% [markdown]
# The errors that count are those of the held-out shapes, against the noise beside them, which says
# how quiet the machine was while this ran: a fit cannot be better. Points that lie apart by kind,
# or that drift with time, would be a term that the model lacks.
#
# ## The same on GPUs that are not here
#
# The simulator fits its scheduler's model in the same way, to a hardware model of four H100s with
# Qwen3-14B and 2% of noise. There the two attention paths overlap, which on a CPU they do not.

# %%
SPEC, HARDWARE, GPUS = KNOWN_SPECS["qwen3-14b"], load_hardware("h100"), 4
SIMULATED = plotting.simulated(f"{SPEC.name} on {GPUS} x {HARDWARE.name}")
gpu_config = default_config(GPUS, 1, {"max_bypass": 1_000_000})
limits, ladders = sizes(SPEC, gpu_config, HARDWARE.memory_bytes)
costs = ConfluxCosts(SPEC, HARDWARE, GPUS)
most = gpu_config.scheduler.max_num_batched_tokens
on_gpus = profile(costs, limits, ladders, most, {"model": SPEC.name})
plotting.table(
    ["", "k_d", "k_p", "held-out error, mean", "p95", "noise, mean"],
    [
        [name, c.model.k_d, c.model.k_p, f"{c.errors(c.held_out).mean:.1%}",
         f"{c.errors(c.held_out).p95:.1%}", f"{c.noise().mean:.1%}"]
        for name, c in (("this machine", measured), ("four H100s, simulated", on_gpus))
    ],
    f"{MACHINE}; {SIMULATED}",
)  # fmt: skip

# %% [markdown]
# ## What the interference factors mean
#
# The attention stage lasts `max(prefill + k_d * decode, decode + k_p * prefill)`. With both factors
# 1 the paths run one after the other (on a CPU that is known, and so not fitted); with 0 the
# shorter one is hidden. Between them, `k_d` is the share of decode's time that prefill loses to
# it. On the right, what lies between the dotted and the solid line is what overlapping gains.

# %%
ROWS = ladders.rows[-1]
DECODES, CONTEXT = 32, 8192  # of each group


def mixed(prefix):
    """An iteration full of one prompt's chunk after `prefix` tokens, beside all the decodes."""
    bucket = ladders.pick(DECODES, ROWS, prefill=True, handoff=False)
    chunk = (prefix, GPUS * (ROWS - DECODES))
    return iteration_shape(bucket, [DECODES * CONTEXT] * GPUS, CONTEXT, [chunk], shared=False)


prefixes = np.linspace(0, 100_000, 41).astype(int).tolist()
parts = [on_gpus.model.parts(mixed(prefix)) for prefix in prefixes]
figure, panels = plotting.axes(2)
names = ("linear", "head", "handoff", "stage")
panels[0].stackplot(
    prefixes, [[1000 * getattr(p, name) for p in parts] for name in names],
    labels=["linear and fixed", "head", "hand-off", "attention, both paths"],
    colors=plotting.COLORS, alpha=0.8,
)  # fmt: skip
panels[0].set(title="a full iteration", xlabel="prompt tokens before the chunk", ylabel="ms")
panels[0].legend(loc="upper left")
prefill, decode, stage = (
    np.array([1000 * getattr(p, name) for p in parts]) for name in ("prefill", "decode", "stage")
)
panels[1].plot(prefixes, prefill + decode, ":", color="#999999", label="one after the other")
panels[1].plot(prefixes, stage, color=plotting.OURS, label="as fitted")
panels[1].plot(prefixes, np.maximum(prefill, decode), "--", color="#999999", label="shorter hidden")
panels[1].set(title="its attention stage", xlabel="prompt tokens before the chunk", ylabel="ms")
panels[1].legend(loc="upper left")
plotting.show(figure, SIMULATED)

# %% [markdown]
# ## A model that is wrong
#
# The scheduler in the simulator gets a model that is 5%, 10% or 20% wrong, in three ways, on
# traffic with the paper's prompt lengths (median 6,346 tokens, 95th percentile 26,114):
#
# - **fast**: every iteration is believed to be so much shorter than it is;
# - **slow**: so much longer;
# - **tilted**: linear layers so much longer and attention so much shorter: right on average, wrong
#   for every single shape.
#
# The scheduler corrects its model slowly by what iterations took, and keeps a margin that grows
# with how much they scatter. TBT target 100 ms; the first token within 2 s, or later for long
# prompts.

# %%
blueprint = Blueprint(gpu_config.scheduler, limits, ladders, on_gpus.model, costs)
TBT_S, COUNT, SHARE = 0.1, sized(200, quick=20), 0.95
OFFS = sized((0.05, 0.1, 0.2), quick=(0.2,))
targets = scaled_targets(SPEC, HARDWARE, GPUS, TBT_S)
arrivals = traffic.poisson(COUNT, 1.0, 6346, 26_114, output_median=120)


def scaled(model, linear, attention):
    """A latency model with its linear and its attention terms multiplied."""
    curves = {"linear": linear, "head": linear}
    curves |= {"communication": attention, "decode_rows": attention}
    numbers = ("work_s", "read_s", "chunk_s", "token_s", "context_s", "all_context_s",
               "padded_context_s")  # fmt: skip
    changed = {name: attention * getattr(model, name) for name in numbers}
    for name, factor in curves.items():
        curve = getattr(model, name)
        changed[name] = Curve(curve.sizes, tuple(factor * s for s in curve.seconds))
    return dataclasses.replace(model, handoff_s=linear * model.handoff_s, **changed)


def run(model, rate, most_late=None):
    requests = simulated(at_rate(arrivals, rate), targets)
    system = ConfluxSystem(dataclasses.replace(blueprint, predictor=model))
    return simulate(system, requests, most_late=most_late)


def goodput(model, start):
    """The highest rate at which 95% of the requests have every token on time."""

    def sustains(rate):
        results = run(model, rate, allowed_late(COUNT, SHARE))
        return results.complete and results.attainment >= SHARE

    return highest_sustained(sustains, start, step=1.15).low


right = blueprint.predictor
best = goodput(right, start=8.0)
RATE = 0.75 * best  # at which TBT is looked at: busy, not overloaded
WRONG = {
    (way, off): scaled(right, *factors)
    for off in OFFS
    for way, factors in {
        "fast": (1 - off, 1 - off),
        "slow": (1 + off, 1 + off),
        "tilted": (1 + off, 1 - off),
    }.items()
}
found = {}
for key, model in {("right", 0.0): right, **WRONG}.items():
    results = run(model, RATE)
    gaps = np.frombuffer(results.gaps_s, np.float64)
    rate = best if model is right else goodput(model, start=best)
    summary = results.summary()
    found[key] = {
        "goodput": rate,
        "p99": 1000 * summary["tbt_p99_s"],
        "late": float((gaps > TBT_S).mean()),
        "attainment": results.attainment,
    }

# %%
figure, panels = plotting.axes(2)
for index, way in enumerate(("fast", "slow", "tilted")):
    line = [found["right", 0.0], *(found[way, off] for off in OFFS)]
    x = [0, *(100 * off for off in OFFS)]
    color = plotting.COLORS[index]
    panels[0].plot(x, [f["p99"] for f in line], "o-", color=color, label=way)
    panels[1].plot(x, [f["goodput"] for f in line], "o-", color=color, label=way)
panels[0].axhline(1000 * TBT_S, color="#999999", linestyle=":")
panels[0].set(title=f"at {RATE:.1f} requests/s", xlabel="wrong by, %", ylabel="p99 of TBT, ms")
panels[1].set(title="goodput", xlabel="wrong by, %", ylabel="requests/s", ylim=(0, None))
panels[1].legend()
plotting.show(figure, SIMULATED)
plotting.table(
    ["model", "wrong by", "p99 TBT, ms", "gaps over 100 ms", f"on time at {RATE:.1f}/s",
     "goodput, requests/s"],
    [
        [way, f"{off:.0%}", f["p99"], f"{f['late']:.2%}", f"{f['attainment']:.1%}", f["goodput"]]
        for (way, off), f in found.items()
    ],
    SIMULATED,
)  # fmt: skip

# %% [markdown]
# Goodput is found to within 4%, on one slice of made-up traffic: differences of less are none.


# %%
def change(way):
    return f"{found[way, 0.2]['goodput'] / best - 1:+.0%}"


plotting.note(
    f"A model that is 20% wrong changes goodput by {change('fast')} where it is too fast, "
    f"{change('slow')} where it is too slow, {change('tilted')} where it is tilted. What is wrong "
    "by the same factor everywhere is corrected within some fifty iterations of either kind; what "
    "is wrong by shape is not, and the margin has to cover it."
)
