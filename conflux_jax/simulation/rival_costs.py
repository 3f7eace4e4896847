"""What an iteration of each rival takes, put together from the operators of the hardware model.

The chunked rival needs nothing of its own: its iterations are `Work` on one tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from conflux_jax.models.spec import ModelSpec
from conflux_jax.simulation.hardware import Hardware
from conflux_jax.simulation.model_costs import ModelOnGpus
from conflux_jax.simulation.operators import BYTES

PARTIAL_BYTES = 4  # of a partial attention output, which is summed up in float32
ENDLESS = 1e9  # times as fast as the GPU

Chunks = Sequence[tuple[int, int]]  # (start, length) of each


class Operators(Protocol):
    """`ModelOnGpus`, as far as the rivals use it: seconds over all layers, 0 for no rows. tp: GPUs
    of a group. sms: of each GPU, that the kernels have; None: all."""

    @property
    def num_layers(self) -> int: ...

    @property
    def sms(self) -> int:
        """Of a GPU."""
        ...

    @property
    def iteration_s(self) -> float:
        """Of an iteration: launches and the host's share that nothing hides."""
        ...

    @property
    def contention(self) -> float:
        """By how much two things slow each other that run on SMs of their own, though memory has
        bandwidth for both."""
        ...

    def memory_share(self, sms: int) -> float:
        """Of the memory's bandwidth, that kernels on so many SMs can draw."""
        ...

    def reading_s(self, rows: int, tp: int = 1) -> float:
        """`linear_s`, if products and all-reduces took no time: what memory alone takes."""
        ...

    def linear_s(self, rows: int, tp: int = 1, sms: int | None = None) -> float:
        """Norms, projections and FFN, and the two all-reduces of each layer."""
        ...

    def head_s(self, rows: int, samples: int, tp: int = 1) -> float: ...

    def prefill_attention_s(
        self, chunks: Chunks, ways: int = 1, sms: int | None = None
    ) -> float: ...

    def decode_attention_s(
        self, rows: int, context_tokens: int, ways: int = 1, sms: int | None = None
    ) -> float: ...

    def ring_prefill_s(self, chunks: Chunks, degree: int, tp: int = 1) -> float:
        """Attention of striped sequences over `degree` groups, which pass their KV round."""
        ...

    def masters_s(self, rows: int, groups: int, tp: int = 1) -> float:
        """What decode rows of each group take to reach the KV of all groups and come back."""
        ...

    def kv_transfer_s(self, tokens: int, tp: int = 1) -> float:
        """The KV of so many tokens from one group to another."""
        ...


class RivalOperators(ModelOnGpus):
    """Satisfies Operators."""

    def __init__(self, spec: ModelSpec, hardware: Hardware):
        super().__init__(spec, hardware)
        endless = hardware.scaled(
            hardware.name, source=hardware.source, flops=ENDLESS, link=ENDLESS
        )
        tileless = replace(endless.gemm, tile_s=0.0)
        self._memory_only = ModelOnGpus(spec, replace(endless, gemm=tileless))

    @property
    def num_layers(self) -> int:
        return self.spec.num_layers

    @property
    def sms(self) -> int:
        return self.hardware.sms

    @property
    def iteration_s(self) -> float:
        return self.hardware.iteration_s

    @property
    def contention(self) -> float:
        return self.hardware.contention

    def memory_share(self, sms: int) -> float:
        return self.hardware.memory_share(sms)

    def reading_s(self, rows: int, tp: int = 1) -> float:
        return self._memory_only.linear_s(rows, tp)

    def masters_s(self, rows: int, groups: int, tp: int = 1) -> float:
        """Queries of all masters go to all groups (an all-gather), and what each of these made of
        its KV comes back with a sum of weights (an all-to-all)."""
        gpu, heads = self.hardware, self.heads(tp).queries
        out = gpu.all_gather_s(groups * rows * heads * self.spec.head_dim * BYTES, groups)
        partial = groups * rows * heads * (self.spec.head_dim + 1) * PARTIAL_BYTES
        return self.num_layers * (out + gpu.all_to_all_s(partial, groups))


