"""One iteration of a long prefill on H100s, counted in compiled programs: the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from bench.h100.accounting import Cost, Iteration
from bench.hlo_counts import Collective
from bench.variants import VARIANTS

MIB, GIB, TFLOP = 1 << 20, 1 << 30, 10**12
NOTES = """\
Per device, of the busiest group. Read in the compiled programs: rows (padding included), what the
collectives send to other devices, the weights that matrix products read, the products' FLOPs, and
launches (kernels, copies, collectives); branches of the sampler that only some iterations take are
left out. The attention kernels in these programs are stand-ins: KV bytes and attention FLOPs are
arithmetic, from the programs' heads, sizes and types and this iteration's lengths, each token of KV
read once. decode: KV of the decodes; context: of the long prompt; moved: what the hand-off's gather
reads, a static size."""


def table(costs: Mapping[str, Cost], iteration: Iteration, model: str) -> str:
    """costs: by key of the variant."""
    decodes = [context for group in iteration.decodes for context in group]
    lines = [
        f"{model} on H100s, compiled, not run. One iteration: {iteration.chunk_tokens:,} "
        f"tokens of prefill after {iteration.context_tokens:,}, beside {len(decodes)} decodes of "
        f"{max(decodes):,}",
        "",
        f"{'':29}{'sent, MiB':>20}{'read, GiB':>38}{'TFLOP':>20}",
        f"{'':23}{'rows':>6}{'all-to-all':>12}{'sums':>8}{'weights':>11}{'decode':>9}"
        f"{'context':>9}{'moved':>9}{'products':>10}{'attention':>10}{'launches':>10}",
    ]
    lines += [_row(v.label, costs[v.key]) for v in VARIANTS if v.key in costs]
    lines += ["", "Collectives in their order, MiB that each device brings:"]
    lines += [
        f"{v.label:23}{_collectives(costs[v.key].collectives)}" for v in VARIANTS if v.key in costs
    ]
    return "\n".join([*lines, "", NOTES])


def _row(label: str, cost: Cost) -> str:
    attention = cost.attention
    return (
        f"{label:23}{cost.rows:6}{cost.bytes_sent('all-to-all') / MIB:12,.0f}"
        f"{cost.bytes_sent('all-reduce') / MIB:8,.0f}{cost.weight_bytes / GIB:11.2f}"
        f"{attention.decode_bytes / GIB:9.2f}{attention.prefill_bytes / GIB:9.2f}"
        f"{attention.handoff_bytes / GIB:9.2f}{cost.product_flops / TFLOP:10.2f}"
        f"{attention.flops / TFLOP:10.2f}{cost.launches:10,}"
    )


def _collectives(collectives: Sequence[Collective]) -> str:
    """Equal sequences once, with how often: the layers' are `32 x (...)`."""
    brought = [(c.name, f"{c.kind} {c.operand_bytes / MIB:.3g}") for c in collectives]
    counts = {name: sum(other == name for other, _ in brought) for name, _ in brought}
    once = {name: text for name, text in brought}
    parts = []
    for count, names in groupby(once, key=lambda name: counts[name]):
        texts = ", ".join(once[name] for name in names)
        parts.append(texts if count == 1 else f"{count} x ({texts})")
    return ", ".join(parts)


def flat(costs: Mapping[str, Cost]) -> dict[str, int]:
    """What `--json` writes: `h100_<variant>_<figure>`."""
    return {
        f"h100_{key}_{figure}": value
        for key, cost in costs.items()
        for figure, value in cost.flat().items()
    }