@dataclass(frozen=True)
class ElasticCosts:
    """Sequence parallelism over some of the groups of `tp` GPUs, as LoongServe has it."""

    operators: Operators
    tp: int = 1

    def prefill_s(self, chunks: Chunks, degree: int) -> float:
        """Whole prompts, or chunks after earlier ones, striped over `degree` groups."""
        ops, tp = self.operators, self.tp
        rows = -(-sum(length for _, length in chunks) // degree)
        attention = ops.ring_prefill_s(chunks, degree, tp)
        linear = ops.linear_s(rows, tp) + ops.head_s(rows, len(chunks), tp)
        return linear + attention + ops.iteration_s

    def decode_s(self, decodes: int, contexts: int, degree: int) -> float:
        """Each group is master of its share of the requests and holds its share of all KV."""
        ops, tp = self.operators, self.tp
        rows = -(-decodes // degree)
        attention = ops.decode_attention_s(decodes, -(-contexts // degree), tp)
        if degree > 1:
            attention += ops.masters_s(rows, degree, tp)
        linear = ops.linear_s(rows, tp) + ops.head_s(rows, rows, tp)
        return linear + attention + ops.iteration_s

    def move_s(self, tokens: int) -> float:
        return self.operators.kv_transfer_s(tokens, self.tp)


@dataclass(frozen=True)
class MultiplexedCosts:
    """Prefill and decode on disjoint SMs of the same `tp` GPUs, as MuxWise has it: each is a batch
    of its own, so both read the weights. decode_sms: those that decode has, the rest is prefill's.

    While both run, both are slower by the hardware's contention, and where together they would
    draw more than the memory's bandwidth, by as much again.
    """

    operators: Operators
    tp: int

    @property
    def sms(self) -> int:
        return self.operators.sms

    def draw(self, chunks: Chunks, decode_sms: int) -> float:
        """Share of the memory's bandwidth that a batch of prompts draws."""
        rows = sum(length for _, length in chunks)
        return self.operators.reading_s(rows, self.tp) / self._prefill_s(chunks, decode_sms)

    def prefill_s(self, chunks: Chunks, decode_sms: int, beside: bool) -> float:
        """All layers of a batch of prompts. beside: whether decode runs too."""
        seconds = self._prefill_s(chunks, decode_sms)
        factor = self._slower(self.draw(chunks, decode_sms), decode_sms) if beside else 1.0
        return factor * seconds + self.operators.iteration_s

    def decode_s(
        self, decodes: int, contexts: int, decode_sms: int, draw: float | None = None
    ) -> float:
        """One iteration. draw: of the prefill beside it; None: there is none."""
        ops, tp = self.operators, self.tp
        attention = ops.decode_attention_s(decodes, contexts, tp, decode_sms)
        linear = ops.linear_s(decodes, tp, decode_sms) + ops.head_s(decodes, decodes, tp)
        factor = 1.0 if draw is None else self._slower(draw, decode_sms)
        return factor * (linear + attention) + ops.iteration_s

    def _prefill_s(self, chunks: Chunks, decode_sms: int) -> float:
        ops, tp, sms = self.operators, self.tp, self.sms - decode_sms
        rows = sum(length for _, length in chunks)
        attention = ops.prefill_attention_s(chunks, tp, sms)
        return ops.linear_s(rows, tp, sms) + ops.head_s(rows, len(chunks), tp) + attention

    def _slower(self, draw: float, decode_sms: int) -> float:
        """
        Worked: decode's SMs can draw 90% of the bandwidth and prefill draws 20%: 1.1 times as slow,
        and the contention on top.
        """
        wanted = draw + self.operators.memory_share(decode_sms)
        return (1.0 + self.operators.contention) * max(1.0, wanted)


@dataclass(frozen=True)
class SideCosts:
    """One instance of one side of a disaggregated system: `degree` groups of `tp` GPUs, sequence
    parallel where there are several."""

    operators: Operators
    tp: int = 1
    degree: int = 1

    def prefill_s(self, chunks: Chunks) -> float:
        return ElasticCosts(self.operators, self.tp).prefill_s(chunks, self.degree)

    def decode_s(self, decodes: int, contexts: int) -> float:
        return ElasticCosts(self.operators, self.tp).decode_s(decodes, contexts, 1)

    def exposed_s(self, tokens: int, prefill_s: float) -> float:
        """Seconds that the KV of a prompt of `tokens` still travels after its prefill.

        Each layer's KV leaves as soon as it is there (Splitwise), so the last layer's always comes
        after, and all that the layers before took longer than their prefill.

        Worked: 10 layers whose KV takes 5 ms, prefilled in 20: 0.5 ms after. In 2 ms: 5 - 1.8.
        """
        whole_s = self.operators.kv_transfer_s(tokens, self.tp)
        layers = self.operators.num_layers
        return max(whole_s / layers, whole_s - prefill_s * (layers - 1) / layers)
